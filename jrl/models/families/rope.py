"""RoPE in config.json: rope_theta and rope_scaling of transformers 4, rope_parameters of transformers 5."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jrl.models.families.contract import Keys
from jrl.models.rope import LinearRope, Llama3Rope, LongRope, ProportionalRope, Stretch, YarnRope, amplitude
from jrl.models.shape import Decoder

ORIGINAL = "original_max_position_embeddings"


def read_rope(
    keys: Keys, head_dim: int, *, theta: float = 10_000.0, theta_key: str = "rope_theta", share: float = 1.0,
    share_key: str = "partial_rotary_factor", harmless: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Returns the Decoder fields rope_theta, rope and rotary_dim.

    Args:
      theta: default base; theta_key: its name in transformers 4.
      share: default share of a head that is rotated; share_key: its name in transformers 4.
      harmless: keys of rope that have no effect.
    """
    scaling, parameters = read_one_of_two(keys)
    theta = read_theta(keys, scaling, theta, theta_key)
    share = keys.number(share_key, share)
    if parameters is not None:
        theta = parameters.number("rope_theta", theta)
        share = parameters.number("partial_rotary_factor", share)
    inner = parameters or scaling
    rotary_dim = int(head_dim * share)
    return {
        "rope_theta": theta,
        "rope": None if inner is None else read_stretch(inner, keys, harmless),
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
    }


def read_one_of_two(keys: Keys) -> tuple[Keys | None, Keys | None]:
    """Returns (rope_scaling, rope_parameters), of which at most one may be there."""
    scaling, parameters = keys.inside("rope_scaling"), keys.inside("rope_parameters")
    if scaling is not None and parameters is not None:
        raise ValueError(f"{keys.where} has both rope_scaling and rope_parameters; leave one of them out")
    return scaling, parameters


def read_theta(keys: Keys, scaling: Keys | None, default: float, key: str = "rope_theta") -> float:
    """Returns the base, which transformers 4 reads from `key`, and 5 from rope_scaling first."""
    declared, theta = keys.take(key, None), keys.number(key, default)
    if scaling is None:
        return theta
    inner_theta = scaling.number("rope_theta", theta)
    if declared is not None and inner_theta != theta:
        raise ValueError(
            f"{keys.where}: {key} is {theta:g} and rope_theta of rope_scaling is {inner_theta:g}; "
            "transformers 4 takes the first and 5 the second, so leave the wrong one out"
        )
    return inner_theta


def read_stretch(inner: Keys, outer: Keys, harmless: tuple[str, ...] = ()) -> Stretch | None:
    """Returns how wavelengths are stretched. `outer` gives the original length where `inner` leaves it out."""
    known = {name: name for name in ("default", "linear", "llama3", "yarn", "longrope")} | {"su": "longrope"}
    kind = inner.one_of("rope_type", known, inner.take("type", "default"))
    inner.take("type", None)
    if kind == "default":
        inner.take("factor", None)
        stretch = None
    elif kind == "linear":
        stretch = LinearRope(factor=inner.number("factor"))
    elif kind == "llama3":
        stretch = Llama3Rope(
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_length=inner.count(ORIGINAL),
        )
    elif kind == "longrope":
        stretch = _read_longrope(inner, outer)
    else:
        length, factor = _original_length(inner, outer, outer), inner.number("factor")
        mscale, all_dim = inner.take("mscale", 0), inner.take("mscale_all_dim", 0)
        attention_factor = inner.maybe("attention_factor", None)
        of = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
        if attention_factor is None and mscale and all_dim:
            attention_factor = of(mscale) / of(all_dim)
        if (multiplier := inner.maybe("attn_factor", None)) is not None:
            product = multiplier * of(1)
            if attention_factor is not None and not math.isclose(attention_factor, product, rel_tol=1e-6):
                raise ValueError(
                    f"{inner.where}: transformers scales queries and keys by {attention_factor:.4g} (attention_factor "
                    f"or mscale), vLLM and SGLang by {product:.4g} (attn_factor times {of(1):.4g}); leave the wrong "
                    "one out"
                )
            attention_factor = product if attention_factor is None else attention_factor
        stretch = YarnRope(
            factor=factor,
            original_length=length,
            beta_fast=inner.number("beta_fast", 32.0),
            beta_slow=inner.number("beta_slow", 1.0),
            attention_factor=attention_factor,
            truncate=inner.flag("truncate", True),
        )
    inner.take(ORIGINAL, None)
    inner.close(set(harmless))
    return stretch


