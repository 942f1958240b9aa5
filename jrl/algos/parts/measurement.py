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
            f"{_TESTS}::test_one_run_has_no_interval_over_runs",
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
    {
        "id": "M1",
        "function": "jrl.ops.statistics:pass_at_k",
        "inputs": ["correct", "samples", "k"],
        "output": "chance [problems] float64",
        "tests": [
            "tests/ops/test_statistics.py::test_pass_at_k_by_hand",
            "tests/ops/test_statistics.py::test_pass_at_k_equals_the_formula_and_the_enumeration",
            "tests/ops/test_statistics.py::test_pass_at_k_refuses_too_few_samples",
        ],
    },
    {
        "id": "M2",
        "function": "jrl.ops.statistics:problem_means",
        "inputs": ["scores", "scored"],
        "output": "means [problems] float64",
        "tests": ["tests/ops/test_statistics.py::test_problem_means_on_the_reference_numbers"],
    },
    {
        "id": "M3",
        "function": "jrl.ops.statistics:majority_at_k",
        "inputs": ["answers", "correct", "k", "draws", "seed"],
        "output": "share [] float",
        "tests": [
            "tests/ops/test_statistics.py::test_majority_at_k_by_hand",
            "tests/ops/test_statistics.py::test_majority_at_k_counts_the_unreadable_as_wrong",
        ],
    },
]
