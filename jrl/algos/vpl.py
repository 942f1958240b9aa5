"""VPL: a reward model for different kinds of users, with a latent variable inferred from each user's comparisons.

    b, e [D], f [D], g [D] = the reward head at the last token of a sequence, 1 + 3 D numbers
    mu = mean of f_w - f_l,  log sigma = mean of (g_w + g_l) / 2,  over the user's other pairs; z ~ N(mu, sigma^2)
    r(x, y, z) = b + e . z
    l_u = E_z[-log sigmoid(r(y_w, z) - r(y_l, z))] + kl_weight * KL(N(mu, sigma^2) || N(0, 1))                 P36
    L   = mean over users of the mean over their pairs

z is 0 for a user with one pair. The rewards are linear in z, so the expectation is computed and z is not sampled. For a
user with a known z, set Online.attribute_weights = (1, z, 0, .., 0), in the order of the head's outputs.

Source: Poddar et al. 2408.10075, where encoder and reward are separate networks over embeddings, and z is sampled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common
from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.paired import positive
from jrl.ops import reduce
from jrl.ops.latent_user import expected_latent_preference, latent_kl
from jrl.ops.segments import same_unit
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class VPL:
    latent: int = 4  # D, numbers that tell users apart
    kl_weight: float = 1e-3  # of the KL to the prior


def check(config: VPL, facts: Facts) -> None:
    positive("VPL.kl_weight", config.kl_weight, 1e-3)
    common.check_positive(config, {"latent": "without a latent variable use BradleyTerry. 4 is usual."})


def needs(config: VPL) -> Needs:
    base_alone = (1.0, *[0.0] * (3 * config.latent))  # r(x, y, 0): the user is not known
    return Needs(logprobs=False, score=True, score_outputs=len(base_alone), score_weights=base_alone)


def sequence_loss(config: VPL, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P36 at the preferred sequence of every pair, divided by the user's number of pairs, 0 elsewhere, [..., S]
    float32; and its metrics. The preferred sequence of a user's pair i is labeled 2 i + 1, the other one 2 i."""
    counts = sequences.mask & (sequences.length > 0)
    label = jnp.where(counts, sequences.label, -1)
    outputs = reduce.masked(sequences.score, jnp.broadcast_to(counts[..., None], sequences.score.shape))
    same_user = same_unit(sequences.unit, counts)
    odd = (label % 2 == 1) & (label > 0)
    pair = same_user & odd[..., :, None] & (label[..., None, :] == label[..., :, None] - 1)
    preferred = pair.any(-1)
    other = jnp.einsum("...st,...tk->...sk", pair.astype(outputs.dtype), outputs)
    at_preferred = lambda x: jnp.where(preferred[..., None], x, 0)
    base, effect, shift, _ = jnp.split(at_preferred(outputs - other), _places(config.latent), axis=-1)
    spread = at_preferred((outputs + other) / 2)[..., 1 + 2 * config.latent :]

    itself = jnp.eye(label.shape[-1], dtype=bool).reshape((1,) * (label.ndim - 1) + (label.shape[-1],) * 2)
    context = same_user & preferred[..., :, None] & preferred[..., None, :] & ~itself
    others = context.sum(-1)  # the user's other pairs
    has_context = others > 0
    mean_of = lambda x: jnp.einsum("...st,...tk->...sk", context.astype(x.dtype), x) / jnp.maximum(others, 1)[..., None]
    mean, log_deviation = mean_of(shift), mean_of(spread)
    kl = jnp.where(has_context, latent_kl(mean, log_deviation), 0)
    variance = jnp.where(has_context, jnp.sum(effect**2 * jnp.exp(2 * log_deviation), axis=-1), 0)
    difference = base[..., 0] + jnp.sum(effect * mean, axis=-1)
    loss = expected_latent_preference(difference, variance, kl, weight=config.kl_weight)
    share = jnp.where(preferred, 1 / (others + 1), 0)
    metrics = {
        "reward_model/accuracy": 0.5 * (1 + jnp.sign(difference)),
        "reward_model/margin": difference,
        "vpl/kl": kl,
    }
    return share * loss, {
        name: jax.lax.stop_gradient(share * value).astype(jnp.float32) for name, value in metrics.items()
    }


def _places(latent: int) -> tuple[int, int, int]:
    """Returns the first indices of e, f and g among the head's outputs."""
    return 1, 1 + latent, 1 + 2 * latent


OBJECTIVE = Objective(
    config=VPL,
    check=check,
    needs=needs,
    sequence_loss=sequence_loss,
    unit_size=8,
)
