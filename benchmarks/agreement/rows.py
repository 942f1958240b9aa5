"""Which part is compared with which function of which library, and in what the two are known to differ."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.agreement.cases import BINS, Case, shared_mask
from benchmarks.agreement.cases import ROWS as N
from jrl.ops import covariance, reduce

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Row:
    part: str  # a function of the parts list, without its module
    library: str
    name: str  # what is asked of the library, a name of benchmarks/agreement/peers/LIBRARY.py
    finish: str = ""  # what makes our output theirs, a name of FINISH
    prepare: str = ""  # what is changed in the cases, a name of PREPARE
    differentiate: str = ""  # the input that both are differentiated by
    output: int = 0  # which of our outputs
    note: str = ""  # where the two differ outside the cases that are compared


def spread(advantages: Array, case: Case) -> Array:
    return jnp.where(case["action_mask"], advantages[:, None], 0)


FINISH = {
    "spread": spread,
    "whitened": lambda x, case: reduce.whiten(x, case["action_mask"]),
    "spread, whitened": lambda x, case: reduce.whiten(spread(x, case), case["action_mask"]),
    "masked": lambda x, case: jnp.where(case["mask"], x, 0),
    "G1": lambda x, case: reduce.token_mean(x, case["mask"]),
    "G2": lambda x, case: reduce.sequence_mean_token_mean(x, case["mask"]),
    "G4": lambda x, case: reduce.constant_mean(x, case["mask"], rows=N, max_completion=x.shape[1]),
}


def mask_of_rows(case: Case, rng: np.random.Generator) -> Case:
    return case | {"action_mask": shared_mask(["group"], rng)}


def lengths_of_rows(case: Case, rng: np.random.Generator) -> Case:
    case = mask_of_rows(case, rng)
    return case | {"length": np.sum(case["action_mask"], axis=1)}


def all_components(case: Case, rng: np.random.Generator) -> Case:
    components = np.where(np.isnan(case["components"]), 0.5, case["components"])
    return mask_of_rows(case, rng) | {"components": components.astype(np.float32)}


def greedy_rows(case: Case, rng: np.random.Generator) -> Case:
    first = np.array([np.flatnonzero(case["group"] == g)[0] for g in case["group"]])
    greedy_reward = case["reward"][first]
    return mask_of_rows(case, rng) | {"greedy": first == np.arange(N), "greedy_reward": greedy_reward}


def rewards_of_returns(case: Case, rng: np.random.Generator) -> Case:
    returns = np.where(case["action_mask"], case["returns"], 0)
    rewards = returns - np.pad(returns, ((0, 0), (0, 1)))[:, 1:]
    return case | {"token_reward": rewards.astype(np.float32)}


def rewards_on_actions(case: Case, rng: np.random.Generator) -> Case:
    return case | {"token_reward": np.where(case["action_mask"], case["token_reward"], 0).astype(np.float32)}


def one_lambda(case: Case, rng: np.random.Generator) -> Case:
    return rewards_on_actions(case, rng) | {"policy_lambda": np.float32(1)}


def trace_of_one(case: Case, rng: np.random.Generator) -> Case:
    return rewards_on_actions(case, rng) | {"max_trace": np.float32(1)}


def lambda_of_one(case: Case, rng: np.random.Generator) -> Case:
    return trace_of_one(case, rng) | {"gae_lambda": np.float32(1)}


def one_bound(case: Case, rng: np.random.Generator) -> Case:
    return case | {"clip_high": case["clip_low"]}


def even_bins(case: Case, rng: np.random.Generator) -> Case:
    return case | {"bins": np.linspace(-4, 4, BINS, dtype=np.float32)}


def selected_tokens(case: Case, rng: np.random.Generator) -> Case:
    """The tokens that our own Clip-Cov's sibling selects, of advantages that differ: the library selects inside."""
    mask = case["mask"]
    share = np.float32(max(rng.uniform(0.1, 0.5), 1.01 / mask.sum()))
    advantages = np.where(mask, rng.normal(size=mask.shape), np.nan).astype(np.float32)
    selected = np.asarray(_kl_cov(case["logprobs"], advantages, mask, share))
    return case | {"advantages": advantages, "share": share, "selected": selected}


