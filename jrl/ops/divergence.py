"""Divergences between a policy and a teacher at each token's state, over the whole vocabulary (P37)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jrl.ops import reduce
from jrl.ops.logprobs import before, by_chunk

Array = jax.Array

Divergence = Literal["reverse", "forward", "jensen_shannon"]


def reverse_kl(policy: Array, teacher: Array) -> Array:
    """Returns P37's KL(policy, teacher) = sum_v p (log p - log q), [...]: mode seeking, the policy avoids what the
    teacher would not say and may cover only a part of what it would.

    Args:
      policy, teacher: [..., V] float32 or wider, log-probs, finite.

    Source: MiniLLM 2306.08543; on-policy with every token GKD 2306.13649.
    """
    return jnp.sum(jnp.exp(policy) * (policy - teacher), axis=-1)


def forward_kl(policy: Array, teacher: Array) -> Array:
    """Returns P37's KL(teacher, policy) = sum_v q (log q - log p), [...]: mode covering. It is the cross-entropy with
    the teacher's distribution minus the teacher's entropy.

    Args: as `reverse_kl`.

    Source: Hinton et al. 1503.02531; of sequences Kim and Rush 1606.07947.
    """
    return reverse_kl(teacher, policy)


def jensen_shannon(policy: Array, teacher: Array, share: float = 0.5) -> Array:
    """Returns P37's b KL(teacher, m) + (1 - b) KL(policy, m) with m = b teacher + (1 - b) policy, [...]: bounded, and
    between the two KLs.

    Args: as `reverse_kl`. share: b, the teacher's share of m, in (0, 1).

    Source: GKD, Agarwal et al. 2306.13649 eq. 1. Peers: TRL's GKD trainer has the same and calls share beta; at 0 and 1
    it takes the forward and the reverse KL, their limits by b and 1 - b.
    """
    mixture = jnp.logaddexp(policy + jnp.log1p(-share), teacher + jnp.log(share))
    return share * reverse_kl(teacher, mixture) + (1 - share) * reverse_kl(policy, mixture)


DIVERGENCES: dict[str, Callable[[Array, Array], Array]] = {
    "reverse": reverse_kl,
    "forward": forward_kl,
    "jensen_shannon": jensen_shannon,
}


def token_divergence(
    hidden: Array,
    teacher_hidden: Array,
    mask: Array,
    unembed: Callable[[Array], Array],
    teacher_unembed: Callable[[Array], Array],
    *,
    kind: Divergence,
    temperature: Array,
    chunk: int,
    predictor: Callable[[Array], Array] = before,
) -> Array:
    """Returns P37's divergence between policy and teacher at the state of every token, [R, L] float32 or wider, 0
    outside the mask. The logits of both exist for one chunk of positions at a time.

    Args:
      hidden: [R, L, D], of the policy. teacher_hidden: [R, L, E], of the teacher. mask: [R, L] bool.
      unembed, teacher_unembed: hidden states of a chunk -> logits [R, c, V], of one vocabulary.
      temperature: [] float32, of both distributions.
      chunk: positions of a row whose logits exist at once.
      predictor: as in `jrl.ops.logprobs.token_logprobs`.
    """

    def chunk_divergence(h: Array, t: Array) -> Array:
        logprobs = lambda z: jax.nn.log_softmax(z / temperature.astype(z.dtype), axis=-1)
        return DIVERGENCES[kind](logprobs(unembed(h)), jax.lax.stop_gradient(logprobs(teacher_unembed(t))))

    return by_chunk(chunk_divergence, (predictor(hidden), predictor(teacher_hidden)), mask, chunk=chunk)


def teacher_advantage(old_logprobs: Array, teacher_logprobs: Array, action_mask: Array) -> Array:
    """Returns P37's advantage of a sampled token, lp_teacher - lp_old, 0 outside the mask, [N, T] float32 or wider.

    Its mean under the policy is -KL(policy, teacher), so the policy gradient with it lowers that KL; each token is
    credited for its own step only. As a loss, lp_old - lp_teacher would have zero expected gradient (K2).

    Args:
      old_logprobs, teacher_logprobs: [N, T] float; may be NaN outside the mask. action_mask: [N, T] bool.

    Source: on-policy distillation as in prime-rl and tinker; MiniLLM 2306.08543 with one step of credit. AReaL uses the
    estimate as a loss.
    """
    return reduce.masked(teacher_logprobs, action_mask) - reduce.masked(old_logprobs, action_mask)
