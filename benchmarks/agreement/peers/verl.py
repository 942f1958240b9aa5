"""verl's advantages, policy losses, reductions, value loss and KL penalties: verl/trainer/ppo/core_algos.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

from benchmarks.agreement.peers.torch_loss import Answer, tensors, with_gradient

Array = np.ndarray


def rewards_of_rows(reward: Array, mask: Array) -> torch.Tensor:
    """Returns the rewards on the last token of each row."""
    rewards = np.zeros(mask.shape, np.float32)
    rewards[np.arange(len(mask)), mask.sum(axis=1) - 1] = reward
    return torch.tensor(rewards)


def of_rows(estimator: Callable, **options: Any) -> Callable[..., Answer]:
    """Returns an estimator of rows' advantages as a row of the comparison: [N, T], 0 where masked."""

    def row(reward: Array, group: Array, action_mask: Array, epsilon: float = 1e-6, **rest: Array) -> Answer:
        given = {"epsilon": float(epsilon)} | options
        advantages, _ = estimator(
            rewards_of_rows(reward, action_mask), **tensors(response_mask=action_mask), index=group, **given
        )
        return advantages.numpy(), None

    return row


def gae(token_reward, values, action_mask, discount, gae_lambda) -> Answer:
    given = tensors(token_level_rewards=token_reward, values=values, response_mask=action_mask)
    advantages, _ = core_algos.compute_gae_advantage_return(**given, gamma=float(discount), lam=float(gae_lambda))
    return (advantages * given["response_mask"]).numpy(), None


def gae_returns(token_reward, values, action_mask, discount, critic_lambda, policy_lambda) -> Answer:
    given = tensors(token_level_rewards=token_reward, values=values, response_mask=action_mask)
    _, returns = core_algos.compute_gae_advantage_return(**given, gamma=float(discount), lam=float(critic_lambda))
    return (returns * given["response_mask"]).numpy(), None


def whitened_returns(token_reward, action_mask, discount, **rest) -> Answer:
    given = tensors(token_level_rewards=token_reward, response_mask=action_mask)
    config = AlgoConfig(gamma=float(discount))
    return core_algos.compute_reinforce_plus_plus_outcome_advantage(**given, config=config)[0].numpy(), None


def remax(reward, greedy_reward, action_mask, **rest) -> Answer:
    advantages, _ = core_algos.compute_remax_outcome_advantage(
        rewards_of_rows(reward, action_mask), torch.tensor(greedy_reward), **tensors(response_mask=action_mask)
    )
    return advantages.numpy(), None


def token_optimal(token_reward, probability, sum_squared, action_mask, group, **rest) -> Answer:
    given = tensors(
        token_level_rewards=token_reward,
        response_mask=action_mask,
        old_log_probs=np.log(np.where(action_mask, probability, 1)),
        sum_pi_squared=sum_squared,
    )
    advantages, _ = core_algos.compute_optimal_token_baseline_advantage(
        **given, index=group, handle_zero_tail=False, epsilon=1e-30
    )
    return advantages.numpy(), None


def component_zscores(components, weights, group, action_mask, epsilon, **rest) -> Answer:
    names = [f"component {k}" for k in range(len(components))]
    given = tensors(response_mask=action_mask)
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros(action_mask.shape),
        given["response_mask"],
        group,
        epsilon=float(epsilon),
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": [float(w) for w in weights]},
        non_tensor_batch=dict(zip(names, components)),
        batch={"prompts": torch.zeros((len(group), 0)), "attention_mask": given["response_mask"].long()},
    )
    return advantages.numpy(), None


@functools.cache
def actor_config(**options: Any) -> ActorConfig:
    policy_loss = {name: options.pop(name) for name in ("kl_cov_ratio", "ppo_kl_coef") if name in options}
    return ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(**policy_loss), **options
    )


def policy_loss(name: str, reduction: str, options: Callable[[dict], dict]) -> Callable[..., Answer]:
    """Returns a policy loss as a row: one number of the batch, with its gradient by the log-probs."""

    def row(logprobs, advantages, mask, old_logprobs=None, behaviour_logprobs=None, **rest) -> Answer:
        old = behaviour_logprobs if old_logprobs is None else old_logprobs
        given = tensors(old_log_prob=old, advantages=advantages, response_mask=mask)
        config = actor_config(**{key: float(value) for key, value in options(rest).items()})
        loss = lambda log_prob: core_algos.get_policy_loss_fn(name)(
            log_prob=log_prob, **given, loss_agg_mode=reduction, config=config
        )[0]
        return with_gradient(loss, logprobs)

    return row


