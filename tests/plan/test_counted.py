"""Seconds of a program from the compiler's cycles, the stated model of links and kernels, and what is warned of."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from jrl.models.expert_group import EXPERT_CHUNKS
from jrl.rollout import sampler
from jrl.tools.plan import budget, counted, cycles, estimate
from jrl.tools.plan.case import evaluated_case, programs_of
from jrl.tools.plan.chips import CHIPS
from jrl.tools.plan.counted import hlo_cost, received
from jrl.tools.plan.cycles import parse_instruction
from jrl.tools.plan.frequency import frequency

V5P = CHIPS["v5p"]

# A decode loop of a bfloat16 model over tensor 4 that copies a cache of [2, 3, 2, 40, 16] (more than a layer's
# 3 x 2 x 32 x 16), waits for a gather, and multiplies a float32 operand; and one matrix that is laid out anew.
TEXT = """HloModule jit_f

%fused (p0: f32[8,64], p1: bf16[64,512]) -> f32[8,512] {
  %p0 = f32[8,64]{1,0} parameter(0)
  %p1 = bf16[64,512]{1,0} parameter(1)
  ROOT %c = f32[8,512]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf, operand_precision={highest,highest}, metadata={op_name="f/decode/while/body/bld,vd->blv/dot_general"}
}

%begins (p0: bf16[64,128]) -> (bf16[64,128], bf16[64,512]) {
  %gather = bf16[64,512]{1,0} all-gather(%p0), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}
  ROOT %s = (bf16[64,128]{1,0}, bf16[64,512]{1,0}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}

%body (p: (s32[])) -> (s32[]) {
  %copy.1 = bf16[2,3,2,40,16]{4,3,2,1,0} copy(%k), metadata={op_name="f/decode/while/body/layer"}, backend_config={"estimated_cycles":"1750000"}
  %copy.2 = bf16[2048,512]{0,1} copy(%w), backend_config={"estimated_cycles":"3500000"}
  %g = bf16[64,512]{1,0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, metadata={op_name="f/decode/while/body/reshard"}
  %a = (bf16[64,128]{1,0}, bf16[64,512]{1,0}) fusion(%x), kind=kCustom, calls=%begins
  %f = f32[8,512]{1,0} fusion(%h, %w), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"17500"}
  %r = bf16[8,16]{1,0} custom-call(%q), custom_call_target="tpu_custom_call", metadata={op_name="f/decode/while/body/ragged_attention"}
  ROOT %t = (s32[]) tuple(%i)
}

%condition (p: (s32[])) -> pred[] {
  ROOT %or = pred[] or(%a, %b)
}

%refill (p: (s32[])) -> (s32[]) {
  %inner = (s32[]) while(%p), condition=%condition, body=%body, metadata={op_name="f/refills/while/body/decode/while"}
  ROOT %t = (s32[]) tuple(%i)
}

ENTRY %main (p0: s32[]) -> (s32[]) {
  %square = f32[32,4,32,32]{3,2,1,0} copy(%p0), metadata={op_name="f/scores"}, backend_config={"estimated_cycles":"175000000"}
  ROOT %w = (s32[]) while(%t), condition=%condition, body=%refill, metadata={op_name="f/refills/while"}
}
"""  # noqa: E501


KERNELS = """HloModule m

