"""SCoRe: two attempts at a prompt, with a bonus if the second is better than the first.

    r_i1 = R of the first attempt,  r_i2 = R_i + bonus * (R_i - R of the first attempt)      S17, R24
    A_ik = r_ik - mean_g(r_k) on the tokens of attempt k; no credit flows from the second to the first   A21
    l_t  = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t) + kl * k2_t     L2 (L3), K2
    L    = mean over all tokens of the step                                                  G1

Without the bonus, the easiest policy makes its best attempt first and repeats it. This is stage two; stage one,
SCoReFirst, trains a second attempt that differs. `Online.strategy = @SelfCorrection()` draws the attempts.

Source: Kumar et al. 2409.12917 section 4: bonus 10, KL 0.01. They use REINFORCE on single samples; the group baselines
and the clip for several updates per batch are ours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Tokens
from jrl.ops import kl, shaping, turns
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SCoRe(common.Clipped):
    bonus: float = 10.0  # weight, in the second attempt's reward, of its progress over the first
    kl: float = 0.01  # coefficient of the KL to the reference


def check(config: SCoRe, facts: Facts) -> None:
    common.check_clipped(config, facts)
    check_attempts(config, facts)
    if not config.bonus >= 0:
        raise ValueError(f"SCoRe.bonus = {config.bonus} must not be negative: it would reward a second attempt that is "
                         "worse. 10.0 is usual")  # fmt: skip


def check_attempts(config: SCoRe, facts: Facts) -> None:
    """Raises ValueError unless there are two attempts and a KL to the reference."""
    name = type(config).__name__
    if facts.attempts != 2:
        raise ValueError(f"{name} learns from two attempts at a prompt; set Online.strategy = @SelfCorrection()")
    common.check_positive(config, {"kl": "0.01 is usual; without a tie the first attempt drifts unseen."})


def turn_rewards(groups: Groups, first: Array, second: Array) -> Array:
    """Returns the advantages of both attempts on their tokens, [N, T], each relative to the group's same attempt.

    Args:
      first, second: [N] float, rewards of the attempts.
    """
    counts = contract.eligible(groups)
    present = jnp.stack([(groups.action_mask & (groups.turn == k)).any(-1) for k in (0, 1)], axis=-1)
    by_turn = turns.turn_advantages(
        jnp.stack([first, second], axis=-1), present, groups.group, counts, discount=0.0, num_groups=groups.num_groups
    )
    return turns.spread_turns(by_turn, groups.turn, groups.action_mask)


def first_attempt(groups: Groups) -> Array:
    """Returns the rewards of the first attempts, [N] float32; NaN if there is none."""
    return groups.components["first_attempt"]


def advantages(config: SCoRe, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    first = first_attempt(groups)
    second = shaping.progress_bonus(first, reward, coefficient=config.bonus)
    return turn_rewards(groups, first, second), state, counters(groups, reward)


def counters(groups: Groups, reward: Array) -> dict[str, Array]:
    """Returns the counters of every objective, plus the mean progress from the first attempt to the second."""
    counts = contract.eligible(groups)
    progress = jnp.where(counts, reward - first_attempt(groups), 0).sum() / jnp.maximum(counts.sum(), 1)
    return common.count_groups(groups, reward) | {"progress": progress}


def token_loss(config: SCoRe, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, metrics = common.clipped_token_loss(config, tokens, state)
    return loss + config.kl * kl.k2(tokens.logprobs, tokens.ref_logprobs, tokens.mask), metrics


OBJECTIVE = Objective(
    config=SCoRe,
    check=check,
    corrects_staleness=common.has_importance,
    advantages=advantages,
    token_loss=token_loss,
    needs=lambda config: Needs(reference=True, entropy_gradient=config.entropy_bonus is not None),
)
