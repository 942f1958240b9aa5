from __future__ import annotations

import numpy as np
import pytest
from data_fakes import TOKENIZER

from jrl.tasks.data.preferences import SOURCE, Preferences
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.data.stored import LeftOut, Template, padded_rows
from jrl.tasks.example import Example, Message
from jrl.tools.check import check_stored_source


def visit(name, answer, rejected=None, prompt=(1, 2), **info):
    texts = info if rejected is None else {"rejected": rejected, **info}
    return Visit(Example(name, (Message("user", "q"),), answer=answer, info=texts), (0, 0), prompt)


def pairs_of(visits, width=10, **config):
    return SOURCE.rows(Preferences(**config), visits, TOKENIZER, width)


def texts_of(rows):
    return [TOKENIZER.decode(tokens[mask]) for tokens, mask in zip(rows.tokens, rows.action_mask)]


def test_a_pair_by_hand():
    rows, counts = pairs_of([visit("a", "yes", "no")])
    # two ids of prompt | y e s end and n o end | padding
    assert rows.tokens.tolist() == [
        [1, 2, 121, 101, 115, 258, 256, 256, 256, 256],
        [1, 2, 110, 111, 258, 256, 256, 256, 256, 256],
    ]
    assert rows.length.tolist() == [6, 5]
    assert rows.action_mask.tolist() == [
        [False] * 2 + [True] * 4 + [False] * 4,
        [False] * 2 + [True] * 3 + [False] * 5,
    ]
    assert (rows.label.tolist(), rows.weight.tolist(), rows.unit.tolist()) == ([1, 0], [1, 1], [0, 0])
    assert rows.value.tolist() == [0, 0]
    assert counts == {}
    dtypes = [np.int32, np.int32, np.bool_, np.float32, np.float32, np.int32, np.float32]
    assert [x.dtype for x in rows] == dtypes


def test_pairs_are_left_out_whole_and_counted_by_cause():
    visits = [
        visit("a", "1", "2"),
        visit("b", None, "2"),
        visit("c", "1"),
        visit("d", "same", "same"),
        visit("e", "x" * 9, "2"),  # only the preferred answer is too long
        visit("f", "1", "x" * 9),  # only the other one is
        visit("g", "3", "4"),
    ]
    rows, counts = pairs_of(visits)
    assert counts == {"no_answer": 1, "no_rejected": 1, "same_answers": 1, "too_long": 2}
    assert texts_of(rows) == ["1", "2", "3", "4"]
    assert (rows.label.tolist(), rows.unit.tolist()) == ([1, 0, 1, 0], [0, 0, 1, 1])


def test_a_pair_that_fits_exactly_is_kept():
    visits = [visit("a", "1", "four")]  # 2 + 4 + 1 tokens
    assert len(pairs_of(visits, width=7)[0].length) == 2
    assert pairs_of(visits, width=6)[1] == {"too_long": 1}


def test_answers_are_compared_as_they_are_said():
    # The texts differ, what is said does not.
    visits = [visit("a", "1", "2", shown="7")]
    assert pairs_of(visits, chosen="{shown}", rejected="{shown}")[1] == {"same_answers": 1}


def test_every_place_is_filled_at_once():
    rows, _ = pairs_of([visit("a", "{rejected}", "{answer}", hint="{answer}")], width=40, chosen="{answer} {hint}")
    assert texts_of(rows) == ["{rejected} {answer}", "{answer}"]


def test_answers_come_from_any_text_of_the_example():
    visits = [visit("a", "1", best="b", worst="w"), visit("b", "1", best="b")]
    rows, counts = pairs_of(visits, chosen="<{best}>", rejected="<{worst}>")
    assert (texts_of(rows), counts) == (["<b>", "<w>"], {"no_worst": 1})


def test_a_text_that_is_no_text_is_missing():
    assert pairs_of([visit("a", "1", rejected=5)])[1] == {"no_rejected": 1}


def test_no_pair_gives_empty_arrays_that_fill_up():
    rows, counts = pairs_of([visit("a", "1")])
    assert rows.tokens.shape == rows.action_mask.shape == (0, 10) and counts == {"no_rejected": 1}
    filled = padded_rows(rows, 2)
    assert filled.length.tolist() == [0, 0] and filled.unit.tolist() == [-1, -1]


@pytest.mark.parametrize("name", ["chosen", "rejected"])
def test_a_template_without_a_place_is_refused(name):
    with pytest.raises(
        ValueError, match=rf"Preferences\.{name} is 'yes'; it must contain a placeholder such as \{{answer\}}"
    ):
        Preferences(**{name: "yes"})