def clip_of(rest: dict) -> dict:
    clip = {"clip_ratio_low": rest["clip_low"], "clip_ratio_high": rest["clip_high"]}
    return clip | {"clip_ratio_c": rest.get("dual_clip", 1e6)}


def reduction(mode: str, **options: Any) -> Callable[..., Answer]:
    def row(loss, mask, **rest) -> Answer:
        given = tensors(loss_mat=loss, loss_mask=mask)
        return core_algos.agg_loss(**given, loss_agg_mode=mode, **options).numpy(), None

    return row


def constant_mean(loss, mask, **rest) -> Answer:
    rows, columns = mask.shape
    given = tensors(loss_mat=loss, loss_mask=mask)
    options = {"loss_agg_mode": "seq-mean-token-sum-norm", "global_batch_size": rows, "loss_scale_factor": columns}
    return core_algos.agg_loss(**given, **options).numpy(), None


def value_loss(values, old_values, returns, mask, clip) -> Answer:
    given = tensors(values=old_values, returns=returns, response_mask=mask)
    loss = lambda vpreds: core_algos.compute_value_loss(vpreds, **given, cliprange_value=float(clip))[0]
    return with_gradient(loss, values)


def kl(estimator: str) -> Callable[..., Answer]:
    def row(logprobs, ref_logprobs, mask) -> Answer:
        given = tensors(ref=ref_logprobs, mask=mask)
        return with_gradient(lambda lp: core_algos.kl_penalty(lp, given["ref"], estimator) * given["mask"], logprobs)

    return row


ROWS = {
    "grpo": of_rows(core_algos.compute_grpo_outcome_advantage),
    "grpo vectorized": of_rows(core_algos.compute_grpo_vectorized_outcome_advantage),
    "dr_grpo": of_rows(core_algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
    "rloo": of_rows(core_algos.compute_rloo_outcome_advantage),
    "rloo vectorized": of_rows(core_algos.compute_rloo_vectorized_outcome_advantage),
    "remax": remax,
    "reinforce++": whitened_returns,
    "reinforce++ baseline": of_rows(core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage),
    "opo": of_rows(core_algos.compute_opo_outcome_advantage),
    "optimal token baseline": token_optimal,
    "pass@k": of_rows(core_algos.compute_grpo_passk_outcome_advantage, config={"norm_adv_by_std_in_grpo": False}),
    "gdpo": component_zscores,
    "gae": gae,
    "gae returns": gae_returns,
    "vanilla": policy_loss("vanilla", "token-mean", clip_of),
    "dual clip": policy_loss("vanilla", "token-mean", clip_of),
    "gspo": policy_loss("gspo", "seq-mean-token-mean", clip_of),
    "gspo token": policy_loss("gspo", "seq-mean-token-mean", clip_of),
    "cispo": policy_loss(
        "cispo", "token-mean", lambda rest: {"clip_ratio_low": 1.0, "clip_ratio_high": rest["max_weight"] - 1}
    ),
    "sapo": policy_loss(
        "sapo",
        "token-mean",
        lambda rest: {"tau_pos": rest["positive_temperature"], "tau_neg": rest["negative_temperature"]},
    ),
    "geo_mean": policy_loss(
        "geo_mean",
        "token-mean",
        lambda rest: {"clip_ratio_low": rest["log_clip_low"], "clip_ratio_high": rest["log_clip_high"]},
    ),
    "kl_cov": policy_loss(
        "kl_cov", "token-mean", lambda rest: {"kl_cov_ratio": rest["share"], "ppo_kl_coef": rest["coefficient"]}
    ),
    "dppo_tv": policy_loss(
        "dppo_tv",
        "token-mean",
        lambda rest: {"clip_ratio_low": rest["delta"], "clip_ratio_high": rest["delta"], "clip_ratio_c": 1e6},
    ),
    "token-mean": reduction("token-mean"),
    "seq-mean-token-mean": reduction("seq-mean-token-mean"),
    "seq-mean-token-sum": reduction("seq-mean-token-sum"),
    "seq-mean-token-sum-norm": constant_mean,
    "value loss": value_loss,
    "k1": kl("k1"),
    "k2": kl("k2"),
    "k3": kl("k3"),
    "k3+": kl("k3+"),
}