ENTRY %main (p: f32[1]) -> f32[1] {
  %p = f32[1]{0} parameter(0)
  %a = f32[1]{0} custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="f/decode/fused_qkv"}
  ROOT %b = f32[1]{0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="f/decode/fused_mlp"}
}
"""


def test_kernels_read_weights_and_their_adapters(small):
    program = cycles.parse(KERNELS)
    seconds = lambda case: counted.streamed_seconds(cycles.runs(program, frequency("sample", case)), case, V5P)
    wide = ("Decoder.dtype='bfloat16'", "MeshShape.tensor=2")
    adapted = (*wide, "Config.adapter=@LoRA()", "LoRA.rank=8")
    # On one of two devices: 64 x (4 + 2 x 2) heads x 16 / 2 and 3 x 64 x 128 / 2 entries of 2 bytes.
    weights = 64 * 64 + 3 * 64 * 64
    rate = 0.8 * V5P.hbm_rate
    assert seconds(small(*wide, devices=2)) == pytest.approx(2 * weights / rate)
    # Of rank 8: three A of 64 inputs; B of 3 x 8 rows for all 64 outputs; three A or B of 64 and three of 128 / 2.
    low = 24 * (64 + 64) + 24 * (64 + 64)
    assert seconds(small(*adapted, devices=2)) == pytest.approx(2 * (weights + low) / rate)
    assert seconds(small(*adapted, "LoRA.sampling='merged'", devices=2)) == pytest.approx(2 * weights / rate)


@pytest.fixture
def case(small):
    return small("Decoder.dtype='bfloat16'", "Decoder.vocab_size=2048", "Decoder.width=512", "Sampler.slots=3")


def count(case, kind="sample", **changed):
    given = {"kernels": 0.5, "memory": 0.0, "times": 2, **changed}
    return hlo_cost(TEXT, kind, case, V5P, **given)


def test_a_sampler_runs_its_loops_as_often_as_it_has_rounds_and_tokens(case):
    # 4 prompts x 2 samples in 3 slots: 3 rounds of 24 tokens; 8 / 3 sequences get a slot in each.
    own = frequency("sample", case)
    trips = {sampler.REFILLS: 3, sampler.ADMIT: 8 / 3, sampler.DECODE: 24, sampler.COMPACTED: 0}
    assert own.trips == {**trips, EXPERT_CHUNKS: 0, sampler.PREFILL_CHUNKS: 1}
    # Of 4 prompts, ceil(4 / ceil(4 / (ceil(3 / 2) + 2))) = 4 are resident at once: one prefill for 8 sequences.
    assert own.taken == {sampler.PREFILL: 1 / 8, sampler.PREFILL_REST: 0}


def test_further_segments_are_drawn_as_often_as_there_are_and_prefilled_as_far_as_they_go(small):
    # 24 tokens in segments of 8: before the second and the third a row has 8 + 8 and 8 + 16 tokens, of which the last
    # is fed when it is decoded. In chunks of 7: 15 tokens are 3 chunks, 23 are 3 and the rest.
    partial = ("Online.strategy=@Partial()", "Partial.tokens=8", "Partial.newest_only=True")
    case = small(*partial, "Sampler.prefill_chunk=7")
    kind, segment = programs_of(case)["rl.next_segment"]
    assert kind == "sample" and estimate.calls(case)["rl.next_segment"] == 2
    assert (segment.prompts, segment.samples, segment.width, segment.begun) == (8, 1, case.width, (16, 24))
    own = frequency("sample", segment)
    assert own.trips[sampler.PREFILL_CHUNKS] == 3 and own.taken[sampler.PREFILL_REST] == 0.5
    assert own.trips[sampler.DECODE] == 8 and segment.prefilled == (21 + 24) / 2
    first = programs_of(case)["rl.sample"].case
    assert frequency("sample", first).trips[sampler.DECODE] == first.drawn == 8 and first.width == 8 + 24
    # Draws wait, and an evaluation draws whole completions.
    assert budget.resident_memory(segment) == budget.resident_memory(case) and case.waiting == 2
    assert evaluated_case(small(*partial, "Config.eval=@Eval()", "Data.held_out_every=5")).drawn == 24


def test_an_evaluation_draws_completions_of_the_samplers_length(small):
    evaluated = ("Config.eval=@Eval()", "Data.held_out_every=5")
    short = small(*evaluated, "Online.completion_length=6")
    assert programs_of(short)["rl.sample"].case.width == 8 + 6
    assert evaluated_case(short).width == 8 + 24
    programs = budget.of_programs(short)
    assert programs["sample_eval"].cache == budget.of_programs(small(*evaluated))["sample_eval"].cache


def test_an_update_skips_the_chunks_that_nobody_reads(small):
    # Rows of 32 tokens hold 24 of a completion: 3 of 4 chunks of 8.
    case = small("Learner.logprob_chunk=8", "Learner.row_length=32")
    own = frequency("update", case)
    assert own.trips["micro_batches"] == case.micro_batches and own.trips["chunks"] == 3
    assert own.taken == {"chunk": 0.75, "chunks": 0.0}  # there is more than one chunk


def test_stored_rows_that_a_step_imitates_have_a_loop_of_their_own(small):
    # 6 rows of 32 tokens, 2 in a micro-batch, beside 8 rows of samples.
    mixed = ("Online.pretraining=@PretrainingMix()", "PretrainingMix.source=@Demonstrations()")
    case = small(*mixed, "PretrainingMix.batch_size=6", "Learner.row_length=32")
    assert (frequency("update", case).trips | {"chunks": 0, "middle": 0}) == (
        frequency("update", small("Learner.row_length=32")).trips
        | {"pretraining_micro_batches": 3, "chunks": 0, "middle": 0}
    )


def test_seconds_are_cycles_at_the_clock_and_what_nothing_overlaps(case):
    actual = count(case)
    steps, clock = 3 * 24, 1.75e9
    # A step: copies of 1 and 2 ms, a product of 10 us; once a call, 0.1 s outside of the loop.
    assert actual.compute == pytest.approx(0.1 + steps * 3.01e-3)
    assert actual.kernels == pytest.approx(0.5 + steps * 2122 / clock)
    # 64 x 512 bfloat16 over 4 devices: 3/4 of 65,536 bytes at 200 GB/s, and a microsecond.
    gather = 1e-6 + 49152 / 200e9
    assert actual.links == pytest.approx(steps * gather)
    assert actual.links_overlapped == pytest.approx(steps * gather)  # the one that the fusion starts
    assert actual.seconds == pytest.approx(actual.compute + actual.kernels + actual.links)
    assert actual.decode_operations == 4  # two copies, a product, a kernel
    assert actual.gathers_in_loops == steps
    # All passes are of the only product, which has a float32 operand.
    assert actual.float32_share == 1.0


def test_memory_is_the_least_and_links_hide_no_longer_than_the_work(case):
    actual = dataclasses.replace(count(case), compute=1.0, kernels=0.5, memory=2.0, links=0.25, links_overlapped=3.0)
    assert actual.seconds == 2.0 + 0.25 + (3.0 - 2.0)
    assert dataclasses.replace(actual, memory=1.0, links_overlapped=1.0).seconds == 1.5 + 0.25


def test_the_dearest_operations_are_named(case):
    first, second = count(case).dearest[:2]
    assert first.name == "copy.2 (the compiler's own)" and first.seconds == pytest.approx(72 * 2e-3)
    assert second.name == "f/scores" and second.times == 1


def test_waste_is_named_with_its_cost_a_step(case):
    lines = count(case).warnings
    found = lambda text: next(line for line in lines if text in line)
    assert found("a copy in a loop of more than a layer's cache, bf16[2,3,2,40,16]").endswith(": 144 ms a step")
    assert found("weights laid out anew in a loop, bf16[2048,512] (copy.2)").endswith(": 288 ms a step")
    assert "a product of bf16 and f32 in a bfloat16 run, 3 passes" in "".join(count_of_cheap(case).warnings)
    assert "a gather that nothing overlaps, in a loop (while/body/reshard)" in "".join(count_of_cheap(case).warnings)


def count_of_cheap(case):
    """The count without the copies: what costs less than a share of the whole is not warned of."""
    text = TEXT
    for dear in ("1750000", "3500000", "175000000"):
        text = text.replace(f'"{dear}"', '"1"')
    text = text.replace('"17500"', '"1"')
    return hlo_cost(text, "sample", case, V5P, kernels=0.0, memory=0.0, times=1)


def test_square_arrays_are_found_in_an_update(case):
    lines = hlo_cost(TEXT, "update", case, V5P, kernels=0.0, memory=0.0, times=1).warnings
    assert not any("f32[32,4,32,32]" in line for line in lines)  # half a MiB
    large = TEXT.replace("f32[32,4,32,32]", "f32[3200,4,32,32]").replace('"175000000"', '"1"')
    large = large.replace('"1750000"', '"1"').replace('"3500000"', '"1"').replace('"17500"', '"1"')
    lines = hlo_cost(large, "update", case, V5P, kernels=0.0, memory=0.0, times=1).warnings
    assert any("an array of f32[3200,4,32,32] (f/scores)" in line for line in lines)


@pytest.mark.parametrize(
    "line, size",
    [
        ("%g = bf16[8,16]{1,0} all-gather(%x), replica_groups=[2,4]<=[8]", 256 * 3 / 4),
        ("%g = f32[8,16]{1,0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add", 2 * 512 * 3 / 4),
        ("%g = f32[2,16]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8]", 128 * 3),
        ("%g = f32[8,16]{1,0} all-to-all(%x), replica_groups=[2,4]<=[8]", 512 * 3 / 4),
        ("%g = (f32[2,16]{1,0}, f32[8,16]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8]", 512 * 3 / 4),
        ("%g = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%x)", 512),
    ],
)
def test_a_collective_receives_its_share(line, size):
    assert received(parse_instruction(line), 8) == size


def test_json_holds_every_field(case):
    printed = counted.to_json(count(case))
    assert printed["seconds"] == count(case).seconds and printed["dearest"][0]["times"] == 72
    assert {field.name for field in dataclasses.fields(counted.HloCost)} <= set(printed)
    assert cycles.ITEMSIZE["bf16"] == 2


GROUPED = """HloModule m

