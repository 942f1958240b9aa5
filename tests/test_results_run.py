"""A run whose objective names its metrics as it pleases: what jrl writes beside them, it refuses."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.algos.contract import Needs, Objective
from jrl.algos.results import RESERVED_METRICS, RESERVED_PREFIXES, is_reserved
from jrl.ops import reduce
from jrl.tasks.data import curricula
from jrl.tasks.data.curricula import CURRICULA, ConfiguredCurriculum, SizeMixing
from jrl.types import traced

pytestmark = pytest.mark.usefixtures("mesh_of_the_runs")

SETTINGS = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=8",
    "Config.task=@Mixture()", "Mixture.tasks=[@Addition(), @Jsonl()]", "Data.on_bad_prompt='drop'",
    "Data.held_out_every=4", "Config.eval=@Eval()", "Eval.prompts=4", "Eval.every=1", "Log.samples=0", "Log.writers=()",
    "Scoring.workers=1",
    "Config.stages=[@warm/Offline(), @Online()]", "warm/Offline.source=@Demonstrations()",
    "warm/Offline.objective=@Stored()", "warm/Offline.steps=1", "warm/Offline.batch_size=8",
    "Online.objective=@Sampled()", "Online.steps=1", "Online.prompts=8", "Online.samples=2",
    "Online.critic='policy'", "Online.pretraining=@PretrainingMix()", "PretrainingMix.source=@Demonstrations()",
    "PretrainingMix.batch_size=8",
]  # fmt: skip


@traced
class Stored:
    scale: float = 1.0


@traced
class Sampled:
    scale: float = 1.0


def token_loss(config, tokens, state):
    loss = -reduce.masked(tokens.logprobs, tokens.mask)
    return loss, {"mine": jax.lax.stop_gradient(loss)}


def value_loss(config, tokens, state):
    loss = jnp.square(reduce.masked(tokens.values - tokens.returns, tokens.mask))
    return loss, {"mine": jax.lax.stop_gradient(loss), "value/mine": jax.lax.stop_gradient(loss)}


def over_tokens(config, groups, reward):
    return jnp.where(groups.action_mask, reward[:, None], 0)


def advantages(config, groups, reward, state):
    return over_tokens(config, groups, reward), state, {"mine": reward.sum()}


ALGOS = {
    "Stored": Objective(config=Stored, token_loss=token_loss),
    "Sampled": Objective(
        config=Sampled,
        needs=lambda config: Needs(values=True),
        refill=lambda config: 1,
        advantages=advantages,
        returns=over_tokens,
        token_loss=token_loss,
        value_loss=value_loss,
    ),
}


def test_jrl_refuses_the_names_that_it_writes_and_no_others(tmp_path):
    long = "0123456789"
    rows = [{"prompt": f"{i}?{long * (i % 2)}", "answer": str(i)} for i in range(40)]  # half are dropped
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bindings = [*SETTINGS, f"Jsonl.path='{tmp_path / 'rows.jsonl'}'"]
    list(jrl.steps("configs/tiny.gin", bindings, parts=[{"ALGOS": ALGOS}], run=tmp_path / "run"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    # No run has both: a curriculum refuses Data.on_bad_prompt = 'drop', with which `data/` is counted.
    curriculum = ConfiguredCurriculum(CURRICULA["SizeMixing"], SizeMixing())
    names |= curricula.metrics(curriculum, curricula.no_outcomes(np.array([0, 1]), [curriculum])).keys()
    of_the_objective = {"mine", "critic/mine", "value/mine", "advantage/mine"}
    assert of_the_objective <= names
    assert [name for name in sorted(names - of_the_objective) if not is_reserved(name)] == []
    assert [name for name in RESERVED_METRICS if name not in names] == []
    assert [prefix for prefix in RESERVED_PREFIXES if not any(name.startswith(prefix) for name in names)] == []
