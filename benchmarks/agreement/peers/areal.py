"""AReaL's decoupled loss, its rejection of stale samples, SAPO and value loss: areal/utils/functional/functional.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.utils.functional import apply_rejection_sampling, ppo_actor_loss_fn, ppo_critic_loss_fn, sapo_loss_fn

from benchmarks.agreement.peers.torch_loss import Answer, with_gradient

Array = np.ndarray


def actor(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, behaviour=None, **options: Any) -> Answer:
    given = {
        "proximal_logprobs": torch.tensor(old_logprobs),
        "old_logprobs": torch.tensor(old_logprobs if behaviour is None else behaviour),
        "advantages": torch.tensor(advantages),
        "loss_mask": torch.tensor(mask),
        "eps_clip": float(clip_low),
        "eps_clip_higher": float(clip_high),
    }
    return with_gradient(lambda lp: ppo_actor_loss_fn(lp, **given, **options)[0], logprobs)


def token(logprobs, old_logprobs, advantages, mask, clip_low, clip_high) -> Answer:
    return actor(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)


def dual_clip(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip) -> Answer:
    return actor(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, c_clip=float(dual_clip))


def sequence(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, **rest) -> Answer:
    given = (logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return actor(*given, importance_sampling_level="sequence")


def decoupled(logprobs, old_logprobs, behaviour_logprobs, advantages, mask, clip_low, clip_high, cap) -> Answer:
    truncated = RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=float(cap))
    given = (logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return actor(*given, behaviour=behaviour_logprobs, rejection_sampling=truncated)


def rejected(level: str, agg: str) -> Callable[..., Answer]:
    """Returns a row of the mask that stays."""

    def row(old_logprobs, behaviour_logprobs, mask, low, high, **rest) -> Answer:
        bounds = {"lower": float(low), "upper": float(high)}
        config = RejectionSamplingConfig(level=level, action="mask", metric="ratio", agg=agg, **bounds)
        given = (torch.tensor(old_logprobs), torch.tensor(behaviour_logprobs), torch.tensor(mask))
        return apply_rejection_sampling(*given, None, config).loss_mask.numpy(), None

    return row


def geometric_weights(old_logprobs, behaviour_logprobs, mask, cap, **rest) -> Answer:
    config = RejectionSamplingConfig(level="sequence", action="clamp", metric="ratio", agg="mean", upper=float(cap))
    given = (torch.tensor(old_logprobs), torch.tensor(behaviour_logprobs), torch.tensor(mask))
    return apply_rejection_sampling(*given, None, config).behave_imp_weight.numpy(), None


def sapo(logprobs, old_logprobs, advantages, mask, positive_temperature, negative_temperature) -> Answer:
    given = (torch.tensor(old_logprobs), torch.tensor(advantages))
    temperatures = (float(positive_temperature), float(negative_temperature))
    return with_gradient(lambda lp: sapo_loss_fn(lp, *given, *temperatures, torch.tensor(mask))[0], logprobs)


def critic(values, old_values, returns, mask, clip) -> Answer:
    given = (torch.tensor(old_values), torch.tensor(returns), float(clip), torch.tensor(mask))
    return with_gradient(lambda value: ppo_critic_loss_fn(value, *given)[0], values)


ROWS = {
    "token": token,
    "dual clip": dual_clip,
    "sequence": sequence,
    "decoupled": decoupled,
    "reject tokens": rejected("token", "mean"),
    "reject by product": rejected("sequence", "sum"),
    "reject by geometric mean": rejected("sequence", "mean"),
    "geometric weights": geometric_weights,
    "sapo": sapo,
    "critic": critic,
}
