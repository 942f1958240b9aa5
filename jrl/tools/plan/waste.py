"""Checks programs for waste: logits of full rows, a second KV cache, weights gathered in the decode loop."""

from __future__ import annotations

import math
import re
from typing import Any

from jrl.device.sharding import BATCH_AXES, EXPERT
from jrl.models.attention.kv_cache import cache_shapes, ends
from jrl.tools.plan import budget
from jrl.tools.plan.case import Case

_WHILE = re.compile(r" = \((.*)\) while\(")
_ARRAY = re.compile(r"\b(?:f32|bf16|f16|f64)\[([\d,]+)\]")


def widest_logits(text: str, vocab_sizes: set[int]) -> int:
    """Returns the most positions of any array of logits in a compiled program: of arrays whose last dimension is one of
    `vocab_sizes`, the vocabulary or a device's share of it."""
    widest = 0
    for dims in set(_ARRAY.findall(text)):
        *rows, last = (int(n) for n in dims.split(","))
        if last in vocab_sizes and len(rows) > 1:
            widest = max(widest, math.prod(rows))
    return widest


def full_logits(name: str, case: Case, positions: int) -> str | None:
    """Returns the problem if a learner program holds logits of more `positions` at once on one device than a chunk has;
    else None."""
    if positions <= case.rows * case.chunk:
        return None
    return (
        f"{name} holds logits of {positions} positions at once, where Learner.logprob_chunk asks for "
        f"{case.rows} rows x {case.chunk}"
    )


def caches_carried(text: str, case: Case) -> int:
    """Returns the most blocks of a layer's cache, or of a stack's, that a loop of a compiled sampler carries. If there
    are as many prompts in flight as slots, the prompts' blocks count too: they have the same shape."""
    shapes = set()
    for layers, rows, heads, entries in _stacks(case):
        for columns in _blocks(case):
            for shape in (f"{rows},{heads},{columns},{entries}]", f"{rows},{heads},{entries},{columns}]"):
                shapes |= {f"[{shape}", f"[{layers},{shape}"}
    return max((sum(line.count(shape) for shape in shapes) for line in _WHILE.findall(text)), default=0)


def second_cache(name: str, case: Case, carried: int) -> str | None:
    """Returns the problem if a sampler's loop carries keys and values more than once; else None."""
    slots = _blocks(case)
    prompts = [n for n in _blocks(case, case.config.data.prompt_length) if n in slots]
    blocks = len(slots) + (len(prompts) if budget.prompts_in_flight(case) == case.slots else 0)
    scanned = case.config.sampler.layers == "scanned"
    expected = 2 * blocks * sum(1 if scanned else layers for layers, *_ in _stacks(case))
    if carried <= expected:
        return None
    return f"{name} carries {carried} blocks of the KV cache through a loop; one copy has {expected}"


def _stacks(case: Case) -> list[tuple[int, int, int, int]]:
    """Returns (layers, rows, heads on one device, head dimension) of every stack of keys and values."""
    caches = cache_shapes(case.cfg, case.slots, case.width).values()
    shapes = [fields["k"][0] for fields in caches if "k" in fields]
    return [(layers, rows, heads // case.sizes["tensor"], entries) for layers, rows, heads, _, entries in shapes]


def _blocks(case: Case, columns: int | None = None) -> tuple[int, ...]:
    """Returns the number of columns of every block of the sampler's cache, or of its first `columns`."""
    columns = case.width if columns is None else columns
    block_ends = ends(columns, case.width, case.config.sampler.layout)
    return tuple(end - start for start, end in zip((0, *block_ends), block_ends))


def gathers_in_loop(name: str, case: Case, rows: list[dict[str, Any]]) -> list[str]:
    """Returns the problems of a decode loop whose collectives cross batch axes, or gather more than a decode step's
    activations."""
    lines = []
    step_bytes = case.slots * (case.cfg.vocab_size + case.cfg.width * (2 * case.cfg.layers + 1)) * 4
    for row in rows:
        if not row["in_loop"]:
            continue
        if set(row["axes"].split("+")) & {"slices", *BATCH_AXES} - {EXPERT}:  # experts exchange tokens
            lines.append(f"{name}: {row['op']} over {row['axes']} inside the decode loop, {row['count']} times")
        elif row["op"] == "all-gather" and row["bytes"] > 1.5 * case.decode_steps * step_bytes:
            lines.append(
                f"{name}: the decode loop gathers {row['bytes'] / case.decode_steps / 1e6:.1f} MB a step "
                f"over {row['axes']}"
            )
    return lines
