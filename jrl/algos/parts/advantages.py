"""Advantages: section A of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "A1",
        "function": "jrl.ops.advantages:discounted_returns",
        "inputs": ["token_reward", "action_mask", "discount"],
        "output": "returns [N, T] float32",
        "tests": [
            "tests/ops/test_advantages.py::test_returns_skip_tokens_the_policy_did_not_sample",
            "tests/ops/test_advantages.py::test_returns_accumulate_within_a_row_only",
        ],
    },
    {
        "id": "A2",
        "function": "jrl.ops.advantages:moving_baseline",
        "inputs": ["reward", "valid", "baseline", "decay"],
        "output": "(advantages [N] float32, baseline [] float32)",
        "tests": ["tests/ops/test_advantages.py::test_moving_baseline_by_hand"],
    },
    {
        "id": "A3",
        "function": "jrl.ops.advantages:group_zscore",
        "inputs": ["reward", "group", "valid", "num_groups", "epsilon"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_advantages.py::test_group_advantages_by_hand",
            "tests/ops/test_advantages.py::test_a_group_of_equal_rewards_gets_exactly_zero",
        ],
    },
    {
        "id": "A4",
        "function": "jrl.ops.advantages:group_centered",
        "inputs": ["reward", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": ["tests/ops/test_advantages.py::test_group_advantages_by_hand"],
    },
    {
        "id": "A5",
        "function": "jrl.ops.advantages:leave_one_out",
        "inputs": ["reward", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_advantages.py::test_group_advantages_by_hand",
            "tests/ops/test_advantages.py::test_leave_one_out_equals_the_difference_to_the_others",
        ],
    },
    {
        "id": "A7",
        "function": "jrl.ops.advantages:whitened_returns",
        "inputs": ["token_reward", "action_mask", "valid", "discount"],
        "output": "advantages [N, T] float32",
        "tests": ["tests/ops/test_advantages.py::test_whitened_returns_by_hand"],
    },
    {
        "id": "A8",
        "function": "jrl.ops.advantages:whitened_centered",
        "inputs": ["reward", "group", "valid", "action_mask", "num_groups"],
        "output": "advantages [N, T] float32",
        "tests": ["tests/ops/test_advantages.py::test_whitened_centered_by_hand"],
    },
    {
        "id": "A9",
        "function": "jrl.ops.advantages:group_mean_batch_std",
        "inputs": ["reward", "group", "valid", "num_groups", "epsilon"],
        "output": "advantages [N] float32",
        "tests": ["tests/ops/test_advantages.py::test_group_mean_batch_std_by_hand"],
    },
    {
        "id": "A13",
        "function": "jrl.ops.advantages:gae",
        "inputs": ["token_reward", "values", "action_mask", "discount", "gae_lambda"],
        "output": "advantages [N, T] float32, before whitening",
        "tests": [
            "tests/ops/test_advantages.py::test_gae_by_hand",
            "tests/ops/test_advantages.py::test_gae_steps_over_a_tools_answer",
            "tests/ops/test_advantages.py::test_gae_is_the_return_less_the_value_or_the_error_of_one_step",
        ],
    },
    {
        "id": "A23",
        "function": "jrl.ops.advantages:clip_advantages",
        "inputs": ["advantages", "limit"],
        "output": "advantages [...] float32",
        "tests": ["tests/ops/test_advantages.py::test_clip_by_hand"],
    },
    {
        "id": "A23",
        "function": "jrl.ops.reduce:whiten",
        "inputs": ["x", "mask"],
        "output": "advantages [...] float32",
        "tests": ["tests/ops/test_reduce.py::test_whiten_by_hand"],
    },
]
