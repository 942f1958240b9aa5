"""Plans every recipe in a folder for the topology that its header names, for `jrl plan --all`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jrl.config import ConfigError
from jrl.device.chips import GIB
from jrl.resolve import load_config
from jrl.tools.plan.chips import parse_topology
from jrl.tools.plan.planning import make_plan

_HEADER = re.compile(r"^#\s*Topology:\s*(\S+)\s*$", re.MULTILINE)


class Line(NamedTuple):
    """The result for one recipe."""

    config: str
    topology: str
    mesh: str
    gib: str  # of the largest program on one device, and the device's limit
    step: str
    verdict: str
    good: bool


def topology_of(text: str) -> str | None:
    """Returns the topology named in a recipe's header by a comment such as `# Topology: v5e:2x4`; None if there is
    none."""
    match = _HEADER.search(text)
    return match[1] if match else None


def check_all(folder: Path, say: Callable[[str], None]) -> list[Line]:
    """Returns a line for every recipe below `folder` whose header names a topology.

    Raises: ValueError if there is none.
    """
    text_of = lambda path: path.read_text(encoding="utf-8", errors="replace")  # loading it refuses what is no text
    named = {path: topology_of(text_of(path)) for path in sorted(folder.rglob("*.gin"))}
    if not any(named.values()):
        raise ValueError(f"no .gin file below {folder} has a line '# Topology: CHIP:GRID' in its header")
    lines = []
    for path, name in named.items():
        if name is not None:
            say(f"{path} on {name}")
            lines.append(check_one(path, name, say))
    return lines


def check_one(path: Path, name: str, say: Callable[[str], None]) -> Line:
    """Returns the line of one recipe. If it cannot be planned, the verdict says why."""
    try:
        topology = parse_topology(name)
        config, parts = load_config(str(path))
        plan = make_plan(config, parts, topology, [str(path)], say, count=False)
    except (ConfigError, ValueError) as error:
        return Line(str(path), name, "", "", "", f"not planned: {str(error).splitlines()[0]}", False)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.case.sizes.items() if size > 1) or "one device"
    how = "compiled" if plan.largest.compiled is not None else "by arithmetic"
    took = f"{plan.largest.memory.total / GIB:.2f} of {plan.limit / GIB:.2f}"
    return Line(
        str(path), topology.name, mesh, f"{took} ({plan.shown(plan.largest)}, {how})",
        f"{plan.step_seconds:.3g} s", "fits" if plan.fits else "does not fit", plan.fits,
    )  # fmt: skip


PAGE = """# Recipes and their topologies

Written by `jrl plan --all configs/`, without any of these topologies. Memory is from the TPU compiler where the table
says compiled, else from arithmetic; the time of a step is a lower bound. A published model that is not in the folder
that its recipe names is planned with its published shape.

| recipe | topology | mesh | GiB a device | a step at least | |
| --- | --- | --- | --- | --- | --- |
"""


def markdown(lines: list[Line]) -> str:
    """Returns the table as a Markdown page."""
    return PAGE + "".join(f"| {' | '.join(line[:-1])} |\n" for line in lines)
