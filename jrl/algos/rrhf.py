"""RRHF: a ranking loss on a prompt's samples, plus imitation of the best one.

    l = sum over pairs of a prompt's samples with r_i < r_j of max(0, LPbar_i - LPbar_j)                  P23
        + nll * NLL of the best, a mean over its tokens                                                   P23
    L = mean over the prompts of the step whose rewards differ

Source: Yuan et al. 2304.05302 eq. 2 to 4, with only the policy's own samples.
"""

from __future__ import annotations

from jrl.algos import sampled_lists
from jrl.ops import listwise
from jrl.types import traced


@traced
class RRHF:
    nll: float = 1.0  # weight of the best answer's negative log-prob


sequence_loss = sampled_lists.list_loss(listwise.rrhf, lambda config, count: config.nll)

OBJECTIVE = sampled_lists.list_objective(RRHF, sequence_loss)