ENTRY %main (p: s32[4]) -> bf16[2048,32] {
  %x = bf16[2048,64]{1,0} parameter(0)
  %w = bf16[4,64,32]{2,1,0} parameter(1)
  ROOT %y = bf16[2048,32]{1,0} custom-call(%m, %x, %w), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,64,32"}
}
"""  # noqa: E501


@pytest.mark.parametrize("expert, filled", [(1, 2048), (2, 2048 * 4 / 5)])
def test_products_of_experts_take_tiles_of_rows_and_read_the_experts_that_are_visited(expert, filled):
    case = SimpleNamespace(sizes={"expert": expert}, cfg=SimpleNamespace(dtype="bfloat16"))
    program = cycles.parse(GROUPED)
    chip = SimpleNamespace(matrix_rate=V5P.matrix_rate, hbm_rate=1e30)
    # All four experts are visited: filled / 128 tiles, and one more for each expert; 2 x 128 x 128 a row, to which both
    # dimensions are padded.
    expected = (filled / 128 + 4) * 128 * 2 * 128 * 128 / (counted.KERNEL_SHARE * chip.matrix_rate)
    runs = cycles.runs(program, cycles.Frequency())
    assert counted.expert_seconds(program, runs, case, chip) == pytest.approx(expected, rel=1e-9)
    # Where the memory decides: 4 x 64 x 128 weights, rows of 128 and 128, in bytes of two.
    chip = SimpleNamespace(matrix_rate=1e30, hbm_rate=V5P.hbm_rate)
    moved = 2 * (4 * 64 * 128 + filled * (128 + 128))
    actual = counted.expert_seconds(program, runs, case, chip)
    assert actual == pytest.approx(moved / (counted.STREAM_SHARE * chip.hbm_rate), rel=1e-9)


OF_MATRICES = """HloModule m

