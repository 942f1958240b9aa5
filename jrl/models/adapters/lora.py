"""Low-rank adapters: a small tree beside frozen weights, and the model that reads both.

    y = x W + s (x A) B            W [in, out] frozen, A [in, r], B [r, out]; s = alpha / r or alpha / sqrt(r)
    y = c * (x W + s (x A) B)      DoRA: c = (|W| + d) / |W + s A B|, one number an output; norms are over inputs

B and d begin at 0, so that the first policy is the base, bit for bit. No gradient passes through DoRA's norms (its
section 4.3). What DoRA calls the magnitude m is |W| + d here: learning d is learning m, and zeros are its beginning.

Sources: LoRA 2106.09685, section 4.1; rsLoRA 2312.03732, theorem 3.2; DoRA 2402.09353, equations 5 and 11.

The parameters of an adapted model are the base's tree with one more entry, ADAPTER: projection -> {"a", "b"[, "d"]},
stacked as the layers are. Before layers are computed the adapters move into them, s multiplied into B and c computed:
that is what `decoder` reads. W may be kept in few bits, which `quantised` makes whole where they multiply.
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
from jrl.models.adapters.quantized import KINDS, in_few_bits, is_quantised, quantise, whole
from jrl.models.contract import ADAPTER, Model, Names, ParamSpec, axes, init
from jrl.types import Array, PyTree

READ = {"d": "c"}  # what the decoder reads in place of a leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters to train in place of the weights, which are frozen."""

    rank: int = 16  # r
    alpha: float = 32.0
    scaling: Literal["alpha/rank", "alpha/sqrt(rank)"] = "alpha/rank"  # s; the root is rsLoRA's
    kind: Literal["lora", "dora"] = "lora"  # dora learns the length of each output's weights apart
    # Patterns over q, k, v, o, gate, up, down and q_gate, of which a decoder may lack some; and over expert_gate,
    # expert_up and expert_down, which only a pattern that begins with "expert" meets.
    targets: tuple[str, ...] = ("*",)
    sampling: Literal["unmerged", "merged"] = "unmerged"  # two small products a layer, or a merged copy for each call
    base: Literal["int8", "int4", "nf4"] | None = None  # how frozen matrices are kept; None: in the model's param_dtype

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA.rank must be at least 1; got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"LoRA.alpha must be above 0; got {self.alpha}")
        if not self.targets:
            raise ValueError("LoRA.targets names no projection, so nothing would be trained")
        _targets(self.targets, (*ADAPTABLE, *EXPERTS))
        if self.kind == "dora" and any(pattern.startswith("expert") for pattern in self.targets):
            raise ValueError("LoRA.kind = 'dora' is not known for experts; leave them out of LoRA.targets")
        if self.base is not None and self.sampling == "merged":
            raise ValueError(
                f"LoRA.sampling = 'merged' makes every matrix whole, and LoRA.base = {self.base!r} is there to keep "
                "none so; set LoRA.sampling = 'unmerged'"
            )

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.rank if self.scaling == "alpha/rank" else math.sqrt(self.rank))


def _targets(patterns: tuple[str, ...], names: Any) -> tuple[str, ...]:
    """Returns the names that a pattern matches. Raises ValueError for a pattern that matches none."""
    # Experts are most of what a model of theirs would train, so that they are asked for by name.
    meets = lambda name, pattern: (
        (name not in EXPERTS or pattern.startswith("expert"))
        and any(fnmatch.fnmatchcase(said, pattern) for said in (name, name.removeprefix("full_").removeprefix("wide_")))
    )
    for pattern in patterns:
        if not any(meets(name, pattern) for name in names):
            raise ValueError(f"LoRA.targets: {pattern!r} matches no projection; there are {', '.join(names)}")
    return tuple(name for name in names if any(meets(name, pattern) for pattern in patterns))


def without_adapters(base: PyTree) -> tuple[str, ...]:
    """Returns the matrices in the layers of `base`, a decoder's spec, that no target can name: routers, gates
    of an MLP beside experts, linear attention, inputs of layers; and experts where they have no adapters there. They
    stay frozen."""
    own = {*ADAPTABLE, *base.get(ADAPTER, ())}
    return tuple(name for name in ("router", "beside_gate", *MATRICES) if name in base["layers"] and name not in own)


def adapter_spec(config: LoRA, base: PyTree) -> PyTree:
    """Returns the abstract tree of the adapters to `base`, a decoder's spec.

    A begins normal with variance 1 / (3 in), that of PEFT's uniform; B and d at 0. float32, or wider with the base.

    Raises: ValueError for a target that the decoder does not have.
    """
    found = {}
    for name in _targets(config.targets, [name for name in (*ADAPTABLE, *EXPERTS) if name in base["layers"]]):
        weight = base["layers"][name]
        first, inputs = 1 + MATRICES[name][0], 2 + MATRICES[name][-1]  # behind the layer, and an expert's number
        apart, into, out = weight.shape[:first], weight.shape[first:inputs], weight.shape[inputs:]
        apart_axes, into_axes, out_axes = weight.axes[:first], weight.axes[first:inputs], weight.axes[inputs:]
        dtype = jnp.promote_types(weight.dtype, jnp.float32)
        found[name] = {
            "a": ParamSpec(
                (*apart, *into, config.rank), dtype, (*apart_axes, *into_axes, "rank"), (3 * math.prod(into)) ** -0.5
            ),
            "b": ParamSpec((*apart, config.rank, *out), dtype, (*apart_axes, "rank", *out_axes), 0.0),
        }
        if config.kind == "dora":
            found[name]["d"] = ParamSpec((*apart, *out), dtype, (*apart_axes, *out_axes), 0.0)
    return found


