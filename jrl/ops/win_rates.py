"""Win rates of one policy over another by a judge who compares (M11). Host only: numpy, float64."""

from __future__ import annotations

import numpy as np

from jrl.ops.statistics import Interval, share_interval

Array = np.ndarray
RIDGE = 1e-3  # keeps the coefficients finite where one policy wins everywhere


def swapped_wins(first: Array, second: Array) -> Array:
    """Returns M11's win of each prompt with the order swapped, [n] float64: the mean of both orders, NaN where the
    judge failed in one of them.

    Args:
      first: [n] float, 1 where the judge prefers the policy when its answer stands first, 0 where the other one's, 0.5
        at a tie, NaN where the judge failed. second: the same with its answer in the second place.
    """
    return (np.asarray(first, np.float64) + np.asarray(second, np.float64)) / 2


def win_rate(wins: Array, *, confidence: float = 0.95) -> Interval:
    """Returns M11, (wins + ties / 2) / n over the prompts that were judged, with an interval over prompts
    (`share_interval`).

    Args:
      wins: [n] float in [0, 1], as `swapped_wins` gives them; NaN: not judged. The count of the judged is Interval.n.
    """
    wins = np.asarray(wins, np.float64)
    return share_interval(wins[np.isfinite(wins)], confidence=confidence)


def length_controlled(wins: Array, length_difference: Array, difficulty: Array | None = None) -> float:
    """Returns M11's length-controlled win rate: what a logistic regression says at equal lengths; NaN where no prompt
    was judged.

        logit = model + length * tanh(difference / std of the differences) + difficulty's term, at difference 0

    averaged over prompts. A ridge of 1e-3 keeps the coefficients finite.

    Args:
      wins: [n] float in [0, 1]; NaN: not judged. length_difference: [n] float, the policy's length minus the other's,
        finite where judged.
      difficulty: [n] float of each prompt, such as its mean win rate over other policies, finite where judged; None: no
        such term.

    Source: length-controlled AlpacaEval, Dubois et al. 2404.04475; its form is from memory.
    """
    wins, difference = np.asarray(wins, np.float64), np.asarray(length_difference, np.float64)
    judged = np.isfinite(wins)
    if not judged.any():
        return float("nan")
    wins, difference = wins[judged], difference[judged]
    if not np.isfinite(difference).all():
        raise ValueError("the length difference of a judged prompt must be a finite number")
    spread = difference.std()
    columns = [np.ones_like(wins), np.tanh(difference / spread) if spread > 0 else np.zeros_like(wins)]
    if difficulty is not None:
        difficulty = np.asarray(difficulty, np.float64)[judged]
        if not np.isfinite(difficulty).all():
            raise ValueError("the difficulty of a judged prompt must be a finite number")
        columns.append(difficulty)
    features = np.stack(columns, axis=1)
    weights = np.zeros(features.shape[1])
    objective = lambda w: np.logaddexp(0, features @ w).sum() - wins @ features @ w + RIDGE / 2 * w @ w
    for _ in range(100):
        chance = 1 / (1 + np.exp(-features @ weights))
        slope = features.T @ (chance - wins) + RIDGE * weights
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features + RIDGE * np.eye(len(weights))
        move, size = np.linalg.solve(curvature, slope), 1.0
        while size > 1e-6 and objective(weights - size * move) > objective(weights):
            size /= 2
        weights = weights - size * move
        if np.abs(slope).max() < 1e-10:
            break
    features[:, 1] = 0
    return float((1 / (1 + np.exp(-features @ weights))).mean())
