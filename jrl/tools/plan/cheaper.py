"""Suggests changes to a run that does not fit, each with the memory that it saves and the time that it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jrl.device.sharding import OPTIONAL_AXES, MeshShape
from jrl.experiment import Config
from jrl.models.attention.kernels import NO_KERNEL
from jrl.plugins import Parts
from jrl.tools.plan import budget, estimate
from jrl.tools.plan.case import Case, case_of, main_stage, make_case
from jrl.tools.plan.chips import Chip

MOST_CHANGES = 3  # most changes that are suggested


class Change(NamedTuple):
    """One change to a configuration, and its effect."""

    bindings: tuple[str, ...]
    saves: int  # bytes of the largest program, on one device
    fits: bool
    slower: float | None  # estimated seconds of a step, after / before; None if the chip is not known


def candidates(case: Case) -> Iterator[dict[str, object]]:
    """Yields changes as {name: value}: smaller micro-batches, fewer slots, fewer saved activations, smaller attention
    blocks and chunks of logits, frozen weights in bfloat16, more shards of the weights."""
    config = case.config
    shape = case_of(case, budget.peak(case)[0]).shape
    smallest = shape.row_length * shape.shards
    tokens = shape.rows * shape.row_length // 2
    while tokens >= smallest:
        yield {"Learner.micro_batch_tokens": tokens}
        tokens //= 2
    slots = case.slots // 2
    while slots >= 1:
        yield {"Sampler.slots": slots}
        slots //= 2
    if case.cfg.remat in ("none", "dots"):
        yield {f"{type(config.model).__name__}.remat": "layer"}
    if case.adapters is not None and case.cfg.param_dtype == "float32" and case.cfg.dtype == "bfloat16":
        yield {f"{type(config.model).__name__}.param_dtype": "bfloat16"}  # of frozen weights alone
    if case.cfg.attention in NO_KERNEL and case.cfg.attention_block is None and case.shape.row_length > 512:
        yield {f"{type(config.model).__name__}.attention_block": 512}
    chunk = min(case.stage.learner.chunk, shape.row_length) // 2
    if chunk >= 16:
        yield {"Learner.logprob_chunk": chunk}
    sizes = case.sizes
    slices = config.mesh.slices
    others = {f"MeshShape.{axis}": sizes[axis] for axis in ("tensor", *OPTIONAL_AXES) if sizes[axis] > 1}
    if sizes["data"] > slices:
        yield {"MeshShape.data": slices, "MeshShape.fsdp": sizes["fsdp"] * sizes["data"] // slices, **others}
    moved = 2
    while sizes["fsdp"] % moved == 0:
        fewer = {"MeshShape.data": sizes["data"], "MeshShape.fsdp": sizes["fsdp"] // moved, **others}
        yield {**fewer, "MeshShape.tensor": sizes["tensor"] * moved}
        if moved == 2 and shape.rows <= shape.shards:  # micro-batches cannot shrink, but their rows can be split
            yield {**fewer, "MeshShape.sequence": sizes["sequence"] * 2}
        moved *= 2


def cheapest(case: Case, parts: Parts, limit: int, num_devices: int, chip: Chip | None) -> list[Change]:
    """Returns the best changes: first those that make the run fit, the least time first; then those that save the
    most, without any that saves no more than a faster one."""
    _, before = budget.peak(case)
    seconds = estimate.step_seconds(case, chip) if chip is not None else None
    stage = None if case.others else case.name
    changes: list[Change] = []
    for change in candidates(case):
        try:
            after = make_case(applied(case.config, change), parts, num_devices, stage, case.slices)
        except ValueError:
            continue
        _, size = budget.peak(after)
        if size >= before:
            continue
        slower = estimate.step_seconds(after, chip) / seconds if chip is not None else None
        bindings = tuple(f"{name}={value!r}" for name, value in change.items())
        changes.append(Change(bindings, before - size, size <= limit, slower))
    factor = lambda change: change.slower or 1.0
    changes.sort(key=lambda c: (not c.fits, factor(c) if c.fits else 0.0, -c.saves, factor(c)))
    best: list[Change] = []
    for change in changes:
        if change.fits or change.slower is None or all(change.slower < other.slower for other in best):
            best.append(change)
    return best[:MOST_CHANGES]


def sentence(change: Change, gib: float = 2**30) -> str:
    """Returns a change as a line of text."""
    time = "" if change.slower is None else f", step x {change.slower:.2f}"
    verdict = "fits" if change.fits else "alone does not fit"
    return f"{' '.join(change.bindings)}: saves {change.saves / gib:.2f} GiB a device{time}; {verdict}"


PLACES = {"MeshShape": "mesh", "Sampler": "sampler", "Decoder": "model", "Published": "model"}  # in Config
SAMPLER_MESH = "Config.sampler_mesh"  # a MeshShape, or None
STAGE_PLACES = {"Learner": "learner"}  # in each of its stages


def applied(config: Config, bindings: Mapping[str, Any]) -> Config:
    """Returns the configuration with the bindings of a layout applied. A binding of a stage's section changes every
    stage that has the main stage's value: a different value was bound in a scope, which the binding does not reach."""
    fields: dict[str, dict[str, Any]] = {}
    stages = list(config.stages)
    main = stages[main_stage(config)]
    if SAMPLER_MESH in bindings:
        config = dataclasses.replace(config, sampler_mesh=bindings[SAMPLER_MESH])
    for name, value in bindings.items():
        section, field = name.split(".")
        if section == "Config":
            continue
        if section in PLACES:
            fields.setdefault(PLACES[section], {})[field] = value
            continue
        place = STAGE_PLACES[section]
        shared = getattr(getattr(main, place), field)
        for i, stage in enumerate(stages):
            if getattr(getattr(stage, place), field) == shared:
                section_after = dataclasses.replace(getattr(stage, place), **{field: value})
                stages[i] = dataclasses.replace(stage, **{place: section_after})
    if "mesh" in fields:
        fields["mesh"] = {**dataclasses.asdict(MeshShape()), "slices": config.mesh.slices, **fields["mesh"]}
    changed = {place: dataclasses.replace(getattr(config, place), **new) for place, new in fields.items()}
    return dataclasses.replace(config, stages=tuple(stages), **changed)
