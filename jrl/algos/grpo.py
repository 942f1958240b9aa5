"""GRPO: each completion against the others of its prompt, in standard deviations; PPO's clip; the mean over sequences.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i) + kl * k_t       L2 (L3), K2
    L   = mean over sequences of the mean over their tokens                                   G2

Source: Shao et al. 2402.03300 eq. 3 and 4. The published KL coefficient is 0.04 with k3; verifiable rewards rarely want
one, so it is off here (None: no reference is loaded). k3's gradient is that of the forward KL; k2 gives the reverse.
"""

from __future__ import annotations

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Tokens
from jrl.ops import advantages as advantage_ops
from jrl.ops import reduce
from jrl.types import Array, PyTree, traced


@traced
class GRPO:
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    dual_clip: float | None = None  # largest ratio where A < 0, above 1 + clip_high; None: no bound
    kl: float | None = None  # coefficient of the KL to the reference in the loss
    # 'k3', 'k2', 'k3_corrected' (times the ratio) or 'k3_straight' (k3's value, k2's gradient)
    kl_estimator: str = "k3"
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: GRPO, facts: Facts) -> None:
    common.check_clipped(config, facts)
    common.check_kl_estimator(config)
    if config.kl is not None and not config.kl > 0:
        raise ValueError(
            f"GRPO.kl = {config.kl} must be above 0, or None: at 0 a reference would be loaded and run for nothing."
        )


def advantages(config: GRPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    row = advantage_ops.group_zscore(reward, groups.group, contract.eligible(groups), num_groups=groups.num_groups)
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


def token_loss(config: GRPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, weighting = common.correct(config.importance, common.clipped_loss(config, tokens), tokens)
    if config.kl is not None:
        loss = loss + config.kl * common.kl_loss(config.kl_estimator, tokens)
    loss = common.with_entropy(config.entropy_bonus, loss, tokens)
    return loss, common.metrics_of(
        tokens, common.common_metrics(tokens), common.clip_metrics(config, tokens), weighting
    )


OBJECTIVE = Objective(
    config=GRPO,
    check=check,
    corrects_staleness=common.has_importance,
    advantages=advantages,
    token_loss=token_loss,
    weights=lambda config, loss_mask, max_completion: reduce.inverse_length_weights(loss_mask),
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_sequences(loss_mask),
    needs=lambda config: Needs(reference=config.kl is not None, entropy_gradient=config.entropy_bonus is not None),
)
