"""Every recipe of configs/algos/ at the smallest sizes: it loads, learns for two steps and writes its summary."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
from small_model import BIGRAM, PARTS, PLAIN_DECODER

import jrl
from jrl.experiment import row_of
from jrl.resolve import load_config

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "configs" / "algos").glob("*.gin"))}
# Two halves for two workers, each with one shape of packed rows.
SEVERAL_UPDATES = [name for name, text in RECIPES.items() if "Learner.minibatches" in text]
ONE_UPDATE = [name for name in RECIPES if name not in SEVERAL_UPDATES]
# Whatever the recipe, so that recipes share most of their programs.
SMALL = [
    "Online.prompts=4", "Online.samples=8", "Online.steps=2", "Sampler.slots=8", "Scoring.workers=1",
    "Log.writers=()",
]  # fmt: skip
# Where the optimizer treats the matrices of layers by themselves, a head reads hidden states, embeddings are mixed, or
# a pair model compares: after the last token alone, both orders of two answers are a tie.
DECODER = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32",
]  # fmt: skip
# A verifier that a policy without training satisfies now and then, where the recipe has none of its own.
EASY = ["Addition.verifiers=()", "Scoring.verifiers=[@Regex()]", "Regex.pattern='.*[0-9].*'"]

# Where a judge must say yes to a policy without training, and where much is remembered.
OWN = {name: ["Constraints.components=('Regex',)"] for name in ("crpg", "codpo", "crraft")}
OWN["task_normalized_grpo"] = [*EASY, "Jsonl.verifiers=()"]
SHORT = {"curiosity": ["Curiosity.history=64", "Curiosity.width=32"]}


def small(name):
    """Returns the file of a recipe and the bindings that make it small."""
    text = RECIPES[name]
    text += "".join(RECIPES[base] for base in re.findall(r"^include '(\w+)\.gin'", text, re.MULTILINE) if base != "toy")
    offline = {"warm", *re.findall(r"^(\w+)/Offline", text, re.MULTILINE)}
    bound = [f"{stage}/Offline.{field}" for stage in sorted(offline) for field in ("steps=1", "batch_size=8")]
    for stage in re.findall(r"^(\w+)/Online:\n(?:  .*\n)*?  samples = ", text, re.MULTILINE):
        bound += [f"{stage}/Online.prompts=4", f"{stage}/Online.samples=8"]
    if "Learner.minibatches = 4" in text:
        bound.append("Learner.minibatches=2")
    if "@Regex()" in text:
        bound.append(EASY[-1])
    bindings = [*SMALL, *bound, *OWN.get(name, [] if "verifiers" in text else EASY), *SHORT.get(name, [])]
    if "Config.stages = [@warm/Offline(), @pairs/Offline()]" in text:  # it samples nothing
        bindings = [one for one in bindings if not one.startswith("Online.")]
    path = str(ROOT / "configs" / "algos" / f"{name}.gin")
    decoder = "optimizer = " in text or "pair_model = @" in text or reads_states(path, bindings)
    return path, [*bindings, *([*DECODER, *PLAIN_DECODER] if decoder else [BIGRAM])]


def reads_states(path, bindings):
    config, parts = load_config(path, bindings)
    needs = [row_of(parts.tables, "algos", stage.objective).needs(stage.objective) for stage in config.stages]
    return any(one.heads or one.input_mix is not None for one in needs)


def check_that_it_learns_and_writes_its_summary(name, folder):
    path, bindings = small(name)
    steps = list(jrl.steps(path, bindings, parts=[PARTS], run=folder))
    online = [step for step in steps if step.batch is not None]
    assert len(online) >= 2 or len(steps) == 2  # or one step of imitation, one on stored rows
    assert all(np.isfinite(step.metrics["loss"]) for step in steps)
    assert any(step.metrics["grad_norm"] > 0 for step in online or steps[1:])
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert found.keys() == {"steps", "seconds", "eval", "tokens_per_second", "peak_bytes", "goodput", "best"}
    assert found["steps"] == len(steps)
