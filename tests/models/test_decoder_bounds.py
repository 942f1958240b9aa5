"""Sizes that no decoder can have are refused by name, before anything is compiled."""

from __future__ import annotations

import pytest

import jrl
from jrl.config import ConfigError
from jrl.config.schema import fields_of, options_of
from jrl.models.shape import LARGEST, Decoder


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("value", [0, -1, 10**20])
def test_a_size_out_of_bounds_is_refused_by_name(name, value):
    with pytest.raises(ValueError) as refused:
        Decoder(**{name: value})
    assert str(refused.value) == f"Decoder.{name} must be from 1 to {LARGEST[name]:,}; got {value}"


def test_every_integer_field_of_the_decoder_is_bounded():
    integers = {name for name, field in fields_of(Decoder).items() if int in options_of(field.hint)}
    assert integers - {"rotary_dim", "shared_layers"} == set(LARGEST)  # those are bounded by other fields


def test_a_configuration_names_the_binding():
    with pytest.raises(ConfigError, match=r"command line: Decoder: Decoder\.vocab_size must be from 1 to 16,777,216"):
        jrl.load_config("tiny", [f"Decoder.vocab_size={10**20}"])