def adapted(model: Model, config: LoRA) -> Model:
    """Returns the model whose parameters are those of `model`, kept as `config.base` says, and, under ADAPTER, adapters
    to them."""

    def whole_spec(cfg: Any) -> PyTree:
        base = model.spec(cfg)
        kept = base if config.base is None else in_few_bits(base, config.base)
        return {**kept, ADAPTER: adapter_spec(config, base)}

    def whole_init(key: Array, cfg: Any, place: Any = lambda names: None) -> PyTree:
        # The name of a parameter gives its draw: those of the base are what they are without adapters, in all bits.
        adapters, base = {ADAPTER: whole_spec(cfg)[ADAPTER]}, model.init(key, cfg, place)
        if config.base is not None:
            names = axes(model.spec(cfg))["layers"]
            layers = {name: quantise(leaf, name, config.base, names[name]) if name in MATRICES else leaf
                      for name, leaf in base["layers"].items()}  # fmt: skip
            base = {**base, "layers": layers}
        return {**base, **init(key, adapters, place)}

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
            widened = functools.partial(_widened, name=name, names=_names(names, name))
            inside[name]["c"] = columns(
                base["layers"][name], **inside[name], d=leaf["d"], names=names[ADAPTER][name]["d"][1:], widened=widened
            )
    return {**base, "layers": {**base["layers"], ADAPTER: inside}}


def _names(names: PyTree, name: str) -> Names:
    """Returns the logical axes of a layer's matrix, in few bits or whole."""
    found = names["layers"][name]
    return (next(found[kind] for kind in KINDS if kind in found) if is_quantised(found) else found)[1:]


def _widened(weight: Array | PyTree, dtype: Any, *, name: str, names: Names) -> Array:
    return whole(weight, name, dtype, spec(names, TRAIN))


def columns(
    weight: Array | PyTree,
    a: Array,
    b: Array,
    d: Array,
    names: Names,
    widened: Callable[[Any, Any], Array] = lambda weight, dtype: weight.astype(dtype),
) -> Array:
    """Returns DoRA's c = (|W| + d) / |W + A B| for every layer and output, [layers, *out]. Its gradient is that of d.

    |W + A B|^2 = |W|^2 + 2 sum_r B_r (A^T W)_r + sum_rq B_r (A^T A)_rq B_q, so that no matrix of W's size is made.

    Args:
      weight: [layers, *in, *out]. a: [layers, *in, r]. b: [layers, r, *out], s multiplied in. d: [layers, *out].
      names: logical axes of the outputs. widened: (a layer's weight, dtype) -> it in that dtype.
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
        now = jnp.sqrt(jnp.maximum(changed, 0))
        now = jnp.where(now > 0, now, 1)  # an output whose weights are all 0 has no direction to keep
        # In this order c is exactly 1 where nothing was learned, whatever a compiler does to a quotient.
        return 1 + (d - (now - jnp.where(square > 0, jnp.sqrt(square), 1))) / now

    return jax.lax.map(layer, (weight, a, b, d))


def merge(params: PyTree, config: LoRA, names: PyTree, *, dtype: Any) -> PyTree:
    """Returns the base's tree with W + s A B, or DoRA's c times that, in place of every adapted W, in `dtype`; and with
    whole matrices in `dtype` in place of those in few bits.

    Sums are in float32 or wider. A layer at a time: what is made on the way is of one layer's size.

    Args:
      names: the logical axes of every leaf of `params`.
    """
    tree = attach(params, config, names)
    layers = dict(tree["layers"])
    for name, leaf in layers.pop(ADAPTER).items():
        layers[name] = _merge_stack(layers[name], leaf, name, _names(names, name), dtype)
    return in_full({**tree, "layers": layers}, names, dtype=dtype)


def in_full(params: PyTree, names: PyTree, *, dtype: Any) -> PyTree:
    """Returns parameters with whole matrices in `dtype` in place of those in few bits. names: as `merge` takes them."""
    layers = {name: _merge_stack(leaf, None, name, _names(names, name), dtype) if is_quantised(leaf) else leaf
              for name, leaf in params["layers"].items()}  # fmt: skip
    return {**params, "layers": layers}


def _merge_stack(weight: Array | PyTree, adapter: PyTree | None, name: str, names: Names, dtype: Any) -> Array:
    def layer(leaves: tuple[Array | PyTree, PyTree | None]) -> Array:
        weight, adapter = leaves
        merged = _widened(weight, jnp.float32, name=name, names=names) if is_quantised(weight) else weight
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
    """Returns the contraction laid out as parameters with such logical axes are."""
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.einsum(formula, x, y)
    return jnp.einsum(formula, x, y, out_sharding=spec(names, TRAIN))
