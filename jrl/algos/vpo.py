"""VPO, offline: DPO with pessimism, which keeps the policy near the data.

    l_u = -log sigmoid(beta D) - weight * beta * u_cal                                              P5, P21
    L   = mean over the pairs of the step

u_cal is the log-ratio of a sample of the calibration distribution. That is the preferred answers (u_w), or the
reference: (u_w + u_l) / 2, if the reference wrote both answers of the pairs. A large weight amounts to supervised
fine-tuning on these samples. For the policy's own samples, with the sign of optimism, use OnlineVPO.

Source: Cen et al. 2405.19320; sign and form as its abstract states them.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class VPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    weight: float = 0.1  # alpha of the paper, above 0
    # What is calibrated with: the preferred answers, or the reference by both answers, which it must have written.
    calibration: Literal["preferred", "reference"] = "preferred"


def check(config: VPO, facts: Facts) -> None:
    positive("VPO.beta", config.beta, 0.1)
    positive("VPO.weight", config.weight, 0.1)
    if config.calibration not in ("preferred", "reference"):
        raise ValueError(f"VPO.calibration = {config.calibration!r} must be 'preferred' or 'reference'.")


def loss(config: VPO, pair: Pair) -> Array:
    """Returns P5 plus P21's pessimistic term, of every pair, [..., S]."""
    calibration = pair.gain if config.calibration == "preferred" else (pair.gain + pair.other_gain) / 2
    return pair_losses.vpo(config.beta * pair.margin, config.beta * calibration, -config.weight)


OBJECTIVE = pair_objective(VPO, loss, check)
