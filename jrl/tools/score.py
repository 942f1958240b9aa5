"""Log-probs of given texts under a trained policy, by the learner's own packed path: what `jrl score` writes."""

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
from jrl.rollout.rewards import RewardModel, classify, conversation_ids, open_classifier
from jrl.run.trained import Trained, is_published, without_tokenizer
from jrl.tasks.example import Message
from jrl.types import Array, PyTree

CLASSIFIER_TOKENS = 16_384  # of a row that a published classifier judges: attention holds a score for every pair
WIDTH_STEP = 8192  # rows beyond two of these are a multiple of it; a power of two would be half empty
SCORES_BYTES = 2**28  # of attention's scores that exist at once, in longer rows
SEQUENCES = 64  # of a batch, at most


def score_file(trained: Trained, rows: str | Path, out: str | Path) -> int:
    """Writes {"tokens","logprobs"} for every row of a file, a line each, in order. Returns how many.

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
    """Whether a folder is a published classifier's."""
    return is_published(folder) and labels_of(read_config(folder), str(folder / "config.json")) is not None


@full_precision()
def judge_file(
    folder: Path, rows: str | Path, out: str | Path, announce: Callable[[int, int], None] | None = None
) -> int:
    """Writes {"tokens","rewards": {label: number}} of a published classifier for every row of a file. Returns how many.

    A conversation is read as `conversation_ids` has it.

    Raises: ValueError naming file and line for a row that cannot be judged; nothing is written then.
    """
    judge = _classifier(folder)
    sequences = read_rows(rows, judge.tokenizer, judge.cfg.vocab_size, answer_end=judge.answer_end,
                          most_tokens=CLASSIFIER_TOKENS)  # fmt: skip
    rewards = classify_sequences(judge, sequences, announce)
    lines = [
        json.dumps({"tokens": tokens, "rewards": dict(zip(judge.labels, map(float, values)))})
        for tokens, values in zip(sequences, rewards)
    ]
    paths.write_bytes_atomic(out, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


@full_precision()
def judge_conversations(
    folder: Path, conversations: Sequence[Sequence[Message]], announce: Callable[[int, int], None] | None = None
) -> dict[str, np.ndarray]:
    """Returns what each label of a published classifier is given for conversations, {label: [n] float32}, each as
    `conversation_ids` has it.

    Raises: ValueError for a folder without a tokenizer or template, and for a conversation that is too long.
    """
    judge = _classifier(folder)
    sequences = [conversation_ids(judge.tokenizer, each, answer_end=judge.answer_end) for each in conversations]
    if (longest := max(map(len, sequences))) > CLASSIFIER_TOKENS:
        raise ValueError(f"{folder}: a conversation has {longest} tokens; at most {CLASSIFIER_TOKENS} are judged")
    rewards = classify_sequences(judge, sequences, announce)
    return {label: rewards[:, k] for k, label in enumerate(judge.labels)}


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
    judge: _Classifier, sequences: Sequence[Sequence[int]], announce: Callable[[int, int], None] | None = None
) -> np.ndarray:
    """Returns what the labels of a published classifier are given for rows of ids, [n, labels] float32."""
    folder, cfg, labels, tokenizer, _ = judge
    longest = max(map(len, sequences), default=1)
    # No wider than the table of positions: the padding beyond it would have none.
    width = max(longest, min(_width(longest), cfg.learned_positions or CLASSIFIER_TOKENS))
    config = RewardModel(path=str(folder), weights=(1.0,) * len(labels), length=longest, batch=max(1, 8192 // width))
    mesh = make_mesh(MeshShape())
    jax.set_mesh(mesh)
    opened = open_classifier(config, mesh, lambda name, fn: jax.jit(fn), announce, tokenizer, width)
    return classify(opened, sequences)


def _width(longest: int) -> int:
    """Returns the columns of rows as long as the longest sequence: a power of two of at least 128, beyond 16,384 a
    multiple of 8,192."""
    width = 128
    while width < longest:
        width = 2 * width if width < 2 * WIDTH_STEP else width + WIDTH_STEP
    return width


def _in_blocks(cfg: Decoder, width: int) -> Decoder:
    """Returns a decoder whose attention over rows of `width` tokens holds no score of every pair of them at once."""
    if width <= 2 * WIDTH_STEP or cfg.attention not in NO_KERNEL or cfg.attention_block is not None:
        return cfg
    return dataclasses.replace(cfg, attention_block=max(SCORES_BYTES // (4 * cfg.heads * width), 1))


class _Laid(NamedTuple):
    """How sequences are laid out to be scored: all batches have one shape, set by the longest sequence."""

    cfg: Any  # the model's
    chunk: int
    shape: pack.Shape

    def batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Yields the sequences of each batch."""
        for start in range(0, len(sequences), self.shape.sequences):
            yield sequences[start : start + self.shape.sequences]


def _laid(trained: Trained, sequences: Sequence[Sequence[int]]) -> _Laid:
    policy = trained.policy
    shards = batch_shards(policy.mesh)
    longest = max(map(len, sequences), default=0)
    cfg = policy.cfg
    if isinstance(cfg, Decoder):
        cfg = for_length(cfg, longest)
        check_length(cfg, longest)
    # No wider than the table of positions: the padding beyond it would have none.
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
    return _Laid(cfg, config.chunk, layout.packed_shape(config, count, width, rows, shares=shares))


@full_precision()
def score(trained: Trained, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns log p(token t | tokens before t) at temperature 1 for every sequence, [its length] float32 or wider each.

    The first token has no predecessor: its value is 0.
    """
    laid = _laid(trained, sequences)
    static = dict(model=trained.policy.model, cfg=laid.cfg, chunk=laid.chunk)
    program = jax.jit(functools.partial(_logprobs, **static, width=laid.shape.width, rows=laid.shape.sequences))
    out: list[np.ndarray] = []
    for batch in laid.batches(sequences):
        values = np.asarray(jax.device_get(program(trained.params, *_placed(trained, batch, laid.shape))))
        for tokens, row in zip(batch, values):
            out.append(np.concatenate([np.zeros(1, row.dtype), row[1 : len(tokens)]]))
    return out


@full_precision()
def score_rewards(trained: Trained, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns what the reward head of a role says at the last token of every sequence, [N] float32 or wider: of
    several outputs the sum that the run learned by, or their mean."""
    laid = _laid(trained, sequences)
    static = dict(model=trained.policy.model, cfg=laid.cfg, attribute_weights=trained.attribute_weights)
    program = jax.jit(functools.partial(_rewards, **static))
    out: list[np.ndarray] = []
    for batch in laid.batches(sequences):
        arrays = _placed(trained, batch, laid.shape)
        sequence, scores = jax.device_get(program(learner.Weights(trained.params, trained.heads), *arrays))
        values = np.zeros(laid.shape.sequences, scores.dtype)
        placed = sequence < len(batch)
        values[sequence[placed]] = scores[placed]
        out.append(values[: len(batch)])
    return np.concatenate(out) if out else np.zeros(0, np.float32)


def _rewards(
    weights: learner.Weights, tokens: Array, mask: Array, plan: pack.PackingPlan, one: Array, *,
    model: Model, cfg: Any, attribute_weights: tuple[float, ...] | None,
) -> tuple[Array, Array]:  # fmt: skip
    packed = pack.pack_tokens(tokens, mask, plan, one)
    scores = learner.sequence_scores(weights, packed, model=model, cfg=cfg, attribute_weights=attribute_weights)
    return packed.sequence, scores


@full_precision()
def embeddings(trained: Trained, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the model's last hidden state at the last token of every sequence, [N, width] float32 or wider."""
    laid = _laid(trained, sequences)
    program = jax.jit(functools.partial(_embeddings, model=trained.policy.model, cfg=laid.cfg))
    out = np.zeros((len(sequences), trained.policy.cfg.width), np.float32)
    for number, batch in enumerate(laid.batches(sequences)):
        sequence, states = jax.device_get(program(trained.params, *_placed(trained, batch, laid.shape)))
        placed = sequence < len(batch)
        out[number * laid.shape.sequences + sequence[placed]] = states[placed]
    return out


def _embeddings(
    params: PyTree, tokens: Array, mask: Array, plan: pack.PackingPlan, one: Array, *, model: Model, cfg: Any
) -> tuple[Array, Array]:
    packed = pack.pack_tokens(tokens, mask, plan, one)

    def read(i: Array) -> Array:
        micro = learner.micro_batch(packed, i)
        hidden = row_layout().joined(learner.hidden_of(params, micro, model, cfg)[0])
        following = jnp.concatenate([micro.segment[:, 1:], jnp.full_like(micro.segment[:, :1], -1)], axis=1)
        places = jnp.arange(micro.sequence.shape[-1])[None, :, None]
        at_last = (micro.segment != following)[:, None, :] & (micro.segment[:, None, :] == places)  # [R, S, L]
        # Off every sequence a state may be anything, and 0 * NaN is NaN.
        clean = jnp.where(jnp.any(at_last, axis=1)[..., None], hidden, 0).astype(jnp.float32)
        return jnp.einsum("rsl,rld->rsd", at_last.astype(jnp.float32), clean)

    return packed.sequence, jax.lax.map(read, jnp.arange(packed.sequence.shape[0]))


def _logprobs(
    params: PyTree,
    tokens: Array,
    mask: Array,
    plan: pack.PackingPlan,
    one: Array,
    *,
    model: Model,
    cfg: Any,
    chunk: int,
    width: int,
    rows: int,
) -> Array:
    packed = pack.pack_tokens(tokens, mask, plan, one)
    values = learner.logprobs(learner.Weights(params, {}), packed, model=model, cfg=cfg, chunk=chunk)
    return pack.unpack(values, plan.source, width, rows)


def _placed(trained: Trained, batch: Sequence[Sequence[int]], shape: pack.Shape) -> tuple[Any, ...]:
    """Returns tokens [N, T], mask [N, T], plan and temperature on the device."""
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
    """Returns the ids of every row of a JSONL file: {"tokens": [...]} as they are, {"text": ...} as bos and its ids,
    {"messages": [...]}, whose last message is the assistant's, as `conversation_ids`.

    Args:
      answer_end: as in `conversation_ids`.
      most_tokens: of a row; None: any number.

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
        messages = [Message(**row) for row in rows]
        if any(type(text) is not str for message in messages for text in (message.role, message.content)):
            raise TypeError("role and content must be text")
    except TypeError as error:
        raise ValueError(f'{place}: messages are a list of {{"role": ..., "content": ...}} ({error})') from error
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise ValueError(f"{place}: messages must end with one of the assistant, after at least one other")
    try:
        return conversation_ids(tokenizer, messages, answer_end=answer_end)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
