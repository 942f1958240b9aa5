"""How far a sampler's log-probs are from the learner's, and what importance weights leave of a sample (M17, M18)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import kl, ratios, reduce

Array = jax.Array


def sampler_mismatch(behaviour_logprobs: Array, old_logprobs: Array, mask: Array) -> dict[str, Array]:
    """Returns M17, {name: [] float32 or wider}, of the tokens of the mask; with delta = beh - old:

        k1 = mean delta, k3 = mean(exp(-delta) - 1 + delta): KL(sampler, learner) on the sampler's tokens
        probability: max |exp(beh) - exp(old)|; correlation: of both probabilities, 0 where one does not vary,
            tested exactly (E1)
        sampler_perplexity, learner_perplexity = exp(-mean lp); chi2 = mean(exp(-2 delta)) - 1

    Args:
      behaviour_logprobs: [..., T] float, as the sampler gave them. old_logprobs: [..., T] float, the learner's, at the
        sampler's weights. mask: [..., T] bool.

    Source: the definitions of verl, TRL and slime.
    """
    clean = lambda x: reduce.masked(x, mask)
    mean = lambda x: reduce.masked_mean(x, mask)
    behaviour, old = clean(behaviour_logprobs), clean(old_logprobs)
    theirs, ours = clean(jnp.exp(behaviour)), clean(jnp.exp(old))
    a, b = clean(theirs - mean(theirs)), clean(ours - mean(ours))
    # Out of the rounding of their means, equal probabilities would have a correlation of 1 or -1.
    varies = lambda x: jnp.max(jnp.where(mask, x, -jnp.inf)) > jnp.min(jnp.where(mask, x, jnp.inf))
    spread = jnp.sum(a**2) * jnp.sum(b**2)
    weights = ratios.ratio(old_logprobs, behaviour_logprobs, mask)
    return {
        "k1": mean(kl.k1(behaviour_logprobs, old_logprobs, mask)),
        "k3": mean(kl.k3(behaviour_logprobs, old_logprobs, mask)),
        "probability": jnp.max(jnp.abs(theirs - ours)),
        "correlation": jnp.where(
            varies(theirs) & varies(ours), jnp.sum(a * b) / jnp.sqrt(jnp.where(spread > 0, spread, 1)), 0
        ),
        "sampler_perplexity": jnp.exp(-mean(behaviour)),
        "learner_perplexity": jnp.exp(-mean(old)),
        "chi2": mean(weights**2) - 1,
    }


def effective_sample_size(weights: Array, mask: Array) -> tuple[Array, Array]:
    """Returns M18, (sum w)^2 / sum w^2 and its share of the tokens or sequences of the mask, [] each; 0 where all
    weights are 0.

    Args:
      weights: [...] float, importance weights of tokens or of sequences, at least 0, as they enter the loss: after
        truncation where there is one. mask: [...] bool.

    Source: Kish 1965; of policy losses, verl, after truncation.
    """
    weights = reduce.masked(weights, mask)
    squares = jnp.sum(weights**2)
    size = jnp.sum(weights) ** 2 / jnp.where(squares > 0, squares, 1)
    return size, size / jnp.maximum(mask.sum(), 1)
