"""A model of two tables, whose programs are compiled in a fraction of a decoder's time: what comes next depends on a
token and its position alone. For runs that are not about the model."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jrl.device.sharding import constrain, einsum, gather, take_rows
from jrl.models import contract
from jrl.models.contract import CustomModel, Model, ParamSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigram:
    vocab_size: int | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    width: int = 8
    longest: int = 64  # tokens of a sequence


def spec(cfg):
    dtype = jnp.dtype(cfg.param_dtype)
    return {
        "embed": ParamSpec((cfg.vocab_size, cfg.width), dtype, ("vocab", "embed"), 1.0),
        "positions": ParamSpec((cfg.longest, cfg.width), dtype, (None, "embed"), 1.0),
        "head": ParamSpec((cfg.vocab_size, cfg.width), dtype, ("vocab", "embed"), 0.3),
    }


def forward(params, tokens, positions, segment, cfg, cache=None):
    rows = lambda name, index: constrain(take_rows(table(name), index, ("batch", None, "embed_shard")), *HIDDEN)
    table = lambda name: constrain(params[name].astype(cfg.dtype), None, "embed_shard")
    return rows("embed", tokens) + rows("positions", positions), cache


def unembed(params, hidden, cfg):
    head = gather(params["head"].astype(hidden.dtype), "vocab", "embed")
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return einsum("bld,vd->blv", hidden, head, ("batch", None, "vocab"), wide)


HIDDEN = ("batch", None, None)
MODEL = Model(
    spec=spec,
    init=lambda key, cfg, place=lambda names: None: contract.init(key, spec(cfg), place),
    forward=forward,
    routed=lambda *args: (forward(*args)[0], None),
    unembed=unembed,
    init_cache=lambda cfg, batch, length: constrain(jnp.zeros((1, batch, 1)), None, *HIDDEN[:2]),  # it needs none
    cut_cache=lambda cache, length, layout: cache,
    unstack=lambda params, cfg: params,
    prepare_for_decode=lambda params, cfg: (params, contract.axes(spec(cfg))),
)
PARTS = {"MODELS": {"Bigram": CustomModel(Bigram, MODEL)}}
BIGRAM = "Config.model=@Bigram()"  # where PARTS are among the parts


def part_in(folder):
    """Writes a plugin with the model into a folder, and returns the binding that names it."""
    path = folder / "bigram.py"
    path.write_text('from small_model import PARTS\n\nMODELS = PARTS["MODELS"]\n')
    return f"parts=['{path}']"


# Where a run needs a decoder and is not about it: one without what most of the others have, whose programs compile in
# less time.
PLAIN_DECODER = [
    "Decoder.rotary_dim=0", "Decoder.qk_norm=None", "Decoder.mlp='plain'", "Decoder.activation='relu'",
    "Decoder.parallel=True",
]  # fmt: skip
