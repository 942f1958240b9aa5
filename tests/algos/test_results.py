"""What the functions of a user's objective return has the shapes of the contract, or is refused in words."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from jrl.algos import ALGOS
from jrl.algos.conformance import ROWS, WIDTH, given_sequences, sample_groups, sample_tokens
from jrl.algos.contract import Needs, Objective, Pairs
from jrl.algos.results import ARGUMENTS as NAMES
from jrl.algos.results import CHECKS, RESERVED_METRICS, RESERVED_PREFIXES, checked, wrong_function
from jrl.tasks.wrong_result import WrongResult

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ALGOS["GRPO"].config()
GROUPS, TOKENS, PAIRS = sample_groups(), sample_tokens(), ALGOS["DPO"]
SEQUENCES = given_sequences(PAIRS, PAIRS.config())
STATE = {"mean": jnp.zeros(())}
N, NT, L, S = (ROWS,), (ROWS, WIDTH), TOKENS.mask.shape, SEQUENCES.mask.shape
MASK = jnp.ones(NT, bool)
ZEROS = {shape: jnp.zeros(shape) for shape in ((), N, NT, L, S, (ROWS, 1), (WIDTH,), (1,))}
OF_ROWS = {"groups": GROUPS, "reward": GROUPS.reward, "state": STATE}
ARGUMENTS = {
    "needs": (),
    "keep": (GROUPS,),
    "keep_tokens": (GROUPS,),
    "shape": (GROUPS,),
    "shape_with_state": tuple(OF_ROWS.values()),
    "advantages": tuple(OF_ROWS.values()),
    "pairs": (GROUPS, GROUPS.reward),
    "select": (GROUPS, ZEROS[NT]),
    "positive": (GROUPS,),
    "returns": (GROUPS, GROUPS.reward),
    "token_loss": (TOKENS, STATE),
    "value_loss": (TOKENS, STATE),
    "sequence_loss": (SEQUENCES, STATE),
    "weights": (MASK, WIDTH),
    "denominator": (MASK, ROWS, WIDTH),
    "sequence_baseline": (SEQUENCES,),
    "sequence_denominator": (MASK[:, 0], GROUPS.group),
    "next_state": (STATE, {"loss": ZEROS[()]}),
    "stop": ({"loss": 1.0},),
}
pairs = lambda **other: Pairs(**{"label": ZEROS[N], "unit": GROUPS.group, "weight": ZEROS[N], **other})
RIGHT = {
    "needs": Needs(),
    "keep": MASK[:, 0],
    "keep_tokens": MASK,
    "shape": ZEROS[N],
    "shape_with_state": ZEROS[N],
    "advantages": (ZEROS[NT], STATE, {"mine": ZEROS[()]}),
    "pairs": pairs(),
    "select": MASK,
    "positive": MASK[:, 0],
    "returns": ZEROS[NT],
    "token_loss": (ZEROS[L], {"mine": ZEROS[L]}),
    "value_loss": (ZEROS[L], {}),
    "sequence_loss": (ZEROS[S], {"mine": ZEROS[S]}),
    "weights": ZEROS[NT],
    "denominator": ZEROS[()],
    "sequence_baseline": ZEROS[()],
    "sequence_denominator": ZEROS[()],
    "next_state": {"mean": jnp.ones(())},
    "stop": None,
}
WRONG = [
    ("needs", None, "jrl.algos.contract.Needs, and it returned None"),
    ("keep", MASK[:, :1], "a bool array of shape [12], and its result has the shape [12, 1]"),
    ("keep", ZEROS[N], "a bool array of shape [12], and its result has dtype float32"),
    ("keep_tokens", MASK[:, 0], "a bool array of shape [12, 6], and its result has the shape [12]"),
    ("shape", ZEROS[NT], "an array of shape [12], and its result has the shape [12, 6]"),
    ("shape", None, "an array of shape [12], and its result is None"),
    ("shape_with_state", (ZEROS[N], STATE), "an array of shape [12], and its result is a tuple of 2"),
    ("advantages", ZEROS[NT], "state, a dictionary of counters of shape []), and it returned one array"),
    ("advantages", (ZEROS[NT], STATE), "state, a dictionary of counters of shape []), and it returned a tuple of 2"),
    ("advantages", (ZEROS[N], STATE, {}), "(advantages of shape [12, 6], state, a dictionary of counters of shape []), "
     "and its array of advantages has the shape [12]"),
    ("advantages", (0.0, STATE, {}), "counters of shape []), and its array of advantages is a value of type float"),
    ("advantages", (ZEROS[NT], STATE, {"mine": ZEROS[N]}), "and its counter 'mine' has the shape [12]"),
    ("advantages", (ZEROS[NT], (), {}), "the same shapes as the one before, {'mean': ()}, and its state has ()"),
    ("pairs", (ZEROS[N], GROUPS.group, ZEROS[N]), "Pairs of arrays of shape [12], and it returned a tuple of 3"),
    ("pairs", pairs(weight=1.0), "Pairs of arrays of shape [12], and its weight is a value of type float"),
    ("pairs", pairs(value=ZEROS[NT]), "and its value has the shape [12, 6]"),
    ("select", ZEROS[NT], "a bool array of shape [12, 6], and its result has dtype float32"),
    ("positive", MASK, "a bool array of shape [12], and its result has the shape [12, 6]"),
    ("returns", ZEROS[(ROWS, 1)], "an array of shape [12, 6], and its result has the shape [12, 1]"),
    ("token_loss", None, "(loss of shape [2, 6], a dictionary of metrics of that shape), and it returned None"),
    ("token_loss", ZEROS[L], "a dictionary of metrics of that shape), and it returned one array"),
    ("token_loss", (ZEROS[L], None), "and it returned a tuple of 2"),
    ("token_loss", (ZEROS[()], {}), "and its loss has the shape []"),
    ("token_loss", (ZEROS[L], {"mine": ZEROS[()]}), "and its metric 'mine' has the shape []"),
    ("token_loss", (ZEROS[L], {"loss": ZEROS[L]}), "names that jrl does not use, and its metric 'loss' would replace"),
    ("token_loss", (ZEROS[L], {3: ZEROS[L]}), "and the names of its metrics are not all texts"),
    ("sequence_loss", (ZEROS[S], {"mine": ZEROS[S], "reward/mean": ZEROS[S]}), "its metric 'reward/mean' would"),
    ("value_loss", (ZEROS[(WIDTH,)], {}), "and its loss has the shape [6]"),
    ("sequence_loss", (ZEROS[L], {}), "(loss of shape [2, 7], a dictionary of metrics of that shape), and its loss"),
    ("weights", ZEROS[(ROWS, 1)], "an array of shape [12, 6], and its result has the shape [12, 1]"),
    ("denominator", ZEROS[(1,)], "an array of shape [], and its result has the shape [1]"),
    ("denominator", 12, "an array of shape [], and its result is a value of type int"),
    ("sequence_baseline", ZEROS[N], "an array of shape [], and its result has the shape [12]"),
    ("sequence_denominator", 1.0, "an array of shape [], and its result is a value of type float"),
    ("next_state", None, "a state of the same shapes as the one before, {'mean': ()}, and its state has None"),
    ("next_state", {"mean": ZEROS[N]}, "{'mean': ()}, and its state has {'mean': (12,)}"),
    ("next_state", {"mean": jnp.int32(1)}, "before, {'mean': 'float32'}, and its state has {'mean': 'int32'}"),
    ("stop", False, "a text that says why the run must not go on, or None, and it returned False"),
    ("stop", "", "or None, and it returned ''"),
]  # fmt: skip


def under_jit(name, returned):
    """Returns what the function of a row gives that returns this, traced."""
    row = checked(Objective(config=type(CONFIG))._replace(**{name: lambda config, *arguments: returned}))
    return jax.jit(lambda config: getattr(row, name)(config, *ARGUMENTS[name]))(CONFIG)


@pytest.mark.parametrize("name", CHECKS)
def test_what_has_the_right_shapes_is_returned_as_it_is(name):
    found = under_jit(name, RIGHT[name])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, RIGHT[name]))


@pytest.mark.parametrize(("name", "returned", "problem"), WRONG)
def test_another_result_is_refused_in_words(name, returned, problem):
    with pytest.raises(WrongResult) as refused:
        under_jit(name, returned)
    assert str(refused.value).startswith(f"GRPO: {name} must return ")
    assert problem in str(refused.value)


@jax.tree_util.register_pytree_node_class
class Own:
    """A state whose class has no equality."""

    tree_flatten = lambda self: ((jnp.zeros(2),), None)
    tree_unflatten = classmethod(lambda cls, aux, leaves: cls())


def test_a_state_of_a_class_without_equality_keeps_its_form():
    row, state = checked(Objective(config=type(CONFIG))), Own()
    assert row.next_state(CONFIG, state, {}) is state


def test_every_check_is_failed_by_a_result():
    assert {name for name, *_ in WRONG} == set(CHECKS) == set(ARGUMENTS) == set(RIGHT)


def test_a_reason_to_stop_is_returned_as_it_is():
    row = checked(Objective(config=type(CONFIG), stop=lambda config, metrics: "why"))
    assert row.stop(CONFIG, {}) == "why"


def test_every_function_that_works_on_arrays_is_checked_and_the_reason_to_stop():
    on_the_host = {"config", "check", "check_stored", "draw", "corrects_staleness", "init_state", "refill"}
    assert set(CHECKS) == set(Objective._fields) - on_the_host - {"unit_size", "strengths"}


def test_the_arguments_of_every_function_are_known():
    assert set(NAMES) == set(Objective._fields) - {"config", "unit_size", "strengths"}
    assert [name for name, row in ALGOS.items() if wrong_function(row, NAMES) is not None] == []


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda config, tokens: None, "token_loss takes (config, tokens); it is called with (config, tokens, state)"),
        (3, "token_loss is a value of type int; it must be a function (config, tokens, state)"),
    ],
)
def test_a_function_of_other_arguments_is_named(function, problem):
    assert wrong_function(Objective(config=type(CONFIG), token_loss=function), NAMES) == problem


def test_functions_that_a_row_does_not_have_stay_none():
    row = checked(ALGOS["SFT"])
    assert row.advantages is row.pairs is row.sequence_loss is None
    assert row.token_loss.__wrapped__ is ALGOS["SFT"].token_loss


def test_the_guide_lists_the_names_that_jrl_refuses():
    guide = " ".join((ROOT / "docs" / "bring-your-own.md").read_text().split())
    listed = re.search(r"jrl refuses the names of its own metrics: (.*?), and what begins with (.*?)\.", guide)
    assert re.findall(r"`(.*?)`", listed[1]) == [*RESERVED_METRICS]
    assert re.findall(r"`(.*?)`", listed[2]) == [*RESERVED_PREFIXES]
