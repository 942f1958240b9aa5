"""Peak rates and memory of chips, as data: TPUs, which plans also use, and a few GPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30

# HBM that the compiler reserves: on v5e, an overflow reports "15.75G hbm" of 16.
RESERVED_GIB = 0.25


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip's peak rates and memory. A JAX device is a chip, except on the tpu7x, where it is half of one."""

    name: str
    platform: str  # before the colon of libtpu's topology name
    dimensions: int  # of the torus: rings that can be used at once
    devices_per_chip: int
    options: dict[str, Any]  # of libtpu's topology
    hbm_gib: float
    hbm_gb_per_second: float
    bf16_tflops: float  # dense, accumulated in float32
    link_gb_per_second: float  # one link, one direction
    network_gbit_per_second: float | None  # of a chip's share of its host's, between slices, one direction
    network_source: str
    slices: list[str]  # grids that can be rented, the smallest first
    pod: int  # chips of the largest grid
    source: str
    clock_ghz: float  # of the matrix units; the unit of the compiler's cycles
    clock_source: str
    device_kind: str  # JAX's name of its devices

    @property
    def clock_rate(self) -> float:
        """Cycles per second."""
        return self.clock_ghz * 1e9

    @property
    def limit_bytes(self) -> int:
        """Bytes of one device's HBM that a program may use."""
        return int((self.hbm_gib / self.devices_per_chip - RESERVED_GIB) * GIB)

    @property
    def hbm_rate(self) -> float:
        """Bytes per second between HBM and one device."""
        return self.hbm_gb_per_second * 1e9 / self.devices_per_chip

    @property
    def matrix_rate(self) -> float:
        """Operations per second of one device in bfloat16; a multiply-add is two."""
        return self.bf16_tflops * 1e12 / self.devices_per_chip

    @property
    def ring_rate(self) -> float:
        """Bytes per second into one device around a ring that uses a torus dimension in both directions."""
        return 2 * self.link_gb_per_second * 1e9

    @property
    def network_rate(self) -> float:
        """Bytes per second into one device from other slices, over the data center's network."""
        return self.network_gbit_per_second * 1e9 / 8 / self.devices_per_chip


def read_chips() -> dict[str, Chip]:
    """Returns the table of chips."""
    rows = json.loads(Path(__file__).with_name("chips.json").read_text(encoding="utf-8"))
    return {name: Chip(name=name, **row) for name, row in rows.items()}


CHIPS = read_chips()


class Peak(NamedTuple):
    """The peak rates of one JAX device."""

    matrix_rate: float  # operations per second in bfloat16, dense; a multiply-add is two
    hbm_rate: float  # bytes per second


# Source: NVIDIA's data sheets of the A100 (40 and 80 GB), the H100 and the H200; Tensor Core bfloat16 without sparsity.
GPUS = {
    "NVIDIA A100-SXM4-40GB": Peak(312e12, 1.555e12),
    "NVIDIA A100-PCIE-40GB": Peak(312e12, 1.555e12),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": Peak(312e12, 1.935e12),
    "NVIDIA H100 80GB HBM3": Peak(989.4e12, 3.35e12),
    "NVIDIA H100 PCIe": Peak(756e12, 2.0e12),
    "NVIDIA H200": Peak(989.4e12, 4.8e12),
}


def peak_of(device_kind: str) -> Peak | None:
    """Returns the peak rates of a device by JAX's name of its kind; None if they are unknown, as on CPUs."""
    tpus = {chip.device_kind: Peak(chip.matrix_rate, chip.hbm_rate) for chip in CHIPS.values()}
    return {**tpus, **GPUS}.get(device_kind)
