"""The contract of an objective: a record of pure functions on arrays. It never sees a model, a tokenizer or a device.

Sampled rows:  Groups --keep, shape, advantages--> advantages [N, T] --pack--> Tokens --token_loss--> loss [..., L]
                      --returns------------------> returns [N, T], where it has a value head
Stored rows:   Tokens --token_loss--> loss [..., L], Sequences --sequence_loss--> loss [..., S]

loss of a step = sum(weights * token_loss) / denominator + sum(weight * sequence_loss) / sequence_denominator,
with numerators and denominators over the whole optimizer step.

An objective overrides only what differs from the defaults: every scored row counts, the reward is used as scored, the
loss is the mean over tokens, there are no further roles and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.ops import reduce
from jrl.ops.divergence import Divergence
from jrl.ops.segments import same_unit
from jrl.types import Finish, PyTree

Array = jax.Array


@struct.dataclass
class Groups:
    """The rows of one step, before packing. Rows of a prompt share `group`; any may be missing, in any order."""

    reward: Array  # [N] float32, as scored
    outcome: Array  # [N] float32, right or wrong without any shaping; the zero-signal filter reads it
    valid: Array  # [N] bool, the verdict can be trained on
    group: Array  # [N] int32, 0..num_groups-1
    action_mask: Array  # [N, T] bool
    finish: Array  # [N] int8, a Finish
    num_groups: int = struct.field(pytree_node=False)
    max_completion: int = struct.field(pytree_node=False)  # tokens, as configured
    # [N, T] float32, rewards of sampled tokens, in addition to `reward`; 0 where a row is not valid; None: no source
    # rewards tokens
    token_reward: Array | None = None
    # {name: [N] float32}, the terms of the reward before their weights; NaN where a row has no such number
    components: dict[str, Array] | None = None
    # The fields that Needs has a flag for, and `values`, are None where the objective does not need them, and when
    # groups are tested for a refill; `sample`, `turn` and `feasible` are there then too:
    values: Array | None = None  # [N, T] float32, from the value head before the batch's updates
    old_logprobs: Array | None = None  # [N, T] float32; these three with Needs.credit_logprobs
    behaviour_logprobs: Array | None = None  # [N, T] float32, under the sampling distribution
    ref_logprobs: Array | None = None  # [N, T] float32, if there is a reference
    teacher_logprobs: Array | None = None  # [N, T] float32, with Needs.teacher
    old_entropy: Array | None = None  # [N, T] float32, nats, with Needs.credit_entropy
    # [N, T] float32, sum over the vocabulary of p_v^2, with Needs.credit_sum_squared
    old_sum_squared: Array | None = None
    sample: Array | None = None  # [N] int32, sample index within the prompt; seeds per-row draws
    turn: Array | None = None  # [N, T] int8, the turn that a sampled token belongs to
    tokens: Array | None = None  # [N, T] int32, with Needs.credit_tokens
    feasible: Array | None = None  # [N] bool, Shaping.constraints hold; None: there are none
    # [N] int32, 0..num_groups-1, an id of the row's task (the task's smallest group), with Needs.task
    task: Array | None = None
    # [N] int32, the index of the row's example in the run's source, with Needs.examples; -1 on padding, which is never
    # valid
    example: Array | None = None


@struct.dataclass
class Tokens:
    """Packed tokens. Masked entries may hold anything, NaN included."""

    logprobs: Array | None  # [..., L] float32, differentiated; None: Needs.logprobs is False
    # [..., L] float32, recomputed by the learner, never the sampler's: importance weights would then count the mismatch
    # twice. None unless both Needs.logprobs and Needs.old_logprobs
    old_logprobs: Array | None
    behaviour_logprobs: Array | None  # [..., L] float32, under the sampling distribution; None: rows were not sampled
    ref_logprobs: Array | None  # [..., L] float32, if the objective needs a reference
    entropy: Array | None  # [..., L] float32, nats; differentiated with Needs.entropy_gradient
    advantages: Array | None  # [..., L] float32; None: rows were not sampled
    mask: Array  # [..., L] bool, the loss mask
    segment: Array  # [..., L] int32, place of the token's sequence in its row; num_segments or more outside sequences
    num_segments: int = struct.field(pytree_node=False)
    # [..., L] float32, differentiated, if the trained model has a value head; None: it has none, or a critic has it
    values: Array | None = None
    # [..., L, K] float32, differentiated, with Needs.value_bins; `values` are then their expectations
    value_logits: Array | None = None
    old_values: Array | None = None  # [..., L] float32, before the batch's updates; these two with Objective.returns
    returns: Array | None = None  # [..., L] float32, from Objective.returns
    selected: Array | None = None  # [..., L] bool, from Objective.select
    # [..., L] float32, (tokens in the optimizer step's loss) / (those in Objective.positive's rows) on tokens of these
    # rows, 0 elsewhere: times a loss, its mean over the step is the loss's mean over these rows. None: no positive
    positive_weights: Array | None = None
    # [..., L] int32, versions between the weights that drew a token and the weights before its batch's updates, with
    # Needs.staleness
    staleness: Array | None = None
    state_values: Array | None = None  # [..., L] float32, V of each token's state, differentiated, if needed
    divergence: Array | None = None  # [..., L] float32, from the teacher, differentiated, with Needs.divergence
    # [..., L, K] float32, numbers that the data give for the token's stored row, in the order of
    # Needs.row_value_names; None: there are no names
    row_values: Array | None = None


@struct.dataclass
class Sequences:
    """The sequences of packed rows, by row and place. Sequences of one comparison are in one row and share a `unit`.
    Masked entries may hold anything, NaN included."""

    logprob: Array | None  # [..., S] float32, sum over the loss mask, differentiated; None: Needs.logprobs is False
    ref_logprob: Array | None  # [..., S] float32, under the reference, if the objective needs it
    length: Array  # [..., S] int32, tokens in the loss mask
    # [..., S] float32, from the reward head at the last token, differentiated; [..., S, K] with K outputs
    # (Needs.score_outputs); None: no reward head
    score: Array | None
    label: Array  # [..., S] float32, 1: preferred, 0: not
    unit: Array  # [..., S] int32, the comparison that a sequence belongs to; -1: none
    mask: Array  # [..., S] bool
    # [..., S] float32 or wider, Objective.sequence_baseline at every place; None: it has none
    baseline: Array | None = None
    # [..., S] float32, the sequence's value according to the data or to Objective.pairs, such as a score; [..., S, K]
    # for K attributes, NaN where a row lacks one; None: neither gives any
    value: Array | None = None
    # [..., S] float32, sum under the distribution that drew the tokens; None: they were not sampled
    behaviour_logprob: Array | None = None
    # [..., S] float32, sum of r_t lp_t with T-REG's token rewards, differentiated in lp, with Needs.contrast
    contrast: Array | None = None
    # [..., S] float32, sum of max(p_t, floor) lp_t with no gradient through p_t, with Needs.probability_floor
    floored_logprob: Array | None = None
    # [..., S] float32, log-ratio to the reference over the first min(len_w, len_l) tokens of a pair's answers,
    # differentiated, with Needs.common_length
    common_gain: Array | None = None
    # [..., S] float32, sum over the loss mask of ln sum_v p_v^2, without a gradient, with Needs.log_sum_squared
    log_sum_squared: Array | None = None


class ValueBins(NamedTuple):
    """The bins of a value head that predicts a distribution (V2): evenly spaced on the scale of symlog."""

    count: int
    limit: int  # the outermost bins are -limit and limit


class Needs(NamedTuple):
    """What an objective reads in addition to the rewards, masks and labels that every objective has."""

    logprobs: bool = True  # of the trained model; False: no logits are computed
    # log-probs under the weights before a batch's updates; costs a forward pass if a batch has several updates
    old_logprobs: bool = True
    staleness: bool = False  # the age of every sampled token, in versions
    reference: bool = False  # log-probs under the role `reference`, a copy of the model from the start of the stage
    teacher: bool = False  # log-probs under the role `teacher`, trained by an earlier stage
    divergence: Divergence | None = None  # from the teacher's distribution at every token, by this measure
    # the soft value of every token's state, logsumexp of the trained model's logits, with its gradient
    state_values: bool = False
    # share of the likeliest token's embedding in the input of a learned token, from a forward pass before (P34's IFT),
    # [] float; None: inputs are the tokens
    input_mix: Array | float | None = None
    values: bool = False  # a value head on the trained model, or on a separate critic (Online.critic)
    value_bins: ValueBins | None = None  # of that head, whose values are then expectations; None: it predicts scalars
    # the values that the data give for stored rows (Sequences.value, Tokens.row_values)
    row_values: bool = False
    # names of a row's numbers, in order, if the objective reads several; (): one, or one per output of its head
    row_value_names: tuple[str, ...] = ()
    scored_by: tuple[str, ...] = ()  # roles of earlier stages whose mean score is Sequences.value of stored rows
    # for stored rows, token rewards from the reference's contrast of two other prompts (P25), as Sequences.contrast
    contrast: bool = False
    # smallest weight of a token in Sequences.floored_logprob (else its probability), [] float; None: no such field
    probability_floor: Array | float | None = None
    common_length: bool = False  # Sequences.common_gain, over as many tokens as the shorter answer of a pair has
    log_sum_squared: bool = False  # Sequences.log_sum_squared, the log of the expected probability of a draw
    score: bool = False  # a reward head on the trained model, read at the last token of every sequence
    score_outputs: int = 1  # outputs of the reward head, such as one per attribute of a response
    # of those outputs in the score of a sequence, where no Online.attribute_weights are set; None: equal ones
    score_weights: tuple[float, ...] | None = None
    entropy_gradient: bool = False
    # The next seven are inputs of the rewards, the advantages or the baseline of sequences:
    credit_logprobs: bool = False  # log-probs, for a KL in the reward, V-trace, KTO
    credit_entropy: bool = False  # entropies, to train uncertain tokens only
    credit_sum_squared: bool = False  # the sum over the vocabulary of p_v^2, for OTB's squared gradient norms
    credit_tokens: bool = False  # token ids (Groups.tokens)
    task: bool = False  # the row's task (Groups.task)
    # the row's example (Groups.example), for a state with an entry for each of at most this many examples; a run whose
    # source has more is refused. None: not needed
    examples: int | None = None
    token_rewards: bool = False  # rewards of tokens (Groups.token_reward)
    greedy_sample: bool = False  # the first sample of every prompt (Groups.sample 0) is the policy's greedy answer

    @property
    def value_outputs(self) -> int:
        """Outputs of the value head per token."""
        return 1 if self.value_bins is None else self.value_bins.count

    @property
    def has_teacher(self) -> bool:
        """Whether the objective needs the role `teacher`."""
        return self.teacher or self.divergence is not None

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the trained model must have, by name (jrl.models.heads)."""
        return tuple(name for name, needed in (("value", self.values), ("reward", self.score)) if needed)

    @property
    def head_outputs(self) -> dict[str, int]:
        """Outputs of each head, by name."""
        return {"value": self.value_outputs, "reward": self.score_outputs}


