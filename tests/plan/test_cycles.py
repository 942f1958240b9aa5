"""The compiler's cycles of a program, read from a small dump."""

from __future__ import annotations

import pytest

from jrl.tools.plan import cycles
from jrl.tools.plan.cycles import Frequency

DUMP = """HloModule jit_f, is_scheduled=true

%fused (p0: f32[8,4], p1: bf16[4,16]) -> f32[8,16] {
  %p0 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %p1 = bf16[4,16]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = f32[8,16]{1,0:T(8,128)} convolution(%p0, %p1), dim_labels=bf_io->bf, operand_precision={highest,highest}, metadata={op_name="jit(f)/layers/while/body/dot_general"}
}

%inner_condition (p: (s32[], f32[8,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %p = (s32[]{:T(128)}, f32[8,16]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%inner (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %kernel = f32[8,16]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": "{512}"
}}, metadata={op_name="jit(f)/kernel"}, backend_config={"estimated_cycles":"7"}
  %fusion.1 = (f32[8,16]{1,0:T(8,128)}, /*index=1*/s32[2]{0:S(4)}) fusion(%x, %w), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"100"}
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %r)
}

%cheap (p: f32[8]) -> f32[8] {
  ROOT %add = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"10"}
}

%dear (p: f32[8]) -> f32[8] {
  ROOT %copy = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"1000"}
}

%outer (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %w = (s32[], f32[8,16]{1,0}) while(%p), condition=%inner_condition, body=%inner, metadata={op_name="jit(f)/decode/while/body/while"}
  %c = f32[8]{0} conditional(%b, %x, %x), branch_computations={%cheap, %dear}, metadata={op_name="jit(f)/decode/while/body/transpose(jvp(chunk))/cond"}
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %r)
}

%outer_condition (p: (s32[], f32[8,16])) -> pred[] {
  ROOT %or = pred[] or(%a, %b)
}

ENTRY %main (p0: f32[8,4]) -> f32[8,16] {
  %start = f32[8]{0} copy(%p0), backend_config={"estimated_cycles":"3"}
  %loop = (s32[], f32[8,16]{1,0}) while(%t), condition=%outer_condition, body=%outer, metadata={op_name="jit(f)/decode/while"}
  ROOT %o = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def total(frequency, which):
    runs = cycles.runs(cycles.parse(DUMP), frequency)
    return sum(run.instruction.cycles * getattr(run, which) for run in runs)


def test_loops_multiply_and_conditions_take_a_branch():
    # The inner loop counts to 5: 5 (100 + 7) = 535. The condition: 1000, or 0.25 of it and 0.75 of 10 = 257.5.
    frequency = Frequency(trips={"decode": 20}, taken={"chunk": 0.25})
    assert total(frequency, "dearest") == 3 + 20 * (535 + 1000)
    assert total(frequency, "likely") == 3 + 20 * (535 + 257.5)
    assert total(Frequency(), "likely") == 3 + 535 + 1000  # nothing is known: once, and the dearest


def test_an_instruction_has_its_place_and_its_loops():
    runs = cycles.runs(cycles.parse(DUMP), Frequency(trips={"decode": 20}))
    (fusion,) = [run for run in runs if run.instruction.name == "fusion.1"]
    assert [loop.name for loop in fusion.loops] == ["loop", "w"] and fusion.likely == 100
    (kernel,) = [run for run in runs if run.instruction.op == "custom-call"]
    assert kernel.instruction.op_name == "jit(f)/kernel"  # after metadata of several lines
    assert fusion.instruction.shapes[0] == cycles.Shape("f32", (8, 16), (1, 0))
    assert fusion.instruction.shapes[0].bytes == 512


def test_products_are_counted_in_passes_of_the_matrix_unit():
    program = cycles.parse(DUMP)
    fusion = program.computations["inner"]["fusion.1"]
    (product,) = cycles.products(program, fusion)
    assert product.flops == 2 * 8 * 4 * 16
    assert product.dtypes == ("bf16", "f32") and product.passes == 3


@pytest.mark.parametrize(
    "line, left, right, flops",
    [
        # Heads as a spatial dimension that meets every head once: [1024, 4096] by [4096, 8, 128].
        ("%c = bf16[1024,8,128]{0,2,1} convolution(%l, %r), window={size=8 pad=7_7 rhs_reversal=1}, "
         "dim_labels=bf0_i0o->b0f", "bf16[1024,4096,1]{1,0,2}", "bf16[4096,8,128]{2,1,0}", 2 * 1024 * 4096 * 8 * 128),
        # Contracted over heads and entries: [1024, 8, 128] by [8, 128, 4096].
        ("%c = bf16[1024,4096,1]{1,0,2} convolution(%l, %r), window={size=8}, dim_labels=b0f_0io->bf0",
         "bf16[1024,8,128]{2,1,0}", "bf16[8,128,4096]{2,1,0}", 2 * 1024 * 8 * 128 * 4096),
        # A batch of 8 x 2: [8, 2, 4, 128] by [8, 2, 64, 128], dilated so that a window meets its own member alone.
        ("%c = f32[8,2,4,64]{3,2,1,0} convolution(%l, %r), window={size=8x2 stride=7x1 lhs_dilate=8x2}, "
         "dim_labels=01bf_01oi->01bf", "f32[8,2,4,128]{3,2,1,0}", "f32[8,2,64,128]{3,2,1,0}", 2 * 8 * 2 * 4 * 64 * 128),
    ],
)  # fmt: skip
def test_a_convolution_counts_what_it_multiplies(line, left, right, flops):
    inside = {name: cycles.parse_instruction(f"  %{name} = {shape} parameter(0)")
              for name, shape in (("l", left), ("r", right))}  # fmt: skip
    assert cycles.product_of(cycles.parse_instruction(line), inside).flops == flops


def test_the_scope_of_a_loop_is_the_innermost():
    loop = cycles.parse(DUMP).computations["main"]["loop"]
    assert cycles.scope_of(loop) == "decode"
    condition = cycles.parse(DUMP).computations["outer"]["c"]
    assert cycles.scope_of(condition) == "chunk"  # of transpose(jvp(chunk)), as a gradient has it


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        cycles.parse("HloModule jit_f")


def test_a_condition_written_anew_has_the_scope_of_its_branches():
    inside = 'metadata={op_name="f/chunks/cond/branch_1_fun/mul"}'
    entry, one = "ENTRY %m {\n  %x = f32[] add(%a, %b)\n}\n", f"%one {{\n  %y = f32[] multiply(%a, %b), {inside}\n}}\n"
    text = f"{entry}{one}%two {{\n}}\n"
    program = cycles.parse(text)
    line = '%c = f32[] conditional(%p), branch_computations={%two, %one}, metadata={op_name="f/shard_map/conditional"}'
    assert cycles.condition_scope(program, cycles.parse_instruction(line)) == "chunks"
    kept = line.replace("shard_map/conditional", "prefill/cond")
    assert cycles.condition_scope(program, cycles.parse_instruction(kept)) == "prefill"


def test_what_the_sparse_core_does_is_not_counted():
    text = """HloModule m

%scattered (p: f32[8]) -> f32[8] {
  ROOT %scatter = f32[8]{0} fusion(%p), kind=kCustom, backend_config={"estimated_cycles":"9223372036854"}
}, execution_thread="sparsecore"

%copied (p: f32[8]) -> f32[8] {
  ROOT %copy = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"5"}
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %beside = (f32[8]{0}, f32[8]{0}) async-start(%p0), async_execution_thread="sparsecore", calls=%scattered
  %begun = (f32[8]{0}, f32[8]{0}) async-start(%p0), calls=%copied
  ROOT %done = f32[8]{0} async-done(%begun)
}
"""
    program = cycles.parse(text)
    assert set(program.computations) == {"scattered", "copied", "main"}
    assert sum(run.instruction.cycles for run in cycles.runs(program, Frequency())) == 5
