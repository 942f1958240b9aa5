"""Reductions: section G of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "G1",
        "function": "jrl.ops.reduce:token_mean",
        "inputs": ["loss", "mask"],
        "output": "loss [] float32",
        "tests": [
            "tests/ops/test_reduce.py::test_aggregations_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "G2",
        "function": "jrl.ops.reduce:sequence_mean_token_mean",
        "inputs": ["loss", "mask"],
        "output": "loss [] float32",
        "tests": [
            "tests/ops/test_reduce.py::test_aggregations_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "G3",
        "function": "jrl.ops.reduce:sequence_mean_token_sum",
        "inputs": ["loss", "mask"],
        "output": "loss [] float32",
        "tests": [
            "tests/ops/test_reduce.py::test_aggregations_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "G4",
        "function": "jrl.ops.reduce:constant_mean",
        "inputs": ["loss", "mask", "rows", "max_completion"],
        "output": "loss [] float32",
        "tests": [
            "tests/ops/test_reduce.py::test_aggregations_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
]
