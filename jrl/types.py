"""The records that pass through jrl, and the letters of their shapes. Read this file first.

    Example --encode--> PromptBatch --sampler--> Rollout --scoring--> Scores
            --assemble--> TrainBatch --update--> TrainState

Dimensions. Other single capital letters, such as the K outputs of a head, are explained where they are used:

    B  prompts in a batch             T  P + C, the width of a rollout
    G  samples per prompt             R  packed rows (written [M, R, L]: M micro-batches of R rows)
    N  B * G sequences                L  length of a packed row
    P  longest prompt                 S  most sequences in a packed row
    C  longest completion             V  vocabulary,  D  model width

Alignment rule: index t of a per-token field describes `tokens[:, t]` given the tokens before it.
Column 0 has no predecessor and is masked. There are no shifted copies and no T-1 arrays.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from typing import Any

import jax
from flax import struct

Array = jax.Array
PyTree = Any


class Finish(enum.IntEnum):
    """Why a sequence ended."""

    STOP_TOKEN = 0
    STOP_STRING = 1
    LENGTH = 2
    TOOL_BUDGET = 3
    FAILED = 4


@struct.dataclass
class PromptBatch:
    """Prompts as token ids, left-aligned: padding is on the right."""

    tokens: Array  # [B, P] int32
    length: Array  # [B] int32
    uid: Array  # [B, 2] uint32, names one visit of one example; random keys derive from it
    sample: Array | None = None  # [B] int32, the index of the prompt's first sample, for its keys; None: 0
    # The prompts that rollout rows hold, if a strategy draws from other prompts than those; None: the ones above
    row_tokens: Array | None = None  # [B, P] int32
    row_length: Array | None = None  # [B] int32


@struct.dataclass
class Rollout:
    """Sampled sequences. Prompt and completion are contiguous from column 0; rows of a prompt are adjacent."""

    tokens: Array  # [N, T] int32
    length: Array  # [N] int32, prompt and completion
    action_mask: Array  # [N, T] bool, sampled by the policy; the stop token is an action
    sampler_logprobs: Array  # [N, T] float32, under the untruncated, temperature-scaled policy
    truncated_logprobs: Array | None  # [N, T] float32, under the sampling distribution, where truncation is on
    support_size: Array | None  # [N, T] int32, tokens in the truncated support, where truncation is on
    finish: Array  # [N] int8, a Finish
    group: Array  # [N] int32, prompt index
    sample: Array  # [N] int32, sample index within the prompt
    version: Array  # [N, T] int32, the update count of the weights that drew the token; -1 where not an action
    turn: Array  # [N, T] int8, the turn a token belongs to; -1 throughout a row that an opponent drew
    weights_fingerprint: Array  # [] uint32, hash of those weights, as passed to the sampler's program
    # [N, T, F] uint8 or uint16, the experts that `tokens[:, t]` was routed to as an input, in every sparse layer; the
    # dtype's largest value where unknown. None: not recorded (Learner.routes)
    routes: Array | None = None

    @property
    def behaviour_logprobs(self) -> Array:
        """[N, T] float32, under the distribution that the tokens were sampled from."""
        return self.sampler_logprobs if self.truncated_logprobs is None else self.truncated_logprobs


@struct.dataclass
class Scores:
    """The rewards of the completions. A row whose verdict is not scorable is masked, never given a reward of 0."""

    reward: Array  # [N] float32, 0 where not valid
    valid: Array  # [N] bool, the verdict can be trained on
    verdict: Array  # [N] int8, a jrl.tasks.verdict.Status
    outcome: Array  # [N] float32, the first verifier's own reward, before weighting and shaping
    # [N, T] float32, rewards of sampled tokens, in addition to `reward`; 0 where a row is not valid; None: no source
    # rewards tokens
    token_reward: Array | None = None
    components: dict[str, Array] | None = None  # {name: [N] float32}, unweighted; NaN where there is no number
    task: Array | None = None  # [N] uint32, a hash of the name of the prompt's task; 0 on padding
    example: Array | None = None  # [N] int32, index of the prompt's example in the run's source; -1 on padding


@struct.dataclass
class PackedBatch:
    """Sequences packed into rows of one length, cut into micro-batches [M, R, L]: one optimizer step, not yet scored.

    `segment` is the sequence's place in its row, 0..S-1; S on padding; above S on a prompt that several sequences
    share. Those sequences attend to it by `shared_prefix`, or by `prefix_row` where it may be in another row.
    `sequence` is N where a place is empty. `num_real` is the number of micro-batches that are not padding; the others
    are never computed.
    """

    tokens: Array  # [M, R, L] int32
    positions: Array  # [M, R, L] int32, place of the token in its own sequence
    segment: Array  # [M, R, L] int32
    shared_prefix: Array | None  # [M, R, L] int32, the second segment a token attends to, or its own; None: not shared
    prefix_row: Array | None  # [M, R, P - 1] int32 (or 1), the shard's row that holds column c; -1: none
    action_mask: Array  # [M, R, L] bool
    behaviour_logprobs: Array | None  # [M, R, L] float32, under the sampling distribution; None: rows were not sampled
    sampler_logprobs: Array | None  # [M, R, L] float32, from the sampler, to compare the learner's with
    sequence: Array  # [M, R, S] int32, which of the N sequences is at a place
    temperature: Array  # [] float32, log-probs are of logits / temperature
    num_real: Array  # [] int32
    routes: Array | None = None  # [M, R, L, F], as Rollout.routes; None: routers decide


@struct.dataclass
class Recomputed:
    """What the weights before the updates compute for a packed batch. None: the objective does not need the field."""

    old_logprobs: Array | None = None  # [M, R, L] float32; None: its batch has a single update, or nothing needs them
    old_values: Array | None = None  # [M, R, L] float32, of the value head
    old_entropy: Array | None = None  # [M, R, L] float32, nats
    old_sum_squared: Array | None = None  # [M, R, L] float32, sum over the vocabulary of p_v^2
    ref_logprobs: Array | None = None  # [M, R, L] float32, under the role `reference`
    teacher_logprobs: Array | None = None  # [M, R, L] float32, under the role `teacher`
    row_values: Array | None = None  # [M, R, S] float32, mean score of other roles


@struct.dataclass
class SequenceTargets:
    """Labels of the sequences of a packed batch, by row and place; 0 where a place is empty."""

    counts: Array  # [M, R, S] bool, enters the loss
    label: Array  # [M, R, S] float32, 1: preferred, 0: not
    weight: Array  # [M, R, S] float32
    unit: Array  # [M, R, S] int32, the comparison that the sequence belongs to; -1: none
    denominator: Array  # [] float32, divides the sum over the sequences of the whole optimizer step
    baseline: Array | None = None  # [] float32 or wider, from Objective.sequence_baseline; None: it has none
    # [M, R, S] float32, the sequence's value according to the data; [M, R, S, K] for K attributes; None: they have none
    value: Array | None = None


@struct.dataclass
class PretrainingBatch:
    """Packed stored rows that an optimizer step on samples also imitates (L17). Every action enters the loss."""

    packed: PackedBatch
    num_tokens: Array  # [] float32, actions of the whole optimizer step, at least 1
    coefficient: Array  # [] float32, weight of the mean loss over these


@struct.dataclass
class TrainBatch:
    """A packed batch with everything the loss reads."""

    packed: PackedBatch
    recomputed: Recomputed
    loss_mask: Array  # [M, R, L] bool, enters the loss; a subset of action_mask
    loss_weights: Array  # [M, R, L] float32, numerator weight of a token's loss; 0 off the loss mask
    advantages: Array | None  # [M, R, L] float32; None: nothing was credited
    returns: Array | None  # [M, R, L] float32, regression targets of the value head; None: no head
    targets: SequenceTargets | None  # None: the loss is of tokens alone
    denominator: Array  # [] float32, divides the weighted sum over the tokens of the whole optimizer step
    selected: Array | None = None  # [M, R, L] bool, as Objective.select returns it; None: no such function
    positive_weights: Array | None = None  # [M, R, L] float32, as in Tokens; None: no Objective.positive
    staleness: Array | None = None  # [M, R, L] int32, age of a sampled token in versions; None: nothing reads it
    pretraining: PretrainingBatch | None = None  # None: no stored rows are imitated


@struct.dataclass
class ModelState:
    """One model of a run, under the name of its role."""

    params: PyTree  # trained leaves: all weights, or the adapters to `frozen`
    frozen: PyTree | None  # weights under adapters; None: none, or those of `shares`
    heads: dict[str, Array]  # by name, [members, D, outputs]; trained with `params`
    opt_state: PyTree | None  # None: no stage trains this model now
    version: Array  # [] int32, updates in the stage that trains it; tokens carry the policy's
    shares: str | None = struct.field(pytree_node=False, default=None)  # the role whose frozen weights it uses


@struct.dataclass
class TrainState:
    """Everything on the device that influences training, and nothing else. One pytree, one checkpoint.

    Roles: `policy` always; `reference`, a copy of the policy from the start of the stage, if the objective needs it;
    `previous`, `previous_2` and so on, older versions of the policy, if a stage with lag may refill; `average`, a
    moving average of the trained model, if the optimizer keeps one; `reward`, `teacher` and others that a stage trains.
    """

    step: Array  # [] int32, completed steps of all stages
    models: dict[str, ModelState]
    objective: PyTree  # the state of the stage's objective (Objective.init_state)
    key: Array  # typed key, root of every named draw; never consumed
    skipped: Array  # [] int32, updates skipped since the start: not finite, or with no token to learn from


def traced(cls: type) -> type:
    """Returns `cls` as a frozen, keyword-only dataclass that is a pytree.

    Fields annotated `float`, `float | None` or with another traced class are leaves: they are passed as arrays, so
    changing one never recompiles. Integers, strings, booleans and None are structure and part of the compile key;
    a feature is switched off by None (another program), never by 0.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    hints = typing.get_type_hints(cls)
    leaves = [f.name for f in dataclasses.fields(cls) if _is_leaf(hints[f.name])]
    structure = [f.name for f in dataclasses.fields(cls) if f.name not in leaves]
    return jax.tree_util.register_dataclass(cls, data_fields=leaves, meta_fields=structure)


def _is_leaf(hint: Any) -> bool:
    options = [option for option in (typing.get_args(hint) or (hint,)) if option is not type(None)]
    return any(option is float or dataclasses.is_dataclass(option) for option in options)
