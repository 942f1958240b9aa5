"""Low-rank adapters: a small tree beside frozen weights, and the model that reads both.

    y = x W + s (x A) B            W [in, out] frozen, A [in, r], B [r, out]; s = alpha / r or alpha / sqrt(r)
    y = c * (x W + s (x A) B)      DoRA: c = (|W| + d) / |W + s A B|, one number an output; norms are over inputs

B and d begin at 0, so that the first policy is the base, bit for bit. No gradient passes through DoRA's norms (its
section 4.3). What DoRA calls the magnitude m is |W| + d here: learning d is learning m, and zeros are its beginning.

Sources: LoRA 2106.09685, section 4.1; rsLoRA 2312.03732, theorem 3.2; DoRA 2402.09353, equations 5 and 11.

The parameters of an adapted model are the base's tree with one more entry, ADAPTER: projection -> {"a", "b"[, "d"]},
stacked as the layers are. Before layers are computed the adapters move into them, s multiplied into B and c computed:
that is what `decoder` reads.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrl.models.contract import ADAPTER, Model, ParamSpec, axes, init
from jrl.models.leaves import ATTENTION_MATRICES, MATRICES, WIDE_LEAVES
from jrl.sharding import TRAIN, spec
from jrl.types import Array, PyTree

# Projections of a layer, and how many of a weight's axes are its inputs; the others are its outputs.
INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1, "q_gate": 1}
# Those of layers whose heads or MLP have a shape of their own, which a pattern meets by their plain names too.
INPUTS |= {f"full_{name}": INPUTS[name] for name in ATTENTION_MATRICES} | {name: 1 for name in WIDE_LEAVES}
READ = {"d": "c"}  # what the decoder reads in place of a leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters to train in place of the weights, which are frozen."""

    rank: int = 16  # r
    alpha: float = 32.0
    scaling: Literal["alpha/rank", "alpha/sqrt(rank)"] = "alpha/rank"  # s; the root is rsLoRA's
    kind: Literal["lora", "dora"] = "lora"  # dora learns the length of each output's weights apart
    targets: tuple[str, ...] = ("*",)  # patterns over q, k, v, o, gate, up, down and q_gate; a decoder may lack some
    sampling: Literal["unmerged", "merged"] = "unmerged"  # two small products a layer, or a merged copy for each call

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA.rank must be at least 1; got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"LoRA.alpha must be above 0; got {self.alpha}")
        if not self.targets:
            raise ValueError("LoRA.targets names no projection, so nothing would be trained")
        _targets(self.targets, INPUTS)

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.rank if self.scaling == "alpha/rank" else math.sqrt(self.rank))


def _targets(patterns: tuple[str, ...], names: Any) -> tuple[str, ...]:
    """Returns the names that a pattern matches. Raises ValueError for a pattern that matches none."""
    meets = lambda name, pattern: any(
        fnmatch.fnmatchcase(said, pattern) for said in (name, name.removeprefix("full_").removeprefix("wide_"))
    )
    for pattern in patterns:
        if not any(meets(name, pattern) for name in names):
            raise ValueError(f"LoRA.targets: {pattern!r} matches no projection; there are {', '.join(names)}")
    return tuple(name for name in names if any(meets(name, pattern) for pattern in patterns))


def without_adapters(base: PyTree) -> tuple[str, ...]:
    """Returns the matrices in the layers of `base`, a decoder's spec, that no target can name: experts and routers,
    linear attention, inputs of layers. They stay frozen."""
    return tuple(name for name in ("router", *MATRICES) if name in base["layers"] and name not in INPUTS)


def adapter_spec(config: LoRA, base: PyTree) -> PyTree:
    """Returns the abstract tree of the adapters to `base`, a decoder's spec.

    A begins normal with variance 1 / (3 in), that of PEFT's uniform; B and d at 0. float32, or wider with the base.

    Raises: ValueError for a target that the decoder does not have.
    """
    found = {}
    for name in _targets(config.targets, [name for name in INPUTS if name in base["layers"]]):
        weight, inputs = base["layers"][name], 1 + INPUTS[name]
        layers, into, out = weight.shape[:1], weight.shape[1:inputs], weight.shape[inputs:]
        into_axes, out_axes = weight.axes[1:inputs], weight.axes[inputs:]
        dtype = jnp.promote_types(weight.dtype, jnp.float32)
        found[name] = {
            "a": ParamSpec(
                (*layers, *into, config.rank), dtype, ("layers", *into_axes, "rank"), (3 * math.prod(into)) ** -0.5
            ),
            "b": ParamSpec((*layers, config.rank, *out), dtype, ("layers", "rank", *out_axes), 0.0),
        }
        if config.kind == "dora":
            found[name]["d"] = ParamSpec((*layers, *out), dtype, ("layers", *out_axes), 0.0)
    return found


