"""Wastes are flagged where they are introduced, and nothing is flagged where they are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jrl.device.sharding import make_mesh
from jrl.models import decoder
from jrl.models.contract import Cache
from jrl.resolve import load_config
from jrl.rollout import sampler
from jrl.tools.plan import budget, waste
from jrl.tools.plan.case import make_case
from jrl.tools.plan.collectives import collectives
from jrl.tools.plan.shapes import lower

BINDINGS = ["MeshShape.fsdp=2", "MeshShape.tensor=2", "Online.prompts=2", "Online.samples=2", "Decoder.width=16",
            "Sampler.layers='scanned'", "Decoder.vocab_size=320", "Learner.logprob_chunk=16"]  # fmt: skip


def compiled(name, *bindings):
    over = dict(binding.split("=", 1) for binding in [*BINDINGS, *bindings])
    config, parts = load_config("configs/tiny.gin", [f"{key}={value}" for key, value in over.items()])
    program = lower(config, parts, make_mesh(config.mesh, jax.devices()[:4]))[f"rl.{name}"]
    return make_case(config, parts, 4), program.compile().as_text()


def test_logits_of_whole_rows_are_flagged():
    case, text = compiled("update", "Learner.row_length=128")
    assert waste.full_logits("update", case, waste.widest_logits(text, {320, 160})) is None
    _, full_rows = compiled("update", "Learner.row_length=128", "Learner.logprob_chunk=128")
    warning = waste.full_logits("update", case, waste.widest_logits(full_rows, {320, 160}))
    assert warning.startswith(f"update holds logits of {case.rows * 128} positions at once")


def test_a_gather_in_the_decode_loop_is_flagged(monkeypatch):
    case, text = compiled("sample")
    rows = [row._asdict() for row in collectives(text, list(case.sizes.items()), case.decode_steps)]
    assert waste.gathers_in_loop("sample", case, rows) == []
    usual = sampler._draw

    def wasteful(keys, logits, sampling_params, is_greedy):
        gathered = jax.lax.all_gather(logits, "fsdp").sum() * 0
        token, *rest = usual(keys, logits + jnp.zeros_like(logits) * gathered, sampling_params, is_greedy)
        return token, *rest

    monkeypatch.setattr(sampler, "_draw", wasteful)
    case, text = compiled("sample", "Sampler.slots=2")  # else the sampler's own trace is found again
    rows = [row._asdict() for row in collectives(text, list(case.sizes.items()), case.decode_steps)]
    assert any("over fsdp inside the decode loop" in line for line in waste.gathers_in_loop("sample", case, rows))


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_a_second_cache_is_flagged(monkeypatch, layers):
    case, text = compiled("sample", f"Sampler.layers={layers!r}", "Decoder.layers=3")
    assert waste.caches_carried(text, case) == (2 if layers == "scanned" else 6)
    assert waste.second_cache("sample", case, waste.caches_carried(text, case)) is None
    # Blocks of prompts that look like blocks of slots are not a second cache: widths of 64, 64 and 72 or 96 columns.
    long = ("Data.prompt_length=200", "Sampler.completion_length=24", "Online.prompts=8", "Sampler.slots=4")
    case, text = compiled("sample", f"Sampler.layers={layers!r}", *long)
    assert budget.prompts_in_flight(case) == case.slots == 4
    assert waste.caches_carried(text, case) == (3 + 2) * 2 * (1 if layers == "scanned" else 2)
    assert waste.second_cache("sample", case, waste.caches_carried(text, case)) is None
    usual = decoder.MODEL.forward

    def wasteful(params, tokens, positions, segment, cfg, cache=None):
        hidden, cache = usual(params, tokens, positions, segment, cfg, cache)
        if isinstance(cache, Cache):  # through a scan, as its inputs and its outputs
            nothing = 0 * hidden.sum().astype(cache.k[0].dtype)
            again = lambda carry, layer: (carry, jax.tree.map(lambda x: x + nothing, layer))
            cache = jax.lax.scan(again, 0, cache)[1]
        return hidden, cache

    monkeypatch.setattr(decoder, "MODEL", decoder.MODEL._replace(forward=wasteful))
    case, text = compiled("sample", "Sampler.layers='scanned'", "Decoder.layers=3", "Sampler.slots=2")
    warning = waste.second_cache("sample", case, waste.caches_carried(text, case))
    assert warning.startswith("sample carries")
