"""A run that cannot fit its devices is refused, with what to change; one that may fit, or cannot be judged, is not."""

from __future__ import annotations

import types

import pytest

from jrl.resolve import load_config
from jrl.tools.plan.start import refuse_overflow


def devices(limit, count=1, platform="tpu"):
    stats = None if limit is None else {"bytes_limit": limit}
    return [types.SimpleNamespace(memory_stats=lambda: stats, platform=platform)] * count


def test_an_overflow_is_refused_with_three_changes():
    config, parts = load_config("configs/plan/8b.gin", [])
    with pytest.raises(ValueError, match="does not fit: sample would take about") as error:
        refuse_overflow(config, parts, devices(2**32, 64))
    changes = str(error.value).splitlines()[1:]
    assert len(changes) == 3
    assert all("saves" in line and "=" in line for line in changes)


def test_a_run_that_fits_goes_on():
    config, parts = load_config("configs/tiny.gin", [])
    refuse_overflow(config, parts, devices(2**34))


def test_a_device_that_does_not_know_its_memory_refuses_nothing():
    config, parts = load_config("configs/plan/8b.gin", [])
    refuse_overflow(config, parts, devices(None, 64))


def test_elsewhere_than_on_a_tpu_it_is_a_warning(caplog):
    config, parts = load_config("configs/plan/8b.gin", [])
    refuse_overflow(config, parts, devices(2**32, 64, "gpu"))
    assert "may not fit: sample would take about" in caplog.text


def test_a_run_that_cannot_be_laid_out_is_refused_and_not_passed_over():
    config, parts = load_config("configs/plan/8b.gin", ["MeshShape.fsdp=1", "MeshShape.tensor=64"])
    with pytest.raises(ValueError, match="does not divide"):
        refuse_overflow(config, parts, devices(2**40, 64))
