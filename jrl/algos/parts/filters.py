"""Filters and curricula: section F of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "F1",
        "function": "jrl.ops.filters:has_signal",
        "inputs": ["outcome", "group", "valid", "num_groups"],
        "output": "keep [N] bool",
        "tests": ["tests/ops/test_filters.py::test_only_groups_of_mixed_outcomes_are_kept"],
    },
    {
        "id": "F3",
        "function": "jrl.ops.filters:not_truncated",
        "inputs": ["finish"],
        "output": "keep [N] bool",
        "tests": [
            "tests/ops/test_filters.py::test_only_rows_cut_at_the_length_limit_are_filtered",
            "tests/ops/test_filters.py::test_a_truncated_row_stays_in_its_groups_statistics",
        ],
    },
    {
        "id": "F15",
        "function": "jrl.ops.pairs:best_against_worst",
        "inputs": ["reward", "group", "valid", "num_groups", "margin"],
        "output": "(label [N] float32, unit [N] int32)",
        "tests": ["tests/ops/test_pairs.py::test_the_best_is_paired_with_the_worst_by_hand"],
    },
]
