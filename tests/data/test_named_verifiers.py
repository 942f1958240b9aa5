"""What is refused of Scoring.verifiers is refused of the verifiers that examples name, too."""

from __future__ import annotations

import pytest

from jrl.experiment import TABLES
from jrl.resolve import load_config
from jrl.run.data import check_named_verifiers
from jrl.tasks.envs.addition import Addition, open_addition

# Addition's examples name Exact, whose verdict is then the outcome, and not that of Regex.
RUN = ["Scoring.verifiers=[@Regex(), @Exact()]", "Regex.pattern='[0-9]+'", "Exact.weight=0.0"]
SHORT = ["Online.shaping=@Shaping()", "Shaping.group_length=@GroupLength()"]


def checked(bindings, **task):
    config, tables = load_config("configs/algos/grpo.gin", bindings)[0], TABLES
    check_named_verifiers(config, tables, open_addition(Addition(digits=1, **task)))


@pytest.mark.parametrize(
    "options, reader",
    [
        (["Online.objective=@DAPO()"], "DAPO keeps the groups"),
        (["Online.objective=@SELF()"], "SELF learns on prompts"),
        (["Online.curriculum=@Prioritized()"], r"Online\.curriculum = @Prioritized"),
        (SHORT, r"Shaping\.group_length rewards"),
    ],
)
def test_a_verdict_that_is_held_out_is_not_learned_from_where_examples_name_it(options, reader):
    with pytest.raises(ValueError, match=rf"Examples name Exact as their first verifier, .*: {reader}"):
        checked([*RUN, *options])
    checked([*RUN, *options], verifiers=())  # Regex is the first, and counts
    checked([*RUN, *options], verifiers=("Numeric", "Exact"))  # so does Numeric, by its default weight
    checked([*RUN[:-1], *options])
    twice = ["Scoring.verifiers=[@Regex(), @Exact(), @watching/Exact()]", RUN[1], "watching/Exact.weight=0.0"]
    checked([*twice, *options])  # of two of a name, examples name the first


def test_what_only_watches_may_be_named_where_nothing_learns_from_verdicts():
    checked(RUN)