class Facts(NamedTuple):
    """The settings of the rest of the run that an objective's configuration is checked against."""

    samples: int  # completions per prompt
    lag: int  # versions between sampling and learning
    updates_per_batch: int
    truncated_sampling: bool  # top-k, top-p or min-p is on
    greedy: bool
    max_completion: int  # tokens
    attempts: int = 1  # per row, each scored separately; 2: turns 0 and 1, and the component `first_attempt`
    # (completions of a prompt that others branch from, branches of each); None: no branching
    branches: tuple[int, int] | None = None
    # Shaping.constraints replace the reward of infeasible rows before the objective reads it
    replaces_infeasible: bool = False
    without_spans: bool = False  # no verifier rewards spans of a completion, or something else rewards tokens too
    pair_model: bool = False  # a pair model compares the samples of every prompt
    rows: int = 0  # completions of a step; 0: rows are stored
    held_out_outcome: bool = False  # the first verifier only watches: Groups.outcome is no part of the reward
    not_rewarded: tuple[str, ...] = ()  # components whose weight in the reward is not above 0: they watch, or punish
    changes_rewards: bool = False  # Shaping changes the reward of a row, after its components are added up
    negative_rewards: tuple[str, ...] = ()  # components and options of Shaping that can make a row's reward negative
    potential: bool = False  # Shaping.potential: the rewards of a completion's tokens are paid back with its last one


