"""Value learning: section V of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "V1",
        "function": "jrl.ops.values:clipped_value_loss",
        "inputs": ["values", "old_values", "returns", "mask", "clip"],
        "output": "(loss [...] float32, where the clip binds [...] bool)",
        "tests": [
            "tests/ops/test_values.py::test_the_clipped_loss_by_hand",
            "tests/ops/test_values.py::test_a_value_that_has_moved_too_far_has_no_gradient",
        ],
    },
    {
        "id": "V4",
        "function": "jrl.ops.values:explained_variance",
        "inputs": ["values", "returns", "mask"],
        "output": "explained variance [] float32",
        "tests": ["tests/ops/test_values.py::test_explained_variance_by_hand"],
    },
]
