"""KL and entropy terms: section K of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "K1",
        "function": "jrl.ops.kl:k1",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_estimators_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K1",
        "function": "jrl.ops.kl:k2",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_estimators_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K1",
        "function": "jrl.ops.kl:k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_estimators_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K2",
        "function": "jrl.ops.kl:k2",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_gradient_coefficients_by_hand",
            "tests/ops/test_kl.py::test_expected_gradients_are_the_ones_of_the_table",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K2",
        "function": "jrl.ops.kl:k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_gradient_coefficients_by_hand",
            "tests/ops/test_kl.py::test_expected_gradients_are_the_ones_of_the_table",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K3",
        "function": "jrl.ops.kl:corrected_k3",
        "inputs": ["logprobs", "old_logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_corrected_k3_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K3",
        "function": "jrl.ops.kl:straight_through_k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_straight_through_k3_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K4",
        "function": "jrl.ops.coefficients:adapted_kl_coefficient",
        "inputs": ["coefficient", "kl", "rows", "target", "horizon"],
        "output": "coefficient []",
        "tests": [
            "tests/ops/test_coefficients.py::test_the_kl_coefficient_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K5",
        "function": "jrl.ops.entropy:entropy_bonus",
        "inputs": ["entropy", "mask", "coefficient"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_entropy.py::test_bonus_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K5",
        "function": "jrl.ops.coefficients:adapted_entropy_coefficient",
        "inputs": ["coefficient", "entropy", "target", "step", "largest"],
        "output": "coefficient []",
        "tests": [
            "tests/ops/test_coefficients.py::test_the_entropy_coefficient_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K6",
        "function": "jrl.ops.reference:reset_due",
        "inputs": ["step", "every"],
        "output": "due [] bool",
        "tests": [
            "tests/ops/test_reference.py::test_a_reset_is_due_every_so_many_steps_and_not_at_the_start",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K6",
        "function": "jrl.ops.reference:averaged_reference",
        "inputs": ["reference", "params", "decay"],
        "output": "reference, a tree",
        "tests": [
            "tests/ops/test_reference.py::test_the_average_by_hand",
            "tests/test_step_parts.py::test_a_reference_becomes_the_policy_or_moves_towards_it",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
        ],
    },
    {
        "id": "K6",
        "function": "jrl.ops.reference:base_share",
        "inputs": ["step"],
        "output": "share [] float32",
        "tests": [
            "tests/ops/test_reference.py::test_the_share_of_the_base_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "K6",
        "function": "jrl.ops.reference:mixed_kl",
        "inputs": ["kl_base", "kl_previous", "step"],
        "output": "penalty [...] float32",
        "tests": [
            "tests/ops/test_reference.py::test_the_mixed_kl_by_hand",
            "tests/algos/test_remix.py::test_the_kl_is_to_the_reference_and_to_the_policy_before_by_a_share_that_moves",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
]