def recomputes_logprobs(needs: Needs, updates_per_batch: int) -> bool:
    """Returns whether a batch's log-probs are recomputed under the weights before its updates. A single update needs
    none, since its ratio is 1; credit always does."""
    for_ratio = needs.old_logprobs and updates_per_batch > 1
    return needs.logprobs and (for_ratio or needs.credit_logprobs)


def reads_old_values(objective: Objective, config: Any) -> bool:
    """Returns whether the values before the updates are computed: the credit of sampled rows needs them."""
    return objective.needs(config).values and objective.returns is not None


def eligible(groups: Groups) -> Array:
    """Returns the rows that may enter a statistic or the loss, [N] bool: those with a valid verdict (E3) and a sampled
    token (E4). A completion of a single stop token counts.
    """
    return groups.valid & ~aborted(groups)


def aborted(groups: Groups) -> Array:
    """Returns the rows without a sampled token, or whose sampling failed, [N] bool."""
    return ~jnp.any(groups.action_mask, axis=-1) | (groups.finish == jnp.int8(Finish.FAILED))


PREFERENCE_OVER = "pair_model/over_"  # + a sample's index: the component with the preference for a row over that sample


def preferences(groups: Groups) -> Array:
    """Returns a pair model's preferences among the samples of every prompt, [N, S] float32: the probability that row i
    is better than sample s of its prompt, with row i shown first; NaN where the two were not compared."""
    components = groups.components or {}
    samples = sum(name.startswith(PREFERENCE_OVER) for name in components)
    if not samples:
        raise ValueError("preferences: no pair model has compared these rows")
    return jnp.stack([components[f"{PREFERENCE_OVER}{s}"] for s in range(samples)], axis=-1)


