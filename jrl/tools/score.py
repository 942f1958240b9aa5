"""Scores given texts under a trained policy, with the learner's own packed code path, for `jrl score`."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import paths
from jrl.device.precision import full_precision
from jrl.device.sharding import (
    SEQUENCE,
    MeshShape,
    batch_sharding,
    batch_shards,
    make_mesh,
    replicated,
    row_sharding,
    row_shards,
)
from jrl.learning import layout, learner, pack
from jrl.learning.row_layout import row_layout
from jrl.models.attention.kernels import NO_KERNEL
from jrl.models.contract import Model
from jrl.models.families import labels_of
from jrl.models.heads import REWARD
from jrl.models.pretrained.published import Published, classifier_of, read_config
from jrl.models.pretrained.tokenizer import published_tokenizer
from jrl.models.shape import Decoder, check_length, for_length
from jrl.ops import segments
from jrl.rollout.rewards import RewardModel, classify, conversation_ids, open_classifier
from jrl.run.trained import Trained, is_published, without_tokenizer
from jrl.tasks.envs.columns import BadRow, messages_of
from jrl.tasks.example import Message
from jrl.types import Array, PyTree

CLASSIFIER_TOKENS = 16_384  # most tokens of a row for a published classifier: attention holds a score for every pair
WIDTH_STEP = 8192  # rows wider than two of these are a multiple of it; a power of two could be half empty
SCORES_BYTES = 2**28  # of attention scores that exist at once, in wider rows
SEQUENCES = 64  # most sequences of a batch


def score_file(trained: Trained, rows: str | Path, out: str | Path) -> int:
    """Writes {"tokens","logprobs"} for every row of a file, or {"tokens","reward"} if the model has a reward head: one
    line each, in order. Returns how many.

    Raises: ValueError naming file and line for a row that cannot be scored; nothing is written then.
    """
    sequences = read_rows(rows, trained.policy.tokenizer, trained.policy.cfg.vocab_size)
    if REWARD in trained.heads:
        rewards = score_rewards(trained, sequences)
        rows_out = [{"tokens": ids, "reward": float(value)} for ids, value in zip(sequences, rewards)]
    else:
        scored = score(trained, sequences)
        rows_out = [{"tokens": ids, "logprobs": [float(x) for x in values]} for ids, values in zip(sequences, scored)]
    lines = [json.dumps(row) for row in rows_out]
    paths.write_bytes_atomic(out, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


def is_classifier(folder: Path) -> bool:
    """Returns whether a folder holds a published classifier."""
    return is_published(folder) and labels_of(read_config(folder), str(folder / "config.json")) is not None


@full_precision()
def judge_file(
    folder: Path, rows: str | Path, out: str | Path, announce: Callable[[int, int], None] | None = None
) -> int:
    """Writes {"tokens","rewards": {label: number}} of a published classifier for every row of a file. Returns how many.

    `conversation_ids` encodes conversations.

    Raises: ValueError naming file and line for a row that cannot be judged; nothing is written then.
    """
    classifier = _classifier(folder)
    sequences = read_rows(rows, classifier.tokenizer, classifier.cfg.vocab_size, answer_end=classifier.answer_end,
                          most_tokens=CLASSIFIER_TOKENS)  # fmt: skip
    rewards = classify_sequences(classifier, sequences, announce)
    lines = [
        json.dumps({"tokens": tokens, "rewards": dict(zip(classifier.labels, map(float, values)))})
        for tokens, values in zip(sequences, rewards)
    ]
    paths.write_bytes_atomic(out, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


@full_precision()
def judge_conversations(
    folder: Path, conversations: Sequence[Sequence[Message]], announce: Callable[[int, int], None] | None = None
) -> dict[str, np.ndarray]:
    """Returns the scores of a published classifier for conversations, {label: [n] float32}. `conversation_ids` encodes
    them.

    Raises: ValueError for a folder without a tokenizer or template, and for a conversation that is too long.
    """
    classifier = _classifier(folder)
    sequences = [
        conversation_ids(classifier.tokenizer, each, answer_end=classifier.answer_end) for each in conversations
    ]
    if (longest := max(map(len, sequences))) > CLASSIFIER_TOKENS:
        raise ValueError(f"{folder}: a conversation has {longest} tokens; at most {CLASSIFIER_TOKENS} are judged")
    rewards = classify_sequences(classifier, sequences, announce)
    return {label: rewards[:, k] for k, label in enumerate(classifier.labels)}


class _Classifier(NamedTuple):
    """A published classifier, without its weights."""

    folder: Path
    cfg: Decoder
    labels: tuple[str, ...]
    tokenizer: Any
    answer_end: bool  # as in Classifier


def _classifier(folder: Path) -> _Classifier:
    _, cfg, labels, _, answer_end = classifier_of(Published(path=str(folder)))
    tokenizer = published_tokenizer(folder)
    tokenizer = without_tokenizer(folder, cfg) if tokenizer is None else tokenizer
    return _Classifier(folder, cfg, labels, tokenizer, answer_end)


def classify_sequences(
    classifier: _Classifier, sequences: Sequence[Sequence[int]], announce: Callable[[int, int], None] | None
) -> np.ndarray:
    """Returns the scores of a published classifier for rows of ids, [n, labels] float32."""
    folder, cfg, labels, tokenizer, _ = classifier
    longest = max(map(len, sequences), default=1)
    # No wider than the table of learned positions: padding beyond it would have no position.
    width = max(longest, min(_width(longest), cfg.learned_positions or CLASSIFIER_TOKENS))
    config = RewardModel(path=str(folder), weights=(1.0,) * len(labels), length=longest, batch=max(1, 8192 // width))
    mesh = make_mesh(MeshShape())
    jax.set_mesh(mesh)
    opened = open_classifier(config, mesh, lambda name, fn: jax.jit(fn), tokenizer, announce, width)
    return classify(opened, sequences)


def _width(longest: int) -> int:
    """Returns the width of rows that fit `longest` tokens: a power of two of at least 128; above 16,384 a multiple of
    8,192."""
    width = 128
    while width < longest:
        width = 2 * width if width < 2 * WIDTH_STEP else width + WIDTH_STEP
    return width


def _in_blocks(cfg: Decoder, width: int) -> Decoder:
    """Returns the decoder with blocked attention if rows of `width` tokens are too wide for all scores at once."""
    if width <= 2 * WIDTH_STEP or cfg.attention not in NO_KERNEL or cfg.attention_block is not None:
        return cfg
    return dataclasses.replace(cfg, attention_block=max(SCORES_BYTES // (4 * cfg.heads * width), 1))


class _PackedLayout(NamedTuple):
    """How sequences are packed for scoring: all batches have one shape, set by the longest sequence."""

    cfg: Any  # of the model, for this width
    chunk: int  # positions whose logits exist at once
    shape: pack.Shape

    def batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Yields the sequences of each batch."""
        for start in range(0, len(sequences), self.shape.sequences):
            yield sequences[start : start + self.shape.sequences]