_kl_cov = jax.jit(lambda logprobs, advantages, mask, share: covariance.kl_cov(logprobs, advantages, mask, share=share))

PREPARE = {
    "": lambda case, rng: case,
    "mask of rows": mask_of_rows,
    "lengths of rows": lengths_of_rows,
    "all components": all_components,
    "greedy rows": greedy_rows,
    "rewards of returns": rewards_of_returns,
    "rewards on actions": rewards_on_actions,
    "one lambda": one_lambda,
    "trace of one": trace_of_one,
    "lambda of one": lambda_of_one,
    "one bound": one_bound,
    "even bins": even_bins,
    "selected tokens": selected_tokens,
}

GROUP_OF_ONE = "a group of one: verl gives R, we 0 (E2)"
EQUAL = "equal rewards whose float mean is not exact: verl divides the rounding by 1e-6, we give 0 (E1)"
ROUNDING = "equal values whose float mean is not exact: the library whitens the rounding, we give 0 (E1)"
ONE_TO_ALL = "rows without a token: TRL counts them in the mean over rows, we do not (E5)"
NO_CLAMP = "log-ratios beyond 20: not clamped there (E9)"
CISPO = "the cap: ours and TRL's are absolute, verl's is 1 + high (the cases give it max_weight - 1)"
NO_REWARD_ELSEWHERE = "a reward on a token of others: the library drops it, we give it to the sampled token before"

