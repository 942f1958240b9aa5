"""The losses of TRL's trainers of preferences, called on log-probs, scores and logits without a model."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer

from benchmarks.agreement.peers.torch_loss import Answer, with_gradient

ONE_PROCESS = types.SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


def bare(cls: type, **options: Any) -> Any:
    """Returns a trainer with what its loss reads and nothing else."""
    trainer = object.__new__(cls)
    given = {
        "accelerator": ONE_PROCESS,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "label_smoothing": 0.0,
        "model": types.SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in (given | options).items():
        setattr(trainer, name, value)
    return trainer


def outputs_of(logprobs: torch.Tensor, squared: torch.Tensor | None = None) -> types.SimpleNamespace:
    """Returns what a model says, log-probs of the completion's tokens and 0 elsewhere; the rest only enters metrics.

    Args:
      squared: log of the sum of squared probabilities at each token; None: 0.
    """
    zeros = torch.zeros_like(logprobs)
    squared = zeros if squared is None else squared
    return types.SimpleNamespace(
        log_probs=logprobs, entropy=zeros, mean_logits=zeros, log_sum_sq_probs=squared, is_top1=zeros.bool()
    )


def batch_of(mask: np.ndarray) -> dict[str, torch.Tensor]:
    """Returns the inputs of a trainer: a token of a prompt, then the completions."""
    completion = torch.tensor(np.pad(mask, ((0, 0), (1, 0))).astype(np.int64))
    return {
        "completion_mask": completion,
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
    }


def within(mask: np.ndarray) -> Callable[[torch.Tensor], torch.Tensor]:
    kept = torch.tensor(mask)
    return lambda x: torch.where(kept, x, torch.zeros_like(x))


def dpo(loss_type: tuple[str, ...], weights: Callable[[dict], list] = lambda rest: None, **options: Any) -> Callable:
    """Returns the DPO trainer's loss with these settings as a row. Options that are functions are of the numbers."""

    def row(logprobs, ref_logprobs, mask, log_sum_squared=None, **rest) -> Answer:
        numbers = {name: float(value) for name, value in rest.items()}
        reference = torch.tensor((ref_logprobs * mask).sum(axis=1)).chunk(2)
        inputs = batch_of(mask) | {"ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
        settings = {"f_divergence_type": "reverse_kl", "use_weighting": False, "ld_alpha": None} | {
            name: value(numbers) if callable(value) else value for name, value in options.items()
        }
        trainer = bare(
            DPOTrainer,
            loss_types=list(loss_type),
            loss_weights=weights(numbers) or [1.0] * len(loss_type),
            beta=numbers["beta"],
            **settings,
        )
        kept = within(mask)
        squared = None if log_sum_squared is None else kept(torch.tensor(log_sum_squared))
        return with_gradient(
            lambda lp: trainer._compute_loss(lambda **_: outputs_of(kept(lp), squared), inputs, False), logprobs
        )

    return row


def sums(logprobs: torch.Tensor, mask: np.ndarray, *, mean: bool) -> tuple[torch.Tensor, torch.Tensor]:
    total = within(mask)(logprobs).sum(dim=1)
    return (total / torch.tensor(mask.sum(axis=1)) if mean else total).chunk(2)


def cpo(loss_type: str, *, mean: bool = False) -> Callable:
    """Returns the CPO trainer's loss with these settings as a row."""

    def row(logprobs, mask, beta, gamma=0.0, noise=0.0, **rest) -> Answer:
        trainer = bare(
            CPOTrainer,
            loss_type=loss_type,
            alpha=0.0,
            beta=float(beta),
            simpo_gamma=float(gamma),
            label_smoothing=float(noise),
        )
        return with_gradient(lambda lp: trainer.cpo_loss(*sums(lp, mask, mean=mean))[0].mean(), logprobs)

    return row


def orpo(logprobs, mask, weight, **rest) -> Answer:
    trainer = bare(ORPOTrainer, beta=float(weight))

    def loss(lp: torch.Tensor) -> torch.Tensor:
        chosen, rejected = sums(lp, mask, mean=True)
        return -chosen.mean() - trainer.odds_ratio_loss(chosen, rejected)[0].mean()

    return with_gradient(loss, logprobs)


def kto(logprobs, ref_logprobs, mask, good, beta, good_weight, bad_weight) -> Answer:
    half = len(mask) // 2
    reference = torch.tensor((ref_logprobs * mask).sum(axis=1))
    inputs = batch_of(mask[:half]) | {
        "label": torch.tensor(good),
        "ref_logps": reference[:half],
        "ref_KL_logps": reference[half:],
    }
    trainer = bare(
        KTOTrainer,
        loss_type="kto",
        beta=float(beta),
        calculate_KL=True,
        desirable_weight=float(good_weight),
        undesirable_weight=float(bad_weight),
    )
    kept = within(mask)

    def loss(lp: torch.Tensor) -> torch.Tensor:
        of_tokens = kept(lp)
        trainer._compute_kl_logps = lambda model, batch: of_tokens[half:].sum(dim=1)
        return trainer._compute_loss(lambda **_: outputs_of(of_tokens[:half]), inputs, False)

    return with_gradient(loss, logprobs)


def reward(score, margin, center) -> Answer:
    trainer = bare(RewardTrainer, args=types.SimpleNamespace(center_rewards_coefficient=float(center)))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        model = lambda **_: types.SimpleNamespace(logits=logits[:, None])
        return trainer.compute_loss(model, {"attention_mask": torch.ones(1), "margin": float(margin)})

    return with_gradient(loss, score)


def divergence(share: float) -> Callable:
    """Returns the GKD trainer's divergence with this share of the teacher in the mixture as a row."""

    def row(logits, teacher) -> Answer:
        other = torch.tensor(teacher)[None]
        return with_gradient(lambda z: GKDTrainer.generalized_jsd_loss(z[None], other, beta=share), logits)

    return row


SMOOTHING = lambda numbers: numbers["noise"]

ROWS = {
    "sigmoid": dpo(("sigmoid",)),
    "cpo label_smoothing": cpo("sigmoid"),
    "robust": dpo(("robust",), label_smoothing=SMOOTHING),
    "ipo": dpo(("ipo",)),
    "cpo ipo": cpo("ipo"),
    "hinge": dpo(("hinge",)),
    "kto": kto,
    "orpo": orpo,
    "cpo simpo": cpo("simpo", mean=True),
    "sigmoid_norm": dpo(("sigmoid_norm",)),
    "forward_kl": dpo(("sigmoid",), f_divergence_type="forward_kl"),
    "js_divergence": dpo(("sigmoid",), f_divergence_type="js_divergence"),
    "alpha_divergence": dpo(
        ("sigmoid",), f_divergence_type="alpha_divergence", f_alpha_divergence_coef=lambda numbers: numbers["alpha"]
    ),
    "exo_pair": dpo(("exo_pair",), label_smoothing=SMOOTHING),
    "nca_pair": dpo(("nca_pair",)),
    "sppo_hard": dpo(("sppo_hard",)),
    "apo_zero": dpo(("apo_zero",)),
    "apo_down": dpo(("apo_down",)),
    "bco_pair": dpo(("bco_pair",)),
    "cpo sigmoid": cpo("sigmoid"),
    "sigmoid and sft": dpo(("sigmoid", "sft"), lambda numbers: [1.0, numbers["weight"]]),
    "use_weighting": dpo(("sigmoid",), use_weighting=True),
    "reward": reward,
    "generalized_jsd_loss 0": divergence(0),
    "generalized_jsd_loss 1": divergence(1),
    "generalized_jsd_loss 0.5": divergence(0.5),
}
