"""What a program should not do: hold logits of whole rows, keep a second cache, gather weights in the decode loop."""

from __future__ import annotations

import re
from typing import Any

from jrl.plan.budget import Memory
from jrl.plan.case import Case
from jrl.plan.chips import GIB
from jrl.plan.compiled import Compiled

_ARRAY = re.compile(r"\b(?:f32|bf16|f16|f64)\[([\d,]+)\]")


def widest_logits(text: str, vocab_sizes: set[int]) -> int:
    """Returns the most positions that any array of a compiled program has logits of: arrays whose last dimension is the
    vocabulary, or a device's share of it."""
    widest = 0
    for dims in set(_ARRAY.findall(text)):
        *rows, last = (int(n) for n in dims.split(","))
        if last in vocab_sizes and len(rows) > 1:
            positions = 1
            for n in rows:
                positions *= n
            widest = max(widest, positions)
    return widest


def full_logits(name: str, case: Case, positions: int) -> str | None:
    """Returns what is wrong with a learner's program that holds logits of `positions` at once on one device."""
    chunk = min(case.config.learner.logprob_chunk, case.shape.row_length)
    if positions <= case.rows * chunk:
        return None
    return (
        f"{name} holds logits of {positions} positions at once, where Learner.logprob_chunk asks for "
        f"{case.rows} rows x {chunk}"
    )


def second_cache(name: str, found: Compiled, arithmetic: Memory) -> str | None:
    """Returns what is wrong with a sampler that takes a whole cache more than arithmetic knows a use for."""
    known = arithmetic.cache + arithmetic.temporary
    if arithmetic.cache == 0 or found.needed is not None or found.temporary < known + 0.9 * arithmetic.cache:
        return None
    return (
        f"{name} makes {found.temporary / GIB:.2f} GiB for itself where {known / GIB:.2f} are known to be needed: as "
        f"much as another cache ({arithmetic.cache / GIB:.2f} GiB)"
    )


def gathers_in_loop(name: str, case: Case, rows: list[dict[str, Any]]) -> list[str]:
    """Returns what is wrong with a decode loop that crosses batch axes, or gathers more than a turn's activations."""
    found = []
    a_turn = case.slots * (case.cfg.vocab_size + case.cfg.width * (2 * case.cfg.layers + 1)) * 4
    for row in rows:
        if not row["in_loop"]:
            continue
        if set(row["axes"].split("+")) & {"data", "fsdp"}:
            found.append(f"{name}: {row['op']} over {row['axes']} inside the decode loop, {row['count']} times")
        elif row["op"] == "all-gather" and row["bytes"] > 1.5 * case.turns * a_turn:
            found.append(
                f"{name}: the decode loop gathers {row['bytes'] / case.turns / 1e6:.1f} MB a turn over {row['axes']}"
            )
    return found
