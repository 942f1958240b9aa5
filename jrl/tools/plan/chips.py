"""TPU chips as data, and the names of topologies: `v5e:4x8` is 32 chips of the v5e in a grid of 4 by 8."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

GIB = 2**30

# HBM that the compiler reserves: on v5e, an overflow reports "15.75G hbm" of 16.
RESERVED_GIB = 0.25


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a chip can do at most. A JAX device is a chip, but for the tpu7x, where it is half of one."""

    name: str
    platform: str  # before the colon of libtpu's topology name
    dimensions: int  # of the torus: rings that can work at once
    devices_per_chip: int
    options: dict[str, Any]  # of libtpu's topology
    hbm_gib: float
    hbm_gb_per_second: float
    bf16_tflops: float  # dense, accumulated in float32
    link_gb_per_second: float  # one link, one direction
    slices: list[str]  # grids that are rented, the smallest first
    source: str
    clock_ghz: float  # of the matrix units; the compiler's cycles are of it
    clock_source: str
    device_kind: str  # as JAX calls its devices

    @property
    def clock_rate(self) -> float:
        """Cycles a second."""
        return self.clock_ghz * 1e9

    @property
    def limit_bytes(self) -> int:
        """HBM of one device that a program may use, bytes."""
        return int((self.hbm_gib / self.devices_per_chip - RESERVED_GIB) * GIB)

    @property
    def hbm_rate(self) -> float:
        """Bytes a second between HBM and one device."""
        return self.hbm_gb_per_second * 1e9 / self.devices_per_chip

    @property
    def matrix_rate(self) -> float:
        """Operations a second of one device in bfloat16; a multiply-add is two."""
        return self.bf16_tflops * 1e12 / self.devices_per_chip

    @property
    def ring_rate(self) -> float:
        """Bytes a second into one device around a ring that uses a torus dimension both ways."""
        return 2 * self.link_gb_per_second * 1e9


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips in a grid."""

    chip: Chip
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.grid)

    @property
    def num_devices(self) -> int:
        """Devices that JAX sees."""
        return self.num_chips * self.chip.devices_per_chip


def read_chips() -> dict[str, Chip]:
    """Returns the table of chips."""
    rows = json.loads(Path(__file__).with_name("chips.json").read_text(encoding="utf-8"))
    return {name: Chip(name=name, **row) for name, row in rows.items()}


CHIPS = read_chips()


def parse_chip(text: str) -> Chip:
    """Returns the chip of a name such as v5p. Raises ValueError listing the known ones."""
    if text.strip() not in CHIPS:
        raise ValueError(f"--topology {text!r}: the table has no chip of that name; there are {', '.join(CHIPS)}")
    return CHIPS[text.strip()]


def parse_topology(text: str) -> Topology:
    """Returns the topology of a name. Raises ValueError with the expected form, or the known chips."""
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", text.strip())
    if match is None:
        raise ValueError(f"--topology {text!r} is not a topology; write CHIP:GRID, such as v5e:4x8 or v5p:4x4x4")
    name, grid = match[1], tuple(int(n) for n in match[2].split("x"))
    if name not in CHIPS:
        raise ValueError(f"--topology {text!r}: unknown chip {name!r}. Available: {', '.join(CHIPS)}")
    chip = CHIPS[name]
    if len(grid) != chip.dimensions or min(grid) < 1:
        example = f"{name}:{'x'.join(['4'] * chip.dimensions)}"
        raise ValueError(f"--topology {text!r}: a grid of the {name} has {chip.dimensions} dimensions, as {example}")
    return Topology(chip, grid)
