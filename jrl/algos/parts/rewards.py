"""Rewards and their shaping: section R of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "R2",
        "function": "jrl.tasks.rewards.format:format_bonus",
        "inputs": ["correct", "formatted", "weight"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_format_rewards_by_hand"],
    },
    {
        "id": "R2",
        "function": "jrl.tasks.rewards.format:format_gate",
        "inputs": ["correct", "formatted"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_format_rewards_by_hand"],
    },
    {
        "id": "R2",
        "function": "jrl.tasks.rewards.format:format_penalty",
        "inputs": ["correct", "formatted", "penalty"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_format_rewards_by_hand"],
    },
    {
        "id": "R3",
        "function": "jrl.tasks.rewards.execution:all_passed",
        "inputs": ["passed"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_passed_tests_by_hand"],
    },
    {
        "id": "R3",
        "function": "jrl.tasks.rewards.execution:share_passed",
        "inputs": ["passed"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_passed_tests_by_hand"],
    },
    {
        "id": "R4",
        "function": "jrl.tasks.rewards.similarity:similarity",
        "inputs": ["text", "reference"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_similarity_by_hand"],
    },
    {
        "id": "R7",
        "function": "jrl.ops.shaping:soft_overlong",
        "inputs": ["length", "max_completion", "buffer", "penalty"],
        "output": "reward [N] float32, to be added",
        "tests": ["tests/ops/test_shaping.py::test_soft_overlong_by_hand"],
    },
    {
        "id": "R14",
        "function": "jrl.tasks.rewards.rubric:rubric_score",
        "inputs": ["scores", "weights", "critical"],
        "output": "reward; NaN where a score is missing",
        "tests": [
            "tests/rewards/test_text_rewards.py::test_a_rubric_by_hand",
            "tests/rewards/test_text_rewards.py::test_a_failed_critical_criterion_is_a_veto",
        ],
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
    {
        "id": "R20",
        "function": "jrl.tasks.rewards.pairwise:pairwise_scores",
        "inputs": ["wins"],
        "output": "rewards of a group; NaN where nothing was compared",
        "tests": ["tests/rewards/test_text_rewards.py::test_pairwise_scores_by_hand"],
    },
    {
        "id": "R21",
        "function": "jrl.tasks.rewards.calibration:calibration",
        "inputs": ["correct", "confidence"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_calibration_by_hand"],
    },
    {
        "id": "R23",
        "function": "jrl.tasks.rewards.novelty:novelty",
        "inputs": ["reward", "words", "history", "coefficient"],
        "output": "reward",
        "tests": [
            "tests/rewards/test_text_rewards.py::test_novelty_by_hand",
            "tests/rewards/test_text_rewards.py::test_self_bleu_by_hand",
        ],
    },
    {
        "id": "R26",
        "function": "jrl.tasks.rewards.gap:reward_gap",
        "inputs": ["score", "reference_score", "same_text"],
        "output": "reward",
        "tests": ["tests/rewards/test_text_rewards.py::test_a_reward_gap_by_hand"],
    },
]
