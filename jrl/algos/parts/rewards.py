"""Rewards and their shaping: section R of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "R7",
        "function": "jrl.ops.shaping:soft_overlong",
        "inputs": ["length", "max_completion", "buffer", "penalty"],
        "output": "reward [N] float32, to be added",
        "tests": ["tests/ops/test_shaping.py::test_soft_overlong_by_hand"],
    },
    {
        "id": "R16",
        "function": "jrl.rollout.token_rewards:span_rewards",
        "inputs": ["spans", "tokens", "action_mask", "tokenizer"],
        "output": "token_reward [N, T] float32",
        "tests": ["tests/test_token_rewards.py::test_rewards_of_spans_by_hand"],
    },
    {
        "id": "R17",
        "function": "jrl.ops.shaping:kl_in_reward",
        "inputs": ["reward", "old_logprobs", "ref_logprobs", "action_mask", "beta"],
        "output": "token_reward [N, T] float32",
        "tests": ["tests/ops/test_shaping.py::test_kl_in_the_reward_by_hand"],
    },
    {
        "id": "R18",
        "function": "jrl.ops.shaping:clip_reward",
        "inputs": ["reward", "limit"],
        "output": "reward [N] float32",
        "tests": ["tests/ops/test_shaping.py::test_rewards_are_clipped_by_hand"],
    },
    {
        "id": "R18",
        "function": "jrl.ops.shaping:whiten_rewards",
        "inputs": ["token_reward", "mask"],
        "output": "token_reward [N, T] float32",
        "tests": [
            "tests/ops/test_shaping.py::test_whitened_rewards_keep_their_mean_by_hand",
            "tests/ops/test_shaping.py::test_rewards_that_are_all_equal_are_not_whitened",
        ],
    },
]
