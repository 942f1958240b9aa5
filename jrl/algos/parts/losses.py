"""Policy losses: section L of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "L1",
        "function": "jrl.ops.surrogate:policy_gradient",
        "inputs": ["logprobs", "advantages", "mask"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_policy_gradient_by_hand"],
    },
    {
        "id": "L2",
        "function": "jrl.ops.surrogate:clipped",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "clip_low", "clip_high"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_surrogate.py::test_clipped_by_hand",
            "tests/ops/test_surrogate.py::test_clipped_equals_the_minimum_of_the_paper",
        ],
    },
    {
        "id": "L3",
        "function": "jrl.ops.surrogate:dual_clipped",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "clip_low", "clip_high", "dual_clip"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_dual_clip_by_hand"],
    },
    {
        "id": "L4",
        "function": "jrl.ops.surrogate:capped",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "clip_low", "clip_high", "delta"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_delta_by_hand"],
    },
    {
        "id": "L8",
        "function": "jrl.ops.surrogate:cispo",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "max_weight"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_cispo_by_hand"],
    },
    {
        "id": "L9",
        "function": "jrl.ops.importance:token_weights",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "cap"],
        "output": "weights [..., L] float32",
        "tests": ["tests/ops/test_importance.py::test_token_weights_by_hand"],
    },
    {
        "id": "L9",
        "function": "jrl.ops.importance:sequence_weights",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "segment", "num_segments", "cap"],
        "output": "weights [..., L] float32",
        "tests": ["tests/ops/test_importance.py::test_sequence_weights_by_hand"],
    },
    {
        "id": "L9",
        "function": "jrl.ops.importance:geometric_weights",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "segment", "num_segments", "cap"],
        "output": "weights [..., L] float32",
        "tests": ["tests/ops/test_importance.py::test_geometric_weights_by_hand"],
    },
    {
        "id": "L10",
        "function": "jrl.ops.importance:accepted",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "low", "high"],
        "output": "mask [..., L] bool",
        "tests": ["tests/ops/test_importance.py::test_rejection_by_hand"],
    },
]
