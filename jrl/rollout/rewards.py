"""Learned rewards: a published classifier scores whole conversations on the device.

The classifier reads a conversation with its own chat template and tokenizer, whatever the policy's are. Each of its
labels is an objective. Their weighted sum is added to the reward of the verifiers. Several folders of one shape form an
ensemble: their weights are stacked along a leading axis, and one program runs the members one at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl import paths
from jrl.device.placement import fetch, place_on_mesh
from jrl.device.sharding import batch_sharding, constrain, replicated, rows_over_shards
from jrl.models import decoder
from jrl.models.families import SCORE_AT
from jrl.models.heads import REWARD, read_head
from jrl.models.pretrained.published import OWN_TOKENIZER, Published, classifier_of, load_classifier
from jrl.models.pretrained.tokenizer import published_tokenizer
from jrl.models.shape import Decoder, check_divides, check_length, for_length
from jrl.ops.ensembles import standardized
from jrl.rollout.ensembles import Ensemble, EnsembleMean, aggregate
from jrl.rollout.reward_gate import Gate, gated_scores, load_gate
from jrl.rollout.sources import Completions, LearnedScores, RewardSource
from jrl.tasks.data.stored import completion_of
from jrl.tasks.example import Message
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.tasks.tokenizers.published import VOCABULARIES, HuggingFace, PublishedTokenizer, fit_to_embedding
from jrl.types import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A published classifier whose scores add to the reward: a folder with config.json, safetensors, a tokenizer."""

    path: str  # the folder
    members: tuple[str, ...] = ()  # folders of the other members of an ensemble: the same shape, labels and tokenizer
    ensemble: Ensemble = dataclasses.field(default_factory=EnsembleMean)  # one score from those of the members
    # So many of the run's own training examples, with their answers, score 0 on average; in an ensemble their standard
    # deviation is 1 for every member, too. None: scores are as the folder gives them.
    normalize_on: int | None = None
    gate: Gate | None = None  # how its labels are mixed, by the prompt; None: by `weights`
    weights: tuple[float, ...] = (1.0,)  # of each of its labels in the reward, or of the gated reward alone
    length: int = 1024  # most tokens of a conversation, by the classifier's tokenizer; longer ones are masked
    batch: int = 16  # conversations judged at once
    dtype: Literal["float32", "bfloat16"] = "float32"  # of matmuls
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # weights are cast to it on the way in

    def __post_init__(self) -> None:
        for name in ("length", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"RewardModel.{name} must be at least 1; got {getattr(self, name)}")
        if self.normalize_on is not None and self.normalize_on < 2:
            raise ValueError(f"RewardModel.normalize_on must be at least 2 examples, or None; got {self.normalize_on}. "
                             "256 is usual")  # fmt: skip
        if self.gate is not None and self.members:
            raise ValueError("RewardModel.gate reads the hidden states of one model; leave RewardModel.members out")
        if bad := [weight for weight in self.weights if not abs(weight) <= LARGEST_REWARD]:
            raise ValueError(f"RewardModel.weights has {bad[0]}; they must be finite, in float32 too")

    @property
    def published(self) -> tuple[Published, ...]:
        """The folders of all members, `path` first."""
        return tuple(
            Published(path=path, dtype=self.dtype, param_dtype=self.param_dtype) for path in (self.path, *self.members)
        )


class OpenClassifier(NamedTuple):
    """A loaded reward model."""

    labels: tuple[str, ...]
    cfg: Decoder
    tokenizer: Any
    params: PyTree  # of a single model, or of all members of an ensemble, stacked along a leading axis
    # (params, tokens [N, W], length [N]) -> [N, labels]; with a gate (.., prompt_length [N]) -> [N, 1 + labels]
    program: Callable[..., Array]
    of_members: Callable[..., Array]  # (params, tokens, length) -> [members, N, labels], not aggregated
    mesh: Mesh
    batch: int  # N
    width: int  # W
    names: tuple[str, ...]  # metric names of the columns that `program` returns
    weights: tuple[float, ...]  # weight of each column in the reward
    gated: bool = False
    answer_end: bool = False  # as in Classifier


