"""The losses of TRL's GRPO and RLOO trainers, called on log-probs without a model."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer, RLOOTrainer

from benchmarks.agreement.peers.torch_loss import Answer, tensors, with_gradient

ONE_PROCESS = types.SimpleNamespace(
    gather=lambda x: x,
    reduce=lambda x, reduction: x,
    pad_across_processes=lambda x, **rest: x,
    num_processes=1,
    sync_gradients=True,
)
OFF = {
    "delta": None,
    "use_bias_correction_kl": False,
    "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.0,
}


def trainer_of(cls: type, columns: int, args: dict, **options: Any) -> Any:
    """Returns a trainer with what its loss reads and nothing else."""
    trainer = object.__new__(cls)
    given = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": columns,
        "accelerator": ONE_PROCESS,
        "model": types.SimpleNamespace(training=True),
        "args": types.SimpleNamespace(**(OFF | args)),
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }
    for name, value in (given | options).items():
        setattr(trainer, name, value)
    return trainer


def loss_of(cls: type, mask: np.ndarray, inputs: dict, args: dict, options: dict) -> Callable:
    given = tensors(completion_mask=mask, **inputs)
    rows, columns = mask.shape
    given |= {
        "prompt_ids": torch.zeros((rows, 1), dtype=torch.long),
        "prompt_mask": torch.ones((rows, 1)),
        "completion_ids": torch.zeros((rows, columns), dtype=torch.long),
        "num_items_in_batch": given["completion_mask"].sum(),
    }
    trainer = trainer_of(cls, columns, args, **options)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros(mask.shape), None)
        return trainer._compute_loss(None, given)

    return loss


def grpo(
    options: Callable[[dict], dict] = lambda rest: {}, args: Callable[[dict], dict] = lambda rest: {}
) -> Callable[..., Answer]:
    """Returns the GRPO trainer's loss with these settings as a row."""

    def row(logprobs, mask, advantages=None, old_logprobs=None, ref_logprobs=None, behaviour_logprobs=None, **rest):
        numbers = {name: float(value) for name, value in rest.items() if np.ndim(value) == 0}
        inputs = {"advantages": np.zeros(mask.shape, np.float32) if advantages is None else advantages}
        if old_logprobs is not None:
            inputs["old_per_token_logps"] = old_logprobs
        if ref_logprobs is not None:
            inputs["ref_per_token_logps"] = ref_logprobs
        return with_gradient(loss_of(GRPOTrainer, mask, inputs, args(numbers), options(numbers)), logprobs)

    return row


def weighted(logprobs, old_logprobs, behaviour_logprobs, advantages, mask, clip_low, clip_high, cap) -> Answer:
    """Returns the clipped loss times weights by token, which the trainer is given as it would compute them."""
    weights = np.exp(old_logprobs - behaviour_logprobs)
    inputs = {
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "importance_sampling_ratio": np.minimum(weights, cap).astype(np.float32),
    }
    options = {"epsilon_low": float(clip_low), "epsilon_high": float(clip_high), "use_vllm": True}
    return with_gradient(loss_of(GRPOTrainer, mask, inputs, {}, options), logprobs)


def rloo(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, **rest) -> Answer:
    of_rows = {
        "advantages": advantages[np.arange(len(mask)), np.argmax(mask, axis=1)],
        "old_logps": (old_logprobs * mask).sum(axis=1).astype(np.float32),
    }
    options = {"epsilon_low": float(clip_low), "epsilon_high": float(clip_high)}
    return with_gradient(loss_of(RLOOTrainer, mask, of_rows, {}, options), logprobs)


def off_policy(logprobs, behaviour_logprobs, advantages, mask, delta, **rest) -> Answer:
    given = tensors(lp=logprobs, beh=behaviour_logprobs, a=advantages, mask=mask)
    of_rows = torch.gather(given["a"], 1, given["mask"].argmax(dim=1, keepdim=True))
    kept = GRPOTrainer.get_off_policy_mask(of_rows, given["lp"], given["beh"], given["mask"], float(delta))
    return (kept * given["mask"]).numpy(), None


def high_entropy(entropy, mask, share) -> Answer:
    trainer = trainer_of(GRPOTrainer, mask.shape[1], {})
    given = tensors(entropies=entropy, mask=mask)
    return trainer.get_high_entropy_mask(**given, threshold=1 - float(share)).float().numpy(), None


CLIP = lambda rest: {"epsilon_low": rest["clip_low"], "epsilon_high": rest["clip_high"]}

ROWS = {
    "dapo": grpo(CLIP),
    "grpo": grpo(lambda rest: CLIP(rest) | {"loss_type": "grpo"}),
    "dr_grpo": grpo(lambda rest: CLIP(rest) | {"loss_type": "dr_grpo"}),
    "delta": grpo(CLIP, lambda rest: {"delta": rest["delta"]}),
    "sequence": grpo(lambda rest: CLIP(rest) | {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "cispo": grpo(lambda rest: {"loss_type": "cispo", "epsilon_high": rest["max_weight"]}),
    "sapo": grpo(
        lambda rest: {"loss_type": "sapo"},
        lambda rest: {
            "sapo_temperature_pos": rest["positive_temperature"],
            "sapo_temperature_neg": rest["negative_temperature"],
        },
    ),
    "beta": grpo(lambda rest: {"beta": 1.0}),
    "bias-corrected KL": grpo(lambda rest: {"beta": 1.0}, lambda rest: {"use_bias_correction_kl": True}),
    "importance_sampling_ratio": weighted,
    "rloo": rloo,
    "get_off_policy_mask": off_policy,
    "get_high_entropy_mask": high_entropy,
}
