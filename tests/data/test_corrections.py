"""Corrections (P28), rationales (P35) and conditional demonstrations (P34) as stored rows."""

from __future__ import annotations

import difflib
import random
import time

import pytest
from data_fakes import TOKENIZER

from jrl.tasks.data import comparisons, contrasts, corrections, demonstrations, rationales, user_preferences
from jrl.tasks.data.comparisons import Comparisons
from jrl.tasks.data.contrasts import ContrastedPreferences
from jrl.tasks.data.corrections import Corrections
from jrl.tasks.data.demonstrations import Demonstrations
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.rationales import RationalePreferences
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.data.user_preferences import UserPreferences
from jrl.tasks.example import Example, Message
from jrl.tasks.rewards.correction import correction_rewards
from jrl.tools.check import check_stored_source


def visit(uid=0, answer="yes", **info):
    return Visit(Example("a", (Message("user", "q"),), answer=answer, info=info), (uid, 0), (1, 2))


def texts_of(rows):
    """Returns (prompt, completion) of every row, without line ends."""
    split = lambda tokens, mask: (tokens[: list(mask).index(True)], tokens[mask])
    return [
        tuple(TOKENIZER.decode(part).replace("\n", "") for part in split(tokens, mask))
        for tokens, mask in zip(rows.tokens, rows.action_mask)
    ]


def test_correction_rewards_by_hand():
    assert correction_rewards([1, 2, 3], [1, 9, 3], scale=0.5) == [0.5, -0.5, 0.5]
    assert correction_rewards([1, 2, 3], [2, 3, 4], scale=1.0) == [-1, 1, 1]  # what is inserted has no place
    assert correction_rewards([1, 2], [1, 2], scale=2.0) == [2, 2]
    assert correction_rewards([1, 2, 3], [1, 9], scale=1.0) == [1, -1, -1]  # no text has an end: none was cut
    assert correction_rewards([1, 2], [], scale=1.0) is None and correction_rewards([], [1], scale=1.0) == []


def test_an_end_before_which_the_correction_goes_on_is_not_kept():
    rewards = lambda tokens, correction: correction_rewards(tokens, correction, scale=1.0, end_ids=[0, 9])
    assert rewards([0], [1, 0]) == [-1]  # an empty text
    assert rewards([1, 0], [1, 2, 0]) == [1, -1]
    assert rewards([1, 0], [2, 0]) == [-1, 1]  # changed, and then both end
    assert rewards([1, 0], [2, 3, 4, 0]) == [-1, -1]  # changed, and goes on
    assert rewards([1, 2, 0], [3, 0]) == [-1, -1, 1]  # shorter, and then both end
    assert rewards([1, 2, 0], [1, 3, 0]) == [1, -1, 1]
    assert rewards([1, 2, 0], [1, 2, 3, 0]) == [1, 1, -1]
    assert rewards([1, 0], [2]) == [0, 0]  # cut before anything is kept
    assert rewards([1, 0], [1, 9]) == [1, 1]  # by another end token
    assert rewards([2, 0], [1, 2, 0]) == [1, 1]
    assert rewards([1, 2], [1, 2, 0]) == [1, 1]  # cut: it has no end
    # The correction was cut: it may have come to the rest, or not.
    assert rewards([1, 0], [1, 2]) == [1, 0]
    assert rewards([1, 2, 3, 4, 0], [8, 8, 1, 5, 3]) == [1, -1, 1, 0, 0]
    assert rewards([1, 0], [0]) is None and rewards([1, 0], [9]) is None and rewards([0], [0]) is None