def open_classifier(
    config: RewardModel,
    mesh: Mesh,
    program: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    tokenizer: Any,
    announce: Callable[[int, int], None] | None = None,
    width: int | None = None,
) -> OpenClassifier:
    """Reads the weights onto `mesh`.

    Args:
      program: (name, function) -> the function compiled, such as a run's program cache.
      tokenizer: that of the folder, see `tokenizer_of`.
      announce: called with (bytes read, total bytes).
      width: columns that are computed, at least config.length, the longest conversation; None: config.length.

    Raises: ValueError for a folder that is not a classifier, if there is not one weight per label, and if the members
    of an ensemble differ in shape, labels or tokenizer.
    """
    first, *others = config.published
    _, cfg, labels, pad_id, answer_end = classifier_of(first)
    if config.gate is not None and len(config.weights) != 1:
        raise ValueError(f"RewardModel.weights has {len(config.weights)} numbers; a gated reward has one")
    if config.gate is None and len(config.weights) != len(labels):
        raise ValueError(f"RewardModel.weights has {len(config.weights)} numbers; {config.path} has the "
                         f"{len(labels)} labels {', '.join(labels)}")  # fmt: skip
    check_divides(cfg, mesh)
    cfg = for_length(cfg, config.length)
    check_length(cfg, config.length)
    for other in others:
        check_alike(first, other)
    params = stacked([load_classifier(published, mesh, announce) for published in config.published], mesh)
    batch = rows_over_shards(config.batch, mesh)
    member_scores = functools.partial(member_rewards, members=len(config.published), cfg=cfg, pad_id=pad_id)
    names = tuple(f"RewardModel/{label}" for label in labels)
    if config.gate is None:
        score = lambda *arrays: aggregate(config.ensemble, member_scores(*arrays))
        names = names if len(labels) > 1 else ("RewardModel",)
        weights = config.weights
    else:
        place = lambda x: place_on_mesh(x, replicated(mesh))
        params = {**params, GATE: jax.tree.map(place, load_gate(config.gate, labels, cfg.width))}
        score = functools.partial(gated, gate=config.gate, labels=labels, cfg=cfg, pad_id=pad_id)
        names = ("RewardModel", *names)
        weights = (*config.weights, *(0.0 for _ in labels))
    try:
        if isinstance(tokenizer, PublishedTokenizer):
            fit_to_embedding(tokenizer, cfg.vocab_size)
        elif tokenizer.filled > cfg.vocab_size:
            raise ValueError(f"its tokenizer fills {tokenizer.filled} ids, and its embedding has {cfg.vocab_size} rows")
    except ValueError as error:
        raise ValueError(f"RewardModel.path: {config.path}: {error}") from error
    return OpenClassifier(
        labels=labels,
        cfg=cfg,
        tokenizer=tokenizer,
        params=params,
        program=program("reward", score),
        of_members=program("reward_members", member_scores),
        mesh=mesh,
        batch=batch,
        width=width or config.length,
        names=names,
        weights=weights,
        gated=config.gate is not None,
        answer_end=answer_end,
    )


