"""Losses of a pair: two answers to one prompt, of which one is preferred.

u = LP(y) - LP_ref(y), the log-ratio to the reference summed over an answer's tokens; D = u_w - u_l, the margin of the
preferred answer (w) over the other one (l). beta is in 1 / nats. Arguments broadcast; each function returns one loss
per pair. Objectives pass float32 or wider (`jrl.algos.paired.pairs_of`).

Peers: TRL, open-instruct and OpenRLHF have most of these as values of one `loss_type`, and TRL averages u over the
answer's length in IPO (here `jrl.ops.pair_losses.ipo` takes the margin as an argument).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def soft_preference(margin: Array, preference: Array | float) -> Array:
    """Returns P6 and P29, -(p log sigmoid(m) + (1 - p) log sigmoid(-m)): DPO's loss with soft labels, for label noise
    or the strength of a judge's preference.

    Args:
      margin: [...] float, m = beta * D. preference: [...] float, p in [0, 1], the probability that the preferred answer
        is the better one: 1 is DPO, 0.5 prefers neither and pulls m to 0.

    Sources: Mitchell, "A note on DPO with noisy preferences" (2023), where p = 1 - noise; OSP 2405.14103.
    """
    return preference * jax.nn.softplus(-margin) + (1 - preference) * jax.nn.softplus(margin)


def robust(margin: Array, noise: Array | float) -> Array:
    """Returns P7, ((1 - e) l(m) - e l(-m)) / (1 - 2 e) with l(m) = -log sigmoid(m): if a share e of the labels is
    flipped at random, its mean over the flips is the loss of the true labels. It may be negative.

    Args:
      margin: [...] float, beta * D. noise: e, at least 0 and below 0.5.

    Source: Chowdhury et al. 2403.00409.
    """
    return ((1 - noise) * jax.nn.softplus(-margin) - noise * jax.nn.softplus(margin)) / (1 - 2 * noise)


def ipo(margin: Array, beta: Array | float) -> Array:
    """Returns P8, (D - 1 / (2 beta))^2: the margin has a finite target.

    Args:
      margin: [...] float, D, of sums or of means over tokens; beta has a different scale in each.

    Source: Azar et al. 2310.12036 eq. 17.
    """
    return (margin - 1 / (2 * beta)) ** 2


def hinge(margin: Array) -> Array:
    """Returns P9, max(0, 1 - m): no gradient once m = beta * D has reached 1.

    Source: SLiC-HF 2305.10425, with the margin of DPO.
    """
    return jax.nn.relu(1 - margin)


def log_odds(mean_logprob: Array) -> Array:
    """Returns P11's log odds of an answer, LPbar - log(1 - exp(LPbar)).

    Args:
      mean_logprob: [...] float, LPbar, below 0; values above -1e-6 are taken as -1e-6.

    Source: ORPO 2403.07691 eq. 4.
    """
    x = jnp.minimum(mean_logprob, -1e-6)
    # log(1 - exp(x)), by the form that is accurate near 0 and far below it
    near = x > -0.6931472
    log1mexp = jnp.where(
        near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x)))
    )
    return x - log1mexp


def simpo(mean_logprob: Array, other_mean_logprob: Array, beta: Array | float, gamma: Array | float) -> Array:
    """Returns P12, -log sigmoid(beta * (LPbar_w - LPbar_l) - gamma): no reference, with a target margin.

    Peers: open-instruct configures gamma / beta; TRL's CPO trainer adds an NLL of weight 1 by default.

    Source: SimPO 2405.14734 eq. 6.
    """
    return jax.nn.softplus(gamma - beta * (mean_logprob - other_mean_logprob))


def alpha_link(gain: Array, alpha: Array | float) -> Array:
    """Returns P14's phi(u) = (exp((a - 1) u) - 1) / (a - 1), and u at a = 1: f-DPO with an alpha divergence.

    a = 1 is the reverse KL (DPO), a = 0 the forward KL. The constant drops out of a margin; with it the function is
    continuous in a. The paper's alpha is 1 - a. u is held to [-20, 20].

    Args:
      gain: [...] float, u. alpha: a, at least 0 and at most 1.

    Source: Wang et al. 2309.16240 table 1.
    """
    u = jnp.clip(gain, -20, 20)
    power = jnp.asarray(alpha, u.dtype) - 1
    return jnp.where(power == 0, u, jnp.expm1(power * u) / jnp.where(power == 0, 1, power))


def jensen_shannon_link(gain: Array) -> Array:
    """Returns P14's phi(u) = log sigmoid(u) for the Jensen-Shannon divergence, u held to [-20, 20].

    Source: Wang et al. 2309.16240 table 1, less the constant log 2.
    """
    return jax.nn.log_sigmoid(jnp.clip(gain, -20, 20))


def exo(margin: Array, noise: Array | float) -> Array:
    """Returns P15, EXO for a pair: KL of (sigmoid(m), sigmoid(-m)) from (1 - e, e), with m = beta * D.

    Args:
      noise: e, in (0, 0.5); 1e-3 is usual.

    Source: Ji et al. 2402.00856 eq. 16, two answers.
    """
    return jax.nn.sigmoid(margin) * (jax.nn.log_sigmoid(margin) - jnp.log1p(-noise)) + jax.nn.sigmoid(-margin) * (
        jax.nn.log_sigmoid(-margin) - jnp.log(noise)
    )


def nca(gain: Array, other_gain: Array, beta: Array | float) -> Array:
    """Returns P15, NCA for a pair: -log sigmoid(b u_w) - (log sigmoid(-b u_w) + log sigmoid(-b u_l)) / 2.

    Source: Chen et al. 2402.05369 eq. 11, rewards 1 and 0 in the limit of a hard label.
    """
    w, l = beta * gain, beta * other_gain
    return jax.nn.softplus(-w) + (jax.nn.softplus(w) + jax.nn.softplus(l)) / 2


def sppo(gain: Array, other_gain: Array, beta: Array | float) -> Array:
    """Returns P15, SPPO with hard labels: (u_w - 1 / (2 b))^2 + (u_l + 1 / (2 b))^2.

    Source: Wu et al. 2405.00675 eq. 4.7, the preferred answer wins with probability 1.
    """
    half = 1 / (2 * beta)
    return (gain - half) ** 2 + (other_gain + half) ** 2


def apo_zero(gain: Array, other_gain: Array, beta: Array | float) -> Array:
    """Returns P15, 1 - sigmoid(b u_w) + sigmoid(b u_l): the preferred answer becomes likelier, the other less likely.

    Source: D'Oosterlinck et al. 2408.06266.
    """
    return jax.nn.sigmoid(-beta * gain) + jax.nn.sigmoid(beta * other_gain)


def apo_down(gain: Array, other_gain: Array, beta: Array | float) -> Array:
    """Returns P15, sigmoid(b u_w) + 1 - sigmoid(b D): for a policy that is better than both answers. Both become less
    likely, the rejected one faster.

    Source: D'Oosterlinck et al. 2408.06266.
    """
    return jax.nn.sigmoid(beta * gain) + jax.nn.sigmoid(-beta * (gain - other_gain))


def bco(gain: Array, other_gain: Array, beta: Array | float, shift: Array | float) -> Array:
    """Returns P15, -log sigmoid(b u_w - d) - log sigmoid(d - b u_l): a classifier whose logit is b u - d.

    Args:
      shift: d, the mean of b u so far; no gradient passes it.

    Source: Jung et al. 2404.04656.
    """
    shift = jax.lax.stop_gradient(shift)
    return jax.nn.softplus(shift - beta * gain) + jax.nn.softplus(beta * other_gain - shift)


def kto(gain: Array, baseline: Array, good: Array, beta: Array | float) -> Array:
    """Returns P10 before its weights, 1 - sigmoid(beta (u - z)) of good answers, 1 - sigmoid(beta (z - u)) of bad ones.

    Args:
      gain: [...] float, u. baseline: [...] float, z; no gradient passes it. good: [...] bool.

    Source: Ethayarajh et al. 2402.01306 eq. 8.
    """
    above = beta * (gain - jax.lax.stop_gradient(baseline))
    return jax.nn.sigmoid(jnp.where(good, -above, above))


def pair_weight(mean_logprob: Array, other_mean_logprob: Array) -> Array:
    """Returns P30's weight, min(1, exp(LPbar_w + LPbar_l)), without a gradient: pairs that the policy would hardly
    sample count for little. WPO passes mean log-probs minus the mean log of a draw's expected probability.

    Peers: open-instruct multiplies a [B] weight by a [B, T] mask and lets its gradient through.

    Source: WPO 2406.11827 section 3.2, means over tokens.
    """
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(mean_logprob + other_mean_logprob, 0)))


def step_apo(margin: Array, value: Array, other_value: Array, scale: Array | float) -> Array:
    """Returns P22, -log sigmoid(beta * D_s - a (Q_w - Q_l)): two next steps from one state, with a target margin
    proportional to the difference of their values. D_s is over the steps' tokens.

    Args:
      margin: [...] float, beta * D_s. value, other_value: [...] float, Q of the steps, value above other_value.
      scale: a, at least 0; 0 is Step-DPO.

    Source: CPL 2409.08642.
    """
    return jax.nn.softplus(scale * (value - other_value) - margin)


def inpo(margin: Array, ref_margin: Array, previous_margin: Array, eta: Array | float, tau: Array | float) -> Array:
    """Returns P19, (h - 1 / (2 eta))^2 with h = M - (tau / eta) M_ref - (1 - tau / eta) M_t, M = LP_w - LP_l under the
    policy, the reference, and the policy of the iteration before, which drew the pair.

    Args:
      eta: above 0. tau: in [0, eta]; at eta this is IPO against the reference with beta = eta.

    Source: INPO 2407.00617 eq. 8.
    """
    share = tau / eta
    return (margin - share * ref_margin - (1 - share) * previous_margin - 1 / (2 * eta)) ** 2


def xpo(margin: Array, ref_sample_logprob: Array, alpha: Array | float) -> Array:
    """Returns P20, -log sigmoid(m) + a LP(y'): DPO plus a push away from the reference's answers.

    Args:
      margin: [...] float, beta * D. ref_sample_logprob: [...] float, LP(y') under the policy of the pair's answer that
        the reference drew. alpha: a, above 0 and small.

    Source: Xie et al. 2405.21046 algorithm 1.
    """
    return jax.nn.softplus(-margin) + alpha * ref_sample_logprob


def vpo(margin: Array, calibration: Array, weight: Array | float) -> Array:
    """Returns P21, -log sigmoid(m) + w c: DPO, with optimism if w is above 0, which moves probability away from the
    calibration distribution, and pessimism if w is below 0, which moves probability to it.

    Args:
      margin: [...] float, beta * D. calibration: [...] float, c = beta * u of a sample of the calibration distribution.
      weight: w; above 0 for pairs that the policy samples, below for stored ones.

    Source: Cen et al. 2405.19320; sign and form as its abstract states them.
    """
    return jax.nn.softplus(-margin) + weight * calibration


def desensitized(gain: Array, common_gain: Array, alpha: Array | float) -> Array:
    """Returns P13's gain for LD-DPO, that over the common length of both answers plus alpha times the rest, [...].

    Args:
      gain, common_gain: [...] float, log-ratios summed over all tokens, and over the first min(len_w, len_l).

    Source: LD-DPO, Liu et al. 2409.06411.
    """
    return common_gain + alpha * (gain - common_gain)


def cpl(logprob: Array, other_logprob: Array, alpha: Array | float, bias: Array | float) -> Array:
    """Returns P26, -log(exp(a_w) / (exp(a_w) + exp(lam a_l))), a = alpha * LP: no reference, and the other answer
    counts for less. LP are sums (or sums of discounted log-probs), so that long answers weigh more.

    Args:
      bias: lam, in (0, 1]; 1 is symmetric, 0.5 is usual.

    Source: Hejna et al. 2310.13639 eq. 5 and section 3.2.
    """
    return jax.nn.softplus(alpha * (bias * other_logprob - logprob))


def noisy_preference(
    margin: Array, strength: Array, flip_below: Array | float, soft_below: Array | float, noise: Array | float
) -> Array:
    """Returns P2, a Bradley-Terry loss that trusts a label as far as several reward models agree with it:

        strength < flip_below:  -log sigmoid(-m), the label is treated as wrong
        strength < soft_below:  (1 - e) (-log sigmoid(m)) + e (-log sigmoid(-m))
        else:                   -log sigmoid(m - strength), a clear pair must win by as much

    Args:
      margin: [...] float, m = r_w - r_l of the trained model. strength: [...] float, mean over the reward models of
        r_w - r_l; no gradient. flip_below, soft_below: quantiles of the strength over the data. noise: e in [0, 0.5].

    Source: Wang et al. 2401.06080 sections 2.3 and 2.4.
    """
    strength = jax.lax.stop_gradient(strength)
    soft = soft_preference(margin, 1 - noise)
    clear = jax.nn.softplus(strength - margin)
    return jnp.where(strength < flip_below, jax.nn.softplus(margin), jnp.where(strength < soft_below, soft, clear))
