"""Mismatch between the sampler's and the learner's log-probs, and the effective sample size (M17, M18)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import kl, ratios, reduce

Array = jax.Array


def sampler_mismatch(behaviour_logprobs: Array, old_logprobs: Array, mask: Array) -> dict[str, Array]:
    """Returns M17, {name: [] float32 or wider}, over the tokens in the mask; with delta = beh - old:

        k1 = mean delta, k3 = mean(exp(-delta) - 1 + delta): KL(sampler, learner) on the sampler's tokens
        probability: max |exp(beh) - exp(old)|; correlation: of both probabilities, 0 if one is constant,
            tested exactly (E1)
        sampler_perplexity, learner_perplexity = exp(-mean lp); chi2 = mean(exp(-2 delta)) - 1

    Args:
      behaviour_logprobs: [..., T] float, from the sampler. old_logprobs: [..., T] float, the learner's, under the
        sampler's weights. mask: [..., T] bool.

    Source: definitions as in verl, TRL and slime.
    """
    clean = lambda x: reduce.masked(x, mask)
    mean = lambda x: reduce.masked_mean(x, mask)
    behaviour, old = clean(behaviour_logprobs), clean(old_logprobs)
    theirs, ours = clean(jnp.exp(behaviour)), clean(jnp.exp(old))
    a, b = clean(theirs - mean(theirs)), clean(ours - mean(ours))
    # By the rounding of their means, constant probabilities would have a correlation of 1 or -1.
    varies = lambda x: jnp.max(jnp.where(mask, x, -jnp.inf)) > jnp.min(jnp.where(mask, x, jnp.inf))
    spread = jnp.sum(a**2) * jnp.sum(b**2)
    weights = ratios.ratio(old_logprobs, behaviour_logprobs, mask)
    return {
        "k1": mean(kl.k1(behaviour_logprobs, old_logprobs, mask)),
        "k3": mean(kl.k3(behaviour_logprobs, old_logprobs, mask)),
        "probability": jnp.max(probability_difference(behaviour_logprobs, old_logprobs, mask)),
        "correlation": jnp.where(
            varies(theirs) & varies(ours), jnp.sum(a * b) / jnp.sqrt(jnp.where(spread > 0, spread, 1)), 0
        ),
        "sampler_perplexity": jnp.exp(-mean(behaviour)),
        "learner_perplexity": jnp.exp(-mean(old)),
        "chi2": jnp.where(mask.any(), mean(weights**2) - 1, 0),
    }


def mismatch_terms(sampler_logprobs: Array, old_logprobs: Array, mask: Array) -> dict[str, Array]:
    """Returns the per-token terms whose means M17 and M18 need, {name: [..., T] float32 or wider}, 0 where masked: k1 =
    delta and k3 = exp(-delta) - 1 + delta with delta = sampler - old, the weight w = exp(-delta) and its square, both
    log-probs, and for p and q = 1 - p the values of both sides, their squares and their product.

    Unlike a correlation, these means can be combined over parts of a batch. The correlations of p and of q are equal;
    if most tokens have p near 1, the means of q lose less to rounding, and if p is small, those of p.

    Args:
      As in `sampler_mismatch`.
    """
    weight = reduce.masked(ratios.ratio(old_logprobs, sampler_logprobs, mask), mask)
    theirs, ours = (reduce.masked(x, mask) for x in (sampler_logprobs, old_logprobs))
    forms = {"p": (jnp.exp(theirs), jnp.exp(ours)), "q": (-jnp.expm1(theirs), -jnp.expm1(ours))}
    of_forms = {}
    for name, both in forms.items():
        a, b = (reduce.masked(x, mask) for x in both)
        values = {"sampler": a, "learner": b, "sampler_squared": a**2, "learner_squared": b**2, "product": a * b}
        of_forms |= {f"{name}_{key}": value for key, value in values.items()}
    return {
        "k1": kl.k1(sampler_logprobs, old_logprobs, mask),
        "k3": kl.k3(sampler_logprobs, old_logprobs, mask),
        "weight": weight,
        "weight_squared": weight**2,
        "sampler": theirs,
        "learner": ours,
        **of_forms,
    }


def probability_difference(sampler_logprobs: Array, old_logprobs: Array, mask: Array) -> Array:
    """Returns M17's |exp(sampler) - exp(old)| of every token, [..., T] float32 or wider, 0 where masked.

    Args:
      As in `sampler_mismatch`.
    """
    theirs, ours = (reduce.masked(x, mask) for x in (sampler_logprobs, old_logprobs))
    return jnp.abs(jnp.exp(theirs) - jnp.exp(ours))


def mismatch_of_means(means: dict[str, Array]) -> dict[str, Array]:
    """Returns M17's k1, k3, chi2, correlation and perplexities, and M18's effective share of the tokens, mean(w)^2 /
    mean(w^2) with untruncated weights, [] each.

    The correlation is 0 if the standard deviation of either side is below 1/1000 of its root mean square, which may be
    rounding.

    Args:
      means: over tokens, of the terms from `mismatch_terms`; all 0 without tokens: then all results are 0, and the
        perplexities 1.
    """
    weight, squared = means["weight"], means["weight_squared"]
    some = squared > 0
    smaller = means["p_sampler_squared"] < means["q_sampler_squared"]
    of = lambda name: jnp.where(smaller, means[f"p_{name}"], means[f"q_{name}"])
    variance = lambda name: of(f"{name}_squared") - of(name) ** 2
    varies = lambda name: variance(name) > 1e-6 * of(f"{name}_squared")
    both = varies("sampler") & varies("learner")
    spread = jnp.sqrt(jnp.where(both, variance("sampler") * variance("learner"), 1))
    covariance = of("product") - of("sampler") * of("learner")
    return {
        "k1": means["k1"],
        "k3": means["k3"],
        "chi2": jnp.where(some, squared - 1, 0),
        "correlation": jnp.where(both, jnp.clip(covariance / spread, -1, 1), 0),
        "sampler_perplexity": jnp.exp(-means["sampler"]),
        "learner_perplexity": jnp.exp(-means["learner"]),
        "effective_share": jnp.where(some, weight**2 / jnp.where(some, squared, 1), 0),
    }


def effective_sample_size(weights: Array, mask: Array) -> tuple[Array, Array]:
    """Returns M18, (sum w)^2 / sum w^2 and its share of the tokens or sequences in the mask, [] each; 0 if all weights
    are 0.

    Args:
      weights: [...] float, importance weights of tokens or of sequences, at least 0, as they enter the loss: after
        truncation where there is one. mask: [...] bool.

    Source: Kish 1965; of policy losses, verl, after truncation.
    """
    weights = reduce.masked(weights, mask)
    squares = jnp.sum(weights**2)
    size = jnp.sum(weights) ** 2 / jnp.where(squares > 0, squares, 1)
    return size, size / jnp.maximum(mask.sum(), 1)
