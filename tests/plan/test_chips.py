"""Topologies are read from their names, and the table of chips is complete and says where its figures come from."""

from __future__ import annotations

import pytest

from jrl.device.chips import CHIPS, GIB
from jrl.tools.plan.chips import parse_chip, parse_topology


def test_a_topology_is_a_chip_and_a_grid():
    topology = parse_topology("v5p:4x4x4")
    assert (topology.name, topology.num_chips, topology.num_devices) == ("v5p:4x4x4", 64, 64)
    assert parse_topology("v5e:4x8").grid == (4, 8)


def test_a_count_before_the_chip_is_of_slices():
    topology = parse_topology("2xtpu7x:2x2x1")
    assert (topology.name, topology.slices, topology.grid, topology.num_devices) == ("2xtpu7x:2x2x1", 2, (2, 2, 1), 16)
    assert parse_topology("1xv5e:4x8") == parse_topology("v5e:4x8")


def test_half_a_tpu7x_is_a_device():
    topology = parse_topology("tpu7x:2x2x1")
    assert (topology.num_chips, topology.num_devices) == (4, 8)
    chip = topology.chip
    assert chip.limit_bytes == int((192 / 2 - 0.25) * GIB)
    assert chip.matrix_rate == 2307e12 / 2 and chip.hbm_rate == 7380e9 / 2
    assert chip.network_rate == 100e9 / 8 / 2  # of two devices


@pytest.mark.parametrize(
    "text, message",
    [
        ("v5e", "a chip without a grid; write CHIP:GRID"),
        (
            "v5p-8",
            "an accelerator type, which does not say the grid; write CHIP:GRID, such as v5p:2x2x1 for its 4 chips, or",
        ),
        ("v5litepod-16", "an accelerator type, which does not say the grid; write CHIP:GRID, such as v5e:4x4 for its"),
        ("v6e-64", "such as v6e:8x8 for its 64 chips"),
        ("v5p-24", "an accelerator type, which does not say the grid; write CHIP:GRID, such as v5e:4x8 or v5p:4x4x4"),
        ("v5e:3x3", "no slice of the v5e has that grid; write one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        (
            "v5p:3x4x4",
            "no slice of the v5p has that grid; write one of 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, "
            "4x8x8, 8x8x8, 8x8x16, 8x16x16 or a grid of multiples of 4",
        ),
        ("v5p:1x1x3", "no slice of the v5p has that grid"),
        ("v5e:", "write CHIP:GRID"),
        ("v5e:4x", "write CHIP:GRID"),
        ("v5e:-4x8", "write CHIP:GRID"),
        ("h100:8", "unknown chip 'h100'. Available: v4, v5e"),
        ("v7x:2x2x1", "unknown chip 'v7x'"),
        ("v5p:4x4", "3 dimensions, as v5p:4x4x4"),
        ("v5e:4x4x4", "2 dimensions, as v5e:4x4"),
        ("v5e:1000x1000", "a pod of the v5e has 256 chips, and no slice has more; several have the network between"),
        ("v5e:0x4", "2 dimensions"),
        ("0xv5e:2x4", "write CHIP:GRID"),
        ("x2v5e:2x4", "unknown chip 'x2v5e'"),
        ("2xv4:2x2x1", "no rate of the network between slices of the v4 is published"),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_right(text, message):
    with pytest.raises(ValueError, match="--topology") as error:
        parse_topology(text)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["v5e:8x4", "v5p:4x4x12", "v5p:4x2x2", "v4:1x1x1", "tpu7x:8x8x4"])
def test_a_slice_may_be_turned_built_of_cubes_or_a_part_of_a_host(text):
    assert parse_topology(text).name == text


def test_the_table_has_every_chip_with_its_source():
    assert set(CHIPS) == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    for chip in CHIPS.values():
        assert "docs" in chip.source
        assert min(chip.hbm_gib, chip.hbm_gb_per_second, chip.bf16_tflops, chip.link_gb_per_second) > 0
        # Links of a chip, both ways, against the figure for the whole chip in its source.
        assert chip.network_gbit_per_second is None or chip.network_gbit_per_second > 0
        assert "docs" in chip.network_source
        both_ways = chip.link_gb_per_second * 2 * 2 * chip.dimensions
        assert both_ways == {"v4": 600, "v5e": 400, "v5p": 1200, "v6e": 800, "tpu7x": 1200}[chip.name]


def test_an_accelerator_type_is_no_chip_either():
    with pytest.raises(ValueError, match="'v5p-128' is an accelerator type; with --search write a chip alone"):
        parse_chip("v5p-128")
