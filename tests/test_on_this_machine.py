"""What a run was trained with and this machine has not is replaced where the run is only read, and said."""

from __future__ import annotations

import pytest

from jrl.models.attention.kernels import check_attention
from jrl.resolve import load_config
from jrl.run.trained import on_this_machine

SPLASH = "Decoder.attention='splash'"


def test_a_kernel_that_is_not_here_gives_way_to_the_reference(caplog):
    config, _ = load_config("configs/tiny.gin", [SPLASH])
    assert on_this_machine(config, ()).model.attention == "reference"
    assert "attention='splash' is not on this CPU: using the reference" in caplog.text


def test_so_does_the_samplers(caplog):
    ragged = "Sampler.attention='ragged'"
    config, _ = load_config("configs/tiny.gin", [ragged])
    assert on_this_machine(config, ()).sampler.attention == "reference"
    assert "Sampler.attention='ragged' is not on this CPU: using the reference" in caplog.text
    assert on_this_machine(config, [ragged]).sampler.attention == "ragged"
    assert on_this_machine(config, ["Decoder.attention='reference'"]).sampler.attention == "reference"


def test_one_that_is_bound_is_kept_and_so_refused():
    config, _ = load_config("configs/tiny.gin", [SPLASH])
    unchanged = on_this_machine(config, [SPLASH])
    assert unchanged.model.attention == "splash"
    with pytest.raises(ValueError, match="is a kernel for TPUs"):
        check_attention(unchanged.model, "cpu")
