from __future__ import annotations

import numpy as np
import pytest

from jrl.tasks.envs import ENVS, open_source
from jrl.tasks.stopping import StopRequested

ADDITION = ENVS["Addition"].config
CLEANED = ENVS["Cleaned"].config


def prompts(source):
    return [source[i].messages[0].content for i in range(len(source))]


def test_duplicates_and_prompts_of_an_evaluation_set_are_left_out_and_counted():
    task, held = ADDITION(digits=1, size=150), ADDITION(digits=1, size=10, seed=1)
    every, evaluated = prompts(open_source(task, ENVS)), set(prompts(open_source(held, ENVS)))
    source = open_source(CLEANED(task=task, evaluation=(held,)), ENVS)
    found = prompts(source)
    assert found == [p for i, p in enumerate(every) if p not in every[:i] and p not in evaluated]
    assert evaluated & set(every)  # something was left out for that
    assert source.counts == {
        "duplicate": len(every) - len(set(every)), "contaminated": len(evaluated & set(every))
    }  # fmt: skip
    assert source.verifiers == {"Exact"}


def test_its_identity_follows_what_is_cleaned_and_by_what():
    task = ADDITION(digits=1, size=20)
    variants = [CLEANED(task=task), CLEANED(task=task, ngram=3), CLEANED(task=task, evaluation=(ADDITION(size=5),)),
                CLEANED(task=ADDITION(digits=1, size=21))]  # fmt: skip
    assert len({open_source(variant, ENVS).fingerprint for variant in variants}) == 4


def test_examples_keep_their_task():
    mixture = ENVS["Mixture"].config(tasks=(ADDITION(digits=1, size=6), ADDITION(digits=2, size=6)))
    source = open_source(CLEANED(task=mixture), ENVS)
    digits = [len(p.split("+")[0]) for p in prompts(source)]
    np.testing.assert_array_equal(source.task, np.array(digits) - 1)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Cleaned leaves no example of 9: 9 too_long"):
        open_source(CLEANED(task=ADDITION(size=9, digits=2), max_words=1), ENVS)
    with pytest.raises(ValueError, match=r"Cleaned\.ngram and max_words must be at least 1; got 0 and None"):
        open_source(CLEANED(task=ADDITION(size=9), ngram=0), ENVS)
    asked = iter([False, False, True])
    with pytest.raises(StopRequested):
        open_source(CLEANED(task=ADDITION(size=9)), ENVS, lambda: next(asked))


def test_what_two_of_them_leave_out_for_one_reason_is_added_up():
    task, first, second = ADDITION(digits=1, size=150), ADDITION(size=9, digits=1), ADDITION(size=9, digits=1, seed=1)
    inner = CLEANED(task=task, evaluation=(first,))
    counts = [open_source(one, ENVS).counts for one in (inner, CLEANED(task=inner, evaluation=(second,)))]
    left = len(open_source(CLEANED(task=inner, evaluation=(second,)), ENVS))
    assert counts[0]["contaminated"] < counts[1]["contaminated"] and sum(counts[1].values()) + left == 150
