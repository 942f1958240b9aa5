"""Measurement: section M of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

_TESTS = "tests/ops/test_statistics.py"

PARTS: list[Part] = [
    {
        "id": "M6",
        "function": "jrl.ops.statistics:interquartile_mean",
        "inputs": ["scores"],
        "output": "[...] float64",
        "tests": [
            f"{_TESTS}::test_interquartile_mean_by_hand",
            f"{_TESTS}::test_interquartile_mean_trims_the_floor_of_a_quarter",
        ],
    },
    {
        "id": "M7",
        "function": "jrl.ops.statistics:stratified_bootstrap",
        "inputs": ["tasks", "statistic", "confidence", "draws", "seed"],
        "output": "Interval",
        "tests": [
            f"{_TESTS}::test_stratified_bootstrap_equals_the_enumeration_of_all_resamples",
            f"{_TESTS}::test_stratified_bootstrap_never_moves_a_run_to_another_task",
        ],
    },
    {
        "id": "M8",
        "function": "jrl.ops.statistics:performance_profile",
        "inputs": ["scores", "thresholds"],
        "output": "[thresholds] float64",
        "tests": [f"{_TESTS}::test_performance_profile_by_hand"],
    },
    {
        "id": "M9",
        "function": "jrl.ops.statistics:probability_of_improvement",
        "inputs": ["tasks", "baseline", "confidence", "draws", "seed"],
        "output": "Interval",
        "tests": [
            f"{_TESTS}::test_probability_of_improvement_by_hand",
            f"{_TESTS}::test_probability_of_improvement_equals_the_enumeration_of_all_resamples",
        ],
    },
    {
        "id": "M10",
        "function": "jrl.ops.statistics:optimality_gap",
        "inputs": ["scores", "gamma"],
        "output": "[...] float64",
        "tests": [f"{_TESTS}::test_optimality_gap_by_hand"],
    },
]
