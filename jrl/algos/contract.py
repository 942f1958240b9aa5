"""What an objective is: a record of pure functions on arrays. It never sees a model, a tokenizer or a device.

Sampled rows:  Groups --keep, shape, advantages--> advantages [N, T] --pack--> Tokens --token_loss--> loss [..., L]
                      --returns------------------> returns [N, T], where it has a value head
Stored rows:   Tokens --token_loss--> loss [..., L], Sequences --sequence_loss--> loss [..., S]

loss of a step = sum(weights * token_loss) / denominator + sum(weight * sequence_loss) / sequence_denominator,
numerators and denominators both over the whole optimizer step.

A row states what differs from the defaults: every judged row counts, the reward as it is, the mean over tokens, no
further roles, no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.ops import reduce
from jrl.ops.divergence import Divergence
from jrl.types import Finish, PyTree

Array = jax.Array


@struct.dataclass
class Groups:
    """The rows of one step, before packing. Those of a prompt share `group`; any may be missing, in any order."""

    reward: Array  # [N] float32, as scored
    outcome: Array  # [N] float32, right or wrong without any shaping: what the zero-signal filter judges
    valid: Array  # [N] bool, the verdict can be trained on
    group: Array  # [N] int32, 0..num_groups-1
    action_mask: Array  # [N, T] bool
    finish: Array  # [N] int8, a Finish
    num_groups: int = struct.field(pytree_node=False)
    max_completion: int = struct.field(pytree_node=False)  # tokens, as configured
    # Beside `reward`, on sampled tokens: [N, T] float32, 0 where a row is not valid; None: no source gives any
    token_reward: Array | None = None
    # {name: [N] float32}, what the reward was summed of, each before its weight; NaN where a row has no such number
    components: dict[str, Array] | None = None
    # None without them, and where groups are judged for a refill:
    values: Array | None = None  # [N, T] float32, of the value head before the update
    old_logprobs: Array | None = None  # [N, T] float32; these three where Needs.credit_logprobs
    behaviour_logprobs: Array | None = None  # [N, T] float32, of the sampling distribution
    ref_logprobs: Array | None = None  # [N, T] float32, where there is a reference
    teacher_logprobs: Array | None = None  # [N, T] float32, where Needs.teacher
    old_entropy: Array | None = None  # [N, T] float32, nats, where Needs.credit_entropy
    # [N, T] float32, sum over the vocabulary of p_v^2, where Needs.credit_sum_squared
    old_sum_squared: Array | None = None
    sample: Array | None = None  # [N] int32, the row's place among the samples of its prompt; names a draw
    turn: Array | None = None  # [N, T] int8, the turn that a sampled token belongs to
    tokens: Array | None = None  # [N, T] int32, where Needs.credit_tokens
    feasible: Array | None = None  # [N] bool, Shaping.constraints hold; None: there are none
    # [N] int32, 0..num_groups-1, the same in all rows of a task: the smallest group that is of it, where Needs.task
    task: Array | None = None


@struct.dataclass
class Tokens:
    """Packed tokens. What is masked may hold anything, NaN included."""

    logprobs: Array | None  # [..., L] float32, differentiated; None: Needs.logprobs is False
    # [..., L] float32, recomputed by the learner: never the sampler's, that would count twice; None where one of
    # Needs.logprobs and Needs.old_logprobs is False
    old_logprobs: Array | None
    behaviour_logprobs: Array | None  # [..., L] float32, of the sampling distribution; None: rows were not sampled
    ref_logprobs: Array | None  # [..., L] float32, where the objective needs a reference
    entropy: Array | None  # [..., L] float32, nats; differentiated where the objective needs its gradient
    advantages: Array | None  # [..., L] float32; None: rows were not sampled
    mask: Array  # [..., L] bool, the loss mask
    segment: Array  # [..., L] int32, place of the token's sequence in its row, num_segments or more off every sequence
    num_segments: int = struct.field(pytree_node=False)
    # [..., L] float32, differentiated, where the model that learns has a value head; None: a critic of its own has it
    values: Array | None = None
    # [..., L, K] float32, differentiated, where Needs.value_bins; `values` are then what they expect
    value_logits: Array | None = None
    old_values: Array | None = None  # [..., L] float32, before the update; these two where there are Objective.returns
    returns: Array | None = None  # [..., L] float32, as Objective.returns gave them
    selected: Array | None = None  # [..., L] bool, as Objective.select gave them
    # [..., L] float32, tokens of the optimizer step's loss / tokens of its rows in Objective.positive on the latter, 0
    # elsewhere: a loss times these has the mean over the latter; None: there is no Objective.positive
    positive_weights: Array | None = None
    # [..., L] int32, versions between the weights that drew a token and those that the updates of its batch begin with,
    # where Needs.staleness
    staleness: Array | None = None
    state_values: Array | None = None  # [..., L] float32, V of each token's state, differentiated, where Needs asks
    divergence: Array | None = None  # [..., L] float32, from the teacher, differentiated, where Needs.divergence
    # [..., L, K] float32, what the data say of the stored row that a token is part of, K numbers in the order of
    # Needs.row_value_names; None: it names none
    row_values: Array | None = None


@struct.dataclass
class Sequences:
    """The sequences of packed rows, by row and place. What is compared is in one row and has one `unit`. What is masked
    may hold anything, NaN included."""

    logprob: Array | None  # [..., S] float32, sum over the loss mask, differentiated; None: Needs.logprobs is False
    ref_logprob: Array | None  # [..., S] float32, under the reference, where the objective needs it
    length: Array  # [..., S] int32, tokens in the loss mask
    # [..., S] float32, of the reward head at the last token, differentiated; [..., S, K] of one with K outputs
    # (Needs.score_outputs); None: no such head
    score: Array | None
    label: Array  # [..., S] float32, 1: preferred, 0: not
    unit: Array  # [..., S] int32, the comparison that a sequence is part of; -1: none
    mask: Array  # [..., S] bool
    # [..., S] float32 or wider, Objective.sequence_baseline at every place; None: it has none
    baseline: Array | None = None
    # [..., S] float32, what its data or Objective.pairs say that it is worth, such as a score; [..., S, K] of data with
    # K attributes, NaN where a row lacks one; None: nothing
    value: Array | None = None
    # [..., S] float32, sum under the distribution that drew the tokens; None: they were not sampled
    behaviour_logprob: Array | None = None
    # [..., S] float32, sum of r_t lp_t with T-REG's token rewards, differentiated in lp, where Needs.contrast
    contrast: Array | None = None
    # [..., S] float32, sum of max(p_t, floor) lp_t with no gradient through p_t, where Needs.probability_floor
    floored_logprob: Array | None = None
    # [..., S] float32, log-ratio to the reference over the first min(len_w, len_l) tokens of a pair's answers,
    # differentiated, where Needs.common_length
    common_gain: Array | None = None
    # [..., S] float32, sum over the loss mask of ln sum_v p_v^2, without a gradient, where Needs.log_sum_squared
    log_sum_squared: Array | None = None


class ValueBins(NamedTuple):
    """The bins of a value head that gives a distribution (V2): evenly spaced on the scale of symlog."""

    count: int
    limit: int  # the outermost are -limit and limit


class Needs(NamedTuple):
    """What an objective reads beside the log-probs of the model that it trains."""

    logprobs: bool = True  # of that model; False: no logits are computed
    # log-probs of the weights before the updates of a batch, for which a pass over it is made where there are several
    old_logprobs: bool = True
    staleness: bool = False  # how many versions old every sampled token is
    reference: bool = False  # log-probs under the role `reference`: the model as the stage found it
    teacher: bool = False  # log-probs under the role `teacher`, which an earlier stage has trained
    divergence: Divergence | None = None  # from the teacher's distribution at every token, by this measure
    # the soft value of every token's state, logsumexp of the logits of the model that it trains, with its gradient
    state_values: bool = False
    # share of the likeliest token's embedding in the input of a learned token, which the model finds in a pass before
    # (P34's IFT), [] float; None: inputs are the tokens
    input_mix: Array | float | None = None
    values: bool = False  # a value head on the trained model, or on a critic of its own (Online.critic)
    value_bins: ValueBins | None = None  # of that head, whose values are then expectations; None: it gives numbers
    # of stored rows, what the data say that each is worth (Sequences.value, Tokens.row_values)
    row_values: bool = False
    # what the numbers of a row are, in order, where it reads several; (): one, or one for each output of its head
    row_value_names: tuple[str, ...] = ()
    scored_by: tuple[str, ...] = ()  # roles of earlier stages whose mean score is Sequences.value of stored rows
    # of stored rows, token rewards by the reference's contrast of two other prompts (P25), as Sequences.contrast
    contrast: bool = False
    # least weight of a token in Sequences.floored_logprob, whose own is its probability, [] float; None: no such field
    probability_floor: Array | float | None = None
    common_length: bool = False  # Sequences.common_gain, over as many tokens as the shorter answer of a pair has
    log_sum_squared: bool = False  # Sequences.log_sum_squared: how likely what the model draws there is
    score: bool = False  # a reward head on the trained model, read at the last token of every sequence
    score_outputs: int = 1  # numbers that it gives, such as one for each attribute of a response
    entropy_gradient: bool = False
    # advantages, or a baseline of sequences, are taken of log-probs too: a KL in the reward, V-trace, KTO
    credit_logprobs: bool = False
    credit_entropy: bool = False  # advantages are taken of entropies too: only uncertain tokens learn
    # advantages are taken of the sum over the vocabulary of p_v^2 too: OTB's squared norms of gradients
    credit_sum_squared: bool = False
    credit_tokens: bool = False  # rewards or advantages are taken of what the tokens are (Groups.tokens)
    task: bool = False  # rewards or advantages are compared by task (Groups.task)
    token_rewards: bool = False  # advantages are taken of the rewards of tokens too (Groups.token_reward)
    greedy_sample: bool = False  # the first sample of every prompt (Groups.sample 0) is the policy's greedy answer

    @property
    def value_outputs(self) -> int:
        """How many numbers the value head gives for a token."""
        return 1 if self.value_bins is None else self.value_bins.count

    @property
    def has_teacher(self) -> bool:
        """Whether the objective reads anything of the role `teacher`."""
        return self.teacher or self.divergence is not None

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the trained model must have, by name (jrl.models.heads)."""
        return tuple(name for name, needed in (("value", self.values), ("reward", self.score)) if needed)

    @property
    def head_outputs(self) -> dict[str, int]:
        """How many numbers each head gives, by name."""
        return {"value": self.value_outputs, "reward": self.score_outputs}


