from __future__ import annotations

import numpy as np
import pytest
from data_fakes import TOKENIZER, numbered

from jrl.rollout.prompts import prompt_batch
from jrl.tasks.data.demonstrations import SOURCE, Demonstrations
from jrl.tasks.data.prompts import Data, Visit, is_held_out
from jrl.tasks.data.stored import padded_rows, stack
from jrl.tasks.data.stream import open_stream
from jrl.tasks.data.survey import texts_of
from jrl.tasks.example import Example, Message, visit_uid

CONFIG = Data(prompt_length=16, held_out_every=None)


def demonstrate(visits, width, template="{answer}"):
    return SOURCE.rows(Demonstrations(template=template), visits, TOKENIZER, width)


def visits_of(source):
    visits = open_stream(source, TOKENIZER, CONFIG, seed=0).next(len(source))
    return sorted(visits, key=lambda visit: visit.example.id)


def test_prompt_answer_and_end_token_by_hand():
    rows, counts = demonstrate(visits_of(numbered(1, ["q"], ["ab"])), width=10)
    # bos user q end assistant | a b end | padding
    assert rows.tokens.tolist() == [[257, 260, 113, 258, 261, 97, 98, 258, 256, 256]]
    assert rows.length.tolist() == [8]
    assert rows.action_mask.tolist() == [[False] * 5 + [True] * 3 + [False] * 2]
    assert counts == {}
    assert rows.tokens.dtype == rows.length.dtype == rows.unit.dtype == np.int32
    assert (rows.label.tolist(), rows.weight.tolist(), rows.unit.tolist()) == ([1], [1], [0])


def test_missing_and_overlong_answers_are_left_out_and_counted():
    source = numbered(4, ["a", "b", "c", "d"], ["1", None, "x" * 50, "2"])
    rows, counts = demonstrate(visits_of(source), width=12)
    assert counts == {"no_answer": 1, "too_long": 1}
    assert rows.tokens[:, 2].tolist() == [ord("a"), ord("d")]


def test_an_answer_that_fits_exactly_is_kept():
    visits = visits_of(numbered(1, ["q"], ["ab"]))
    assert len(demonstrate(visits, width=8)[0].length) == 1
    assert demonstrate(visits, width=7)[1] == {"too_long": 1}


def test_a_template_surrounds_the_answer():
    rows, _ = demonstrate(visits_of(numbered(1, ["q"], ["{answer}7"])), width=30, template="<a>{answer}</a>")
    assert TOKENIZER.decode(rows.tokens[0][rows.action_mask[0]]) == "<a>{answer}7</a>"
    with pytest.raises(ValueError, match=r"\{answer\}"):
        demonstrate([], width=30, template="answer")


def test_a_worked_solution_is_imitated_where_the_template_asks_for_it():
    examples = [Example("a", (Message("user", "q"),), answer="7", info={"solution": "3+4={answer}"}),
                Example("b", (Message("user", "q"),), answer="8")]  # fmt: skip
    visits = [Visit(example, visit_uid(example.id, 0), (1, 2)) for example in examples]
    rows, counts = demonstrate(visits, width=30, template="{solution}; {answer}")
    assert TOKENIZER.decode(rows.tokens[0][rows.action_mask[0]]) == "3+4={answer}; 7"
    assert (len(rows.length), counts) == (1, {"no_solution": 1})


def test_any_text_of_an_example_can_be_imitated():
    info = {"hint": "so", "steps": 3}
    visits = [Visit(Example("a", (Message("user", "q"),), answer="7", info=info), (0, 0), (1, 2))]
    rows, _ = demonstrate(visits, width=30, template="{hint}: {answer}")
    assert TOKENIZER.decode(rows.tokens[0][rows.action_mask[0]]) == "so: 7"
    assert demonstrate(visits, width=30, template="{steps} {answer}")[1] == {"no_steps": 1}  # no text


def test_numbers_of_a_condition_are_written_in_full_if_they_are_whole():
    info = {"year": 1234567, "views": 7654321.0, "score": 0.25, "large": 10**400, "most": float("inf")}
    visits = [Visit(Example("a", (Message("user", "q"),), answer="7", info=info), (0, 0), (1, 2))]
    rows, _ = SOURCE.rows(Demonstrations(condition="{year}, {views}: {score}"), visits, TOKENIZER, 40)
    assert TOKENIZER.decode(rows.tokens[0]) == "1234567, 7654321: 0.25q7"


def test_the_examples_answer_is_not_hidden_by_its_info():
    visits = [Visit(Example("a", (Message("user", "q"),), answer="7", info={"answer": "8"}), (0, 0), (1, 2))]
    rows, _ = demonstrate(visits, width=30)
    assert TOKENIZER.decode(rows.tokens[0][rows.action_mask[0]]) == "7"


def test_each_row_is_alone_and_empty_rows_fill_the_batch():
    rows, _ = demonstrate(visits_of(numbered(2, answers=["1", "2"])), width=12)
    assert rows.unit.tolist() == [0, 1]
    filled = padded_rows(rows, 4)
    assert filled.length.tolist() == [*rows.length.tolist(), 0, 0]
    assert filled.unit.tolist() == [0, 1, -1, -1]
    assert filled.weight.tolist() == filled.label.tolist() == [1, 1, 0, 0]
    assert not filled.action_mask[2:].any()
    assert [x.dtype for x in filled] == [x.dtype for x in rows]
    for before, after in zip(rows, filled, strict=True):
        np.testing.assert_array_equal(after[:2], before)


def test_nothing_usable_gives_empty_arrays():
    rows, counts = demonstrate(visits_of(numbered(2, answers=[None, None])), width=12)
    assert rows.tokens.shape == rows.action_mask.shape == (0, 12)
    assert counts == {"no_answer": 2}


def test_prompt_batch_is_left_aligned_and_carries_the_visits_names():
    batch = prompt_batch(visits_of(numbered(2, ["a", "bcd"])), prompt_length=9, pad_id=TOKENIZER.pad_id)
    assert batch.tokens.tolist() == [
        [257, 260, 97, 258, 261, 256, 256, 256, 256],
        [257, 260, 98, 99, 100, 258, 261, 256, 256],
    ]
    assert batch.length.tolist() == [5, 7]
    assert batch.uid.tolist() == [list(visit_uid("e0", 0)), list(visit_uid("e1", 0))]
    assert (batch.tokens.dtype, batch.uid.dtype) == (np.int32, np.uint32)
    with pytest.raises(ValueError, match="'e1'"):
        prompt_batch(visits_of(numbered(2, ["a", "bcd"])), prompt_length=6, pad_id=0)


def test_tokenizer_texts_are_those_of_the_training_split():
    config = Data(prompt_length=16, held_out_every=2)
    source = numbered(40)
    texts = list(texts_of(source, config))
    train = [i for i in range(40) if not is_held_out(source[i], config)]
    assert 0 < len(train) < 40
    assert texts == [text for i in train for text in (f"q{i}", str(i))]
    # Indices 0, 10, 20, 30 are looked at.
    assert list(texts_of(source, config, 4)) == [t for i in train if i % 10 == 0 for t in (f"q{i}", str(i))]


def test_a_sequence_longer_than_the_rows_is_refused_by_name():
    with pytest.raises(ValueError, match=r"have 5 tokens, more than width = 4.*check_fits"):
        stack([([1, 2], [3], 1.0), ([1, 2], [3, 4, 5], 1.0)], 1, 0, 4)