def test_a_template_names_what_is_missing_first():
    template = Template("{answer} {hint}", "here")
    assert template.fill(visit("a", "1", hint="2")) == "1 2"
    for answer, cause in (("1", "no_hint"), (None, "no_answer")):
        with pytest.raises(LeftOut, match=f"^{cause}$"):
            template.fill(visit("a", answer))


# Every row of SOURCES


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_units_of_adjacent_rows_or_a_cause(name):
    source = SOURCES[name]
    width = {"Corrections": 72, "Comparisons": 100}.get(name, 24)  # their prompts hold answers, and words around them
    scored = {"label": 1, "value": 2, "rejected_value": 1, "helpfulness": 3, "steps": ["1", "2"], "labels": [1, 0],
              "others": [{"prompt": "p", "chosen": "a", "rejected": "b"}]}  # fmt: skip
    if name == "StepValues":
        scored |= {"steps": ["1"], "success": [0.5, 1.0]}  # its only step is the last, which ends
    visits = [visit(str(i), "a" * i, "b" * (i + 1), **scored) for i in range(26)] + [visit("none", None)]
    rows, counts = source.rows(source.config(), visits, TOKENIZER, width)
    count = len(rows.length)
    assert 0 < count == source.unit_size * (len(visits) - sum(counts.values())) and sum(counts.values()) > 0
    assert rows.unit.tolist() == [i // source.unit_size for i in range(count)]
    assert rows.tokens.shape == rows.action_mask.shape == (count, width)
    assert rows.length.max() <= width
    for tokens, length, mask in zip(rows.tokens, rows.length, rows.action_mask):
        first = mask.argmax()
        assert mask[first:length].all() and not mask[length:].any() and mask.any()
        ends = name != "StepLabels"  # which goes on after the step
        assert (tokens[length - 1] == TOKENIZER.end_id) == ends and (tokens[length:] == TOKENIZER.pad_id).all()
    again, _ = source.rows(source.config(), visits, TOKENIZER, width)
    for one, other in zip(rows, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", SOURCES)
def test_the_name_of_a_source_is_the_name_of_its_config(name):
    assert SOURCES[name].config.__name__ == name


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_passes_the_check_of_a_users_own(name):
    (finding,) = check_stored_source(name, SOURCES[name])
    assert finding.problem is None


def longer(rows):
    return rows._replace(length=rows.length - 1)


def renumbered(rows):
    return rows._replace(unit=rows.unit + 1)


def nothing_learned(rows):
    return rows._replace(action_mask=np.zeros_like(rows.action_mask))


def narrower(rows):
    return rows._replace(tokens=rows.tokens[:, :-1], action_mask=rows.action_mask[:, :-1])


FAULTS = [
    (longer, "a token beyond a row's length is learned"),
    (renumbered, "units are not numbered in order"),
    (nothing_learned, "a row has no token to learn"),
    (narrower, "rows are not"),
]


@pytest.mark.parametrize("fault, message", FAULTS)
def test_a_fault_of_a_source_is_named(fault, message):
    def rows(config, visits, tokenizer, width):
        stored, counts = SOURCE.rows(config, visits, tokenizer, width)
        return fault(stored), counts

    (finding,) = check_stored_source("Mine", SOURCE._replace(rows=rows))
    assert message in finding.problem


def test_visits_that_are_neither_rows_nor_counted_are_named():
    silent = lambda *arguments: (SOURCE.rows(*arguments)[0], {})
    (finding,) = check_stored_source("Mine", SOURCE._replace(rows=silent))
    assert finding.problem == "visits are neither rows nor counted"


def test_the_strength_of_a_preference_is_its_label():
    visits = [visit("a", "1", "2", sure=0.75), visit("b", "1", "2"), visit("c", "1", "2", sure=0.5)]
    rows, counts = pairs_of([*visits, visit("d", "1", "2", sure="0.9")], strength="sure")
    assert rows.label.tolist() == [0.75, 0.25]
    assert counts == {"no_strength": 3}


def test_both_answers_have_values_where_the_data_are_asked_for_them():
    visits = [
        visit("a", "1", "2", value=0.8, other=0.2),
        visit("b", "1", "2", value=0.5, other=0.5),  # no better
        visit("c", "1", "2", value=0.8),
        visit("d", "1", "2", value=float("nan"), other=0.2),
        visit("e", "1", "2", value=True, other=0),
        visit("f", "1", "2", value=10**400, other=0),  # no float
        visit("g", "1", "2", value=1e300, other=0),  # infinite in float32
    ]
    rows, counts = pairs_of(visits, values=("value", "other"))
    np.testing.assert_allclose(rows.value, [0.8, 0.2])
    assert counts == {"no_values": 6}
    rows, counts = pairs_of(visits)
    assert counts == {} and rows.value.tolist() == [0] * 14
    with pytest.raises(ValueError, match=r"Preferences\.values names two entries"):
        Preferences(values=("value",))
