"""Searches for the layout of a run on a topology: mesh, micro-batch, remat, slots. By arithmetic first, then compiled.

Every candidate has a time, or the reason why it is refused. The compiler assigns the memory of the fastest, and refuses
those that do not fit. The rest of these are the finalists: they are compiled fully, and ranked by the compiler's count
of their cycles, together with the configuration's own layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.config.syntax import read_statements
from jrl.device.chips import GIB, Chip
from jrl.device.sharding import AXES, OPTIONAL_AXES, MeshShape
from jrl.experiment import Config, Online, longest_row
from jrl.models.attention.kernels import NO_KERNEL, check_attention
from jrl.plugins import Parts
from jrl.tools.plan import assigned, budget, compiled, estimate, planning
from jrl.tools.plan.case import (
    Case,
    decoder_of_run,
    for_tpus,
    make_case,
    programs_of,
    sampling_case,
    shown_name,
    split_name,
    uncounted,
    with_known_shape,
)
from jrl.tools.plan.cheaper import SAMPLER_MESH, applied
from jrl.tools.plan.chips import Topology
from jrl.tools.plan.compiled import Compiled
from jrl.tools.plan.planning import Say

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8)  # packed rows of a micro-batch on one batch shard
SHARES = (1, 2, 4, 8)  # of a packed row, tried if a sequence may have at least LONG tokens
LONG = 8192
SPLITS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of the devices that only sample
REMAT = ("none", "layer")
BLOCK = 512  # queries of attention at a time, tried if rows are longer
BEST = 5  # most layouts shown
COMPILED = 3  # layouts that must pass the compiler before the search of a named topology ends: the finalists
TRIES = 6  # most layouts whose memory the compiler assigns

# Programs that have no micro-batches; the others have no slots.
SAMPLING = ("sample", "next_segment", "correct", "sample_eval")


class Candidate(NamedTuple):
    """One layout: its bindings, and its time, or why it was refused."""

    bindings: Mapping[str, Any]
    gib: float | None  # of the largest program on one device; None: it cannot be sharded
    step_seconds: float | None  # by arithmetic: a lower bound
    refused: str | None
    compiled: bool = False  # the compiler confirmed that it fits
    counted_seconds: float | None = None  # of a step, by the compiler's count; None: not a finalist


class Search(NamedTuple):
    """The result of a search on one topology."""

    topology: Topology
    default: Candidate  # the configuration's own layout
    fitting: list[Candidate]  # those that fit, fastest first: finalists by the compiler's count, then by arithmetic
    refused: list[Candidate]


def search(
    config: Config, parts: Parts, topology: Topology, source: Sequence[str], say: Say, max_layouts: int = COMPILED
) -> Search:
    """Returns all layouts of a run on a topology. If libtpu is installed, the compiler has assigned the memory of the
    best ones.

    Args:
      source: the configuration and bindings, as on the command line, for the compiler process.
      max_layouts: layouts that must pass the compiler before the search ends.

    Raises: ValueError if the run requires a kernel of another platform, or there are several slices.
    """
    slices = max(mesh.slices for mesh in (topology, config.mesh, config.sampler_mesh) if mesh is not None)
    if slices > 1:
        raise ValueError(f"--search lays out one slice, and there are {slices}: search one (a topology of one, and "
                         "MeshShape.slices=1), then give its layout MeshShape.slices, and MeshShape.data and "
                         "Online.prompts as many times")  # fmt: skip
    config, note = with_known_shape(config)
    check_attention(decoder_of_run(config), "tpu")
    for line in (note, uncounted(config)):
        if line is not None:
            say(line)
    say(f"searching layouts for {topology.name}")
    candidates = [judged(config, parts, topology, bindings) for bindings in layouts(config, parts, topology)]
    default = judged(config, parts, topology, {})
    refused = [c for c in candidates if c.refused is not None]
    fitting = sorted((c for c in candidates if c.refused is None), key=lambda c: (c.step_seconds, c.gib))
    say(f"{len(fitting)} of {len(candidates)} layouts fit by arithmetic")
    if fitting and compiled.libtpu_version() is not None:
        fitting, rejected = confirmed(config, parts, topology, fitting, source, say, max_layouts)
        refused += rejected
        finalists, others = ([c for c in fitting if c.compiled is passed] for passed in (True, False))
        if len(finalists) > 1:
            tried = len(finalists)
            if default.refused is None and all(applied(config, c.bindings) != config for c in finalists):
                finalists.append(default)
            finalists, rejected = ranked(config, parts, topology, finalists, say)
            default = next((c for c in (*finalists, *rejected) if not c.bindings), default)
            refused += [c for c in rejected if c.bindings]
            if not any(c.bindings for c in finalists):
                refused, others = [*refused, *refuse_untried(others, tried)], []
        fitting = [*finalists, *others]
    return Search(topology, default, fitting, refused)


def smallest(config: Config, parts: Parts, chip: Chip, source: Sequence[str], say: Say) -> Search:
    """Returns the search on a chip's smallest slice on which the run fits; on the largest slice if it fits on none.

    If libtpu is installed, one layout must pass the compiler; the search of a slice ends with the first that does.
    """
    for grid in chip.slices:
        done = search(config, parts, Topology(chip, tuple(int(n) for n in grid.split("x"))), source, say, max_layouts=1)
        if done.fitting:
            return done
    return done


def layouts(config: Config, parts: Parts, topology: Topology) -> Iterator[dict[str, Any]]:
    """Yields the bindings of layouts: every mesh that uses all devices, and for each valid one every combination of
    micro-batch, remat, attention block and slots."""
    model, samples = type(config.model).__name__, any(isinstance(stage, Online) for stage in config.stages)
    for mesh, sampler in (*in_turn(config, topology.num_devices), *splits(config, topology.num_devices)):
        bindings: dict[str, Any] = {f"MeshShape.{axis}": size for axis, size in mesh.items()}
        for axis in OPTIONAL_AXES:
            if getattr(config.mesh, axis) != 1:
                bindings.setdefault(f"MeshShape.{axis}", 1)
        if sampler is not None or config.sampler_mesh is not None:
            bindings[SAMPLER_MESH] = sampler
        try:
            case = case_of_layout(config, parts, topology, bindings)
        except ValueError:
            yield bindings
            continue
        local = case.sequences // case.shards
        sampled = case.sequences // sampling_case(case).shards
        configured = case.cfg.attention_block
        group_rows = (case.shape.samples + 1,) if case.shape.prefix_columns else ()  # a group's prompt, and each sample
        rows = sorted({min(n, local) for n in (*ROWS, *group_rows)})
        slots = sorted({min(n, sampled) for n in SLOTS}) if samples else [config.sampler.slots]
        blocked = case.cfg.attention in NO_KERNEL and case.shape.row_length > BLOCK
        blocks = {None, BLOCK, configured} if blocked else {configured}
        for row, remat, block, slot in itertools.product(
            rows, REMAT, sorted(blocks, key=lambda n: n or math.inf), slots
        ):
            yield {
                **bindings,
                "Learner.micro_batch_tokens": row * case.shape.row_length * case.shape.shards,
                f"{model}.remat": remat,
                f"{model}.attention_block": block,
                "Sampler.slots": slot,
            }


def in_turn(config: Config, num_devices: int) -> Iterator[tuple[dict[str, int], None]]:
    """Yields every mesh on which all devices sample and learn in turn, with packed rows split over devices or not."""
    for shares in row_shares(config):
        for mesh in meshes(num_devices // shares, expert_shards(config)) if num_devices % shares == 0 else ():
            yield mesh | ({"sequence": shares} if shares > 1 else {}), None


def row_shares(config: Config) -> tuple[int, ...]:
    """Returns the numbers of shares that a packed row may be split into."""
    return SHARES if longest_row(config) >= LONG else SHARES[:1]


def expert_shards(config: Config) -> tuple[int, ...]:
    """Returns the numbers of shards that the experts may be split into; () for a model without experts."""
    experts = getattr(decoder_of_run(config), "experts", None)
    return () if experts is None else tuple(n for n in range(1, experts.count + 1) if experts.count % n == 0)


def splits(config: Config, num_devices: int) -> Iterator[tuple[dict[str, int], MeshShape]]:
    """Yields pairs of a mesh that learns and a mesh that samples meanwhile, with SPLITS of the devices and the same
    number of shards over tensor and expert. Yields none unless all Online stages have a lag: a search does not change
    the method."""
    sampled = [stage for stage in config.stages if isinstance(stage, Online)]
    if not sampled or any(stage.lag < 1 for stage in sampled):
        return
    for share in SPLITS:
        count = int(num_devices * share)
        for mesh in meshes(num_devices - count, expert_shards(config)) if count else ():
            model_shards = mesh["tensor"] * mesh.get("expert", 1)
            if count % model_shards == 0:
                yield mesh, MeshShape(data=count // model_shards, tensor=mesh["tensor"], expert=mesh.get("expert", 1))


def meshes(num_devices: int, shards: Sequence[int] = ()) -> Iterator[dict[str, int]]:
    """Yields every mesh over data, fsdp and tensor that uses all devices; with `shards`, also over expert, whose size
    is one of them."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tensor, fsdp, expert in itertools.product(divisors, divisors, shards or (1,)):
        if num_devices % (tensor * fsdp * expert) == 0:
            mesh = {"data": num_devices // (tensor * fsdp * expert), "fsdp": fsdp, "tensor": tensor}
            yield {**mesh, "expert": expert} if shards else mesh


def case_of_layout(config: Config, parts: Parts, topology: Topology, bindings: Mapping[str, Any]) -> Case:
    """Returns the shapes of a layout, with its kernels resolved. Raises ValueError if the shapes do not divide."""
    chosen, _ = for_tpus(applied(config, bindings), topology.num_devices)
    return make_case(chosen, parts, topology.num_devices)


def judged(config: Config, parts: Parts, topology: Topology, bindings: Mapping[str, Any]) -> Candidate:
    """Returns a layout with its memory and time by arithmetic, or the reason why it is refused."""
    try:
        case = case_of_layout(config, parts, topology, bindings)
    except ValueError as error:
        return Candidate(bindings, None, None, str(error))
    name, size = budget.peak(case)
    limit, seconds = topology.chip.limit_bytes, estimate.step_seconds(case, topology.chip)
    refused = None
    if size > limit:
        refused = f"{takes(case, name, size, limit)}, by arithmetic"
    return Candidate(bindings, size / GIB, seconds, refused)


def takes(case: Case, name: str, size: float, limit: int) -> str:
    """Returns how much of a device's memory a program takes, as text."""
    return f"{shown_name(case, name)} takes {size / GIB:.2f} of {limit / GIB:.2f} GiB a device"


def confirmed(
    config: Config,
    parts: Parts,
    topology: Topology,
    fitting: Sequence[Candidate],
    source: Sequence[str],
    say: Say,
    max_layouts: int,
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns (remaining layouts, refused layouts) after the compiler assigned the memory of the fastest."""
    accepted, rejected = [], []
    known: dict[tuple, str] = {}  # the compiler's refusals, by program and the bindings it depends on
    limit = topology.chip.limit_bytes
    rest, tried = list(fitting), 0
    excess: dict[str, float] = {}  # compiled bytes / bytes by arithmetic, by refused program
    later: list[Candidate] = []  # likely to be refused too: tried after the others
    # All programs of a run except a few small ones. The initial state is no larger.
    deciding = list(programs_of(case_of_layout(config, parts, topology, fitting[0].bindings)))
    while (rest or later) and len(accepted) < max_layouts and tried < TRIES:
        first_time = bool(rest)
        candidate = (rest or later).pop(0)
        refusals = [known[key] for name in deciding if (key := depends_on(name, candidate.bindings)) in known]
        if refusals:
            rejected.append(candidate._replace(refused=refusals[0]))
            continue
        case = case_of_layout(config, parts, topology, candidate.bindings)
        arithmetic = budget.of_programs(case)
        if first_time and any(arithmetic[name].total * factor > limit for name, factor in excess.items()):
            later.append(candidate)
            continue
        say(f"compiling {' '.join(words(candidate.bindings))}")
        tried += 1
        memory = assigned.ask([source[0], *bound(source[1:], candidate.bindings)], topology, deciding)
        for name, result in memory.items():
            say(f"  {shown_name(case, name)}: {result.total / GIB:.2f} GiB, {result.compile_seconds:.0f} s")
        name, size = largest(memory, case)
        if size > limit:
            why = f"{takes(case, name, size, limit)}, as compiled"
            known[depends_on(name, candidate.bindings)] = why
            excess[name] = max(excess.get(name, 1.0), size / arithmetic[name].total)
            rejected.append(candidate._replace(gib=size / GIB, refused=why))
        else:
            accepted.append(candidate._replace(gib=size / GIB, compiled=True))
    rest = sorted([*rest, *later], key=lambda c: (c.step_seconds, c.gib))
    if not accepted:
        return [], [*rejected, *refuse_untried(rest, tried)]
    return [*accepted, *rest], rejected


def refuse_untried(rest: Sequence[Candidate], tried: int) -> list[Candidate]:
    """Returns the remaining layouts as refused, because the compiler refused all that it was asked about."""
    why = f"the compiler refused all {tried} that it was asked about, and was not asked about this one"
    return [candidate._replace(refused=why) for candidate in rest]


def ranked(
    config: Config, parts: Parts, topology: Topology, finalists: Sequence[Candidate], say: Say
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns (the finalists with their time by the compiler's count, fastest first; those that the compiler
    refused)."""
    counted = []
    for candidate in finalists:
        say(f"counting {shown(candidate)}")
        counted.append(compile_fully(config, parts, topology, candidate, say))
        seconds, why = counted[-1].counted_seconds, counted[-1].refused
        say(f"  {seconds:.3g} s a step, at least {candidate.step_seconds:.3g} s" if why is None else f"  {why}")
    fitting = [c for c in counted if c.refused is None]
    return sorted(fitting, key=lambda c: (c.counted_seconds, c.gib)), [c for c in counted if c.refused is not None]


def compile_fully(config: Config, parts: Parts, topology: Topology, candidate: Candidate, say: Say) -> Candidate:
    """Returns a layout with the seconds of a step by the compiler's count, as in its plan. It is refused if a program
    does not fit after all: without a count, its lower bound would rank it above the others."""
    from jrl.tools.plan.shapes import lower, topology_meshes

    config, _ = for_tpus(applied(config, candidate.bindings), topology.num_devices)
    case = make_case(config, parts, topology.num_devices)
    lowered = lower(config, parts, *topology_meshes(config, topology))
    counts = {name: lowered[name] for name in programs_of(case)}
    waiting = lambda names, seconds: say(f"  {planning.waiting_text([shown_name(case, n) for n in names], seconds)}")
    programs = compiled.compile_all(counts, topology, lambda *_: None, waiting)
    if needs := {name: program.needed for name, program in programs.items() if program.needed is not None}:
        name, limit = max(needs, key=needs.get), topology.chip.limit_bytes
        why = f"{takes(case, name, needs[name], limit)}, as compiled to the end"
        return candidate._replace(gib=needs[name] / GIB, compiled=False, refused=why)
    seconds, _ = planning.step_of(case, topology, planning.rows_of(case, topology, programs, None))
    return candidate._replace(counted_seconds=seconds, compiled=True)


def depends_on(program: str, bindings: Mapping[str, Any]) -> tuple:
    """Returns a program and the bindings that its memory depends on: an update has no slots, a sampler no
    micro-batches."""
    irrelevant = "Learner." if split_name(program)[1] in SAMPLING else "Sampler."
    return (program, *(item for item in bindings.items() if not item[0].startswith(irrelevant)))


def largest(memory: Mapping[str, Compiled], case: Case) -> tuple[str, int]:
    """Returns the program that needs the most memory, and its bytes including the run's state."""

    def total(name: str) -> int:
        program = memory[name]
        resident = budget.resident_beside(case, name).total
        return max(program.total, resident + program.temporary + program.outputs + program.code)

    name = max(memory, key=total)
    return name, total(name)


def words(bindings: Mapping[str, Any]) -> list[str]:
    """Returns bindings as arguments of `jrl train`."""
    lines = []
    for name, value in bindings.items():
        if isinstance(value, MeshShape):  # all axes: others would be those of the learner's mesh
            lines.append(f"{name}=@sampler/MeshShape()")
            lines += [f"sampler/MeshShape.{axis}={getattr(value, axis)}" for axis in AXES]
        else:
            lines.append(f"{name}={value!r}")
    return lines


def shown(candidate: Candidate) -> str:
    """Returns the bindings of a layout on one line; "as configured" if there are none."""
    return " ".join(words(candidate.bindings)) or "as configured"


def bound(given: Sequence[str], layout: Mapping[str, Any]) -> list[str]:
    """Returns the given bindings that a layout does not replace, followed by the layout's. A layout replaces the meshes
    of a run with all that is bound in their scopes."""
    replaced = {line.split("=")[0] for line in words(layout)}
    names = [statement.name for line in given for statement in read_statements(None, [line], Config)]
    kept = [line for line, name in zip(given, names) if name not in replaced and "/MeshShape." not in name]
    return [*(kept if layout else given), *words(layout)]


def gin_text(done: Search, source: str, given: Sequence[str]) -> str:
    """Returns the winner as a gin file that includes the searched configuration and sets its bindings and the layout.

    Args:
      source: the searched configuration, as the gin file includes it.
    """
    winner = done.fitting[0]
    time = f"at least {winner.step_seconds:.3g} s a step"
    if winner.counted_seconds is not None:
        time = f"{winner.counted_seconds:.3g} s a step by the compiler's count, {time}"
    lines = [f"# The fastest layout found for {done.topology.name}: {time}.", "#",
             f"# Topology: {done.topology.name}", f"include {source!r}", ""]  # fmt: skip
    spaced = [line.replace("=", " = ", 1) for line in bound(given, winner.bindings)]
    return "\n".join([*lines, *spaced]) + "\n"


def text(done: Search) -> str:
    """Returns the search as text: the configuration's own layout, the best ones, and why the others are refused."""
    topology, best = done.topology, done.fitting[:BEST]
    head = f"{topology.name}: {topology.num_chips} chips of {topology.chip.hbm_gib:g} GiB"
    lines = [head, "", "a step at least, by the compiler's count, GiB a device"]
    default = done.default
    if default.step_seconds is None:
        lines.append(f"  as configured: {default.refused}")
    elif default.counted_seconds is None:
        reason = "" if default.refused is None else f": {default.refused}"
        lines.append(f"  {default.step_seconds:8.3g} s           -  {default.gib:6.2f}  as configured{reason}")
    for c in best:
        source = "compiled" if c.compiled else "by arithmetic"
        count = "         -" if c.counted_seconds is None else f"{c.counted_seconds:8.3g} s"
        lines.append(f"  {c.step_seconds:8.3g} s  {count}  {c.gib:6.2f}  {shown(c)}  ({source})")
    if not best:
        lines.append("  no layout fits")
    lines += gain(done)
    return "\n".join([*lines, "", f"refused: {len(done.refused)}", *why_refused(done.refused)])


def gain(done: Search) -> list[str]:
    """Returns lines on what the fastest split of the devices gains over the fastest mesh that samples and learns in
    turn; [] unless both were found."""
    # The configuration's own layout is left out: it has no bindings that tell which of the two it is.
    proposed = [c for c in done.fitting if c.bindings]
    split = [c for c in proposed if c.bindings.get(SAMPLER_MESH) is not None]
    together = [c for c in proposed if c.bindings.get(SAMPLER_MESH) is None]
    if not split or not together:
        return []
    # By the count only if both have one: a lower bound would always win against a count.
    counts = [[c.counted_seconds for c in rows if c.counted_seconds is not None] for rows in (split, together)]
    by_count = all(counts)
    best, other = map(min, counts if by_count else ([c.step_seconds for c in rows] for rows in (split, together)))
    how = "by the compiler's count" if by_count else "at least"
    return ["", f"sampling on devices of its own: {best:.3g} s a step {how}, in turn {other:.3g} s; "
            f"x {other / best:.2f}"]  # fmt: skip


def why_refused(refused: Sequence[Candidate]) -> list[str]:
    """Returns a line for every mesh with refused layouts: how many, and the reason for the smallest one."""
    by_mesh: dict[tuple, list[Candidate]] = {}
    for c in refused:
        mesh = {axis: size for axis in AXES if (size := c.bindings.get(f"MeshShape.{axis}")) is not None}
        by_mesh.setdefault((tuple(mesh.items()), c.bindings.get(SAMPLER_MESH)), []).append(c)
    lines = []
    for (axes, sampler), rows in by_mesh.items():
        mesh = dict(axes)
        smallest_layout = min(rows, key=lambda c: c.gib if c.gib is not None else math.inf)
        shape = "x".join(map(str, mesh.values()))
        if sampler is not None:
            shape += f", sampling on {'x'.join(str(getattr(sampler, axis)) for axis in mesh)}"
        many = f"{len(rows)} layouts, the smallest: " if len(rows) > 1 else ""
        lines.append(f"  {' x '.join(mesh)} {shape}: {many}{smallest_layout.refused}")
    return lines


def to_json(done: Search) -> dict[str, Any]:
    """Returns the output of `jrl plan --search --json`."""
    row = lambda c: {"bindings": words(c.bindings), "hbm_gib": c.gib, "step_seconds": c.step_seconds,
                     "counted_seconds": c.counted_seconds, "compiled": c.compiled, "refused": c.refused}  # fmt: skip
    return {
        "topology": done.topology.name,
        "fits": bool(done.fitting),
        "limit_gib": done.topology.chip.limit_bytes / GIB,
        "default": row(done.default),
        "best": [row(c) for c in done.fitting[:BEST]],
        "refused": [row(c) for c in done.refused],
    }
