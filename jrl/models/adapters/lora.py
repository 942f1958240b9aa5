"""Low-rank adapters: a small tree next to frozen weights, and the model that reads both.

    y = x W + s (x A) B            W [in, out] frozen, A [in, r], B [r, out]; s = alpha / r or alpha / sqrt(r)
    y = c * (x W + s (x A) B)      DoRA: c = (|W| + d) / |W + s A B|, one number per output; norms are over inputs

B and d start at 0: the initial policy is the base, bit for bit. No gradient passes through DoRA's norms (its
section 4.3). What DoRA calls the magnitude m is |W| + d here: learning d is learning m, and d starts at zero.

Sources: LoRA 2106.09685, section 4.1; rsLoRA 2312.03732, theorem 3.2; DoRA 2402.09353, equations 5 and 11.

The parameters of an adapted model are `Adapted`: the base's tree, and adapters: projection -> {"a", "b"[, "d"]},
stacked as the layers are. Before layers are computed the adapters move into them, with s multiplied into B and c
computed: `decoder` reads that form. W may be quantized; `quantized` dequantizes it where it is used.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrl.device.sharding import TRAIN, spec
from jrl.models.adapters.matrices import ADAPTABLE, EXPERTS, MATRICES
from jrl.models.adapters.quantized import KINDS, dequantize, is_quantized, quantize, quantized_spec
from jrl.models.contract import ADAPTER, Adapted, Model, Names, ParamSpec, axes, init, split_params
from jrl.types import Array, PyTree

READ = {"d": "c"}  # leaf -> the leaf that the decoder reads in its place


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters, trained instead of the weights, which are frozen."""

    rank: int = 16  # r
    alpha: float = 32.0  # numerator of the scale s
    scaling: Literal["alpha/rank", "alpha/sqrt(rank)"] = "alpha/rank"  # s; the root is rsLoRA's
    kind: Literal["lora", "dora"] = "lora"  # dora also learns the norm of each output's weights
    # Patterns over q, k, v, o, gate, up, down and q_gate, of which a decoder may lack some; and over expert_gate,
    # expert_up and expert_down, which only a pattern that begins with "expert" matches.
    targets: tuple[str, ...] = ("*",)
    sampling: Literal["unmerged", "merged"] = "unmerged"  # two small products per matrix, or one merged copy per call
    base: Literal["int8", "int4", "nf4"] | None = (
        None  # quantization of frozen matrices; None: none, in the model's param_dtype
    )

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA.rank must be at least 1; got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"LoRA.alpha must be above 0; got {self.alpha}")
        if not self.targets:
            raise ValueError("LoRA.targets names no projection, so nothing would be trained")
        _targets(self.targets, (*ADAPTABLE, *EXPERTS))
        if self.kind == "dora" and any(pattern.startswith("expert") for pattern in self.targets):
            raise ValueError("LoRA.kind = 'dora' is not supported for experts; leave them out of LoRA.targets")
        if self.base is not None and self.sampling == "merged":
            raise ValueError(
                f"LoRA.sampling = 'merged' dequantizes every matrix, which LoRA.base = {self.base!r} is there to "
                "avoid; set LoRA.sampling = 'unmerged'"
            )

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.rank if self.scaling == "alpha/rank" else math.sqrt(self.rank))


def _targets(patterns: tuple[str, ...], names: Any) -> tuple[str, ...]:
    """Returns the names that a pattern matches. Raises ValueError for a pattern that matches none."""
    # Experts hold most of a sparse model's weights, so they are matched only by name.
    matches = lambda name, pattern: (
        (name not in EXPERTS or pattern.startswith("expert"))
        and any(
            fnmatch.fnmatchcase(option, pattern)
            for option in (name, name.removeprefix("full_").removeprefix("shared_mlp_"))
        )
    )
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"LoRA.targets: {pattern!r} matches no projection. Available: {', '.join(names)}")
    return tuple(name for name in names if any(matches(name, pattern) for pattern in patterns))


def without_adapters(base: PyTree) -> tuple[str, ...]:
    """Returns the matrices in the layers of `base`, a decoder's spec, that stay frozen because no target can name them:
    routers, gates of shared experts, linear attention, inputs of layers; and experts that have no adapters."""
    base, adapters = split_params(base)
    base, adapters = (adapters, ()) if base is None else (base, adapters)
    named = {*ADAPTABLE, *adapters}
    return tuple(
        name for name in ("router", "shared_expert_gate", *MATRICES) if name in base["layers"] and name not in named
    )


