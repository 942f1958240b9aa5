"""A tiny run as a case, for counts by hand."""

from __future__ import annotations

import pytest

from jrl.resolve import load_config
from jrl.tools.plan.case import make_case

SMALL = [
    "Decoder.vocab_size=512",
    "Decoder.layers=2",
    "Decoder.width=64",
    "Decoder.heads=4",
    "Decoder.kv_heads=2",
    "Decoder.head_dim=16",
    "Decoder.mlp_width=128",
    "Data.prompt_length=8",
    "Sampler.completion_length=24",
    "Sampler.slots=3",
    "Learner.row_length=32",
    "Learner.micro_batch_tokens=64",
    "Online.prompts=4",
    "Online.samples=2",
]


def small_bindings(*bindings):
    over = dict(binding.split("=", 1) for binding in [*SMALL, *bindings])
    return [f"{name}={value}" for name, value in over.items()]


@pytest.fixture(scope="session")
def two_stages():
    """Bindings of a supervised stage before the run's own."""
    return (
        "Config.stages=[@warm/Offline(), @Online()]",
        "warm/Offline.source=@Demonstrations()",
        "warm/Offline.objective=@SFT()",
        "warm/Offline.steps=1",
    )


@pytest.fixture(scope="session")
def small():
    """(bindings, devices, stage) -> the case of a tiny run."""

    def make(*bindings, devices=1, stage=None):
        config, parts = load_config("configs/tiny.gin", small_bindings(*bindings))
        return make_case(config, parts, devices, stage)

    return make