def check_alike(first: Published, other: Published) -> None:
    """Raises ValueError if two folders cannot be members of one ensemble."""
    a, b = classifier_of(first), classifier_of(other)
    where = f"RewardModel.members: {other.path}"
    if a.labels != b.labels:
        raise ValueError(f"{where} has {len(b.labels)} labels ({', '.join(b.labels)}), and {first.path} has "
                         f"{len(a.labels)} ({', '.join(a.labels)}); members of an ensemble have the same")  # fmt: skip
    fields = [field.name for field in dataclasses.fields(a.cfg)
              if getattr(a.cfg, field.name) != getattr(b.cfg, field.name)]  # fmt: skip
    if fields or (a.pad_id, a.answer_end) != (b.pad_id, b.answer_end):
        names = ", ".join(fields or ["pad_token_id" if a.pad_id != b.pad_id else SCORE_AT])
        raise ValueError(f"{where} is not like {first.path}: {names} differ; they are stacked")  # fmt: skip
    fingerprints = [tokenizer_of(published.path).fingerprint for published in (first, other)]
    if fingerprints[0] != fingerprints[1]:
        raise ValueError(f"{where} has another tokenizer or chat template than {first.path}; the members of an "
                         "ensemble read the same tokens")  # fmt: skip


def tokenizer_of(path: str, date: str | None = None) -> Any:
    """Returns the tokenizer of a reward model's folder. Raises ValueError if it has none.

    Args:
      date: the date that its chat template uses; None: today.
    """
    chosen = HuggingFace(path=path, date=date)
    if (tokenizer := published_tokenizer(paths.readable_without_weights(path), chosen=chosen)) is None:
        names = [*VOCABULARIES, f"{OWN_TOKENIZER}/"]
        raise ValueError(f"Config.reward: {path!r} holds no tokenizer to read conversations with: neither "
                         f"{' nor '.join(names)}")  # fmt: skip
    return tokenizer


def stacked(members: list[PyTree], mesh: Mesh) -> PyTree:
    """Returns the members' parameters stacked along a leading axis, leaf by leaf; a single member's unchanged."""
    if len(members) == 1:
        return members[0]
    leaves, structure = [jax.tree.leaves(member) for member in members], jax.tree.structure(members[0])
    members.clear()
    stacked_leaves = []
    with jax.set_mesh(mesh):
        for i in range(len(leaves[0])):
            stacked_leaves.append(jnp.stack([leaf[i] for leaf in leaves]))
            for leaf in leaves:
                leaf[i] = None  # frees it, so that at most one leaf exists twice
    return jax.tree.unflatten(structure, stacked_leaves)


def member_rewards(
    params: PyTree, tokens: Array, length: Array, *, members: int, cfg: Decoder, pad_id: int | None
) -> Array:
    """Returns the scores of every member, [members, N, labels] float32, computed one member at a time.

    Args:
      params: as for `rewards`; those of several members stacked along a leading axis.
    """
    score = lambda member: rewards(member, tokens, length, cfg=cfg, pad_id=pad_id)
    return score(params)[None] if members == 1 else jax.lax.map(score, params)


