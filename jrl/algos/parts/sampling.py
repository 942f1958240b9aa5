"""Sampling strategies: section S of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "S1",
        "function": "jrl.ops.truncate:support",
        "inputs": ["logits", "top_k", "top_p", "min_p"],
        "output": "mask [..., V] bool",
        "tests": [
            "tests/ops/test_truncate.py::test_hand_numbers",
            "tests/ops/test_truncate.py::test_support_equals_sorting",
        ],
    },
    {
        "id": "S2",
        "function": "jrl.ops.keys:row_key",
        "inputs": ["key", "stream", "uid", "sample"],
        "output": "key of a sequence",
        "tests": ["tests/ops/test_keys.py::test_every_part_of_the_name_changes_the_key"],
    },
    {
        "id": "S3",
        "function": "jrl.ops.statistics:best_of_n",
        "inputs": ["rewards", "scored"],
        "output": "index [P] int64, -1: none",
        "tests": [
            "tests/ops/test_statistics.py::test_best_of_n_by_hand",
            "tests/test_evaluate.py::test_the_best_of_k_is_chosen_by_reward",
        ],
    },
    {
        "id": "S3",
        "function": "jrl.ops.statistics:best_of_n_kl",
        "inputs": ["n"],
        "output": "nats",
        "tests": ["tests/ops/test_statistics.py::test_the_kl_of_the_best_of_n_by_hand"],
    },
    {
        "id": "S4",
        "function": "jrl.ops.statistics:majority",
        "inputs": ["answers", "weights"],
        "output": "answer, or None",
        "tests": [
            "tests/ops/test_statistics.py::test_majority_by_hand",
            "tests/ops/test_statistics.py::test_majority_tie_goes_to_the_first_seen_and_nobody_gives_none",
        ],
    },
    {
        "id": "S12",
        "function": "jrl.ops.staleness:token_staleness",
        "inputs": ["version", "token_version", "action_mask"],
        "output": "versions [...] int32",
        "tests": [
            "tests/ops/test_staleness.py::test_staleness_by_hand",
            "tests/test_loop.py::test_update_t_learns_from_the_version_that_the_lag_declares",
        ],
    },
    {
        "id": "S12",
        "function": "jrl.ops.staleness:row_staleness",
        "inputs": ["version", "token_version", "action_mask"],
        "output": "versions [...] int32",
        "tests": ["tests/ops/test_staleness.py::test_staleness_by_hand"],
    },
    {
        "id": "S12",
        "function": "jrl.ops.staleness:rows_to_start",
        "inputs": ["version", "accepted", "running", "lag", "batch", "most_running"],
        "output": "rows, 0 or less: none",
        "tests": [
            "tests/ops/test_staleness.py::test_rows_to_start_by_hand",
            "tests/ops/test_staleness.py::test_a_queue_of_lag_draws_fills_the_bound_and_no_row_exceeds_it",
        ],
    },
]