class Facts(NamedTuple):
    """What of the rest of the run decides whether an objective's configuration makes sense."""

    samples: int  # completions a prompt
    lag: int  # versions between sampling and learning
    updates_per_batch: int
    truncated_sampling: bool  # top-k, top-p or min-p is on
    greedy: bool
    max_completion: int  # tokens
    attempts: int = 1  # of a row, each scored by itself; 2: turns 0 and 1, and the component `first_attempt`
    # completions of a prompt that others branch from, and how many from each; None: none branches
    branches: tuple[int, int] | None = None
    # Shaping.constraints give infeasible rows another reward, before the objective sees it
    replaces_infeasible: bool = False
    without_spans: bool = False  # no verifier rewards spans of a completion, or something else rewards tokens too
    pair_model: bool = False  # a pair model compares the samples of every prompt


def recomputes_logprobs(needs: Needs, updates_per_batch: int) -> bool:
    """Returns whether the weights before the updates are asked for the log-probs of a batch. The only update of a batch
    needs none: its ratio is 1. What rows are credited by is needed always."""
    of_updates = needs.old_logprobs and updates_per_batch > 1
    return needs.logprobs and (of_updates or needs.credit_logprobs)


def reads_old_values(objective: Objective, config: Any) -> bool:
    """Returns whether the values from before the update are asked for: sampled rows are credited by them."""
    return objective.needs(config).values and objective.returns is not None


