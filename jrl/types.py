"""The records that travel through jrl, and the letters their shapes are written in. Read this file first.

    Example --encode--> PromptBatch --sampler--> Rollout --scoring--> Scores
            --assemble--> TrainBatch --update--> TrainState

Dimensions, the only single capital letters used in the project:

    B  prompts in a batch             T  P + C, the width of a rollout
    G  samples a prompt               R  packed rows (written [M, R, L]: M micro-batches of R rows)
    N  B * G sequences                L  length of a packed row
    P  longest prompt                 S  most sequences that a packed row holds
    C  longest completion             V  vocabulary,  D  model width

Alignment rule: index t of a per-token field speaks about `tokens[:, t]` given the tokens before it.
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
    # Of a strategy that draws from other prompts than rows hold: those of rows; None: these
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
    weights_fingerprint: Array  # [] uint32, hash of those weights, as the sampler's program is given them
    # [N, T, F] uint8 or uint16, which experts `tokens[:, t]` went to as an input, in every sparse layer; the largest
    # value where that is not known. None: not recorded (Learner.routes)
    routes: Array | None = None

    @property
    def behaviour_logprobs(self) -> Array:
        """[N, T] float32, under the distribution that the tokens were drawn from."""
        return self.sampler_logprobs if self.truncated_logprobs is None else self.truncated_logprobs


@struct.dataclass
class Scores:
    """What rewards the completions got. A row whose verdict is not scorable is masked, never rewarded with 0."""

    reward: Array  # [N] float32, 0 where not valid
    valid: Array  # [N] bool, the verdict can be trained on
    verdict: Array  # [N] int8, a jrl.tasks.verdict.Status
    outcome: Array  # [N] float32, the first verifier's own reward, before weighting and shaping
    # Beside `reward`, on sampled tokens: [N, T] float32, 0 where a row is not valid; None: no source gives any
    token_reward: Array | None = None
    components: dict[str, Array] | None = None  # {name: [N] float32}, unweighted; NaN where there is no number
    task: Array | None = None  # [N] uint32, a hash of the name of the task that the prompt is of; 0 on padding


@struct.dataclass
class PackedBatch:
    """Sequences packed into rows of one length, cut into micro-batches [M, R, L]: one optimizer step, not yet judged.

    `segment` is the sequence's place in its row, 0..S-1, S where there is padding, and more where several sequences
    share a prompt; those see it by `shared_prefix`, or by `prefix_row` where it may be in another row.
    `sequence` is N where a place is empty. `num_real` says how many of the M micro-batches hold anything; the rest are
    never computed.
    """

    tokens: Array  # [M, R, L] int32
    positions: Array  # [M, R, L] int32, place of the token in its own sequence
    segment: Array  # [M, R, L] int32
    shared_prefix: Array | None  # [M, R, L] int32, the other segment a token sees, or its own; None: no shared prompt
    prefix_row: Array | None  # [M, R, P - 1] int32 (or 1): which of the shard's rows holds column c; -1: none
    action_mask: Array  # [M, R, L] bool
    behaviour_logprobs: Array | None  # [M, R, L] float32, under the sampling distribution; None: rows were not sampled
    sampler_logprobs: Array | None  # [M, R, L] float32, as the sampler gave them; what the learner's are compared with
    sequence: Array  # [M, R, S] int32, which of the N sequences is at a place
    temperature: Array  # [] float32, log-probs are of logits / temperature
    num_real: Array  # [] int32
    routes: Array | None = None  # [M, R, L, F], as Rollout.routes; None: routers decide


@struct.dataclass
class Recomputed:
    """What the weights from before an update say of a packed batch. A field is None where the objective has no need."""

    old_logprobs: Array | None = None  # [M, R, L] float32; None: the only update of its batch, or nothing asks for them
    old_values: Array | None = None  # [M, R, L] float32, of the value head
    old_entropy: Array | None = None  # [M, R, L] float32, nats
    old_sum_squared: Array | None = None  # [M, R, L] float32, sum over the vocabulary of p_v^2
    ref_logprobs: Array | None = None  # [M, R, L] float32, under the role `reference`
    teacher_logprobs: Array | None = None  # [M, R, L] float32, under the role `teacher`
    row_values: Array | None = None  # [M, R, S] float32, mean score of other roles


@struct.dataclass
class SequenceTargets:
    """What is known of the sequences of a packed batch: by row and place, 0 where a place is empty."""

    counts: Array  # [M, R, S] bool, enters the loss
    label: Array  # [M, R, S] float32, 1: preferred, 0: not
    weight: Array  # [M, R, S] float32
    unit: Array  # [M, R, S] int32, which comparison of the batch the sequence is part of; -1: none
    denominator: Array  # [] float32, what the sum over sequences of the whole optimizer step is divided by
    baseline: Array | None = None  # [] float32 or wider, as Objective.sequence_baseline gave it; None: it has none
    # [M, R, S] float32, what its data say that it is worth; [M, R, S, K] of K attributes; None: they do not
    value: Array | None = None


@struct.dataclass
class PretrainingBatch:
    """Packed stored rows that an optimizer step on samples imitates as well (L17). Every action enters the loss."""

    packed: PackedBatch
    num_tokens: Array  # [] float32, actions of the whole optimizer step, at least 1
    coefficient: Array  # [] float32, of the mean over these


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
    denominator: Array  # [] float32, what the weighted sum of the whole optimizer step is divided by
    selected: Array | None = None  # [M, R, L] bool, tokens that the loss treats in another way; None: no such choice
    positive_weights: Array | None = None  # [M, R, L] float32, as Tokens have them; None: no row has a mean of its own
    staleness: Array | None = None  # [M, R, L] int32, versions that a sampled token is old; None: nothing asks for it
    pretraining: PretrainingBatch | None = None  # None: nothing is imitated beside the samples


@struct.dataclass
class ModelState:
    """One model of a run, under the name of its role."""

    params: PyTree  # trained leaves: all weights, or the adapters to `frozen`
    frozen: PyTree | None  # weights under adapters; None: none, or those of `shares`
    heads: dict[str, Array]  # by name, [members, D, outputs]; trained with `params`
    opt_state: PyTree | None  # None: no stage trains this model now
    version: Array  # [] int32, updates in the stage that trains it; tokens carry the policy's
    shares: str | None = struct.field(pytree_node=False, default=None)  # the role whose frozen weights these stand on


@struct.dataclass
class TrainState:
    """Everything on the device that influences training, and nothing else. One pytree, one checkpoint.

    Roles: `policy` always; `reference`, the policy as the stage found it, where the objective compares with it;
    `previous`, `previous_2` and so on, older versions of the policy, where a step with lag may have to refill;
    `average`, a moving average of the model that is trained, where the optimizer asks; `reward`, `teacher` and others
    that a stage trains.
    """

    step: Array  # [] int32, completed steps of all stages
    models: dict[str, ModelState]
    objective: PyTree  # the state of the stage's objective (Objective.init_state)
    key: Array  # typed key, root of every named draw; never consumed
    skipped: Array  # [] int32, updates skipped since the start: not finite, or with no token to learn from


def traced(cls: type) -> type:
    """Returns `cls` as a frozen, keyword-only dataclass that is a pytree.

    Fields annotated `float`, `float | None` or with another traced class are leaves: they travel as arrays, so
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
