"""Pairs whose prompt asks for a score."""

from __future__ import annotations

import pytest
from data_fakes import TOKENIZER

from jrl.tasks.data.conditioned import SOURCE, ConditionedPreferences
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.example import Example, Message
from jrl.tools.check import check_stored_source

QUESTION = (Message("user", "q"),)


def visit(name, uid=0, messages=QUESTION, answer="yes", **info):
    return Visit(Example(name, messages, answer=answer, info=info), (uid, 0), (1, 2))


def pairs_of(visits, width=40, **config):
    return SOURCE.rows(ConditionedPreferences(**config), visits, TOKENIZER, width)


def test_either_answer_is_right_for_its_own_score():
    scored = {"rejected": "no", "value": 9, "rejected_value": 5.5}
    rows, counts = pairs_of([visit("a", uid, **scored) for uid in range(3)], goal="[{score}]")
    prompts = [
        TOKENIZER.decode(tokens[: list(mask).index(True)]) for tokens, mask in zip(rows.tokens, rows.action_mask)
    ]
    answers = [TOKENIZER.decode(tokens[mask]) for tokens, mask in zip(rows.tokens, rows.action_mask)]
    assert [prompt.replace("\n", "") for prompt in prompts] == ["[9]q", "[9]q", "[5.5]q", "[5.5]q", "[9]q", "[9]q"]
    assert answers == ["yes", "no", "no", "yes", "yes", "no"]
    assert (rows.label.tolist(), rows.unit.tolist(), counts) == ([1, 0] * 3, [0, 0, 1, 1, 2, 2], {})


def test_a_system_message_of_the_prompts_own_goes_before_the_goal():
    messages = (Message("system", "Be brief. "), Message("user", "q"))
    rows, _ = pairs_of([visit("a", 0, messages, rejected="no", value=1, rejected_value=0)], goal="[{score}]")
    assert "Be brief. [1]" in TOKENIZER.decode(rows.tokens[0])


def test_pairs_are_left_out_whole_and_counted_by_cause():
    visits = [
        visit("a", rejected="no", value=1),
        visit("b", rejected="no", value=1, rejected_value=1),
        visit("c", rejected="no", value=float("inf"), rejected_value=1),
        visit("d", rejected="yes", value=2, rejected_value=1),
        visit("e", value=2, rejected_value=1),
        visit("f", answer=None, rejected="no", value=2, rejected_value=1),
        visit("g", rejected="x" * 40, value=2, rejected_value=1),
        visit("h", rejected="no", value=True, rejected_value=0),
    ]
    rows, counts = pairs_of(visits)
    assert len(rows.length) == 0
    assert counts == {
        "no_scores": 3, "same_scores": 1, "same_answers": 1, "no_rejected": 1, "no_answer": 1, "too_long": 1,
    }  # fmt: skip


def test_a_whole_number_is_asked_for_in_full():
    rows, counts = pairs_of([visit("a", rejected="no", value=1234567, rejected_value=2.5)], width=60)
    assert counts == {} and "Score: 1234567\n" in TOKENIZER.decode(rows.tokens[0])
    assert pairs_of([visit("a", rejected="no", value=10**400, rejected_value=0)])[1] == {"no_scores": 1}


def test_it_passes_the_contract_tests_and_refuses_a_goal_without_a_place():
    assert all(finding.problem is None for finding in check_stored_source("C", SOURCES["ConditionedPreferences"]))
    with pytest.raises(ValueError, match=r"ConditionedPreferences\.goal is 'best'; it must contain \{score\}"):
        ConditionedPreferences(goal="best")
