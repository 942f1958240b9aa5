"""Collectives are found in a program's text: their groups, their loops, their bytes."""

from __future__ import annotations

import jax
import pytest

from jrl.device.sharding import GATHERED, make_mesh
from jrl.resolve import load_config
from jrl.tools.plan.case import make_case
from jrl.tools.plan.collectives import axes_of, collectives, groups_of
from jrl.tools.plan.cycles import Frequency
from jrl.tools.plan.estimate import held_bytes
from jrl.tools.plan.frequency import frequency
from jrl.tools.plan.shapes import lower

MESH = [("data", 1), ("fsdp", 4), ("tensor", 2)]


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (
            "replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        ("replica_groups={}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups_are_read_in_every_notation(text, groups):
    assert groups_of(text, 8) == groups


def test_axes_are_those_along_which_a_group_differs():
    assert axes_of([[0, 1]], MESH) == "tensor"
    assert axes_of([[0, 2, 4, 6]], MESH) == "fsdp"
    assert axes_of([[0, 1, 2, 3, 4, 5, 6, 7]], MESH) == "fsdp+tensor"
    assert axes_of([[3]], MESH) == ""


TEXT = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %r = f32[8,16]{1,0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[8,16]) tuple(%i, %r)
}

%outer (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %w.1 = (s32[], f32[8,16]) while(%p), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %t = (s32[], f32[8,16]) tuple(%i, %r)
}

ENTRY %main (p0: f32[8,4]) -> f32[8,16] {
  %g = f32[8,16]{1,0} all-gather(%p0), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}
  %w = (s32[], f32[8,16]) while(%t), condition=%cond2, body=%outer
  ROOT %o = f32[8,16] get-tuple-element(%w), index=1
}
"""


def test_loops_multiply_what_is_in_them():
    # The gather brings 3 of 4 parts of 8 x 16 floats. The sum of 512 bytes over 2 takes 2 * 1/2 of them, 3 times in
    # each of the 10 turns of the loop of unknown length.
    assert [tuple(row) for row in collectives(TEXT, MESH, trips=10)] == [
        ("all-reduce", "tensor", 30, 30 * 512, True),
        ("all-gather", "fsdp", 1, 384, False),
    ]


def test_a_loop_in_a_scope_has_turns_of_its_own():
    line = "body=%outer"
    assert TEXT.count(line) == 1
    text = TEXT.replace(line, line + ', metadata={op_name="jit(update)/stored/while"}')
    assert collectives(text, MESH, 10, Frequency({"stored": 4}))[0].count == 12
    assert collectives(text, MESH, 10, Frequency({"red": 4}))[0].count == 30


def test_a_reduction_that_the_cpu_widened_counts_as_it_was():
    text = TEXT.replace("to_apply=%add", "to_apply=%add.clone_promoted")
    assert collectives(text, MESH, trips=1)[0].bytes == 3 * 256


@pytest.fixture(scope="module")
def counted():
    """Collectives of a tiny run's programs on fsdp 2 x tensor 2, by name; and its case."""
    bindings = ["MeshShape.fsdp=2", "MeshShape.tensor=2", "Online.prompts=2", "Online.samples=2", "Decoder.width=16"]
    config, parts = load_config("configs/tiny.gin", [*bindings, "Sampler.layers='scanned'", "Decoder.vocab_size=320"])
    case = make_case(config, parts, 4)
    programs = lower(config, parts, make_mesh(config.mesh, jax.devices()[:4]))
    parts = {"begin", "sample", "pack", "credit", "finish", "update", "close"}
    assert {"init", *(f"rl.{part}" for part in parts)} <= set(programs)
    texts = {name: programs[name].compile().as_text() for name in ("init", "rl.sample")}
    expected = {"init": Frequency(), "rl.sample": frequency("sample", case)}
    return case, {
        name: collectives(text, list(case.sizes.items()), case.decode_steps, expected[name])
        for name, text in texts.items()
    }


def test_sampling_gathers_weights_over_fsdp_once_and_never_over_tensor(counted):
    case, actual = counted
    outside = [row for row in actual["rl.sample"] if row.op == "all-gather" and not row.in_loop]
    over_fsdp = sum(row.bytes for row in outside if row.axes == "fsdp")
    norms = 4 * (16 + 2 * 2 * 16 + 2 * 2 * 16)  # whole everywhere: final, two of width 16 and two of a head in 2 layers
    assert over_fsdp == (held_bytes(case, GATHERED, "float32") - norms) // 2
    # What is left are the prompts' rows, not weights.
    assert all(row.bytes < 4096 for row in outside if "tensor" in row.axes)


def test_no_batch_axis_is_crossed_while_decoding(counted):
    assert {row.axes for row in counted[1]["rl.sample"] if row.in_loop} == {"tensor"}


def test_a_prompt_is_prefilled_once_and_not_at_every_decode_step(counted):
    # Sums over two devices, two in each of 2 layers: of two slots of 16 floats, 128 bytes, in each of 4 decode steps;
    # and of the one prompt of a shard, 8 positions of 16 floats, 512 bytes, when the first of its two samples begins.
    case, actual = counted
    (sums,) = [row for row in actual["rl.sample"] if row.in_loop and row.op == "all-reduce"]
    assert (case.cfg.layers, case.decode_steps, case.slots) == (2, 4, 2)
    assert (sums.count, sums.bytes) == (4 * 2 * 2 + 2 * 2, 4 * 2 * 2 * 128 + 2 * 2 * 512)


def test_fresh_weights_are_drawn_where_they_lie(counted):
    assert sum(row.bytes for row in counted[1]["init"]) == 0
