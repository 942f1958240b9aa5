"""How good a reward model is, by answers whose order is known (M13). Host only: numpy, float64."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def pair_accuracy(chosen: Array, rejected: Array) -> float:
    """Returns M13's share of pairs in which the better answer has the higher reward, a tie half; NaN of no pairs.

    Args:
      chosen, rejected: [pairs] float, rewards; a pair with a NaN is left out.

    Source: RewardBench, Lambert et al. 2403.13787.
    """
    difference = np.asarray(chosen, np.float64) - np.asarray(rejected, np.float64)
    difference = difference[np.isfinite(difference)]
    return float(np.mean((1 + np.sign(difference)) / 2)) if len(difference) else float("nan")


def best_of_many(correct: Array, wrong: Array) -> float:
    """Returns M13's share of problems whose right answer has a higher reward than all wrong ones, a tie being a
    failure; NaN of no problems.

    Args:
      correct: [problems] float, rewards; NaN: the problem is left out. wrong: [problems, answers] float; NaN: there is
        no such answer. A problem without a wrong answer is left out.

    Source: RewardMATH, Kim et al. 2410.01729.
    """
    correct, wrong = np.asarray(correct, np.float64), np.asarray(wrong, np.float64)
    there = np.isfinite(wrong)
    counts = np.isfinite(correct) & there.any(axis=1)
    hardest = np.where(there, wrong, -np.inf).max(axis=1, initial=-np.inf)
    return float((correct > hardest)[counts].mean()) if counts.any() else float("nan")


def instruction_consistency(rewards: Array) -> dict[str, float]:
    """Returns M13's consistency over pairs of instructions that look alike, each with its own answer:

        {"instructions": share of pairs with r(x1, y1) + r(x2, y2) > r(x1, y2) + r(x2, y1),
         "responses": share of answers that are ranked higher under their own instruction}

    ties half; NaN of none.

    Args:
      rewards: [pairs, 2, 2] float, [i, j] the reward of answer j under instruction i; a pair with a NaN is left out.

    Source: Contrast Instructions, Shen et al. 2309.16155 section 2.
    """
    rewards = np.asarray(rewards, np.float64)
    rewards = rewards[np.isfinite(rewards).all(axis=(1, 2))]
    if not len(rewards):
        return {"instructions": float("nan"), "responses": float("nan")}
    (a, b), (c, d) = (rewards[:, 0, 0], rewards[:, 0, 1]), (rewards[:, 1, 0], rewards[:, 1, 1])
    share = lambda difference: float(np.mean((1 + np.sign(difference)) / 2))
    return {"instructions": share(a + d - b - c), "responses": (share(a - c) + share(d - b)) / 2}
