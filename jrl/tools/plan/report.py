"""Formats a plan as text."""

from __future__ import annotations

from jrl.device.chips import GIB
from jrl.experiment import Online
from jrl.learning.layout import more_than_asked
from jrl.run.report.text import aligned, counted
from jrl.run.sampler_devices import mesh_text, publication_text
from jrl.tools.plan import budget, cheaper, estimate
from jrl.tools.plan.budget import Memory
from jrl.tools.plan.case import Case, cases_of, publication_of
from jrl.tools.plan.planning import Plan

SHOWN = 5  # most operations of a program; --json has more
SMALL = 0.01  # GiB beyond the run's state: programs that take less share one line


def text(plan: Plan) -> str:
    """Returns the plan as text: memory by program and kind, time, collectives, verdict, wastes, assumptions."""
    sections = (head, memory, time, links, verdict, wastes, foot)
    return "\n\n".join(section for write in sections if (section := write(plan)))


def head(plan: Plan) -> str:
    topology, case = plan.topology, plan.case
    mesh = mesh_text(case.sizes)
    if case.mesh_slices > 1:
        mesh += f", data over {case.mesh_slices} slices"
    if case.sampler_sizes is not None:
        mesh += f", sampling on {mesh_text(case.sampler_sizes)}"
    if idle := topology.num_devices - case.all_devices:
        mesh += f"; {idle} of {topology.num_devices} devices are not used (MeshShape.data, fsdp, ... divide a run)"
    title = f"{topology.name}: {topology.num_chips} chips of {topology.chip.hbm_gib:g} GiB; mesh {mesh}"
    return "\n".join([title, *map(shapes, cases_of(case))])


def shapes(case: Case) -> str:
    """Returns the shapes of a stage on one line, with its name if the run has several."""
    s, name = case.shape, f"{case.name}: " if len(case.config.stages) > 1 else ""
    batch = f"{counted(case.prompts, 'stored sequence')} of at most {case.width} tokens"
    if isinstance(case.stage, Online):
        batch = (
            f"{counted(case.prompts, 'prompt')} x {counted(case.samples, 'sample')} of at most {case.width} tokens, "
            f"{counted(case.slots, 'slot')} a batch shard"
        )
    shares = "" if case.shares == 1 else f", each on {case.shares} devices"
    more = more_than_asked(s, case.stage.learner)
    batches = f"{counted(case.micro_batches, 'micro-batch')} of {counted(s.rows, 'row')} of {s.row_length}"
    return f"{name}{batch}; {batches}{shares}{more}"


def memory(plan: Plan) -> str:
    """Returns the table of HBM per device, by program and kind, and the host memory."""
    title = ["GiB a device", *Memory._fields, "total", "compiler", "arithmetic"]
    lines = [title]
    small = []
    for row in plan.rows:
        name, resident = plan.shown(row), budget.resident_beside(plan.case, row.name).total
        if row.arithmetic is None and row.memory.total < resident + SMALL * GIB:
            small.append(name)
            continue
        gib = lambda size: "-" if size is None else f"{size / GIB:.2f}"
        compiled = None if row.compiled is None else row.compiled.total
        arithmetic = None if row.arithmetic is None else row.arithmetic.total
        lines.append([name, *map(gib, row.memory), gib(row.memory.total), gib(compiled), gib(arithmetic)])
    text = table(lines)
    if small:
        text += f"\nless than {SMALL} GiB beyond the state of the run: {', '.join(small)}"
    if plan.host.total:
        kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in plan.host._asdict().items() if size)
        text += f"\nhost memory, GiB a device: {kinds}"
    return (
        f"{text}\na checkpoint takes {budget.checkpoint_bytes(plan.case) / GIB:.2f} GiB on disk; the run keeps "
        f"{plan.case.config.checkpoint.keep} or more (Checkpoint.keep)"
    )


def time(plan: Plan) -> str:
    """Returns the table of operations and minimum times."""
    units = estimate.Estimate._fields if plan.topology.slices > 1 else ("compute", "memory", "links")
    lines = [["a call", "TFLOP", "HBM GB a device", *(f"{unit} s" for unit in units), "bound by", "calls a step"]]
    calls = estimate.calls(plan.case)
    for row in plan.rows:
        if row.estimate is not None:
            e = row.estimate
            moved = [f"{row.flops / 1e12:.1f}", f"{row.bytes / 1e9:.1f}"]
            seconds = [f"{getattr(e, unit):.3g}" for unit in units]
            lines.append([plan.shown(row), *moved, *seconds, e.bound, str(calls[row.name])])
    step = f"a step of {plan.case.name}" if len(plan.case.config.stages) > 1 else "a step"
    publication = published(plan)
    text = f"{table(lines)}\n{publication}{between_slices(plan)}{step} takes at least {plan.least_seconds:.3g} s"
    if not any(row.count for row in plan.rows):
        return text
    return f"{text}\n\n{by_compiler(plan)}\n{step} takes about {plan.step_seconds:.3g} s by the compiler's count"