def _packed_layout(trained: Trained, sequences: Sequence[Sequence[int]]) -> _PackedLayout:
    policy = trained.policy
    shards = batch_shards(policy.mesh)
    longest = max(map(len, sequences), default=0)
    cfg = policy.cfg
    if isinstance(cfg, Decoder):
        cfg = for_length(cfg, longest)
        check_length(cfg, longest)
    # No wider than the table of learned positions: padding beyond it would have no position.
    width = _width(longest)
    if isinstance(cfg, Decoder):
        width = max(longest, min(width, cfg.learned_positions or width))
        cfg = _in_blocks(cfg, width)
    settings = policy.config.stages[-1].learner
    budget = max(1, settings.micro_batch_tokens // width)
    count = shards * -(-min(SEQUENCES, max(len(sequences), 1), 4 * budget) // shards)
    rows, shares = row_shards(policy.mesh), policy.mesh.shape[SEQUENCE]
    config = layout.Learner(
        row_length=layout.divisible_length(width, shares),
        micro_batch_tokens=settings.micro_batch_tokens,
        sequences_per_row=settings.sequences_per_row,
        logprob_chunk=settings.chunk,
    )
    return _PackedLayout(cfg, config.chunk, layout.packed_shape(config, count, width, rows, shares=shares))


@full_precision()
def score(trained: Trained, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns log p(token t | tokens before t) at temperature 1 for every sequence, each [length] float32 or wider.

    The first token has no predecessor: its value is 0.
    """
    packed = _packed_layout(trained, sequences)
    static = dict(model=trained.policy.model, cfg=packed.cfg, chunk=packed.chunk)
    program = jax.jit(functools.partial(_logprobs, **static, width=packed.shape.width, rows=packed.shape.sequences))
    logprobs: list[np.ndarray] = []
    for batch in packed.batches(sequences):
        values = np.asarray(jax.device_get(program(trained.params, *_place_batch(trained, batch, packed.shape))))
        for tokens, row in zip(batch, values):
            logprobs.append(np.concatenate([np.zeros(1, row.dtype), row[1 : len(tokens)]]))
    return logprobs


@full_precision()
def score_rewards(trained: Trained, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the output of a role's reward head at the last token of every sequence, [N] float32 or wider. Several
    outputs are combined by `Trained.attribute_weights`, else averaged."""
    packed = _packed_layout(trained, sequences)
    static = dict(model=trained.policy.model, cfg=packed.cfg, attribute_weights=trained.attribute_weights)
    program = jax.jit(functools.partial(_rewards, **static))
    rewards: list[np.ndarray] = []
    for batch in packed.batches(sequences):
        arrays = _place_batch(trained, batch, packed.shape)
        sequence, scores = jax.device_get(program(learner.Weights(trained.params, trained.heads), *arrays))
        values = np.zeros(packed.shape.sequences, scores.dtype)
        placed = sequence < len(batch)
        values[sequence[placed]] = scores[placed]
        rewards.append(values[: len(batch)])
    return np.concatenate(rewards) if rewards else np.zeros(0, np.float32)


def _rewards(
    weights: learner.Weights, tokens: Array, mask: Array, plan: pack.PackingPlan, temperature: Array, *,
    model: Model, cfg: Any, attribute_weights: tuple[float, ...] | None,
) -> tuple[Array, Array]:  # fmt: skip
    packed = pack.pack_tokens(tokens, mask, plan, temperature)
    scores = learner.sequence_scores(weights, packed, model=model, cfg=cfg, attribute_weights=attribute_weights)
    return packed.sequence, scores


@full_precision()
def embeddings(trained: Trained, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the model's last hidden state at the last token of every sequence, [N, width] float32."""
    packed = _packed_layout(trained, sequences)
    program = jax.jit(functools.partial(_embeddings, model=trained.policy.model, cfg=packed.cfg))
    states_out = np.zeros((len(sequences), trained.policy.cfg.width), np.float32)
    for number, batch in enumerate(packed.batches(sequences)):
        sequence, states = jax.device_get(program(trained.params, *_place_batch(trained, batch, packed.shape)))
        placed = sequence < len(batch)
        states_out[number * packed.shape.sequences + sequence[placed]] = states[placed]
    return states_out


def _embeddings(
    params: PyTree, tokens: Array, mask: Array, plan: pack.PackingPlan, temperature: Array, *, model: Model, cfg: Any
) -> tuple[Array, Array]:
    packed = pack.pack_tokens(tokens, mask, plan, temperature)

    def read(i: Array) -> Array:
        micro = learner.micro_batch(packed, i)
        hidden = row_layout().joined(learner.hidden_of(params, micro, model, cfg)[0])
        following = segments.next_column(micro.segment, -1)
        places = jnp.arange(micro.sequence.shape[-1])[None, :, None]
        at_last = (micro.segment != following)[:, None, :] & (micro.segment[:, None, :] == places)  # [R, S, L]
        # The states of all other tokens may be anything, and 0 * NaN is NaN.
        clean = jnp.where(jnp.any(at_last, axis=1)[..., None], hidden, 0).astype(jnp.float32)
        return jnp.einsum("rsl,rld->rsd", at_last.astype(jnp.float32), clean)

    return packed.sequence, jax.lax.map(read, jnp.arange(packed.sequence.shape[0]))


def _logprobs(
    params: PyTree,
    tokens: Array,
    mask: Array,
    plan: pack.PackingPlan,
    temperature: Array,
    *,
    model: Model,
    cfg: Any,
    chunk: int,
    width: int,
    rows: int,
) -> Array:
    packed = pack.pack_tokens(tokens, mask, plan, temperature)
    values = learner.logprobs(learner.Weights(params, {}), packed, model=model, cfg=cfg, chunk=chunk)
    return pack.unpack(values, plan.source, width, rows)


def _place_batch(trained: Trained, batch: Sequence[Sequence[int]], shape: pack.Shape) -> tuple[Any, ...]:
    """Returns the tokens [N, T] int32, mask [N, T] bool, packing plan and temperature of a batch, on the devices."""
    mesh = trained.policy.mesh
    tokens = np.zeros((shape.sequences, shape.width), np.int32)
    mask = np.zeros(tokens.shape, bool)
    lengths = np.zeros(shape.sequences, np.int32)
    for i, sequence in enumerate(batch):
        tokens[i, : len(sequence)], mask[i, : len(sequence)], lengths[i] = sequence, True, len(sequence)
    rows = row_sharding(mesh)
    place = lambda x: jax.device_put(x, rows if np.ndim(x) == 3 else replicated(mesh))
    by_row = lambda x: jax.device_put(x, batch_sharding(mesh, x.ndim))
    plan = jax.tree.map(place, pack.plan(lengths, shape, 0, 1))
    return by_row(tokens), by_row(mask), plan, place(np.float32(1))


def read_rows(
    path: str | Path, tokenizer: Any, vocab_size: int, *, answer_end: bool = True, most_tokens: int | None = None
) -> list[list[int]]:
    """Returns the ids of every row of a JSONL file: {"tokens": [...]} unchanged, {"text": ...} encoded after the
    tokenizer's start ids, {"messages": [...]}, which ends with the assistant's message, by `conversation_ids`.

    Args:
      answer_end: see `conversation_ids`.
      most_tokens: most tokens of a row; None: any number.

    Raises: ValueError naming file and line.
    """
    return [list(ids) for ids in _rows(path, tokenizer, vocab_size, answer_end, most_tokens)]


def _rows(
    path: str | Path, tokenizer: Any, vocab_size: int, answer_end: bool, most_tokens: int | None
) -> Iterator[list[int]]:
    try:
        lines = paths.read_foreign(path, paths.MOST_ROWS_BYTES).split(b"\n")
    except OSError as error:
        raise ValueError(f"the rows to score cannot be read: {error}") from error
    if lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ValueError(f"{path} is empty; give it a row a line")
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            raise ValueError(f"{place} is empty; give it a row a line")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not JSON: {error}") from error
        if not isinstance(row, dict) or len(row.keys() & {"tokens", "text", "messages"}) != 1:
            raise ValueError(f'{place}: a row is {{"tokens": [ids]}}, {{"text": "..."}} or {{"messages": [...]}}')
        if "text" in row:
            if not isinstance(row["text"], str) or not row["text"]:
                raise ValueError(
                    f"{place}: text is {json.dumps(row['text'])[:80]}; it must be a string that is not empty"
                )
            ids = [*tokenizer.start_ids, *tokenizer.encode(row["text"])]
        elif "messages" in row:
            ids = _conversation(row["messages"], tokenizer, place, answer_end)
        else:
            ids = row["tokens"]
            if not isinstance(ids, list) or not ids:
                raise ValueError(f"{place}: tokens is {json.dumps(ids)[:80]}; it must be a list that is not empty")
            for place_in_row, token in enumerate(ids):
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{place}: tokens[{place_in_row}] is {json.dumps(token)[:80]}; ids are whole numbers from 0 to "
                        f"{vocab_size - 1}"
                    )
        if most_tokens is not None and len(ids) > most_tokens:
            raise ValueError(f"{place}: {len(ids)} tokens; at most {most_tokens} can be judged")
        yield ids


def _conversation(rows: Any, tokenizer: Any, place: str, answer_end: bool) -> list[int]:
    try:
        messages = messages_of(rows, "messages")
    except BadRow as error:
        raise ValueError(f"{place}: {error}") from error
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise ValueError(f"{place}: messages must end with one of the assistant, after at least one other")
    try:
        return conversation_ids(tokenizer, messages, answer_end=answer_end)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
