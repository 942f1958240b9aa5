"""The roles of older versions of the policy."""

import pytest

from jrl.algos import ALGOS
from jrl.learning.previous import is_previous, previous_roles, with_previous
from jrl.resolve import load_config
from jrl.run.programs import num_previous
from jrl.types import ModelState


def test_each_version_is_one_step_older_after_a_step():
    model = lambda params, version: ModelState(params, None, {}, None, version)
    models = {"policy": model("w5", 5), "previous_2": model("w3", 3), "previous": model("w4", 4)}
    moved = with_previous(models, "w5", 5)
    assert {role: (state.params, state.version) for role, state in moved.items()} == {
        "policy": ("w5", 5), "previous": ("w5", 5), "previous_2": ("w4", 4)
    }  # fmt: skip
    assert with_previous({"previous": model("w4", 4)}, "w5", 5)["previous"].params == "w5"


def test_roles_are_named_newest_first():
    assert previous_roles(3) == ("previous", "previous_2", "previous_3") and previous_roles(0) == ()


@pytest.mark.parametrize(("role", "expected"), [("previous", True), ("previous_12", True), ("previous_judge", False),
                                                ("policy", False), ("previous_", False)])  # fmt: skip
def test_a_role_of_a_users_own_is_no_previous_version(role, expected):
    assert is_previous(role) is expected


@pytest.mark.parametrize(("max_refills", "expected"), [(None, 0), (0, 0), (1, 2)])
def test_versions_are_kept_only_where_a_step_may_be_refilled(max_refills, expected):
    bindings = ["Online.objective=@DAPO()", "DAPO.importance=@TruncatedImportance()", "Online.lag=2"]
    config, _ = load_config("configs/tiny.gin", [*bindings, f"DAPO.max_refills={max_refills}"])
    assert num_previous(config.stages[0], ALGOS["DAPO"]) == expected
