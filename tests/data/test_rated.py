"""Rated answers (P3), labeled steps (P4) and steps with success rates (A17) as stored rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_fakes import TOKENIZER

from jrl.tasks.data import rated, step_labels, step_values
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.rated import Rated
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.data.step_labels import StepLabels
from jrl.tasks.data.step_values import StepValues
from jrl.tasks.envs.dataset import Dataset, open_dataset
from jrl.tasks.envs.layouts import LAYOUTS
from jrl.tasks.example import Example, Message
from jrl.tools.check import check_stored_source


def visit(uid=0, answer="yes", **info):
    return Visit(Example("a", (Message("user", "q"),), answer=answer, info=info), (uid, 0), (1, 2))


def answers_of(rows):
    return [TOKENIZER.decode(tokens[mask]) for tokens, mask in zip(rows.tokens, rows.action_mask)]


def test_ratings_are_in_the_order_of_the_names_and_missing_ones_are_nan():
    config = Rated(values=("good", "long"))
    visits = [
        visit(good=3, long=1.5),
        visit(long=4),
        visit(),
        visit(good=5),
        visit(good="3"),
        visit(answer=None, good=1),
    ]
    rows, counts = rated.rows(config, [*visits, visit(answer="y" * 40, good=1)], TOKENIZER, 20)
    np.testing.assert_array_equal(rows.value, np.float32([[3, 1.5], [np.nan, 4]]))
    assert answers_of(rows) == ["yes", "yes"] and rows.unit.tolist() == [0, 1]
    assert counts == {"no_values": 1, "bad_value": 2, "no_answer": 1, "too_long": 1}
    whole, counts = rated.rows(Rated(values=("good", "long"), complete=True), visits, TOKENIZER, 20)
    np.testing.assert_array_equal(whole.value, np.float32([[3, 1.5]]))
    assert counts["no_values"] == 4  # one has none, three have one of the two


def test_helpsteer2_rows_are_read_with_their_attributes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LAYOUTS["helpsteer2"].example))
    source = open_dataset(Dataset(path=str(path), layout="helpsteer2", take="each"))
    visits = [Visit(source[i], (0, 0), (1, 2)) for i in range(len(source))]
    rows, counts = rated.rows(Rated(), visits, TOKENIZER, 20)
    assert counts == {} and answers_of(rows) == ["7", "8"]
    np.testing.assert_array_equal(rows.value, [[4, 4, 4, 0, 0], [1, 0, 4, 0, 0]])


def test_a_visit_gives_one_step_with_those_before_it():
    info = {"steps": ["a", "b", "c"], "labels": [True, 0, 0.75]}
    rows, counts = step_labels.rows(StepLabels(separator="."), [visit(uid, **info) for uid in range(4)], TOKENIZER, 20)
    assert answers_of(rows) == ["a.", "a.b.", "a.b.c.", "a."] and counts == {}
    np.testing.assert_array_equal(rows.label, np.float32([1, 0, 0.75, 1]))
    stops = StepLabels(separator=".", through_first_wrong=True)
    rows, _ = step_labels.rows(stops, [visit(uid, **info) for uid in range(4)], TOKENIZER, 20)
    assert answers_of(rows) == ["a.", "a.b.", "a.", "a.b."]


def test_steps_without_as_many_labels_are_left_out():
    bad = [{}, {"steps": []}, {"steps": ["a", 3], "labels": [1, 1]}, {"steps": ["a"]}, {"steps": ["a"], "labels": [2]},
           {"steps": ["a"], "labels": [1, 1]}, {"steps": ["a" * 30], "labels": [1]}]  # fmt: skip
    rows, counts = step_labels.rows(StepLabels(), [visit(**info) for info in bad], TOKENIZER, 20)
    assert len(rows.length) == 0 and counts == {"no_steps": 3, "no_labels": 3, "too_long": 1}


def test_a_visit_gives_one_step_and_the_success_rates_around_it():
    info = {"steps": ["a", "b"], "success": [0.25, 0.5, 1]}
    visits = [*(visit(uid, **info) for uid in range(3)), visit(steps=["a"], success=[1]), visit(success=[1, 1]),
              visit(steps=["a"], success=[0.5, 2]), visit(steps=["a" * 30], success=[0, 1])]  # fmt: skip
    rows, counts = step_values.rows(StepValues(separator="."), visits, TOKENIZER, 20)
    assert counts == {"no_success": 2, "no_steps": 1, "too_long": 1}
    # Only the step is learned from, and the end after the last one; the steps before it are prompt.
    assert [tokens[mask].tolist() for tokens, mask in zip(rows.tokens, rows.action_mask)] == [
        TOKENIZER.encode("a."), [*TOKENIZER.encode("b."), TOKENIZER.end_id], TOKENIZER.encode("a."),
    ]  # fmt: skip
    assert rows.tokens[1, : rows.length[1]].tolist() == [1, 2, *TOKENIZER.encode("a.b."), TOKENIZER.end_id]
    np.testing.assert_array_equal(rows.value, np.float32([[0.25, 0.5], [0.5, 1], [0.25, 0.5]]))
    with pytest.raises(ValueError, match=r"StepValues\.steps and StepValues\.success name the same entry"):
        StepValues(success="steps")


@pytest.mark.parametrize("name", ["Rated", "StepLabels", "StepValues"])
def test_sources_pass_the_contract_test(name):
    info = {"helpfulness": 2, "steps": ["1", "2"], "labels": [1, 0], "success": [0.5, 1, 0]}
    example = Example("a", (Message("user", "q"),), answer="4", info=info)
    assert all(finding.problem is None for finding in check_stored_source(name, SOURCES[name], [example]))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"Rated\.values names the attributes"):
        Rated(values=("a", "a"))
    with pytest.raises(ValueError, match=r"Rated\.lowest = 4\.0 must be below Rated\.highest = 4\.0"):
        Rated(lowest=4.0)
