"""Learned rewards: a published classifier judges whole conversations on the device.

It reads what a person would: the conversation in its own chat template and its own tokens, whatever the policy's are.
Of its labels, each an objective, the reward is a weighted sum; it is added to that of the verifiers.
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

from jrl.device.sharding import batch_sharding, batch_shards, constrain
from jrl.models import decoder
from jrl.models.heads import REWARD, read_head
from jrl.models.pretrained.published import Published, classifier_of, load_classifier
from jrl.models.shape import Decoder, check_divides, check_length, for_length
from jrl.rollout.sources import Completions, LearnedScores, RewardSource
from jrl.tasks.example import Message
from jrl.tasks.tokenizers.published import HuggingFace
from jrl.tasks.tokenizers.published import build as build_tokenizer
from jrl.types import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A published classifier whose scores add to the reward: a folder with config.json, safetensors, a tokenizer."""

    path: str  # the folder
    weights: tuple[float, ...] = (1.0,)  # of each of its labels in the reward
    length: int = 1024  # most tokens of a conversation, by the classifier's tokenizer; longer ones are masked
    batch: int = 16  # conversations judged at once
    dtype: Literal["float32", "bfloat16"] = "float32"  # of matmuls
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # weights are cast to it on the way in

    def __post_init__(self) -> None:
        for name in ("length", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"RewardModel.{name} must be at least 1; got {getattr(self, name)}")

    @property
    def published(self) -> Published:
        return Published(path=self.path, dtype=self.dtype, param_dtype=self.param_dtype)


class OpenClassifier(NamedTuple):
    """A reward model that is open."""

    labels: tuple[str, ...]
    cfg: Decoder
    tokenizer: Any
    params: PyTree
    program: Callable[..., Array]  # (params, tokens [N, W], length [N]) -> [N, labels]
    mesh: Mesh
    batch: int  # N
    width: int  # W
    weights: tuple[float, ...]


def open_classifier(
    config: RewardModel,
    mesh: Mesh,
    program: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    announce: Callable[[int, int], None] | None = None,
    tokenizer: Any = None,
    width: int | None = None,
) -> OpenClassifier:
    """Reads the weights onto `mesh`.

    Args:
      program: (name, function) -> the function compiled, such as a run's program cache.
      announce: called with (bytes read, bytes in all).
      tokenizer: None: the one in the folder.
      width: columns that are computed, at least config.length, which no conversation is longer than; None: so many.

    Raises: ValueError for a folder that is not a classifier, and where there is not one weight a label.
    """
    _, cfg, labels, pad_id = classifier_of(config.published)
    if len(config.weights) != len(labels):
        raise ValueError(f"RewardModel.weights has {len(config.weights)} numbers; {config.path} has the "
                         f"{len(labels)} labels {', '.join(labels)}")  # fmt: skip
    check_divides(cfg, mesh)
    cfg = for_length(cfg, config.length)
    check_length(cfg, config.length)
    params = load_classifier(config.published, mesh, announce)
    batch = -(-config.batch // batch_shards(mesh)) * batch_shards(mesh)
    run = program("reward", functools.partial(rewards, cfg=cfg, pad_id=pad_id))
    tokenizer = build_tokenizer(HuggingFace(path=config.path), ()) if tokenizer is None else tokenizer
    return OpenClassifier(labels, cfg, tokenizer, params, run, mesh, batch, width or config.length, config.weights)


def rewards(params: PyTree, tokens: Array, length: Array, *, cfg: Decoder, pad_id: int | None) -> Array:
    """Returns what the head says at the last token of every row that is not `pad_id`, or at the first where all are;
    mean over its members, [N, labels] float32.

    Args:
      params: of a decoder, with a head as the entry REWARD. tokens: [N, W] int32. length: [N] int32, at least 1.
      pad_id: None: the last token of all.

    Source: transformers' GenericForSequenceClassification, which looks for that token in rows without padding too: a
    template may end every turn with it.
    """
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    columns = constrain(columns, "batch", None)
    hidden, _ = decoder.forward(params, tokens, columns, None, cfg)
    read = columns < length[:, None]
    if pad_id is not None:
        read = read & (tokens != pad_id)
    at = jnp.where(read, columns, 0).max(1, keepdims=True)
    last = jnp.where((columns == at)[..., None], hidden, 0).sum(1)
    return read_head(params[REWARD], last).mean(0).astype(jnp.float32)


def dispatch(opened: OpenClassifier, sequences: Sequence[Sequence[int]]) -> list[Array]:
    """Begins to compute what `classify` returns, and returns the device's arrays by batch at once."""
    outputs = []
    for start in range(0, len(sequences), opened.batch):
        part = sequences[start : start + opened.batch]
        tokens, length = np.zeros((opened.batch, opened.width), np.int32), np.ones(opened.batch, np.int32)
        for row, ids in enumerate(part):
            tokens[row, : len(ids)], length[row] = ids, len(ids)
        place = lambda x: jax.device_put(x, batch_sharding(opened.mesh, x.ndim))
        with jax.set_mesh(opened.mesh):
            outputs.append(opened.program(opened.params, place(tokens), place(length)))
    return outputs


def classify(opened: OpenClassifier, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns what the labels are given for every sequence of ids, [N, labels] float32. Each has 1 to `width` ids."""
    outputs = dispatch(opened, sequences)
    return (
        np.concatenate(jax.device_get(outputs))[: len(sequences)]
        if outputs
        else np.zeros((0, len(opened.labels)), np.float32)
    )


class _Dispatched(NamedTuple):
    problems: list[str]  # [N], "" mostly
    labels: list[Array]  # of the others, by batch


def reward_model_source(opened: OpenClassifier) -> RewardSource:
    """Returns a published classifier as a source of rewards."""
    names = [f"RewardModel/{label}" for label in opened.labels] if len(opened.labels) > 1 else ["RewardModel"]

    def submit(batch: Completions) -> _Dispatched:
        ids, problems = [], []
        for row, text in enumerate(batch.texts):
            messages = [*batch.visits[row // batch.samples].example.messages, Message("assistant", text)]
            encoded, problem = encode(opened, messages)
            problems.append(problem)
            if not problem:
                ids.append(encoded)
        return _Dispatched(problems, dispatch(opened, ids))

    def collect(ticket: _Dispatched) -> LearnedScores:
        problems = list(ticket.problems)
        good = [row for row, problem in enumerate(problems) if not problem]
        values = np.full((len(problems), len(opened.labels)), np.nan, np.float32)
        if good:
            values[good] = np.concatenate(jax.device_get(ticket.labels))[: len(good)]
        for row in good:
            if not np.isfinite(values[row]).all():
                problems[row] = f"its labels are {', '.join(map(str, values[row]))}, which are not numbers"
                values[row] = np.nan
        return LearnedScores(tuple(names), opened.weights, values, problems)

    return RewardSource(submit, collect, tuple(names))


def encode(opened: OpenClassifier, messages: Sequence[Message]) -> tuple[list[int], str]:
    """Returns a conversation's ids in the reward model's own tokens, and why they cannot be judged, "" mostly."""
    try:
        ids = opened.tokenizer.encode_conversation(messages, add_generation_prompt=False)
    except ValueError as error:
        return [], str(error)
    if len(ids) > opened.width:
        return [], f"{len(ids)} tokens; RewardModel.length is {opened.width}"
    return ids, ""