def loss_and_metrics(name: str, config: Any, returned: Any, shape: tuple[int, ...]) -> tuple[Array, dict[str, Array]]:
    """Returns what an objective's loss returned. Raises ValueError where that is not (loss, metrics), the loss of
    `shape`: a sum would be spread over all places without a word.

    Args:
      name: of the function, "token_loss" or "sequence_loss". config: the objective's.
    """
    asked = f"{type(config).__name__}: {name} must return (loss of shape {list(shape)}, a dictionary of metrics)"
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise ValueError(f"{asked}, and it returned a {type(returned).__name__}")
    if jnp.shape(returned[0]) != shape:
        raise ValueError(f"{asked}, and its loss has the shape {list(jnp.shape(returned[0]))}")
    return returned


def credited(config: Any, returned: Any, shape: tuple[int, ...]) -> tuple[Array, PyTree, dict[str, Array]]:
    """Returns what an objective's advantages returned. Raises ValueError where that is not (advantages, state,
    counters), the advantages of `shape`.

    Args:
      config: the objective's.
    """
    asked = f"{type(config).__name__}: advantages must return (advantages of shape {list(shape)}, state, counters)"
    if not isinstance(returned, tuple) or len(returned) != 3 or not isinstance(returned[2], dict):
        raise ValueError(f"{asked}, and it returned a {type(returned).__name__}")
    if jnp.shape(returned[0]) != shape:
        raise ValueError(f"{asked}, and its advantages have the shape {list(jnp.shape(returned[0]))}")
    return returned


