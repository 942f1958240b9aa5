"""DreamerPPO: PPO for rewards of any scale, with DreamerV3's tricks.

    v_t   = symexp(sum_k softmax(z_t)_k b_k): the value head predicts a distribution over bins       V2
    A_t   = gae(r, v_old) / max(1, S), S the moving range of returns from their 5th to their 95th percentile   A13, R19
    l_t   = PPO's clip of A_t                                                                       L2 (L3)
            + value_coefficient * cross-entropy of softmax(z_t) to the two-hot weights of symlog(Ret_t)  V2
    L     = mean over all tokens of the step                                                        G1

Neither the value loss nor the advantages grow with the scale of the rewards. Small advantages are not scaled up, and
none are whitened. The head is initialized to 0: all bins are equally likely and the value is 0.

Source: Sullivan et al. 2310.17805: 256 bins from -20 to 20, decay 0.99. They find no general gain over PPO with clipped
rewards; the tricks help if rewards have no known scale. We leave out unimix, which for a large vocabulary is noise, and
the regularization of the value head toward its moving average (0.98 there).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, ppo
from jrl.algos.contract import Facts, Groups, Needs, Tokens, ValueBins
from jrl.algos.ppo import PPO
from jrl.ops import robust_scale, two_hot
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class DreamerPPO(PPO):
    value_clip: float | None = None  # None: a distribution has no clip
    bins: int = 256  # of the value head
    symlog_limit: int = 20  # the outermost bins, on the scale of symlog: 20 are returns of 5e8
    percentile_decay: float = 0.99  # of the moving percentiles of returns


def check(config: DreamerPPO, facts: Facts) -> None:
    ppo.check(config, facts)
    if config.value_clip is not None:
        raise ValueError(
            f"DreamerPPO.value_clip = {config.value_clip} clips numbers, and its values are distributions; leave it out"
        )
    if config.bins < 2 or config.symlog_limit < 1:
        raise ValueError(
            f"DreamerPPO needs at least 2 bins and symlog_limit 1; got {config.bins} and {config.symlog_limit}. 256 "
            "and 20 are usual."
        )
    if not 0 <= config.percentile_decay < 1:
        raise ValueError(
            f"DreamerPPO.percentile_decay = {config.percentile_decay} must lie in [0, 1): 0 is the last batch alone. "
            "0.99 is usual."
        )


def init_state(config: DreamerPPO) -> PyTree:
    return {"low": jnp.float32(jnp.nan), "high": jnp.float32(jnp.nan)}


def advantages(
    config: DreamerPPO, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    unscaled, counts = ppo.estimates(config, groups, reward)
    returns = ppo.returns(config, groups, reward)
    scale, low, high = robust_scale.percentile_range(
        returns, counts, state["low"], state["high"], decay=config.percentile_decay
    )
    next_state = {"low": low.astype(jnp.float32), "high": high.astype(jnp.float32)}
    counters = ppo.counters(config, groups, reward) | {"percentile_range": scale}
    return robust_scale.percentile_scaled(unscaled, scale), next_state, counters


def value_loss(config: DreamerPPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    bins = two_hot.bins_of(config.bins, config.symlog_limit)
    loss = two_hot.two_hot_loss(tokens.value_logits, tokens.returns, tokens.mask, bins=bins)
    outside = two_hot.out_of_range(tokens.returns, tokens.mask, bins=bins)
    metrics = {"value/loss": loss, "value/out_of_range": outside, "value/mean": tokens.values}
    return loss, common.metrics_of(tokens, metrics)


def token_loss(config: DreamerPPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, metrics = common.clipped_token_loss(config, tokens, state)
    if tokens.values is None:
        return loss, metrics
    value_term, value_metrics = value_loss(config, tokens, state)
    return loss + config.value_coefficient * value_term, {**metrics, **value_metrics}


def needs(config: DreamerPPO) -> Needs:
    return ppo.OBJECTIVE.needs(config)._replace(value_bins=ValueBins(config.bins, config.symlog_limit))


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=DreamerPPO,
    check=check,
    needs=needs,
    init_state=init_state,
    advantages=advantages,
    token_loss=token_loss,
    value_loss=value_loss,
)