def adapter_spec(config: LoRA, base: PyTree) -> PyTree:
    """Returns the abstract tree of the adapters to `base`, a decoder's spec.

    A starts normal with variance 1 / (3 in), that of PEFT's uniform; B and d start at 0. The dtype is float32, or the
    base's if that is wider.

    Raises: ValueError for a target that the decoder does not have.
    """
    specs = {}
    for name in _targets(config.targets, [name for name in (*ADAPTABLE, *EXPERTS) if name in base["layers"]]):
        weight = base["layers"][name]
        first, inputs = 1 + MATRICES[name][0], 2 + MATRICES[name][-1]  # after the layer axis and the expert axis
        stack, into, out = weight.shape[:first], weight.shape[first:inputs], weight.shape[inputs:]
        stack_axes, into_axes, out_axes = weight.axes[:first], weight.axes[first:inputs], weight.axes[inputs:]
        dtype = jnp.promote_types(weight.dtype, jnp.float32)
        specs[name] = {
            "a": ParamSpec(
                (*stack, *into, config.rank), dtype, (*stack_axes, *into_axes, "rank"), (3 * math.prod(into)) ** -0.5
            ),
            "b": ParamSpec((*stack, config.rank, *out), dtype, (*stack_axes, "rank", *out_axes), 0.0),
        }
        if config.kind == "dora":
            specs[name]["d"] = ParamSpec((*stack, *out), dtype, (*stack_axes, *out_axes), 0.0)
    return specs


@functools.cache  # one object per model, so that equal programs are compiled once
def adapted(model: Model, config: LoRA) -> Model:
    """Returns the model whose parameters are those of `model`, quantized to `config.base`, and adapters to them."""

    def adapted_spec(cfg: Any) -> Adapted:
        base = model.spec(cfg)
        stored = base if config.base is None else quantized_spec(base, config.base)
        return Adapted(stored, adapter_spec(config, base))

    def adapted_init(key: Array, cfg: Any, place: Any = lambda names: None) -> Adapted:
        # A parameter's name seeds its draw: the base is bit-identical to the one without adapters.
        adapters, base = {ADAPTER: adapted_spec(cfg).adapters}, model.init(key, cfg, place)
        if config.base is not None:
            names = axes(model.spec(cfg))["layers"]
            layers = {name: quantize(leaf, name, config.base, names[name]) if name in MATRICES else leaf
                      for name, leaf in base["layers"].items()}  # fmt: skip
            base = {**base, "layers": layers}
        return Adapted(base, init(key, adapters, place)[ADAPTER])

    def inside(params: PyTree, cfg: Any) -> PyTree:
        return attach(params, config, axes(adapted_spec(cfg))) if isinstance(params, Adapted) else params

    def forward(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None):
        return model.forward(inside(params, cfg), tokens, positions, segment, cfg, cache)

    def routed(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any, *routes: Array):
        return model.routed(inside(params, cfg), tokens, positions, segment, cfg, *routes)

    def record(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None):
        return model.routes.record(inside(params, cfg), tokens, positions, segment, cfg, cache)

    def unembed(params: PyTree, hidden: Array, cfg: Any) -> Array:
        return model.unembed(params.base if isinstance(params, Adapted) else params, hidden, cfg)

    def unstack(params: PyTree, cfg: Any) -> PyTree:
        return model.unstack(inside(params, cfg), cfg)

    def prepare_for_decode(params: PyTree, cfg: Any) -> tuple[PyTree, PyTree]:
        names = axes(adapted_spec(cfg))
        if config.sampling == "merged":
            return merge(params, config, names, dtype=cfg.dtype), axes(model.spec(cfg))
        adapters = {name: {READ.get(key, key): leaf for key, leaf in tree.items()}
                    for name, tree in names.adapters.items()}  # fmt: skip
        layers = {**names.base["layers"], ADAPTER: adapters}
        return inside(params, cfg), {**names.base, "layers": layers}

    return model._replace(
        spec=adapted_spec,
        init=adapted_init,
        forward=forward,
        routed=routed,
        unembed=unembed,
        unstack=unstack,
        prepare_for_decode=prepare_for_decode,
        routes=model.routes and model.routes._replace(record=record),
    )


def attach(params: Adapted, config: LoRA, names: Adapted) -> PyTree:
    """Returns the base's tree with the adapters inside its layers, as the decoder reads them: a, b times s, and c.

    Args:
      names: the logical axes of every leaf of `params`.
    """
    base, inside = params.base, {}
    for name, leaf in params.adapters.items():
        inside[name] = {"a": leaf["a"], "b": leaf["b"] * config.scale}
        if "d" in leaf:
            widened = functools.partial(_widened, name=name, names=_names(names, name))
            inside[name]["c"] = columns(
                base["layers"][name], **inside[name], d=leaf["d"], names=names.adapters[name]["d"][1:], widened=widened
            )
    return {**base, "layers": {**base["layers"], ADAPTER: inside}}