def eligible(groups: Groups) -> Array:
    """Returns the rows that may enter a statistic or the loss, [N] bool: judged (E3), and with tokens of its own (E4).

    A completion that is one stop token is not empty.
    """
    return groups.valid & ~aborted(groups)


def aborted(groups: Groups) -> Array:
    """Returns the rows that hold no sampled token or whose sampling failed, [N] bool."""
    return ~jnp.any(groups.action_mask, axis=-1) | (groups.finish == jnp.int8(Finish.FAILED))


PREFERENCE_OVER = "pair_model/over_"  # before a sample's place: the component with the preference for a row over it


def preferences(groups: Groups) -> Array:
    """Returns what a pair model says of the samples of every prompt, [N, S] float32: the probability that row i is
    better than sample s of its prompt when it is shown first; NaN where the two were not compared."""
    components = groups.components or {}
    samples = sum(name.startswith(PREFERENCE_OVER) for name in components)
    if not samples:
        raise ValueError("preferences: no pair model has compared these rows")
    return jnp.stack([components[f"{PREFERENCE_OVER}{s}"] for s in range(samples)], axis=-1)


def shaped_reward(objective: Objective, config: Any, groups: Groups, state: PyTree) -> Array:
    """Returns the reward that advantages are taken of, [N]."""
    reward = objective.shape(config, groups)
    if objective.shape_with_state is None:
        return reward
    return objective.shape_with_state(config, groups, reward, state)


def greedy(groups: Groups) -> Array:
    """Returns the rows that are greedy answers, where Needs.greedy_sample asks for them, [N] bool."""
    return groups.sample == 0


class Pairs(NamedTuple):
    """Which sampled rows are compared. Both rows of a comparison are of one prompt."""

    label: Array  # [N] float32, 1: preferred, 0: not
    unit: Array  # [N] int32, the comparison that a row is part of; -1: none, and it is not learned from
    weight: Array  # [N] float32
    value: Array | None = None  # [N] float32, what sequence_loss reads of a row beside its label; None: nothing