def test_either_answer_is_rewritten_into_the_better_one():
    config = Corrections(ask="|{response}>")
    rows, counts = corrections.rows(config, [visit(0, rejected="no"), visit(1, rejected="no")], TOKENIZER, 40)
    assert texts_of(rows) == [("q|yes>", "yes"), ("q|no>", "yes")] and counts == {}
    assert rows.unit.tolist() == [0, 1] and rows.label.tolist() == [1, 1]  # each by itself
    third, _ = corrections.rows(config, [visit(2, rejected="no")], TOKENIZER, 40)
    assert texts_of(third) == [("q|yes>", "yes")]  # an even uid asks as 0 does
    bad = [visit(), visit(rejected="yes"), visit(answer=None, rejected="no"), visit(rejected="n" * 50)]
    left_out = {"no_rejected": 1, "same_answers": 1, "no_answer": 1}
    assert corrections.rows(config, bad[:3], TOKENIZER, 40)[1] == left_out
    assert corrections.rows(config, [visit(1, rejected="n" * 50)], TOKENIZER, 40)[1] == {"too_long": 1}
    with pytest.raises(ValueError, match=r"Corrections\.ask is 'so'; it must contain \{response\}"):
        Corrections(ask="so")


def test_a_pair_is_shown_in_either_order_and_the_verdict_is_imitated():
    config = Comparisons(ask="|{first}|{second}>")
    given = [visit(0, rejected="no"), visit(1, rejected="no"), visit(2, rejected="{second}")]
    rows, counts = comparisons.rows(config, given, TOKENIZER, 40)
    asked = [("q|yes|no>", "A"), ("q|no|yes>", "B"), ("q|yes|{second}>", "A")]  # a text in an answer is no place
    assert texts_of(rows) == asked and counts == {}
    assert rows.unit.tolist() == [0, 1, 2] and rows.label.tolist() == [1, 1, 1]  # each by itself
    turned = Comparisons(ask="<{second}<{first}", labels=("one", "two"))
    assert texts_of(comparisons.rows(turned, given[:1], TOKENIZER, 40)[0]) == [("q<no<yes", "one")]
    bad = [visit(), visit(rejected="yes"), visit(answer=None, rejected="no"), visit(rejected="n" * 50)]
    left_out = {"no_rejected": 1, "same_answers": 1, "no_answer": 1, "too_long": 1}
    assert comparisons.rows(config, bad, TOKENIZER, 40)[1] == left_out
    assert comparisons.first_tokens(config, TOKENIZER) == (ord("A"), ord("B"))
    with pytest.raises(ValueError, match=r"Comparisons\.labels is \('same', 'some'\), which begin with the same token"):
        comparisons.first_tokens(Comparisons(labels=("same", "some")), TOKENIZER)
    with pytest.raises(ValueError, match=r"Comparisons\.ask is '\{first\}'; it must contain \{second\} once"):
        Comparisons(ask="{first}")
    with pytest.raises(ValueError, match=r"must be two different texts"):
        Comparisons(labels=("A", "A"))


def test_a_pair_is_there_after_prompts_that_ask_for_good_and_bad_answers():
    config = ContrastedPreferences(better="+", worse="-------")
    rows, counts = contrasts.rows(config, [visit(rejected="no"), visit(rejected="yes")], TOKENIZER, 40)
    assert counts == {"same_answers": 1}
    two, _ = contrasts.rows(config, [visit(rejected="no")] * 2, TOKENIZER, 40)
    assert two.unit.tolist() == [0] * 6 + [1] * 6
    own = "\x01\x02"
    prompts = [own, own, "q+", "q+", "q-------", "q-------"]
    assert texts_of(rows) == [*zip(prompts, ["yes", "no"] * 3)]
    assert rows.label.tolist() == [1, 0, -1, -2, -3, -4] and rows.unit.tolist() == [0] * 6
    short, _ = contrasts.rows(config, [visit(rejected="no")], TOKENIZER, 10)  # the last prompt does not fit
    assert texts_of(short)[4:] == [(own, "yes"), (own, "no")] and short.label.tolist() == [1, 0, -1, -2, -5, -5]
    with pytest.raises(ValueError, match=r"better and worse are both '\+'; they must differ"):
        ContrastedPreferences(better="+", worse="+")


