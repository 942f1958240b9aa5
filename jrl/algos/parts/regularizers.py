"""KL and entropy terms: section K of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "K1",
        "function": "jrl.ops.kl:k1",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": ["tests/ops/test_kl.py::test_estimators_by_hand"],
    },
    {
        "id": "K1",
        "function": "jrl.ops.kl:k2",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": ["tests/ops/test_kl.py::test_estimators_by_hand"],
    },
    {
        "id": "K1",
        "function": "jrl.ops.kl:k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": ["tests/ops/test_kl.py::test_estimators_by_hand"],
    },
    {
        "id": "K2",
        "function": "jrl.ops.kl:k2",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_gradient_coefficients_by_hand",
            "tests/ops/test_kl.py::test_expected_gradients_are_the_ones_of_the_table",
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
        ],
    },
    {
        "id": "K3",
        "function": "jrl.ops.kl:corrected_k3",
        "inputs": ["logprobs", "old_logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_kl.py::test_corrected_k3_by_hand"],
    },
    {
        "id": "K3",
        "function": "jrl.ops.kl:straight_through_k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_kl.py::test_straight_through_k3_by_hand"],
    },
    {
        "id": "K5",
        "function": "jrl.ops.entropy:entropy_bonus",
        "inputs": ["entropy", "mask", "coefficient"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_entropy.py::test_bonus_by_hand"],
    },
]