class Objective(NamedTuple):
    """A row of ALGOS. `config` is a traced dataclass; each function takes an instance of it first."""

    config: type
    # (config, facts) raises ValueError where the combination is illegal; no device is touched
    check: Callable[[Any, Facts], None] = lambda config, facts: None
    needs: Callable[[Any], Needs] = lambda config: Needs()
    # (config, value [n], or [n, K]) raises ValueError where the numbers of the first n stored rows of a data set
    # (Needs.row_values) give nothing to learn from; on the host, before a run. None: they always give something
    check_stored: Callable[[Any, Any], None] | None = None
    # (config) -> a function of what the data say of every example's row, [n, K] with NaN where there is none, that says
    # how likely each is to be drawn, [n] float of sum 1; on the host. None: examples come in turn. Stored rows only
    draw: Callable[[Any], Callable[[Any], Any] | None] = lambda config: None
    # (config) -> whether it may learn from tokens that are several versions old: their importance weights have a bound,
    # the worst are rejected, or it needs no weights since it imitates or compares; False: Online.lag is at most 1
    corrects_staleness: Callable[[Any], bool] = lambda config: False
    # (config) -> what the objective remembers from step to step: a pytree of arrays in the train state
    init_state: Callable[[Any], PyTree] = lambda config: ()
    # (config, groups) -> [N] bool, rows that enter the loss
    keep: Callable[[Any, Groups], Array] = lambda config, groups: eligible(groups)
    # (config) -> most rounds of fresh prompts for groups without signal; None: off
    refill: Callable[[Any], int | None] = lambda config: None
    # (config, groups) -> [N, T] bool, sampled tokens that may enter the loss where their row does; None: all of them
    keep_tokens: Callable[[Any, Groups], Array] | None = None
    # (config, groups) -> [N] float32, the reward that advantages are taken of
    shape: Callable[[Any, Groups], Array] = lambda config, groups: groups.reward
    # (config, groups, reward [N], state) -> [N] float32, that reward as what the objective remembers changes it, such
    # as a running scale; state is that of before the step. None: it does not
    shape_with_state: Callable[[Any, Groups, Array, PyTree], Array] | None = None
    # (config, groups, reward [N], state) -> advantages [N, T], next state, counters {name: []}; None: for stored rows
    advantages: Callable[[Any, Groups, Array, PyTree], tuple[Array, PyTree, dict[str, Array]]] | None = None
    # (config, groups, reward [N]) -> which of the kept rows sequence_loss compares; None: it compares no sampled rows
    pairs: Callable[[Any, Groups, Array], Pairs] | None = None
    # (config, groups, advantages [N, T]) -> [N, T] bool, tokens that token_loss treats in another way, chosen by what
    # only the whole step knows; None: no selection
    select: Callable[[Any, Groups, Array], Array] | None = None
    # (config, groups) -> [N] bool, rows whose tokens have a mean of their own in token_loss (Tokens.positive_weights),
    # beside the mean over all tokens, which `weights` and `denominator` must leave as it is; None: no such rows
    positive: Callable[[Any, Groups], Array] | None = None
    # (config, groups, reward [N]) -> [N, T], regression targets of the value head; None: no such head, or one that
    # learns from stored rows, which have none
    returns: Callable[[Any, Groups, Array], Array] | None = None
    # (config, tokens, state) -> loss [..., L], metrics {name: [..., L]}; None: no loss of tokens
    token_loss: Callable[[Any, Tokens, PyTree], tuple[Array, dict[str, Array]]] | None = None
    # (config, tokens, state) -> loss [..., L], metrics {name: [..., L]}, of values alone: what a critic of its own
    # learns by, while token_loss is given no values; None: the value head must be on the policy
    value_loss: Callable[[Any, Tokens, PyTree], tuple[Array, dict[str, Array]]] | None = None
    # (config, loss_mask [N, T], max_completion) -> [N, T]
    weights: Callable[[Any, Array, int], Array] = lambda config, mask, max_completion: reduce.token_weights(mask)
    # (config, loss_mask [N, T], rows, max_completion) -> [], at least 1
    denominator: Callable[[Any, Array, Array | int, int], Array] = lambda config, mask, rows, max_completion: (
        reduce.count_tokens(mask)
    )
    # (config, sequences, state) -> loss [..., S], metrics {name: [..., S]}; None: no loss of sequences
    sequence_loss: Callable[[Any, Sequences, PyTree], tuple[Array, dict[str, Array]]] | None = None
    # (config, sequences [..., S] of the whole optimizer step, under the weights before it, no scores) -> [], a number
    # that sequence_loss reads without a gradient; needs credit_logprobs; None: no such number. Stored rows only
    sequence_baseline: Callable[[Any, Sequences], Array] | None = None
    # (config, mask [N] bool, unit [N] int32) -> [], at least 1: comparisons of the optimizer step
    sequence_denominator: Callable[[Any, Array, Array], Array] = lambda config, mask, unit: count_units(mask, unit)
    # rows of a comparison, which the packer never cuts: 1; 2 for pairs (preferred first); 0: all samples of a prompt
    unit_size: int = 1
    # a label between 0.5 and 1 is the strength of a preference; where False, a source that gives strengths is refused
    strengths: bool = False
    # (config, state, metrics {name: []}) -> state after the updates of a step; metrics are the means that it logs, and
    # of sampled rows "loss/rows" and "loss/tokens"
    next_state: Callable[[Any, PyTree, dict[str, Array]], PyTree] = lambda config, state, metrics: state


def count_units(mask: Array, unit: Array) -> Array:
    """Returns max(comparisons with a sequence in the mask, 1), [] float32.

    Args:
      mask: [N] bool. unit: [N] int32, -1: none; those of a comparison in any places.
    """
    ordered = jnp.sort(jnp.where(mask, unit, -1))
    first = ordered != jnp.concatenate([jnp.full_like(ordered[:1], -1), ordered[:-1]])
    return jnp.maximum(jnp.sum(first), 1).astype(jnp.float32)


def other_of_pair(x: Array, sequences: Sequences) -> Array:
    """Returns for each sequence the value of the other one of its pair, [..., S]; 0 where there is none.

    Args:
      x: [..., S] float; what is off `sequences.mask` may be NaN.
    """
    unit, mask = sequences.unit, sequences.mask
    same = (unit[..., :, None] == unit[..., None, :]) & mask[..., :, None] & mask[..., None, :]
    other = same & ~jnp.eye(unit.shape[-1], dtype=bool).reshape((1,) * (unit.ndim - 1) + (unit.shape[-1],) * 2)
    return jnp.sum(jnp.where(other, x[..., None, :], 0), axis=-1)