def _names(names: PyTree, name: str) -> Names:
    """Returns the logical axes of a layer's matrix, quantized or not."""
    axes = names.base["layers"][name]
    return (next(axes[kind] for kind in KINDS if kind in axes) if is_quantized(axes) else axes)[1:]


def _widened(weight: Array | PyTree, dtype: Any, *, name: str, names: Names) -> Array:
    return dequantize(weight, name, dtype, spec(names, TRAIN))


def columns(
    weight: Array | PyTree,
    a: Array,
    b: Array,
    d: Array,
    names: Names,
    widened: Callable[[Any, Any], Array] = lambda weight, dtype: weight.astype(dtype),
) -> Array:
    """Returns DoRA's c = (|W| + d) / |W + A B| for every layer and output, [layers, *out]. Gradients reach only d.

    |W + A B|^2 = |W|^2 + 2 sum_r B_r (A^T W)_r + sum_rq B_r (A^T A)_rq B_q, so W + A B is never computed.

    Args:
      weight: [layers, *in, *out]. a: [layers, *in, r]. b: [layers, r, *out], times s. d: [layers, *out].
      names: logical axes of the outputs. widened: (a layer's weight, dtype) -> the weight in that dtype.
    """
    into, out = "ij"[: a.ndim - 2], "xy"[: d.ndim - 1]
    weight, a, b = jax.lax.stop_gradient((weight, a, b))

    def layer(leaves: tuple[Array, ...]) -> Array:
        weight, a, b, d = leaves
        weight = widened(weight, d.dtype)
        square = jnp.sum(weight * weight, axis=tuple(range(len(into))))
        crossed = _einsum(f"{into}{out},{into}r->r{out}", weight, a, ("rank", *names))
        gram = _einsum(f"{into}r,{into}q->rq", a, a, ("rank", "rank"))
        changed = square + jnp.sum(b * (2 * crossed + _einsum(f"rq,q{out}->r{out}", gram, b, ("rank", *names))), axis=0)
        # An output whose weights are all 0 has no direction to scale.
        norm, now = (jnp.where(changed > 0, jnp.sqrt(jnp.maximum(x, 0)), 1) for x in (square, changed))
        # In this order c is exactly 1 where nothing was learned, whatever a compiler does to a quotient.
        return 1 + (d - (now - norm)) / now

    return jax.lax.map(layer, (weight, a, b, d))


def merge(params: Adapted, config: LoRA, names: Adapted, *, dtype: Any) -> PyTree:
    """Returns the base's tree with every adapted W replaced by W + s A B, or DoRA's c times that, in `dtype`. Quantized
    matrices are dequantized to `dtype`.

    Sums are in float32 or wider. Layers are computed one at a time: intermediate arrays have the size of one layer.

    Args:
      names: the logical axes of every leaf of `params`.
    """
    tree = attach(params, config, names)
    layers = dict(tree["layers"])
    for name, leaf in layers.pop(ADAPTER).items():
        layers[name] = _merge_stack(layers[name], leaf, name, _names(names, name), dtype)
    return dequantize_params({**tree, "layers": layers}, names, dtype=dtype)


def dequantize_params(params: PyTree, names: PyTree, *, dtype: Any) -> PyTree:
    """Returns parameters with quantized matrices dequantized to `dtype`. names: as in `merge`."""
    layers = {name: _merge_stack(leaf, None, name, _names(names, name), dtype) if is_quantized(leaf) else leaf
              for name, leaf in params["layers"].items()}  # fmt: skip
    return {**params, "layers": layers}


def _merge_stack(weight: Array | PyTree, adapter: PyTree | None, name: str, names: Names, dtype: Any) -> Array:
    def layer(leaves: tuple[Array | PyTree, PyTree | None]) -> Array:
        weight, adapter = leaves
        merged = _widened(weight, jnp.float32, name=name, names=names) if is_quantized(weight) else weight
        if adapter is None:
            return merged.astype(dtype)
        each = "e" if name in EXPERTS else ""
        into = "ij"[: adapter["a"].ndim - 1 - len(each)]
        out = "xy"[: merged.ndim - len(each) - len(into)]
        formula = f"{each}{into}r,{each}r{out}->{each}{into}{out}"
        merged = merged + _einsum(formula, adapter["a"], adapter["b"], names)
        if "c" in adapter:
            merged = merged * adapter["c"][(None,) * len(into)]
        return merged.astype(dtype)

    return jax.lax.map(layer, (weight, adapter))


def _einsum(formula: str, x: Array, y: Array, names: tuple[str | None, ...]) -> Array:
    """Returns the contraction, sharded as parameters with these logical axes."""
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.einsum(formula, x, y)
    return jnp.einsum(formula, x, y, out_sharding=spec(names, TRAIN))
