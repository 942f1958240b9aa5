"""What objectives share: options, checks, counters, and the terms that complete every token loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrl.algos import contract
from jrl.ops import entropy, groups, importance, kl, ratios, reduce, shaping, surrogate
from jrl.ops.threefry import threefry
from jrl.types import Finish, traced

Array = jax.Array


@traced
class TruncatedImportance:
    """L9: weights min(exp(old - behaviour), cap) on the policy loss, for a sampler that is not quite the learner.

    `level`: 'token' (jrl, Tunix, open-instruct); 'sequence', the product over a sequence (verl); 'geometric', its
    per-token geometric mean (AReaL's "sequence").
    """

    cap: float = 2.0  # largest weight
    level: Literal["token", "sequence", "geometric"] = "token"  # what one weight covers


@traced
class Clipped:
    """The options of an objective whose loss is PPO's clip alone."""

    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    dual_clip: float | None = None  # largest ratio where A < 0, above 1 + clip_high; None: no bound
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check_clipped(config: Clipped, facts: contract.Facts) -> None:
    """Raises ValueError where the options of `Clipped` are invalid, or a prompt has too few samples to compare."""
    check_sampling(config, facts, grouped=True)
    check_clip(config)
    check_importance(config)
    check_entropy(config)


def clipped_token_loss(config: Clipped, tokens: contract.Tokens, state: Any) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of `Clipped` and its metrics: L2 (L3), importance weights (L9), entropy bonus (K5)."""
    return weighted_loss(config, clipped_loss(config, tokens), tokens, clip_metrics(config, tokens))


def check_sampling(config: Any, facts: contract.Facts, *, grouped: bool) -> None:
    """Raises ValueError where the samples cannot carry a learning signal for this objective."""
    name = type(config).__name__
    if facts.greedy:
        raise ValueError(
            f"{name} cannot learn from greedy sampling (temperature 0): every sample of a prompt is the same. Use a "
            "temperature above 0; 1.0 is usual."
        )
    if grouped and facts.samples < 2:
        raise ValueError(
            f"{name} compares the samples of one prompt and needs at least 2 of them, got samples={facts.samples}: "
            "one alone has nothing to be compared with. Use 4 to 16, or Reinforce, which compares over the batch."
        )


def check_outcome(config: Any, facts: contract.Facts, *, reads: str, instead: str) -> None:
    """Raises ValueError where an objective learns from the first verifier's verdict (Groups.outcome), and that
    verifier only watches.

    Args:
      reads: what it does with the verdict, and `instead` what to set, for the message.
    """
    if facts.held_out_outcome:
        raise ValueError(
            f"{type(config).__name__} {reads}, and the first in Scoring.verifiers has no weight above 0: the "
            f"policy would learn from a held-out verdict. {instead}"
        )


def check_unshaped(config: Any, facts: contract.Facts, *, reads: str) -> None:
    """Raises ValueError where Online.shaping changes rewards, and an objective does not read them.

    Args:
      reads: what it learns from instead, for the message.
    """
    if facts.changes_rewards:
        raise ValueError(
            f"{type(config).__name__} learns from {reads}, and Online.shaping changes only the rewards of completions: "
            "it would change nothing. Leave out what shapes them"
        )


def check_ratio_bounds(config: Any) -> None:
    """Raises ValueError where the bounds of a clipped ratio contradict each other."""
    name = type(config).__name__
    if not 0 <= config.clip_low < 1:
        raise ValueError(
            f"{name}.clip_low = {config.clip_low} puts the lower bound of the ratio at {1 - config.clip_low}; "
            "a ratio is above 0, so clip_low must lie in [0, 1). 0.2 is usual."
        )
    if not config.clip_high >= 0:
        raise ValueError(f"{name}.clip_high = {config.clip_high} must be at least 0; 0.2 is usual, DAPO uses 0.28.")


def check_clip(config: Any) -> None:
    """Raises ValueError where the bounds of PPO's clip, or of the dual clip, contradict each other."""
    name = type(config).__name__
    check_ratio_bounds(config)
    if config.dual_clip is not None and not config.dual_clip > 1 + config.clip_high:
        raise ValueError(
            f"{name}.dual_clip = {config.dual_clip} must exceed 1 + clip_high = {1 + config.clip_high}: it bounds the "
            "loss of ratios that PPO's clip leaves alone. 3.0 is usual; None switches it off."
        )


def check_importance(config: Any) -> None:
    """Raises ValueError where the importance weights would not be positive, or their level is unknown."""
    option = config.importance
    if option is None:
        return
    if not option.cap > 0:
        raise ValueError(
            f"TruncatedImportance.cap = {option.cap} must be above 0: weights are cut to it, so that 0 removes the "
            f"policy loss. 2.0 is usual; {type(config).__name__}.importance = None switches the correction off."
        )
    if option.level not in ("token", "sequence", "geometric"):
        raise ValueError(
            f"TruncatedImportance.level = {option.level!r} must be 'token', 'sequence' (product of a sequence's "
            "ratios) or 'geometric' (their per-token mean)."
        )


def has_importance(config: Any) -> bool:
    """Whether the importance weights, which are capped, are on: the `corrects_staleness` of most methods."""
    return config.importance is not None


def check_kl_estimator(config: Any) -> None:
    """Raises ValueError where the estimator of the KL in the loss is unknown, or has no gradient in expectation."""
    name = type(config).__name__
    if config.kl_estimator == "k1":
        raise ValueError(
            f"{name}.kl_estimator = 'k1' regularizes nothing: the expected gradient of k1 as a loss is zero. Use 'k2' "
            "(reverse KL) or 'k3' (GRPO's own, forward KL)."
        )
    if config.kl_estimator not in ("k2", "k3", "k3_corrected", "k3_straight"):
        raise ValueError(
            f"{name}.kl_estimator = {config.kl_estimator!r} must be 'k2', 'k3', 'k3_corrected' or 'k3_straight'."
        )


def check_entropy(config: Any) -> None:
    """Raises ValueError where the entropy bonus is negative: a penalty that would collapse the policy."""
    if config.entropy_bonus is not None and config.entropy_bonus < 0:
        raise ValueError(
            f"{type(config).__name__}.entropy_bonus = {config.entropy_bonus} must not be negative: the loss is "
            "-entropy_bonus * entropy. None switches it off, and with it the pass that computes its gradient."
        )


def check_kl_in_reward(config: Any) -> None:
    """Raises ValueError where the KL in the reward has no weight, or its estimator is unknown."""
    name = type(config).__name__
    if config.kl_in_reward is not None and not config.kl_in_reward > 0:
        raise ValueError(
            f"{name}.kl_in_reward = {config.kl_in_reward} must be above 0, or None: at 0 a reference would be loaded "
            "and run for nothing. 0.05 is usual."
        )
    if config.kl_in_reward_estimator not in shaping.KL_ESTIMATORS:
        raise ValueError(
            f"{name}.kl_in_reward_estimator = {config.kl_in_reward_estimator!r} must be one of "
            f"{', '.join(map(repr, shaping.KL_ESTIMATORS))}."
        )


def needs_of_reward(config: Any) -> dict[str, bool]:
    """Returns the fields of Needs that `rewards_of_tokens` asks for."""
    has_kl = config.kl_in_reward is not None
    return {"reference": has_kl, "credit_logprobs": has_kl, "token_rewards": True}


def rewards_of_tokens(config: Any, groups: contract.Groups, reward: Array) -> Array:
    """Returns the reward of every sampled token, [N, T] float32 or wider, 0 elsewhere and in ineligible rows: that of
    its span (R16), on the last token the row's, and the KL to the reference (R17).

    Args:
      config: `kl_in_reward` is the coefficient of the KL, None: no such term; `kl_in_reward_estimator` is its
        estimator. The objective's `needs` must include `needs_of_reward(config)`.
      reward: [N] float, as the objective shapes it.
    """
    counts = groups.action_mask & contract.eligible(groups)[:, None]
    if config.kl_in_reward is None:
        rewards = jnp.where(shaping.last_action(counts), reduce.widen(reward)[:, None], 0)
    else:
        rewards = shaping.kl_in_reward(
            reward,
            groups.old_logprobs,
            groups.ref_logprobs,
            counts,
            beta=config.kl_in_reward,
            estimator=config.kl_in_reward_estimator,
        )
    return rewards if groups.token_reward is None else rewards + reduce.masked(groups.token_reward, counts)


def count_groups(rows: contract.Groups, reward: Array) -> dict[str, Array]:
    """Returns the counters of E1 to E4, {name: [] int32}, and the mean reward of the eligible rows, [].

    zero_variance_groups: two rows or more, all rewards equal. group_of_one: one row is left. unscorable: rows without a
    verdict to train on. aborted: rows without a token of their own. Padding has neither and is not counted.
    """
    counts = contract.eligible(rows)
    aborted = contract.aborted(rows)
    padding = aborted & ~rows.valid & (rows.finish != jnp.int8(Finish.FAILED))
    size = groups.count(rows.group, counts, num_groups=rows.num_groups)
    varied = groups.varied(reward, rows.group, counts, num_groups=rows.num_groups)
    return {
        "zero_variance_groups": jnp.sum((size > 1) & ~varied),
        "group_of_one": jnp.sum(size == 1),
        "unscorable": jnp.sum(~rows.valid & ~padding),
        "aborted": jnp.sum(aborted & ~padding),
        "reward_used": reduce.masked_mean(reward, counts),
    }


def ppo_clip(config: Any, tokens: contract.Tokens) -> Array:
    """Returns PPO's clip with the configured bounds (L2)."""
    return surrogate.clipped(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )


def clipped_loss(config: Any, tokens: contract.Tokens) -> Array:
    """Returns PPO's clip with the configured bounds (L2), or the dual clip where `config.dual_clip` is set (L3)."""
    if config.dual_clip is None:
        return ppo_clip(config, tokens)
    return surrogate.dual_clipped(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def correct(option: TruncatedImportance | None, loss: Array, tokens: contract.Tokens) -> tuple[Array, dict[str, Array]]:
    """Returns the policy loss times its importance weights, and their metrics; None: the loss unchanged.

    The KL and entropy terms are added afterwards and are not weighted (as in TRL).
    """
    if option is None:
        return loss, {}
    old, behaviour, mask = tokens.old_logprobs, tokens.behaviour_logprobs, tokens.mask
    by_segment = dict(segment=tokens.segment, num_segments=tokens.num_segments)
    if option.level == "token":
        weights = importance.token_weights(old, behaviour, mask, cap=option.cap)
    elif option.level == "sequence":
        weights = importance.sequence_weights(old, behaviour, mask, **by_segment, cap=option.cap)
    else:
        weights = importance.geometric_weights(old, behaviour, mask, **by_segment, cap=option.cap)
    return weights * loss, {"importance_weight": weights, "importance_capped": weights >= option.cap}


def with_entropy(coefficient: Array | None, loss: Array, tokens: contract.Tokens) -> Array:
    """Returns the loss with the entropy bonus (K5), where one is configured."""
    if coefficient is None:
        return loss
    return loss + entropy.entropy_bonus(tokens.entropy, tokens.mask, coefficient=coefficient)


def kl_loss(estimator: str, tokens: contract.Tokens) -> Array:
    """Returns the estimate of the KL to the reference that enters a loss (K2 to K4), [..., L], by its name in GRPO."""
    new, old, reference, mask = tokens.logprobs, tokens.old_logprobs, tokens.ref_logprobs, tokens.mask
    if estimator == "k2":
        return kl.k2(new, reference, mask)
    if estimator == "k3":
        return kl.k3(new, reference, mask)
    if estimator == "k3_corrected":
        return kl.corrected_k3(new, old, reference, mask)
    return kl.straight_through_k3(new, reference, mask)


def clip_metrics(config: Any, tokens: contract.Tokens) -> dict[str, Array]:
    """Returns where PPO's clip binds (M16): {"clip_fraction_low", "clip_fraction_high"}."""
    new, old, advantages, mask = tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask
    return {
        "clip_fraction_low": surrogate.clipped_low(new, old, advantages, mask, clip_low=config.clip_low),
        "clip_fraction_high": surrogate.clipped_high(new, old, advantages, mask, clip_high=config.clip_high),
    }


def common_metrics(tokens: contract.Tokens) -> dict[str, Array]:
    """Returns the metrics of every algorithm (M16, M17), {name: [..., L]}, to be averaged over the loss mask.

    ratio: new to old probability. approx_kl_k2, approx_kl_k3: KL(old to new policy), of the step so far. mismatch_k1,
    mismatch_k3: KL(sampler to learner) on the sampler's tokens. clamped: the share of log-ratios that E9 clamped.
    kl_ref_k1, kl_ref_k3: KL of the current policy to the reference, where there is one: each token's estimate times
    its ratio of new to sampling probability, since older weights may have drawn the token (K1).
    """
    new, old, behaviour, mask = tokens.logprobs, tokens.old_logprobs, tokens.behaviour_logprobs, tokens.mask
    clamped = ratios.clamped(ratios.log_ratio(new, old, mask)) | ratios.clamped(ratios.log_ratio(old, behaviour, mask))
    metrics = {
        "ratio": ratios.ratio(new, old, mask),
        "approx_kl_k2": kl.k2(old, new, mask),
        "approx_kl_k3": kl.k3(old, new, mask),
        "mismatch_k1": kl.k1(behaviour, old, mask),
        "mismatch_k3": kl.k3(behaviour, old, mask),
    }
    if tokens.ref_logprobs is not None:
        clamped |= ratios.clamped(ratios.log_ratio(new, tokens.ref_logprobs, mask))
        clamped |= ratios.clamped(ratios.log_ratio(new, behaviour, mask))
        behaviour_ratio = ratios.ratio(new, behaviour, mask)
        metrics["kl_ref_k1"] = behaviour_ratio * kl.k1(new, tokens.ref_logprobs, mask)
        metrics["kl_ref_k3"] = behaviour_ratio * kl.k3(new, tokens.ref_logprobs, mask)
    return metrics | {"clamped": clamped}


def metrics_of(tokens: contract.Tokens, *parts: dict[str, Array]) -> dict[str, Array]:
    """Returns the union of `parts`, float32 or wider, 0 where masked and without gradient."""
    metrics = {name: value for part in parts for name, value in part.items()}
    return {name: jax.lax.stop_gradient(reduce.masked(value, tokens.mask)) for name, value in metrics.items()}


def row_draws(groups: contract.Groups) -> Array:
    """Returns a pseudorandom number in [0, 1) for every row, [N] float32, from its prompt's index and its sample index.

    The same at every step: the samples of a prompt are exchangeable, so that any choice that does not look at their
    rewards is a random one.
    """
    key = groups.group.astype(jnp.uint32), groups.sample.astype(jnp.uint32)
    bits = threefry(key, (jnp.zeros_like(key[0]), jnp.zeros_like(key[1])))[0]
    return (bits >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


def token_draws(groups: contract.Groups, draw: Array | int) -> Array:
    """Returns random bits for every token, [N, T] uint32, a function of draw, prompt, sample and column."""
    to_tokens = lambda x: jnp.broadcast_to(x, groups.action_mask.shape).astype(jnp.uint32)
    column = jax.lax.broadcasted_iota(jnp.uint32, groups.action_mask.shape, 1)
    key = to_tokens(draw), to_tokens(groups.group[:, None])
    return threefry(key, (to_tokens(groups.sample[:, None]), column))[0]


# What policy losses share, apart from their formulas


def check_positive(config: Any, usual: dict[str, str]) -> None:
    """Raises ValueError where a field is not above 0. usual: {field: hint with a usual value, for the message}."""
    for field, hint in usual.items():
        value = getattr(config, field)
        if not value > 0:
            raise ValueError(f"{type(config).__name__}.{field} = {value} must be above 0: {hint}")


def check_largest_weight(config: Any) -> None:
    """Raises ValueError where L16's largest weight would cut the weight of an advantage of 0."""
    if not config.max_weight >= 1:
        raise ValueError(
            f"{type(config).__name__}.max_weight = {config.max_weight} must be at least 1, the weight of an advantage "
            "of 0. 20.0 is usual."
        )


def check_weighted(config: Any, facts: contract.Facts) -> None:
    """Raises ValueError where the options that most group methods share are invalid."""
    check_sampling(config, facts, grouped=True)
    check_importance(config)
    check_entropy(config)


def entropy_needs(config: Any) -> contract.Needs:
    """Returns the needs of an objective that needs nothing but, for its entropy bonus, the entropy's gradient."""
    return contract.Needs(entropy_gradient=config.entropy_bonus is not None)


def weighted_loss(
    config: Any, loss: Array, tokens: contract.Tokens, *metrics: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Returns the policy loss with its importance weights and the entropy bonus, and all its metrics."""
    loss, weighting = correct(config.importance, loss, tokens)
    return unweighted_loss(config, loss, tokens, *metrics, weighting)


def ppo_clip_token_loss(config: Any, tokens: contract.Tokens, state: Any) -> tuple[Array, dict[str, Array]]:
    """Returns `ppo_clip` with importance weights (L9) and the entropy bonus (K5), and its metrics."""
    return weighted_loss(config, ppo_clip(config, tokens), tokens, clip_metrics(config, tokens))


def unweighted_loss(
    config: Any, loss: Array, tokens: contract.Tokens, *metrics: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Returns the policy loss with the entropy bonus, and all its metrics: for methods without importance weights."""
    loss = with_entropy(config.entropy_bonus, loss, tokens)
    return loss, metrics_of(tokens, common_metrics(tokens), *metrics)


def bound_metrics(config: Any, ratio: Array, tokens: contract.Tokens) -> dict[str, Array]:
    """Returns where the clip of `ratio`, which is not the token's own, binds, under the names of `clip_metrics`."""
    advantages = reduce.masked(tokens.advantages, tokens.mask)
    return {
        "clip_fraction_low": (advantages < 0) & (ratio < 1 - config.clip_low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1 + config.clip_high),
    }


# The objectives whose loss is PPO's clip alone: each replaces the configuration, and adds at least its advantages.
CLIPPED = contract.Objective(
    config=Clipped,
    check=check_clipped,
    corrects_staleness=has_importance,
    token_loss=clipped_token_loss,
    needs=entropy_needs,
)


def check_most_rejected(config: Any) -> None:
    """Raises ValueError if no share of tokens can exceed the limit."""
    if config.most_rejected is not None and not 0 < config.most_rejected < 1:
        raise ValueError(
            f"{type(config).__name__}.most_rejected = {config.most_rejected} is a share of tokens: above 0 and below "
            "1, or None to go on whatever is rejected. 0.5 is usual."
        )


def too_many_rejected(config: Any, metrics: Mapping[str, float | None]) -> str | None:
    """Returns why a run must not go on whose tokens are mostly rejected (L10); None if they are not."""
    share, name = metrics.get("rejected"), type(config).__name__
    if config.most_rejected is None or share is None or not share > config.most_rejected:
        return None
    return (
        f"{share:.0%} of the tokens were rejected, more than {name}.most_rejected = {config.most_rejected}: the "
        "policy that sampled them and the one that learns are far apart. Look for the cause: old samples (Online.lag), "
        "large updates, sampling in another precision, or top-k, top-p and min-p (Sampler), with which the weight of a "
        f"token is the share of the probability that they keep. {name}.most_rejected = None goes on, with "
        "--accept-change"
    )