def shaped_reward(objective: Objective, config: Any, groups: Groups, state: PyTree) -> Array:
    """Returns the reward that advantages are computed from, [N]."""
    reward = objective.shape(config, groups)
    if objective.shape_with_state is None:
        return reward
    return objective.shape_with_state(config, groups, reward, state)


def greedy(groups: Groups) -> Array:
    """Returns the rows that are greedy answers, [N] bool; for objectives with Needs.greedy_sample."""
    return groups.sample == 0


class Pairs(NamedTuple):
    """Which sampled rows are compared. The rows of a comparison are from one prompt."""

    label: Array  # [N] float32, 1: preferred, 0: not
    unit: Array  # [N] int32, the comparison that a row belongs to; -1: none, the row is not trained on
    weight: Array  # [N] float32
    value: Array | None = None  # [N] float32, Sequences.value of the row; None: it has none


class Objective(NamedTuple):
    """A row of ALGOS. `config` is a traced dataclass; each function takes an instance of it first."""

    config: type
    # (config, facts) raises ValueError if they do not fit together; uses no device
    check: Callable[[Any, Facts], None] = lambda config, facts: None
    needs: Callable[[Any], Needs] = lambda config: Needs()
    # (config, value [n], or [n, K]) raises ValueError if the numbers of the first n stored rows of a data set
    # (Needs.row_values) leave nothing to learn; on the host, before a run. None: no such check
    check_stored: Callable[[Any, Any], None] | None = None
    # (config) -> a function from the values of all examples, [n, K] with NaN for missing ones, to the probability of
    # drawing each, [n] float of sum 1; on the host. None: examples come in turn. Stored rows only
    draw: Callable[[Any], Callable[[Any], Any] | None] = lambda config: None
    # (config) -> whether tokens may be several versions old: their importance weights are bounded, the worst tokens are
    # rejected, or imitation and comparison need no weights; False: Online.lag is at most 1
    corrects_staleness: Callable[[Any], bool] = lambda config: False
    # (config) -> the objective's state, carried from step to step: a pytree of arrays in the train state
    init_state: Callable[[Any], PyTree] = lambda config: ()
    # (config, groups) -> [N] bool, rows that enter the loss
    keep: Callable[[Any, Groups], Array] = lambda config, groups: eligible(groups)
    # (config) -> largest number of rounds of fresh prompts that replace groups without signal; None: no refill
    refill: Callable[[Any], int | None] = lambda config: None
    # (config, groups) -> [N, T] bool, sampled tokens that enter the loss if their row does; None: all of them
    keep_tokens: Callable[[Any, Groups], Array] | None = None
    # (config, groups) -> [N] float32, the reward that advantages are computed from
    shape: Callable[[Any, Groups], Array] = lambda config, groups: groups.reward
    # (config, groups, reward [N], state) -> [N] float32, the shaped reward after a change that depends on the state
    # before the step, such as a running scale. None: no such change
    shape_with_state: Callable[[Any, Groups, Array, PyTree], Array] | None = None
    # (config, groups, reward [N], state) -> advantages [N, T], next state, counters {name: []}; None: for stored rows
    advantages: Callable[[Any, Groups, Array, PyTree], tuple[Array, PyTree, dict[str, Array]]] | None = None
    # (config, groups, reward [N]) -> which of the kept rows sequence_loss compares; None: it compares no sampled rows
    pairs: Callable[[Any, Groups, Array], Pairs] | None = None
    # (config, groups, advantages [N, T]) -> [N, T] bool, tokens that token_loss treats differently, selected with
    # statistics of the whole step; None: no selection
    select: Callable[[Any, Groups, Array], Array] | None = None
    # (config, groups) -> [N] bool, rows for which token_loss has a second term, a mean over their tokens alone
    # (Tokens.positive_weights); `weights` and `denominator` must then be those of the token mean. None: no such term
    positive: Callable[[Any, Groups], Array] | None = None
    # (config, groups, reward [N]) -> [N, T], regression targets of the value head; None: no value head, or one that is
    # trained on stored rows
    returns: Callable[[Any, Groups, Array], Array] | None = None
    # (config, tokens, state) -> loss [..., L], metrics {name: [..., L]}; None: no loss of tokens
    token_loss: Callable[[Any, Tokens, PyTree], tuple[Array, dict[str, Array]]] | None = None
    # (config, tokens, state) -> loss [..., L], metrics {name: [..., L]}, of values alone: the loss of a separate
    # critic, for which token_loss gets no values. None: the value head must be on the policy
    value_loss: Callable[[Any, Tokens, PyTree], tuple[Array, dict[str, Array]]] | None = None
    # (config, loss_mask [N, T], max_completion) -> [N, T]
    weights: Callable[[Any, Array, int], Array] = lambda config, mask, max_completion: reduce.token_weights(mask)
    # (config, loss_mask [N, T], rows, max_completion) -> [], at least 1
    denominator: Callable[[Any, Array, Array, int], Array] = lambda config, mask, rows, max_completion: (
        reduce.count_tokens(mask)
    )
    # (config, sequences, state) -> loss [..., S], metrics {name: [..., S]}; None: no loss of sequences
    sequence_loss: Callable[[Any, Sequences, PyTree], tuple[Array, dict[str, Array]]] | None = None
    # (config, sequences [..., S] of the whole optimizer step, under the weights before it, without scores) -> [], read
    # by sequence_loss without a gradient; needs credit_logprobs; None: no baseline. Stored rows only
    sequence_baseline: Callable[[Any, Sequences], Array] | None = None
    # (config, mask [N] bool, unit [N] int32) -> [], at least 1: comparisons in the optimizer step
    sequence_denominator: Callable[[Any, Array, Array], Array] = lambda config, mask, unit: count_units(mask, unit)
    # rows of a comparison, which the packer never splits: 1; 2 for pairs (preferred first); 0: all samples of a prompt
    unit_size: int = 1
    # a label between 0.5 and 1 is the strength of a preference; False: sources that give strengths are refused
    strengths: bool = False
    # (config, state, metrics {name: []}) -> state after the updates of a step; metrics are the step's logged means and,
    # for sampled rows, "loss/rows" and "loss/tokens"
    next_state: Callable[[Any, PyTree, dict[str, Array]], PyTree] = lambda config, state, metrics: state
    # (config, metrics {name: float, None for a mean over nothing} of a step whose updates were finite, on the host) ->
    # why the run must not go on; None: it goes on
    stop: Callable[[Any, Mapping[str, float | None]], str | None] = lambda config, metrics: None


def count_units(mask: Array, unit: Array) -> Array:
    """Returns max(comparisons with a sequence in the mask, 1), [] float32.

    Args:
      mask: [N] bool. unit: [N] int32, -1: none; rows of a comparison need not be adjacent.
    """
    ordered = jnp.sort(jnp.where(mask, unit, -1))
    first = ordered != jnp.concatenate([jnp.full_like(ordered[:1], -1), ordered[:-1]])
    return jnp.maximum(jnp.sum(first), 1).astype(jnp.float32)


def other_of_pair(x: Array, sequences: Sequences) -> Array:
    """Returns `x` of the other sequence of each one's pair, [..., S]; 0 where there is none.

    Args:
      x: [..., S] float; may be NaN outside `sequences.mask`.
    """
    unit = sequences.unit
    compared = same_unit(unit, sequences.mask)
    itself = jnp.eye(unit.shape[-1], dtype=bool).reshape((1,) * (unit.ndim - 1) + (unit.shape[-1],) * 2)
    return jnp.sum(jnp.where(compared & ~itself, x[..., None, :], 0), axis=-1)