ENTRY %main (p: s32[4]) -> bf16[4,2048,32] {
  %x = bf16[4096,2048]{1,0} parameter(0)
  %g = bf16[4096,32]{1,0} parameter(1)
  ROOT %y = bf16[4,2048,32]{2,1,0} custom-call(%m, %x, %g), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/expert_gradient/pallas_call"}
}
"""  # noqa: E501


def test_gradients_of_experts_take_tiles_of_rows_and_write_every_expert():
    case = SimpleNamespace(sizes={"expert": 1}, cfg=SimpleNamespace(dtype="bfloat16"))
    program = cycles.parse(OF_MATRICES)
    runs = cycles.runs(program, cycles.Frequency())
    # 4096 / 128 tiles of rows, and one more for each of 4 experts; 2 x 2048 x 128 a row, to which 32 columns
    # are padded.
    expected = (32 + 4) * 128 * 2 * 2048 * 128 / (counted.KERNEL_SHARE * V5P.matrix_rate)
    chip = SimpleNamespace(matrix_rate=V5P.matrix_rate, hbm_rate=1e30)
    assert counted.expert_seconds(program, runs, case, chip) == pytest.approx(expected, rel=1e-9)
    # 1024 inputs at once: the gradient of the outputs is read twice, the rows once.
    chip = SimpleNamespace(matrix_rate=1e30, hbm_rate=V5P.hbm_rate)
    moved = 2 * (4 * 2048 * 128 + 4096 * (2048 + 2 * 128))
    expected = moved / (counted.STREAM_SHARE * chip.hbm_rate)
    assert counted.expert_seconds(program, runs, case, chip) == pytest.approx(expected, rel=1e-9)


OF_ROWS = """HloModule m