def normalization(
    opened: OpenClassifier, demonstrations: Sequence[Sequence[Message]], *, unit: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean of every member's scores of demonstrations, which R10 subtracts, and their standard deviation if
    `unit`, else 1, which R11 divides by; [members, labels] float32 each.

    Raises: ValueError if fewer than two demonstrations can be scored.
    """
    ids, problems = encoded(opened, demonstrations)
    if len(ids) < 2:
        problem = next(filter(None, problems), "there is no training example with an answer")
        raise ValueError(f"RewardModel.normalize_on: the reward model can judge {len(ids)} of {len(problems)} "
                         f"demonstrations, and at least 2 are needed: {problem}")  # fmt: skip
    scores = classify(opened._replace(program=opened.of_members, gated=False), ids, rows=1).astype(np.float64)
    std = scores.std(axis=1) if unit else np.ones_like(scores[:, 0])
    return scores.mean(axis=1).astype(np.float32), std.astype(np.float32)


def normalized(opened: OpenClassifier, center: np.ndarray, scale: np.ndarray) -> OpenClassifier:
    """Returns the reward model with its members' scores standardized. center, scale: [members, labels]."""
    place = lambda x: place_on_mesh(np.asarray(x, np.float32), replicated(opened.mesh))
    if len(center) == 1:  # the parameters of a single member have no leading axis
        center, scale = center[0], scale[0]
    return opened._replace(params={**opened.params, CENTER: place(center), SCALE: place(scale)})


CENTER, SCALE = "reward_center", "reward_scale"  # parameters next to the head, [labels] each: R10's normalization
GATE = "reward_gate"  # the layers of a gate, next to the head


def rewards(params: PyTree, tokens: Array, length: Array, *, cfg: Decoder, pad_id: int | None) -> Array:
    """Returns R10 (R30, detail 11): the head's output at each row's last token that is not `pad_id`, or at its first
    token if all are; [N, labels] float32.

    Args:
      params: of a decoder, with the head as the entry REWARD; if it is normalized, with CENTER and SCALE.
      tokens: [N, W] int32. length: [N] int32, at least 1.
      pad_id: None: the last token, whatever it is.

    Source: transformers' GenericForSequenceClassification, which also skips `pad_id` in rows without padding: a chat
    template may end every turn with it.
    """
    return _scores(params, _hidden(params, tokens, cfg), tokens, length, pad_id)


def gated(
    params: PyTree,
    tokens: Array,
    length: Array,
    prompt_length: Array,
    *,
    gate: Gate,
    labels: Sequence[str],
    cfg: Decoder,
    pad_id: int | None,
) -> Array:
    """Returns R12: the labels mixed by a gate that reads the prompt's last token, then the labels themselves,
    [N, 1 + labels] float32.

    Args:
      params: as for `rewards`, with the gate's layers as GATE. prompt_length: [N] int32, tokens before the answer.
    """
    hidden = _hidden(params, tokens, cfg)
    objectives = _scores(params, hidden, tokens, length, pad_id)
    prompt_state = _state_at(hidden, jnp.maximum(prompt_length, 1)[:, None] - 1)
    return gated_scores(gate, params[GATE], labels, objectives, prompt_state)


def _columns(tokens: Array) -> Array:
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return constrain(columns, "batch", None)


def _hidden(params: PyTree, tokens: Array, cfg: Decoder) -> Array:
    return decoder.forward(params, tokens, _columns(tokens), None, cfg)[0]


def _state_at(hidden: Array, column: Array) -> Array:
    """Returns the hidden state at one column of each row, [N, D]. column: [N, 1] int32."""
    return jnp.where((_columns(hidden[..., 0]) == column)[..., None], hidden, 0).sum(1)


def _scores(params: PyTree, hidden: Array, tokens: Array, length: Array, pad_id: int | None) -> Array:
    """Returns the head's outputs for rows with these hidden states, [N, labels] float32."""
    columns = _columns(tokens)
    real = columns < length[:, None]
    if pad_id is not None:
        real = real & (tokens != pad_id)
    last = _state_at(hidden, jnp.where(real, columns, 0).max(1, keepdims=True))
    scores = read_head(params[REWARD], last)[0].astype(jnp.float32)  # a published head has one member
    return standardized(scores, params[CENTER], params[SCALE]) if CENTER in params else scores


def dispatch(
    opened: OpenClassifier, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int] = ()
) -> list[Array]:
    """Dispatches the batches of `classify` and returns their device arrays without waiting.

    Args:
      prompt_lengths: tokens of each sequence before the answer; needed if the reward model has a gate.
    """
    outputs = []
    for start in range(0, len(sequences), opened.batch):
        part = sequences[start : start + opened.batch]
        tokens, length = np.zeros((opened.batch, opened.width), np.int32), np.ones(opened.batch, np.int32)
        for row, ids in enumerate(part):
            tokens[row, : len(ids)], length[row] = ids, len(ids)
        arrays = [tokens, length]
        if opened.gated:
            before_answer = np.ones(opened.batch, np.int32)
            before_answer[: len(part)] = prompt_lengths[start : start + opened.batch]
            arrays.append(before_answer)
        place = lambda x: place_on_mesh(x, batch_sharding(opened.mesh, x.ndim))
        with jax.set_mesh(opened.mesh):
            outputs.append(opened.program(opened.params, *map(place, arrays)))
    return outputs


