"""Nash-MD: win against a mixture of yourself and the reference.

    P_i = mean over the prompt's opponents j of 1[R_i > R_j] + 1[R_i = R_j] / 2, or of the
          pair model's preference for i over j                                               S14, P18
    l_t = max(-rho_t * (P_i - 1/2), -clip(rho_t, 1 - clip_low, 1 + clip_high) * (P_i - 1/2)) + kl * k2_t     L2 (L3), K2
    L   = mean over sequences of the sum over their tokens                                   G3

The reward only decides who wins, so its scale does not matter; with `NashMD.preference = 'pair_model'` the pair model
gives the win probability. `Online.strategy = @MixtureOpponent()` draws the opponents, which are not trained on. If a
prompt has no opponent with a valid verdict, its completions are compared with each other. A row that was compared with
none is left out, and its KL term too.

Source: Munos et al. 2312.00886: mixture 1/2, KL 0.1; there a pair model gives P. TRL multiplies log-ratios by log-probs
token by token, which loses the cross terms between tokens; the KL here is k2 per token.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, sampled_pairs
from jrl.algos.contract import Facts, Groups, Needs, Objective, Tokens
from jrl.ops import advantages as advantage_ops
from jrl.ops import groups as group_ops
from jrl.ops import kl, reduce
from jrl.ops.preferences import compared_with_any, win_share
from jrl.ops.win_rate import win_probability
from jrl.types import Finish, PyTree, traced

Array = jax.Array


@traced
class NashMD(common.Clipped):
    kl: float = 0.1  # coefficient of the KL to the reference
    preference: Literal["reward", "pair_model"] = "reward"  # who wins: the higher reward, or as Online.pair_model says


def check(config: NashMD, facts: Facts) -> None:
    common.check_clipped(config, facts)
    common.check_positive(config, {"kl": "without a tie the policy leaves half of its opponent behind. 0.1 is usual."})
    sampled_pairs.check_preference(config, facts)
    if config.preference == "pair_model":
        common.check_unshaped(config, facts, reads="the preferences of Online.pair_model")


def opponents(groups: Groups) -> Array:
    """Returns the mixture's rows that have a valid verdict, [N] bool."""
    return groups.valid & (groups.turn[:, 0] < 0)


def met(groups: Groups) -> Array:
    """Returns the rows that a prompt's completions are compared with, [N] bool."""
    mixture_rows = opponents(groups)
    num_opponents = group_ops.count(groups.group, mixture_rows, num_groups=groups.num_groups)
    return mixture_rows | (contract.eligible(groups) & (group_ops.to_rows(num_opponents, groups.group) == 0))


def keep(config: NashMD, groups: Groups) -> Array:
    """Returns the completions that were compared with another, [N] bool."""
    against = met(groups)
    if config.preference == "pair_model":
        compared = compared_with_any(
            contract.preferences(groups), groups.group, groups.sample, against, num_groups=groups.num_groups
        )
    else:
        num_against = group_ops.count(groups.group, against, num_groups=groups.num_groups)
        compared = group_ops.to_rows(num_against, groups.group) > against
    return contract.eligible(groups) & compared


def advantages(config: NashMD, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    players, mixture_rows, against = keep(config, groups), opponents(groups), met(groups)
    if config.preference == "pair_model":
        wins = win_share(
            contract.preferences(groups), groups.group, groups.sample, players, against, num_groups=groups.num_groups
        )
    else:
        wins = win_probability(reward, groups.group, players, against, num_groups=groups.num_groups)
    counters = common.count_groups(groups, reward)
    # Opponents have no actions. With a verdict `aborted` counts them, like aborted rows; without one they look like
    # padding and are not counted. A prompt without any action is padding, or all its rows were aborted.
    prompts = group_ops.count(groups.group, groups.action_mask.any(-1), num_groups=groups.num_groups)
    drawn = (groups.turn[:, 0] < 0) & (group_ops.to_rows(prompts, groups.group) > 0)
    failed = groups.finish == jnp.int8(Finish.FAILED)
    num_opponents = group_ops.count(groups.group, mixture_rows, num_groups=groups.num_groups)
    rows = group_ops.count(groups.group, contract.eligible(groups), num_groups=groups.num_groups)
    counters |= {
        "win_rate": reduce.masked_mean(wins, players),
        "aborted": counters["aborted"] - jnp.sum(mixture_rows & ~failed),
        "unscorable": counters["unscorable"] + jnp.sum(drawn & ~groups.valid & ~failed),
        "group_of_one": jnp.sum((rows == 1) & (num_opponents == 0)),
    }
    return advantage_ops.spread(jnp.where(players, wins - 0.5, 0), groups.action_mask), state, counters


def token_loss(config: NashMD, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, metrics = common.clipped_token_loss(config, tokens, state)
    return loss + config.kl * kl.k2(tokens.logprobs, tokens.ref_logprobs, tokens.mask), metrics


OBJECTIVE = Objective(
    config=NashMD,
    check=check,
    corrects_staleness=common.has_importance,
    keep=keep,
    advantages=advantages,
    token_loss=token_loss,
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_sequences(loss_mask),
    needs=lambda config: Needs(reference=True, entropy_gradient=config.entropy_bonus is not None),
)
