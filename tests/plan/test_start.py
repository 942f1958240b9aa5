"""A run that cannot fit its devices is refused, with what to change; one that may fit, or cannot be judged, is not."""

from __future__ import annotations

import random
import re
import types

import pytest

from jrl.resolve import load_config
from jrl.tools.plan.budget import peak
from jrl.tools.plan.case import make_case
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


PLANS = {"plan/0.6b": 8, "plan/1.7b": 16, "plan/1.7b_lora": 8, "plan/8b": 64, "plan/8b_long": 64, "plan/30b_moe": 64,
         "plan/32b": 128, "tiny": 1, "quickstart": 1, "rlhf-tiny": 1}  # fmt: skip
SIZES = {
    "Decoder.layers": (1, 3, 12, 48), "Decoder.remat": ("'none'", "'layer'", "'dots'"), "Online.samples": (4, 8, 64),
    "Sampler.completion_length": (64, 512, 3000), "Sampler.slots": (8, 64, 1024), "Data.prompt_length": (32, 1000),
    "Learner.micro_batch_tokens": (4096, 65536), "Decoder.mlp_width": (512, 8192), "AdamW.memory": ("'host'",),
}  # fmt: skip
CHANGE = re.compile(r"  (?P<bindings>.*): saves (?P<saves>[\d.]+) GiB a device; (?P<verdict>fits|alone does not fit)")


def test_every_overflow_is_refused_and_each_change_saves_what_it_says(trials):
    """Of configurations of any size, on devices with more or less memory than they take."""
    draw, number, tried, fitted = random.Random(0), trials(12, 400), 0, 0
    while tried < number:
        name = draw.choice(list(PLANS))
        chosen = draw.sample(sorted(SIZES), draw.randrange(4))
        bindings = [f"{field}={draw.choice(SIZES[field])}" for field in chosen]
        path, count = f"configs/{name}.gin", PLANS[name] * draw.choice([1, 2])
        try:
            config, parts = load_config(path, bindings)
            _, taken = peak(make_case(config, parts, count))
        except ValueError:  # sizes that do not go together
            continue
        tried += 1
        limit = int(taken / draw.uniform(0.5, 3))
        if taken <= 1.1 * limit:
            refuse_overflow(config, parts, devices(limit, count))
            continue
        with pytest.raises(ValueError, match="the run does not fit") as refused:
            refuse_overflow(config, parts, devices(limit, count))
        _, *lines = str(refused.value).splitlines()
        for change in map(CHANGE.fullmatch, lines):
            if change is None:
                assert lines == ["  no single binding helps"]
                break
            new = change["bindings"].split()
            kept = [one for one in bindings if one.partition("=")[0] not in {each.partition("=")[0] for each in new}]
            changed, _ = load_config(path, [*kept, *new])
            _, then = peak(make_case(changed, parts, count))
            assert (taken - then) / 2**30 == pytest.approx(float(change["saves"]), abs=0.006), (name, bindings, lines)
            assert (change["verdict"] == "fits") == (then <= limit)
            if then <= limit:
                refuse_overflow(changed, parts, devices(limit, count))
                fitted += 1
    assert fitted
