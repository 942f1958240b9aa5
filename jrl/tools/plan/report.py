"""A plan as text."""

from __future__ import annotations

from jrl.tools.plan import budget, cheaper, estimate
from jrl.tools.plan.budget import Memory
from jrl.tools.plan.chips import GIB
from jrl.tools.plan.planning import Plan

SMALL = 0.01  # GiB beyond what the run keeps: programs that take less are one line together


def text(plan: Plan) -> str:
    """Returns the plan as a page: memory by program and kind, time, collectives, verdict, wastes, assumptions."""
    parts = (head, memory, time, links, verdict, wastes, foot)
    return "\n\n".join(said for part in parts if (said := part(plan)))


def head(plan: Plan) -> str:
    topology, case = plan.topology, plan.case
    mesh = " x ".join(f"{axis} {size}" for axis, size in case.sizes.items() if size > 1) or "one device"
    s = case.shape
    return (
        f"{topology.name}: {topology.num_chips} chips of {topology.chip.hbm_gib:g} GiB; mesh {mesh}\n"
        f"{case.prompts} prompts x {case.config.loop.samples} samples of at most {case.width} tokens, "
        f"{case.slots} slots a batch shard; {case.micro_batches} micro-batches of {s.rows} rows of {s.row_length}"
    )


def memory(plan: Plan) -> str:
    """Returns the table of HBM on one device."""
    title = ["GiB a device", *Memory._fields, "total", "compiler", "arithmetic"]
    lines = [title]
    small = []
    least = budget.kept(plan.case).total + SMALL * GIB
    for row in plan.rows:
        if row.arithmetic is None and row.memory.total < least:
            small.append(row.name)
            continue
        gib = lambda size: "-" if size is None else f"{size / GIB:.2f}"
        compiled = None if row.compiled is None else row.compiled.total
        arithmetic = None if row.arithmetic is None else row.arithmetic.total
        lines.append([row.name, *map(gib, row.memory), gib(row.memory.total), gib(compiled), gib(arithmetic)])
    said = table(lines)
    if small:
        said += f"\nless than {SMALL} GiB beside what the run keeps: {', '.join(small)}"
    if plan.host.total:
        kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in plan.host._asdict().items() if size)
        said += f"\nin the host's memory, GiB a device: {kinds}"
    return said


def time(plan: Plan) -> str:
    """Returns the table of operations and least times."""
    lines = [["a call", "TFLOP", "HBM GB a device", "compute s", "memory s", "links s", "bound by", "calls a step"]]
    calls = estimate.calls(plan.case)
    for row in plan.rows:
        if row.estimate is not None:
            e = row.estimate
            lines.append(
                [row.name, f"{row.flops / 1e12:.1f}", f"{row.bytes / 1e9:.1f}", f"{e.compute:.3g}", f"{e.memory:.3g}",
                 f"{e.links:.3g}", e.bound, str(calls[row.name])]
            )  # fmt: skip
    return f"{table(lines)}\na step takes at least {plan.step_seconds:.3g} s"


def links(plan: Plan) -> str:
    """Returns the table of collectives; empty where none were counted."""
    lines = [["collectives", "of", "over", "times", "GB received a device"]]
    for row in plan.rows:
        for c in row.collectives or []:
            if c["bytes"] >= 1e6:
                lines.append([row.name, c["op"], c["axes"], str(c["count"]), f"{c['bytes'] / 1e9:.3f}"])
    return table(lines) if len(lines) > 1 else ""


def verdict(plan: Plan) -> str:
    row = plan.largest
    said = (
        f"{'fits' if plan.fits else 'DOES NOT FIT'}: {row.name} takes {row.memory.total / GIB:.2f} of "
        f"{plan.limit / GIB:.2f} GiB a device"
    )
    if not plan.fits:
        changes = [f"  {cheaper.sentence(change)}" for change in plan.changes]
        said += "\nthe cheapest changes, by arithmetic:\n" + "\n".join(changes or ["  none of one binding was found"])
    return said


def wastes(plan: Plan) -> str:
    """Returns what the programs waste; empty where nothing was found."""
    return "\n".join(["wasted:", *(f"  {line}" for line in plan.wastes)]) if plan.wastes else ""


def foot(plan: Plan) -> str:
    assumed = [f"  {line}" for line in estimate.ASSUMPTIONS]
    return "\n".join([*plan.notes, "the time assumes:", *assumed])


def table(lines: list[list[str]]) -> str:
    """Returns lines as columns, the first to the left and the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    place = lambda i, cell: cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
    return "\n".join("  ".join(place(i, cell) for i, cell in enumerate(line)) for line in lines)
