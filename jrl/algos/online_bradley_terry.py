"""Bradley-Terry on the policy's own samples: a reward model trained on the mistakes that the policy makes.

    pair of a group as in OnlineDPO, by the reward or by the outcome                                       F15
    l_u = -log sigmoid(s_preferred - s_other - margin) + center * (s_preferred + s_other)^2                P1
    L   = mean over the pairs of the step

The policy samples and is not trained; the role in Online.trains is. Any source of rewards can rank the samples: a
verifier, a judge (RLAIF), another reward model.

Sources: pairs of a policy's samples that a judge labels, Lee et al. 2309.00267; pairs labeled by a gold reward that
does not train the policy, Gao et al. 2210.10760 (`ranks_by = 'outcome'`, with the verifier's weight 0).
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos import bradley_terry, sampled_pairs
from jrl.algos.contract import Facts, Groups, Needs, Objective
from jrl.algos.sampled_pairs import Pairing
from jrl.types import traced

Array = jax.Array


@traced
class OnlineBradleyTerry(Pairing):
    # What a pair is made by: the reward, or what the first verifier says, whatever its weight in the reward is.
    ranks_by: Literal["reward", "outcome"] = "reward"
    score_margin: float = 0.0  # by how much the preferred answer must score higher before the loss is that of a tie
    center: float | None = None  # weight of the squared sum of a pair's scores; None: scores may drift together


def check(config: OnlineBradleyTerry, facts: Facts) -> None:
    sampled_pairs.check_pairing(config, facts)
    if not config.score_margin >= 0:
        raise ValueError(f"OnlineBradleyTerry.score_margin = {config.score_margin} must not be negative; 0 is usual.")
    if config.center is not None and not config.center > 0:
        raise ValueError(f"OnlineBradleyTerry.center = {config.center} must be above 0, or None; 0.01 is usual.")
    if config.ranks_by not in ("reward", "outcome"):
        raise ValueError(f"OnlineBradleyTerry.ranks_by = {config.ranks_by!r} must be 'reward' or 'outcome'.")


def loss_of(config: OnlineBradleyTerry) -> bradley_terry.BradleyTerry:
    """Returns the configuration of the loss."""
    return bradley_terry.BradleyTerry(margin=config.score_margin, center=config.center)


def shape(config: OnlineBradleyTerry, groups: Groups) -> Array:
    """Returns the reward that ranks samples for pairs, [N]."""
    if config.ranks_by == "outcome":
        groups = groups.replace(reward=groups.outcome)
    return sampled_pairs.shape(config, groups)


OBJECTIVE = Objective(
    config=OnlineBradleyTerry,
    check=check,
    corrects_staleness=lambda config: True,  # the policy that samples is not trained
    needs=lambda config: Needs(logprobs=False, score=True),
    shape=shape,
    pairs=sampled_pairs.pairs,
    sequence_loss=lambda config, sequences, state: bradley_terry.sequence_loss(loss_of(config), sequences, state),
    unit_size=2,
)