def _original_length(first: Keys, second: Keys, outer: Keys) -> int:
    """Returns the tokens that the model was first trained at: of `first`, else of `second`, else those of now."""
    for keys in (first, second):
        if keys.take(ORIGINAL, None) is not None:
            return keys.count(ORIGINAL)
    return outer.count("max_position_embeddings")


def _read_longrope(inner: Keys, outer: Keys) -> LongRope:
    # Where both have the original length, transformers takes the outer one.
    lists, length = {}, _original_length(outer, inner, outer)
    for name in ("short_factor", "long_factor"):
        lists[name] = inner.take(name)
        if not isinstance(lists[name], list) or not all(type(x) in (int, float) and x > 0 for x in lists[name]):
            raise ValueError(f"{inner.where}: {name} is {lists[name]!r:.200}; it must be a list of numbers above 0")
    factor = inner.maybe("factor", None)
    if factor is None:
        factor = outer.count("max_position_embeddings") / length
    return LongRope(
        short=tuple(map(float, lists["short_factor"])),
        long=tuple(map(float, lists["long_factor"])),
        original_length=length,
        factor=factor,
        attention_factor=inner.maybe("attention_factor", None),
    )


def write_stretch(rope: Stretch | None) -> dict[str, Any] | None:
    """Returns rope_scaling; both versions of transformers read it."""
    if rope is None:
        return None
    if isinstance(rope, LongRope):
        scaling = {"rope_type": "longrope", "short_factor": list(rope.short), "long_factor": list(rope.long)}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        return {**scaling, "factor": rope.factor, "original_max_position_embeddings": rope.original_length}
    if isinstance(rope, LinearRope):
        return {"rope_type": "linear", "factor": rope.factor}
    if isinstance(rope, ProportionalRope):
        return {"rope_type": "proportional", "factor": rope.factor, "partial_rotary_factor": rope.share}
    original = {"original_max_position_embeddings": rope.original_length}
    if isinstance(rope, Llama3Rope):
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            **original,
        }
    scaling = {"rope_type": "yarn", "factor": rope.factor, "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
        multiplier = rope.attention_factor / amplitude(dataclasses.replace(rope, attention_factor=None))
        if not math.isclose(multiplier, 1, rel_tol=1e-6):
            scaling["attn_factor"] = multiplier  # what vLLM and SGLang read instead
    if not rope.truncate:
        scaling["truncate"] = False
    return {**scaling, **original}


def write_rope(cfg: Decoder) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling."""
    return {"rope_theta": cfg.rope_theta, "rope_scaling": write_stretch(cfg.rope)}


def layer_flags(keys: Keys, layers: int, flagged: str = "sliding_attention") -> tuple[bool, ...] | None:
    """Returns whether each layer is of type `flagged` in layer_types, [layers]; None without layer_types."""
    layer_types = keys.take("layer_types", None)
    if layer_types is None:
        return None
    known = {flagged: True, "full_attention": False}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != layers
        or not all(name in known for name in layer_types)
    ):
        raise ValueError(
            f"{keys.where}: layer_types must name each of the {layers} layers, {' or '.join(known)}; "
            f"got {layer_types!r:.200}"
        )
    return tuple(known[name] for name in layer_types)


def layer_types(cfg: Decoder) -> list[str]:
    """Returns layer_types."""
    return ["sliding_attention" if cfg.windowed(i) else "full_attention" for i in range(cfg.layers)]
