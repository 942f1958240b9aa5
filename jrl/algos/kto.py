"""KTO: learn from unpaired answers labeled good or bad, by their log-ratio to the reference against a baseline.

    u    = LP(y) - LP_ref(y), summed over the answer's tokens                                             P0
    z    = max(0, mean of u over mismatched answers: each prompt with another prompt's answer), no gradient
    good:  l = good_weight * (1 - sigmoid(beta (u - z)))                                                 P10
    bad:   l = bad_weight * (1 - sigmoid(beta (z - u)))
    L    = mean over the labeled answers of the step

The metrics kto/good and kto/bad divide the sum of u over a class by the number of all labeled answers: each is the
class's mean times its share.

z is computed over the whole optimizer step under the weights before it, so it does not depend on micro-batches. A step
of one answer has no mismatched answers, and z = 0. Peers: TRL computes z per micro-batch.

Source: Ethayarajh et al. 2402.01306 eq. 7 and 8. There the weights are chosen so that good_weight * (good answers) is 1
to 4/3 times bad_weight * (bad answers).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.paired import gains, positive
from jrl.ops import reduce
from jrl.ops.pair_losses import kto
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class KTO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a log-ratio of 1
    good_weight: float = 1.0  # of answers labeled good
    bad_weight: float = 1.0  # of answers labeled bad


def check(config: KTO, facts: Facts) -> None:
    for name in ("beta", "good_weight", "bad_weight"):
        positive(f"KTO.{name}", getattr(config, name), 0.1 if name == "beta" else 1.0)


def sequence_baseline(config: KTO, sequences: Sequences) -> Array:
    """Returns z of P10, max(0, mean gain of the mismatched answers, which have label -1), []; 0 if there are none."""
    mismatched = sequences.mask & (sequences.label == -1)
    return jnp.maximum(reduce.masked_mean(gains(sequences), mismatched), 0)


def sequence_loss(config: KTO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P10 of every labeled answer, [..., S], 0 for mismatched ones, and metrics."""
    labeled = sequences.mask & (sequences.label >= 0)
    good = sequences.label > 0.5
    gain = gains(sequences)
    loss = kto(gain, sequences.baseline, good, config.beta)
    loss = jnp.where(good, config.good_weight, config.bad_weight) * loss
    logged = lambda x: jax.lax.stop_gradient(reduce.masked(x, labeled)).astype(jnp.float32)
    metrics = {
        "kto/baseline": logged(sequences.baseline),
        "kto/good": logged(jnp.where(good, gain, 0)),
        "kto/bad": logged(jnp.where(good, 0, gain)),
    }
    return jnp.where(labeled, loss, 0), metrics


OBJECTIVE = Objective(
    config=KTO,
    check=check,
    needs=lambda config: Needs(reference=True, credit_logprobs=True),
    sequence_loss=sequence_loss,
    sequence_baseline=sequence_baseline,
    unit_size=2,
)
