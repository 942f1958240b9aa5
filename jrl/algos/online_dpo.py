"""Online DPO: DPO on pairs of each prompt's best and worst sample.

    pair of a group: the row with the highest reward against the lowest (or the second highest, or any
    other), more than `margin` apart                                                                        F15
    u   = LP(y) - LP_ref(y), summed over the answer's tokens; D = u_preferred - u_other                     P0
    l_u = -log sigmoid(beta * D)                                                                            P5
    L   = mean over the pairs of the step

The reference is the initial policy of the stage. Rows without a pair are not trained on.

Source: Guo et al. 2402.04792 (pairs from the policy itself); pairs of K samples: RLHF Workflow, 2405.07863.
"""

from __future__ import annotations

from jrl.algos import dpo, sampled_pairs
from jrl.algos.contract import Facts
from jrl.algos.paired import positive
from jrl.algos.sampled_pairs import Pairing
from jrl.types import traced


@traced
class OnlineDPO(Pairing):
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: OnlineDPO, facts: Facts) -> None:
    sampled_pairs.check_pairing(config, facts)
    positive("OnlineDPO.beta", config.beta, 0.1)


OBJECTIVE = sampled_pairs.sampled_pair_objective(OnlineDPO, dpo.OBJECTIVE.sequence_loss, check)