def adapted(model: Model, config: LoRA) -> Model:
    """Returns the model whose parameters are those of `model` and, under ADAPTER, adapters to them."""

    def whole_spec(cfg: Any) -> PyTree:
        base = model.spec(cfg)
        return {**base, ADAPTER: adapter_spec(config, base)}

    def whole_init(key: Array, cfg: Any, place: Any = lambda names: None) -> PyTree:
        # The name of a parameter gives its draw: those of the base are what they are without adapters.
        adapters = {ADAPTER: whole_spec(cfg)[ADAPTER]}
        return {**model.init(key, cfg, place), **init(key, adapters, place)}

    def inside(params: PyTree, cfg: Any) -> PyTree:
        return attach(params, config, axes(whole_spec(cfg))) if ADAPTER in params else params

    def forward(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None):
        return model.forward(inside(params, cfg), tokens, positions, segment, cfg, cache)

    def routed(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any):
        return model.routed(inside(params, cfg), tokens, positions, segment, cfg)

    def unstack(params: PyTree, cfg: Any) -> PyTree:
        return model.unstack(inside(params, cfg), cfg)

    def ready(params: PyTree, cfg: Any) -> tuple[PyTree, PyTree]:
        names = axes(whole_spec(cfg))
        if config.sampling == "merged":
            return merge(params, config, names, dtype=cfg.dtype), axes(model.spec(cfg))
        adapters = {name: {READ.get(key, key): leaf for key, leaf in tree.items()}
                    for name, tree in names.pop(ADAPTER).items()}  # fmt: skip
        return inside(params, cfg), {**names, "layers": {**names["layers"], ADAPTER: adapters}}

    return model._replace(
        spec=whole_spec, init=whole_init, forward=forward, routed=routed, unstack=unstack, ready=ready
    )


def attach(params: PyTree, config: LoRA, names: PyTree) -> PyTree:
    """Returns the base's tree with the adapters inside its layers, as the decoder reads them: a, b times s, and c.

    Args:
      names: the logical axes of every leaf of `params`.
    """
    base = {name: leaf for name, leaf in params.items() if name != ADAPTER}
    inside = {}
    for name, leaf in params[ADAPTER].items():
        inside[name] = {"a": leaf["a"], "b": leaf["b"] * config.scale}
        if "d" in leaf:
            weight = base["layers"][name]
            inside[name]["c"] = columns(weight, **inside[name], d=leaf["d"], names=names[ADAPTER][name]["d"][1:])
    return {**base, "layers": {**base["layers"], ADAPTER: inside}}


def columns(weight: Array, a: Array, b: Array, d: Array, names: tuple[str | None, ...]) -> Array:
    """Returns DoRA's c = (|W| + d) / |W + A B| for every layer and output, [layers, *out]. Its gradient is that of d.

    |W + A B|^2 = |W|^2 + 2 sum_r B_r (A^T W)_r + sum_rq B_r (A^T A)_rq B_q, so that no matrix of W's size is made.

    Args:
      weight: [layers, *in, *out]. a: [layers, *in, r]. b: [layers, r, *out], s multiplied in. d: [layers, *out].
      names: logical axes of the outputs.
    """
    into, out = "ij"[: a.ndim - 2], "xy"[: d.ndim - 1]
    weight, a, b = jax.lax.stop_gradient((weight, a, b))

    def layer(leaves: tuple[Array, ...]) -> Array:
        weight, a, b, d = leaves
        weight = weight.astype(d.dtype)
        square = jnp.sum(weight * weight, axis=tuple(range(len(into))))
        crossed = _einsum(f"{into}{out},{into}r->r{out}", weight, a, ("rank", *names))
        gram = _einsum(f"{into}r,{into}q->rq", a, a, ("rank", "rank"))
        changed = square + jnp.sum(b * (2 * crossed + _einsum(f"rq,q{out}->r{out}", gram, b, ("rank", *names))), axis=0)
        now = jnp.sqrt(jnp.maximum(changed, 0))
        now = jnp.where(now > 0, now, 1)  # an output whose weights are all 0 has no direction to keep
        # In this order c is exactly 1 where nothing was learned, whatever a compiler does to a quotient.
        return 1 + (d - (now - jnp.where(square > 0, jnp.sqrt(square), 1))) / now

    return jax.lax.map(layer, (weight, a, b, d))


def merge(params: PyTree, config: LoRA, names: PyTree, *, dtype: Any) -> PyTree:
    """Returns the base's tree with W + s A B, or DoRA's c times that, in place of every adapted W, in `dtype`.

    Sums are in float32 or wider. A layer at a time: what is made on the way is of one layer's size.

    Args:
      names: the logical axes of every leaf of `params`.
    """
    tree = attach(params, config, names)
    layers = dict(tree["layers"])
    for name, leaf in layers.pop(ADAPTER).items():
        layers[name] = _merge_stack(layers[name], leaf, names["layers"][name][1:], dtype)
    return {**tree, "layers": layers}


def _merge_stack(weight: Array, adapter: PyTree, names: tuple[str | None, ...], dtype: Any) -> Array:
    into = "ij"[: adapter["a"].ndim - 2]
    out = "xy"[: weight.ndim - 1 - len(into)]

    def layer(leaves: tuple[Array, PyTree]) -> Array:
        weight, adapter = leaves
        whole = weight + _einsum(f"{into}r,r{out}->{into}{out}", adapter["a"], adapter["b"], names)
        if "c" in adapter:
            whole = whole * adapter["c"][(None,) * len(into)]
        return whole.astype(dtype)

    return jax.lax.map(layer, (weight, adapter))


def _einsum(formula: str, x: Array, y: Array, names: tuple[str | None, ...]) -> Array:
    """Returns the contraction laid out as parameters with such logical axes are."""
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.einsum(formula, x, y)
    return jnp.einsum(formula, x, y, out_sharding=spec(names, TRAIN))
