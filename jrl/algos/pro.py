"""PRO: contrast each of a prompt's samples with all worse ones, weighted by the difference in reward.

    s_i = LPbar_i, r_i the reward; T_ki = r_k - r_i for the samples i worse than k, T_k the largest of them
    l   = sum over k of -log(exp(s_k T_k) / (exp(s_k T_k) + sum over i of exp(s_i T_ki)))                 P23
          + nll * (n - 1)^2 * NLL of the best of n, a mean over its tokens                                P23
    L   = mean over the prompts of the step whose rewards differ

Source: Song et al. 2306.17492, with the policy's own samples instead of a data set's; nll 0.05 as there.
"""

from __future__ import annotations

from jrl.algos import sampled_lists
from jrl.ops import listwise
from jrl.types import traced


@traced
class PRO:
    nll: float = 0.05  # weight of the best answer's negative log-prob, times the square of the others' number


sequence_loss = sampled_lists.list_loss(listwise.pro, lambda config, count: config.nll * (count - 1) ** 2)

OBJECTIVE = sampled_lists.list_objective(PRO, sequence_loss)
