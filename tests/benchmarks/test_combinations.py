"""What `benchmarks.combinations` draws is the same for a seed, and every option and layout of it is one."""

from __future__ import annotations

import pytest

from benchmarks.combinations import LAYOUTS, OPTIONS, SMALL, Refused, draw, last_of_each, same, train
from jrl import config as gin
from jrl.experiment import TABLES, Config, config_classes
from jrl.resolve import find_config


def test_a_seed_draws_one_configuration():
    assert draw(7) == draw(7)
    assert len({repr(draw(seed)) for seed in range(50)}) == 50
    assert draw(7, OPTIONS[:0]) == draw(7)[:1]  # the objective


def test_a_field_that_two_options_bind_has_the_later_value():
    assert last_of_each(["A.x=1", "A.y=2", "A.x=3"]) == ["A.x=3", "A.y=2"]


@pytest.mark.parametrize(
    "bindings", [*[option for _, options in OPTIONS for option in options], *LAYOUTS], ids=" ".join
)
def test_every_option_is_one(bindings):
    gin.load(find_config("tiny"), last_of_each([*SMALL, *bindings]), Config, config_classes(TABLES))


def test_a_refusal_has_its_reason(tmp_path):
    with pytest.raises(Refused, match="GRPO reads no values"):
        train([*SMALL, "Online.objective=@GRPO()", "Online.critic='policy'"], tmp_path)


def test_metrics_are_the_same_up_to_rounding():
    assert same(1.0, 1.001) and same(0.0, 1e-5) and same(None, None) and same("rl", "rl")
    assert not same(1.0, 1.01) and not same(0.0, 1e-4) and not same(None, 0.0) and not same("nothing", 0.0)
