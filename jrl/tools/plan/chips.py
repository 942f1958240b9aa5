"""Topologies by name: `v5e:4x8` is a 4 by 8 grid of 32 v5e chips, `2xv5e:4x8` is two such slices."""

from __future__ import annotations

import dataclasses
import math
import re

from jrl.device.chips import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips in a grid, or several such slices connected by the data center network."""

    chip: Chip
    grid: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        several = f"{self.slices}x" if self.slices > 1 else ""
        return f"{several}{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def num_chips(self) -> int:
        return self.slices * math.prod(self.grid)

    @property
    def num_devices(self) -> int:
        """Devices that JAX sees."""
        return self.num_chips * self.chip.devices_per_chip


def parse_chip(text: str) -> Chip:
    """Returns the chip of a name such as v5p. Raises ValueError listing the known ones."""
    if _is_accelerator_type(text):
        raise ValueError(f"--topology {text!r} is an accelerator type; with --search write a chip alone, such as v5p")
    if text.strip() not in CHIPS:
        raise ValueError(f"--topology {text!r}: the table has no chip of that name; there are {', '.join(CHIPS)}")
    return CHIPS[text.strip()]


def _is_accelerator_type(text: str) -> bool:
    """Whether a name is one that gcloud takes, such as v5p-128."""
    return re.fullmatch(r"v\d\w*-\d+", text.strip()) is not None


def _of_accelerator_type(text: str) -> str | None:
    """Returns an example of a topology with as many chips as an accelerator type has, with their number; None if no
    slice is known that has them. Types count two TensorCores for each chip of a v4 or v5p, else chips."""
    kind, _, count = text.strip().rpartition("-")
    name = "v5e" if kind == "v5litepod" else kind
    if name not in CHIPS:
        return None
    chips = int(count) / (2 if name in ("v4", "v5p") else 1)
    grids = [grid for grid in CHIPS[name].slices if math.prod(map(int, grid.split("x"))) == chips]
    return f"{name}:{grids[0]} for its {chips:g} chips" if grids else None


def _is_rented(chip: Chip, grid: tuple[int, ...]) -> bool:
    """Whether a slice may have a grid: one in the table, a part of a host, or cubes of 4 x 4 x 4."""
    listed = [sorted(map(int, each.split("x"))) for each in chip.slices]
    in_cubes = chip.dimensions == 3 and all(size % 4 == 0 for size in grid)
    return sorted(grid) in listed or in_cubes or (chip.dimensions == 3 and math.prod(grid) < 3)


def parse_topology(text: str) -> Topology:
    """Returns the topology of a name. Raises ValueError with the expected form, or the known chips."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z][a-z0-9]*):(\d+(?:x\d+)*)", text.strip())
    if match is None and (text.strip() in CHIPS or _is_accelerator_type(text)):
        kind = "a chip without a grid" if text.strip() in CHIPS else "an accelerator type, which does not say the grid"
        example = _of_accelerator_type(text) or "v5e:4x8 or v5p:4x4x4"
        raise ValueError(f"--topology {text!r} is {kind}; write CHIP:GRID, such as {example}, or a chip "
                         "alone with --search, which finds the smallest slice that fits")  # fmt: skip
    if match is None:
        raise ValueError(f"--topology {text!r} is not a topology; write CHIP:GRID, such as v5e:4x8 or v5p:4x4x4, or "
                         "2xv5p:4x4x4 for two slices")  # fmt: skip
    slices, name, grid = int(match[1] or 1), match[2], tuple(int(n) for n in match[3].split("x"))
    if name not in CHIPS:
        raise ValueError(f"--topology {text!r}: unknown chip {name!r}. Available: {', '.join(CHIPS)}")
    chip = CHIPS[name]
    if len(grid) != chip.dimensions or min(grid) < 1:
        example = f"{name}:{'x'.join(['4'] * chip.dimensions)}"
        raise ValueError(f"--topology {text!r}: a grid of the {name} has {chip.dimensions} dimensions, as {example}")
    if math.prod(grid) > chip.pod:
        raise ValueError(f"--topology {text!r}: a pod of the {name} has {chip.pod} chips, and no slice has more; "
                         f"several have the network between them, as 2x{name}:{chip.slices[-1]}")  # fmt: skip
    if not _is_rented(chip, grid):
        others = " or a grid of multiples of 4" if chip.dimensions == 3 else ""
        raise ValueError(f"--topology {text!r}: no slice of the {name} has that grid; write one of "
                         f"{', '.join(chip.slices)}{others}")  # fmt: skip
    if slices > 1 and chip.network_gbit_per_second is None:
        raise ValueError(f"--topology {text!r}: no rate of the network between slices of the {name} is published; "
                         "plan one slice")  # fmt: skip
    return Topology(chip, grid, slices)