ENTRY %main (p: s32[4]) -> bf16[4096,2048] {
  %g = bf16[4096,32]{1,0} parameter(0)
  %w = bf16[4,2048,32]{2,1,0} parameter(1)
  ROOT %y = bf16[4096,2048]{1,0} custom-call(%m, %g, %w), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/expert_rows_gradient/pallas_call"}
}
"""  # noqa: E501


@pytest.mark.parametrize(("columns", "times"), [(32, 4), (2048, 32 + 4)])
def test_gradients_of_rows_take_tiles_of_rows_and_read_the_experts_that_are_visited(columns, times):
    case = SimpleNamespace(sizes={"expert": 1}, cfg=SimpleNamespace(dtype="bfloat16"))
    program = cycles.parse(OF_ROWS.replace(",32]", f",{columns}]"))
    runs, padded = cycles.runs(program, cycles.Frequency()), max(columns, 128)
    # As above: 32 tiles of rows, and one more for each of 4 experts.
    expected = (32 + 4) * 128 * 2 * 2048 * padded / (counted.KERNEL_SHARE * V5P.matrix_rate)
    chip = SimpleNamespace(matrix_rate=V5P.matrix_rate, hbm_rate=1e30)
    assert counted.expert_seconds(program, runs, case, chip) == pytest.approx(expected, rel=1e-9)
    # 1024 inputs at once: the gradient is read twice, the rows written once. A matrix whose block has all columns is
    # read once for all its rows, one of 2048 columns, 1024 of which are summed at once, at every visit.
    chip = SimpleNamespace(matrix_rate=1e30, hbm_rate=V5P.hbm_rate)
    moved = 2 * (times * 2048 * padded + 4096 * (2048 + 2 * padded))
    expected = moved / (counted.STREAM_SHARE * chip.hbm_rate)
    assert counted.expert_seconds(program, runs, case, chip) == pytest.approx(expected, rel=1e-9)


def test_decoding_reads_the_experts_that_a_slot_goes_to():
    text = OF_MATRICES.replace("expert_gradient", "fused_experts")
    runs = cycles.runs(cycles.parse(text), cycles.Frequency())
    experts = SimpleNamespace(count=8, per_token=4, width=64)
    cfg = SimpleNamespace(dtype="bfloat16", width=128, experts=experts)
    case = SimpleNamespace(sizes={"expert": 2, "tensor": 2}, cfg=cfg, slots=1)
    # Of the device's four experts two tokens go to 3: half of them by each. Three matrices of 128 x 32 for each.
    chip = SimpleNamespace(matrix_rate=1e30, hbm_rate=V5P.hbm_rate)
    expected = 3 * 3 * 128 * 32 * 2 / (counted.STREAM_SHARE * V5P.hbm_rate)
    assert counted.decoded_seconds(runs, case, chip) == pytest.approx(expected, rel=1e-9)
    chip = SimpleNamespace(matrix_rate=V5P.matrix_rate, hbm_rate=1e30)
    expected = 3 * 2 * 2 * 3 * 128 * 32 / (counted.KERNEL_SHARE * V5P.matrix_rate)
    assert counted.decoded_seconds(runs, case, chip) == pytest.approx(expected, rel=1e-9)
    assert counted.decoded_seconds([], case, chip) == 0


def test_few_rows_of_a_group_are_shared_out_evenly():
    case = SimpleNamespace(sizes={"expert": 4})
    assert counted.filled_rows(256, case) == 64
    assert counted.filled_rows(256, SimpleNamespace(sizes={"expert": 1})) == 256


SCATTERED = """HloModule jit_f

%all-reduce-scatter (p0: bf16[64,512]) -> bf16[64,128] {
  %p0 = bf16[64,512]{1,0} parameter(0)
  %sum = bf16[64,512]{1,0} all-reduce(%p0), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %kept = bf16[64,128]{1,0} dynamic-slice(%sum, %zero, %start), dynamic_slice_sizes={64,128}
}

ENTRY %main (x: bf16[64,512]) -> bf16[64,128] {
  ROOT %f = bf16[64,128]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_a_sum_of_which_a_device_keeps_a_part_is_waited_for():
    # Gradients over fsdp: of [64, 512] in bfloat16 a device receives 3 times its quarter of 16,384 bytes.
    program = cycles.parse(SCATTERED)
    waits, overlapped = counted.link_seconds(program, cycles.runs(program, cycles.Frequency()), V5P, 8)
    assert waits == pytest.approx(counted.LATENCY + 3 * 64 * 128 * 2 / V5P.ring_rate) and overlapped == 0