ROWS = (
    Row("group_zscore", "verl", "grpo", "spread", "mask of rows", note=f"{GROUP_OF_ONE}; {EQUAL}"),
    Row("group_zscore", "verl", "grpo vectorized", "spread", "mask of rows", note=f"{GROUP_OF_ONE}; {EQUAL}"),
    Row("group_centered", "verl", "dr_grpo", "spread", "mask of rows", note=GROUP_OF_ONE),
    Row("leave_one_out", "verl", "rloo", "spread", "mask of rows", note=GROUP_OF_ONE),
    Row("leave_one_out", "verl", "rloo vectorized", "spread", "mask of rows"),
    Row("greedy_baseline", "verl", "remax", "spread", "greedy rows"),
    Row("whitened_returns", "verl", "reinforce++", note=ROUNDING),
    Row("whitened_centered", "verl", "reinforce++ baseline", note=f"{GROUP_OF_ONE}; {ROUNDING}"),
    Row("length_weighted", "verl", "opo", "spread", "lengths of rows", note=GROUP_OF_ONE),
    Row(
        "token_optimal",
        "verl",
        "optimal token baseline",
        prepare="rewards of returns",
        note="verl by default has a baseline of 0 where only the longest row goes on; there our advantage is 0",
    ),
    Row("best_minus_second", "verl", "pass@k", "spread", "mask of rows", note="a group of one: verl refuses it"),
    Row("component_zscores", "verl", "gdpo", "spread, whitened", "all components", note=f"{GROUP_OF_ONE}; {ROUNDING}"),
    Row("gae", "verl", "gae", "whitened", "rewards on actions", note=NO_REWARD_ELSEWHERE),
    Row("decoupled_gae", "verl", "gae returns", prepare="one lambda", output=1, note=NO_REWARD_ELSEWHERE),
    Row(
        "clipped", "verl", "vanilla", "G1", differentiate="logprobs", note="verl's dual clip is always on; here at 1e6"
    ),
    Row("dual_clipped", "verl", "dual clip", "G1", differentiate="logprobs"),
    Row("gspo", "verl", "gspo", "G2", differentiate="logprobs", note="verl clamps the mean log-ratio at 10, we at 20"),
    Row("gspo_token", "verl", "gspo token", "G2", differentiate="logprobs", note="the same clamp"),
    Row("cispo", "verl", "cispo", "G1", differentiate="logprobs", note=CISPO),
    Row("soft_gated", "verl", "sapo", "G2", differentiate="logprobs"),
    Row("gmpo", "verl", "geo_mean", "G2", differentiate="logprobs", note="verl does not clamp the mean log-ratio (E9)"),
    Row(
        "kl_cov_loss",
        "verl",
        "kl_cov",
        "G1",
        "selected tokens",
        "logprobs",
        note="verl takes at least one token, and some where all advantages are equal; we take floor(share * tokens)",
    ),
    Row("dppo", "verl", "dppo_tv", "G1", differentiate="logprobs", note="verl also truncates the ratio, here at 1e6"),
    Row("token_mean", "verl", "token-mean"),
    Row("sequence_mean_token_mean", "verl", "seq-mean-token-mean"),
    Row("sequence_mean_token_sum", "verl", "seq-mean-token-sum"),
    Row(
        "constant_mean",
        "verl",
        "seq-mean-token-sum-norm",
        note="verl's divisor counts rows with a token where it is not given the configured number",
    ),
    Row("clipped_value_loss", "verl", "value loss", "G1", differentiate="values"),
    Row("k1", "verl", "k1", differentiate="logprobs"),
    Row("k2", "verl", "k2", differentiate="logprobs"),
    Row("k3", "verl", "k3", differentiate="logprobs", note="verl clamps the estimate at 10 too"),
    Row("straight_through_k3", "verl", "k3+", differentiate="logprobs", note="verl clamps the estimate at 10 too"),
    Row("clipped", "trl", "dapo", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row("clipped", "trl", "grpo", "G2", differentiate="logprobs", note=f"{NO_CLAMP}; {ONE_TO_ALL}"),
    Row("clipped", "trl", "dr_grpo", "G4", differentiate="logprobs", note=NO_CLAMP),
    Row("capped", "trl", "delta", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row("gspo", "trl", "sequence", "G2", differentiate="logprobs", note=f"{NO_CLAMP}; {ONE_TO_ALL}"),
    Row("cispo", "trl", "cispo", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row("soft_gated", "trl", "sapo", "G2", differentiate="logprobs", note=f"{NO_CLAMP}; {ONE_TO_ALL}"),
    Row("k3", "trl", "beta", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row("corrected_k3", "trl", "bias-corrected KL", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row(
        "decoupled_clipped",
        "trl",
        "importance_sampling_ratio",
        "G1",
        differentiate="logprobs",
        note="the weights by token; TRL's default is a product over the sequence that masks it beyond its cap",
    ),
    Row("sequence_clipped", "trl", "rloo", "G2", differentiate="logprobs", note=f"{NO_CLAMP}; {ONE_TO_ALL}"),
    Row("near_policy", "trl", "get_off_policy_mask"),
    Row("high_entropy", "trl", "get_high_entropy_mask"),
    Row("clipped", "areal", "token", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row("dual_clipped", "areal", "dual clip", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row(
        "gspo",
        "areal",
        "sequence",
        "G1",
        differentiate="logprobs",
        note="AReaL takes the mean over tokens (the cases too), we over sequences (G2)",
    ),
    Row("decoupled_clipped", "areal", "decoupled", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row("accepted", "areal", "reject tokens"),
    Row("accepted_by_sequence", "areal", "reject by product"),
    Row("accepted_by_geometric_mean", "areal", "reject by geometric mean"),
    Row(
        "geometric_weights", "areal", "geometric weights", "masked", note="where masked: a weight of 0 there, of 1 here"
    ),
    Row("soft_gated", "areal", "sapo", "G1", differentiate="logprobs", note=NO_CLAMP),
    Row("clipped_value_loss", "areal", "critic", "G1", differentiate="values"),
    Row("discounted_returns", "rlax", "discounted_returns"),
    Row("gae", "rlax", "truncated_generalized_advantage_estimation", prepare="rewards on actions"),
    Row("vtrace", "rlax", "vtrace targets", prepare="trace of one", output=1, note="rlax's c-bar is always 1"),
    Row(
        "vtrace",
        "rlax",
        "vtrace advantages",
        prepare="lambda of one",
        note="with lambda below 1 rlax bootstraps from lambda vs + (1 - lambda) v, we from vs as in the paper",
    ),
    Row("clipped", "rlax", "clipped_surrogate_pg_loss", "G1", "one bound", "logprobs", note="rlax has one bound"),
    Row("policy_gradient", "rlax", "policy_gradient_loss", "G1"),
    Row("symlog", "rlax", "signed_logp1"),
    Row("symexp", "rlax", "signed_expm1"),
    Row("two_hot", "rlax", "transform_to_2hot", prepare="even bins", note="rlax adds 1e-5 to a bin's width"),
    Row("two_hot_value", "rlax", "transform_from_2hot", prepare="even bins"),
)
