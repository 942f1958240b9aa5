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
    {
        "id": "P5",
        "function": "jrl.algos.dpo:sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "loss [..., S] float32",
        "tests": [
            "tests/algos/test_dpo.py::test_the_running_example_by_hand",
            "tests/algos/test_dpo.py::test_a_masked_pair_is_not_seen_whatever_it_holds",
        ],
    },
    {
        "id": "P33",
        "function": "jrl.algos.sft:token_loss",
        "inputs": ["config", "tokens", "state"],
        "output": "loss [..., L] float32",
        "tests": [
            "tests/algos/test_sft.py::test_the_loss_is_the_mean_surprise_of_the_tokens",
            "tests/algos/test_sft.py::test_nothing_under_the_mask_gets_through",
        ],
    },
]
