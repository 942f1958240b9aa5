from __future__ import annotations

import pytest
from data_fakes import TOKENIZER

from jrl.tasks.data.labeled import SOURCE, Labeled
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.example import Example, Message
from jrl.tools.check import check_stored_source


def visit(name, answer, prompt=(1, 2), **info):
    return Visit(Example(name, (Message("user", "q"),), answer=answer, info=info), (0, 0), prompt)


def rows_of(visits, width=8):
    rows, counts = SOURCE.rows(Labeled(), visits, TOKENIZER, width)
    texts = [TOKENIZER.decode(tokens[mask]) for tokens, mask in zip(rows.tokens, rows.action_mask)]
    return rows, counts, texts


def test_an_answer_and_its_prompt_with_the_next_answer():
    rows, counts, texts = rows_of([visit("a", "yes", label=True), visit("b", "no", (3,), label=0)])
    assert texts == ["yes", "no", "no", "yes"]
    assert rows.tokens[:, 0].tolist() == [1, 1, 3, 3]
    assert rows.label.tolist() == [1, -1, 0, -1]
    assert rows.weight.tolist() == [1, 0, 1, 0]
    assert rows.unit.tolist() == [0, 0, 1, 1]
    assert counts == {}


def test_what_cannot_be_used_is_counted_by_cause():
    visits = [
        visit("a", None, label=1),
        visit("b", "1"),
        visit("c", "1", label="good"),
        visit("d", "1", label=2),
        visit("e", "x" * 9, label=1),
        visit("f", "2", label=1.0),
    ]
    rows, counts, texts = rows_of(visits)
    assert counts == {"no_answer": 1, "no_label": 3, "too_long": 1}
    assert texts == ["2", "2"]  # alone: no mismatch
    assert rows.label.tolist() == [1, -2] and rows.weight.tolist() == [1, 0]


def test_good_and_bad_answers_of_pairs_by_the_visit():
    visits = [visit("a", "yes", rejected="no")._replace(uid=(uid, 0)) for uid in (2, 3)]
    rows, counts = SOURCE.rows(Labeled(bad="{rejected}"), visits, TOKENIZER, 8)
    assert [TOKENIZER.decode(t[m]) for t, m in zip(rows.tokens, rows.action_mask)] == ["yes", "no", "no", "yes"]
    assert rows.label.tolist() == [1, -1, 0, -1] and counts == {}


def test_a_mismatch_that_does_not_fit_is_left_out():
    rows, _, texts = rows_of([visit("a", "y", (1,) * 6, label=1), visit("b", "wide", label=0)])
    assert texts == ["y", "y", "wide", "y"]
    assert rows.label.tolist() == [1, -2, 0, -1]


def test_the_contract_of_sources():
    findings = list(check_stored_source("Labeled", SOURCES["Labeled"]))
    assert findings and not [finding for finding in findings if finding.problem]


def test_a_template_without_a_place_is_refused():
    with pytest.raises(ValueError, match=r"Labeled\.completion is 'answer'"):
        Labeled(completion="answer")
    with pytest.raises(ValueError, match=r"Labeled\.bad is 'rejected'"):
        Labeled(bad="rejected")