def test_the_pairs_of_a_user_are_one_unit():
    other = {"prompt": "p", "chosen": "a", "rejected": "b"}
    three = [other | {"prompt": name} for name in "pqr"]
    given = [visit(rejected="no", others=[other]), visit(rejected="no", others=three)]
    rows, counts = user_preferences.rows(UserPreferences(), given, TOKENIZER, 40)
    own = "\x01\x02"
    assert texts_of(rows)[:8] == [(own, "yes"), (own, "no"), ("p", "a"), ("p", "b"), *[(own, "yes"), (own, "no")] * 2]
    assert rows.label.tolist() == [1, 0, 3, 2, -1, -1, -1, -1, 1, 0, 3, 2, 5, 4, 7, 6] and counts == {}
    assert rows.unit.tolist() == [0] * 8 + [1] * 8
    bad = [
        visit(rejected="no"), visit(rejected="no", others=[other] * 4), visit(rejected="no", others=[{"prompt": "p"}]),
        visit(rejected="no", others="p"), visit(rejected="yes", others=[]), visit(others=[]),
        visit(rejected="no", others=[other | {"chosen": "b"}]), visit(rejected="n" * 50, others=[]),
        visit(rejected="no", others=[other, {"prompt": "q", "chosen": "no", "rejected": "yes"}]),
        visit(rejected="no", others=[other, other]),
    ]  # fmt: skip
    causes = {"no_others": 4, "same_answers": 2, "no_rejected": 1, "too_long": 1, "same_pair": 2}
    assert user_preferences.rows(UserPreferences(), bad, TOKENIZER, 40)[1] == causes


def test_a_pair_has_its_rationale_beside_it_or_a_filler_without_weight():
    config = RationalePreferences(ask="|{answer}|{rejected}?")
    whole = visit(rejected="no", rationale="it is")
    rows, counts = rationales.rows(config, [whole, visit(rejected="no"), visit(rejected="yes")], TOKENIZER, 40)
    assert counts == {"same_answers": 1}
    assert [one for _, one in texts_of(rows)] == ["yes", "no", "it is", "yes", "no", "yes"]
    assert texts_of(rows)[2][0] == "q|yes|no?"
    assert rows.label.tolist() == [1, 0, -1, 1, 0, -2] and rows.weight.tolist() == [1, 1, 1, 1, 1, 0]
    assert rows.unit.tolist() == [0, 0, 0, 1, 1, 1]
    short, _ = rationales.rows(config, [whole], TOKENIZER, 8)  # the pair fits, the prompt with both answers does not
    assert short.label.tolist() == [1, 0, -2]
    assert rationales.rows(config, [visit(), visit(rejected="n" * 40)], TOKENIZER, 8)[1] == {
        "no_rejected": 1, "too_long": 1,
    }  # fmt: skip


def test_a_condition_is_in_the_prompt_and_not_learned():
    config = Demonstrations(condition="[{score}]{feedback}")
    known = visit(score=4.0, feedback="ok")
    rows, counts = demonstrations.rows(config, [known, visit(score=1), known], TOKENIZER, 40)
    assert texts_of(rows) == [("[4]okq", "yes")] * 2 and counts == {"no_feedback": 1}
    assert rows.unit.tolist() == [0, 1] and rows.label.tolist() == [1, 1]  # each by itself
    with pytest.raises(ValueError, match=r"Demonstrations\.condition is 'good'"):
        Demonstrations(condition="good")


@pytest.mark.parametrize("name", ["Comparisons", "Corrections", "RationalePreferences"])
def test_sources_pass_the_contract_test(name):
    assert all(finding.problem is None for finding in check_stored_source(name, SOURCES[name]))


def test_texts_that_repeat_a_few_tokens_are_compared_as_others_and_soon():
    draw = random.Random(0)
    for _ in range(200):
        letters = draw.choice([1, 2, 3, 40])
        text, other = ([draw.randrange(letters) for _ in range(draw.randrange(1, 300))] for _ in range(2))
        kept = [-1.0] * len(text)
        for start, _, size in difflib.SequenceMatcher(None, text, other, autojunk=False).get_matching_blocks():
            kept[start : start + size] = [1.0] * size
        assert correction_rewards(text, other, scale=1.0) == kept
    start = time.process_time()
    correction_rewards([5, 6] * 700, [6, 5, 5] * 467, scale=1.0)
    assert time.process_time() - start < 5.0  # difflib takes 12 s
