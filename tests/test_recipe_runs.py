"""Every recipe of configs/algos/ at the smallest sizes: it loads, learns for two steps and writes its summary."""

from __future__ import annotations

import json
import pathlib
import re

import jax
import numpy as np
import pytest

import jrl
from jrl.config import ConfigError
from jrl.device.sharding import MeshShape, make_mesh
from jrl.run.run_hash import run_fingerprint

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "algos").glob("*.gin"))
# Whatever the recipe, so that recipes share most of their programs.
SMALL = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=4", "Online.samples=8", "Online.steps=2", "warm/Offline.steps=1",
    "warm/Offline.batch_size=8", "Sampler.slots=8", "Scoring.workers=1", "Log.writers=()",
]  # fmt: skip
# A verifier that a policy without training satisfies now and then, where the recipe has none of its own.
EASY = ["Addition.verifiers=()", "Scoring.verifiers=[@Regex()]", "Regex.pattern='.*[0-9].*'"]

# Where it is another one that a policy without training must satisfy.
OWN = {"crpg": ["Scoring.verifiers=[@Regex(), @Length()]", "Regex.pattern='.*[0-9].*'", "Length.high=9"]}


@pytest.fixture(scope="module", autouse=True)
def mesh_of_the_runs():
    """A run sets its mesh for the process; the tests after these must not find it."""
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        yield


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_and_writes_its_summary(name, tmp_path):
    path = ROOT / "configs" / "algos" / f"{name}.gin"
    text = path.read_text(encoding="utf-8")
    bindings = SMALL + OWN.get(name, [] if "verifiers" in text else EASY)
    scopes = set(re.findall(r"^(\w+)/Offline:", text, re.MULTILINE)) - {"warm"}
    bindings += [f"{scope}/Offline.steps=1" for scope in sorted(scopes)]
    steps = list(jrl.steps(str(path), bindings, run=tmp_path / "run"))
    online = [step for step in steps if step.batch is not None]
    assert len(online) >= 2
    assert all(np.isfinite(step.metrics["loss"]) for step in steps)
    assert any(step.metrics["grad_norm"] > 0 for step in online)
    found = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert found.keys() == {"steps", "seconds", "eval", "tokens_per_second", "peak_bytes"}
    assert found["steps"] == len(steps)


def test_a_stage_may_have_shorter_completions_and_the_next_one_longer(tmp_path):
    path, bindings = str(ROOT / "configs" / "algos" / "staged_length.gin"), [*SMALL, *EASY, "Checkpoint.keep=9"]
    steps = list(jrl.steps(path, bindings, run=tmp_path / "straight"))
    assert [step.batch.rollout.tokens.shape[1] for step in steps[1:]] == [8 + 3] * 2 + [8 + 4] * 2
    for step in jrl.steps(path, bindings, run=tmp_path / "cut"):
        if step.step == 3:  # the last of the first window
            break
    jrl.train(path, bindings, run=tmp_path / "cut")
    assert run_fingerprint(tmp_path / "cut") == run_fingerprint(tmp_path / "straight")


def test_a_stage_cannot_have_longer_completions_than_the_run():
    with pytest.raises(ConfigError, match=r"Online\.completion_length = 5 exceeds Sampler\.completion_length = 4"):
        jrl.load_config(str(ROOT / "configs" / "algos" / "grpo.gin"), ["Online.completion_length=5"])
    with pytest.raises(ConfigError, match=r"Online\.completion_length must be at least 1"):
        jrl.load_config(str(ROOT / "configs" / "algos" / "grpo.gin"), ["Online.completion_length=0"])
