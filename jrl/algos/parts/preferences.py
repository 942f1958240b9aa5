"""Preference, supervised and reward-model losses: section P of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "P1",
        "function": "jrl.algos.bradley_terry:sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "(loss [..., S] float32, metrics {name: [..., S]})",
        "tests": [
            "tests/algos/test_bradley_terry.py::test_the_loss_of_a_pair_by_hand",
            "tests/algos/test_bradley_terry.py::test_the_gradient_is_that_of_small_differences",
        ],
    },
]