def classify(opened: OpenClassifier, sequences: Sequence[Sequence[int]], rows: int = 0) -> np.ndarray:
    """Returns the labels' scores of sequences of 1 to `width` ids each, [N, labels] float32.

    Args:
      rows: the axis of the program's output that the sequences are along.
    """
    outputs = dispatch(opened, sequences)
    if not outputs:
        return np.zeros((0, len(opened.labels)), np.float32)
    return np.concatenate(fetch(outputs), axis=rows).take(range(len(sequences)), axis=rows)


class _Dispatched(NamedTuple):
    problems: list[str]  # [N], why a conversation is not scored; "" if it is
    labels: list[Array]  # of those that are scored, by batch


def reward_model_source(opened: OpenClassifier) -> RewardSource:
    """Returns a published classifier as a source of rewards."""

    def submit(batch: Completions) -> _Dispatched:
        prompts = [batch.visits[row // batch.samples].example.messages for row in range(len(batch.texts))]
        conversations = [[*messages, Message("assistant", text)] for messages, text in zip(prompts, batch.texts)]
        ids, problems = encoded(opened, conversations)
        lengths = []
        if opened.gated:
            lengths = [prompt_length(opened, messages) for messages, problem in zip(prompts, problems) if not problem]
        return _Dispatched(problems, dispatch(opened, ids, lengths))

    def collect(ticket: _Dispatched) -> LearnedScores:
        problems = list(ticket.problems)
        scored = [row for row, problem in enumerate(problems) if not problem]
        values = np.full((len(problems), len(opened.names)), np.nan, np.float32)
        if scored:
            values[scored] = np.concatenate(fetch(ticket.labels))[: len(scored)]
        for row in scored:
            if not np.isfinite(values[row]).all():
                problems[row] = f"its labels are {', '.join(map(str, values[row]))}, which are not numbers"
                values[row] = np.nan
        return LearnedScores(opened.names, opened.weights, values, problems)

    return RewardSource(submit, collect, opened.names)


def encoded(opened: OpenClassifier, conversations: Sequence[Sequence[Message]]) -> tuple[list[list[int]], list[str]]:
    """Returns the ids of the conversations that can be scored, and for every conversation why it cannot, or ""."""
    results = [encode(opened, messages) for messages in conversations]
    return [ids for ids, problem in results if not problem], [problem for _, problem in results]


def conversation_ids(tokenizer: Any, messages: Sequence[Message], *, answer_end: bool) -> list[int]:
    """Returns the ids of a conversation that ends with an answer, as a classifier reads it.

    Args:
      answer_end: encode the prompt and the answer as for a policy, up to the token that ends the answer; False: encode
        all that the chat template writes, which may be more.

    Raises: ValueError if the template rejects the conversation.
    """
    if not answer_end:
        return tokenizer.encode_conversation(messages, add_generation_prompt=False)
    return [*tokenizer.encode_prompt(messages[:-1]), *completion_of(messages[-1].content, tokenizer)]


def prompt_length(opened: OpenClassifier, messages: Sequence[Message]) -> int:
    """Returns the number of tokens before the answer, its header included, by the reward model's tokenizer."""
    return len(opened.tokenizer.encode_prompt(messages))


def encode(opened: OpenClassifier, messages: Sequence[Message]) -> tuple[list[int], str]:
    """Returns a conversation's ids by the reward model's tokenizer, and why they cannot be scored, or ""."""
    try:
        ids = conversation_ids(opened.tokenizer, messages, answer_end=opened.answer_end)
    except ValueError as error:
        return [], str(error)
    if len(ids) > opened.width:
        return [], f"{len(ids)} tokens; RewardModel.length is {opened.width}"
    return ids, ""