def published(plan: Plan) -> str:
    """Returns lines on what publishing weights takes; "" if the devices that learn also sample."""
    if (p := publication_of(plan.case)) is None:
        return ""
    seconds = estimate.publication_seconds(p, plan.case, plan.topology.chip)
    return (
        f"{publication_text(p)}\npublishing takes at least {seconds:.3g} s; a step is the longer of publishing and "
        "sampling, and of learning, on devices of their own\n"
    )


def between_slices(plan: Plan) -> str:
    """Returns a line on the traffic of a step between slices; "" on one slice."""
    if (n := plan.network) is None:
        return ""
    chip = plan.topology.chip
    bound = f"it is the bound of {', '.join(n.bound)}" if n.bound else "it is the bound of no program"
    counted = "" if n.counted_seconds is None else f", {n.counted_seconds:.3g} s of what the compiler sends"
    published = ""
    if (p := publication_of(plan.case)) is not None:  # by no program of the table
        published = f", of it {p.received / 1e9:.3g} GB of published weights, which sampling waits for"
    return (
        f"between slices each device receives {n.bytes / 1e9:.3g} GB a step, at least {n.seconds:.3g} s at "
        f"{chip.network_rate / 1e9:g} GB/s{counted}{published}; {bound}\n"
    )


def by_compiler(plan: Plan) -> str:
    """Returns the table of times by the compiler's count, and the most expensive operations."""
    has_network = plan.topology.slices > 1
    lines = [["a call, by the compiler", "compute s", "dearest branches", "kernels s", "memory s", "links s",
              "overlapped s", *["network s"] * has_network, "total s", "operations", "float32 passes"]]  # fmt: skip
    dearest, steps = [], []
    for row in plan.rows:
        if (c := row.count) is None:
            continue
        seconds = (c.compute, c.compute_dearest, c.kernels, c.memory, c.links, c.links_overlapped,
                   *[c.network] * has_network, c.seconds)  # fmt: skip
        lines.append([plan.shown(row), *(f"{s:.3g}" for s in seconds), f"{c.instructions:.3g}",
                      f"{c.float32_share:.0%}"])  # fmt: skip
        dearest.append(f"{plan.shown(row)}: the operations that cost the most")
        dearest += [f"  {o.seconds:.3g} s, {o.times:.3g} times: {o.what} ({o.name})" for o in c.dearest[:SHOWN]]
        if c.decode_step is not None:
            steps.append(f"{plan.shown(row)}: a decode step takes {1e3 * c.decode_step:.3g} ms, in "
                         f"{c.decode_operations:.0f} operations")  # fmt: skip
    return "\n".join([table(lines), *steps, *dearest])


def links(plan: Plan) -> str:
    """Returns the table of collectives that move at least 1 MB; "" if there are none."""
    lines = [["collectives", "of", "over", "times", "GB received a device"]]
    for row in plan.rows:
        for c in row.collectives or []:
            if c["bytes"] >= 1e6:
                lines.append([plan.shown(row), c["op"], c["axes"], str(c["count"]), f"{c['bytes'] / 1e9:.3f}"])
    return table(lines) if len(lines) > 1 else ""


def verdict(plan: Plan) -> str:
    row = plan.largest
    text = (
        f"{'fits' if plan.fits else 'DOES NOT FIT'}: {plan.shown(row)} takes {row.memory.total / GIB:.2f} of "
        f"{plan.limit / GIB:.2f} GiB a device"
    )
    if not plan.fits:
        changes = [f"  {cheaper.sentence(change)}" for change in plan.changes]
        text += "\nthe cheapest changes, by arithmetic:\n" + "\n".join(changes or ["  no single change saves memory"])
        if plan.topology.slices == 1 and not any(change.fits for change in plan.changes):
            topology = plan.topology
            text += (
                f"\nno single change is enough: --topology {topology.name} --search tries all layouts of this slice, "
                f"--topology {topology.chip.name} --search finds the smallest slice that fits"
            )
    return text


def wastes(plan: Plan) -> str:
    """Returns lines on what the programs waste; "" if nothing was found."""
    return "\n".join(["wasted:", *(f"  {line}" for line in plan.wastes)]) if plan.wastes else ""


def foot(plan: Plan) -> str:
    assumed = [f"  {line}" for line in estimate.ASSUMPTIONS]
    return "\n".join([*plan.notes, "the time assumes:", *assumed])


def table(lines: list[list[str]]) -> str:
    """Returns lines with aligned columns as text."""
    return "\n".join(aligned(lines))
