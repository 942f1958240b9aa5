"""An example whose fields have other types is refused where it is made, so that the error names the user's line."""

from __future__ import annotations

import pytest

from jrl.tasks.example import Example, Message

ASKED = (Message("user", "1+2="),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": 7}, r"Example\.id of example 7 must be a text, but is of type int: 7"),
        ({"answer": 3}, r"Example\.answer of example 'one' must be a text or None, but is of type int: 3"),
        ({"messages": list(ASKED)}, r"Example\.messages .* a tuple of Message, but is of type list: \[Message"),
        ({"messages": ({"role": "user", "content": "1+2="},)}, r"a tuple of Message, but is of type tuple: \(\{'role'"),
        ({"verifiers": "Exact"}, r"Example\.verifiers .* a tuple of names, but is of type str: 'Exact'"),
        ({"info": None}, r"Example\.info .* a dict of JSON values, but is of type NoneType: None"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(fields, message):
    with pytest.raises(TypeError, match=message):
        Example(**{"id": "one", "messages": ASKED, "answer": "3", **fields})


def test_a_message_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match=r"Message\.content is of type int; it must be a text"):
        Message("user", 3)


def test_an_example_is_the_same_after_json():
    example = Example("one", ASKED, "3", ("Exact",), "sums", {"rejected": "4"})
    assert Example.from_json(example.to_json()) == example
