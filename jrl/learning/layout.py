"""How a batch of sequences is laid out for learning: rows, micro-batches, optimizer steps."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jrl.learning.pack import Shape
from jrl.learning.prefix_packing import max_micro_batches, max_prefix_rows
from jrl.types import traced

LOGPROB_CHUNK = 128


@traced
class RouterLoss:
    """Terms added to the loss of a mixture of experts, over the tokens that are learned from, mean over sparse layers.
    None switches a term off."""

    balance: float | None = None  # weight of the load-balancing loss, which is 1 where load is even
    z: float | None = None  # weight of the squared logsumexp of the router's logits

    def __post_init__(self) -> None:
        for name, value in (("balance", self.balance), ("z", self.z)):
            if isinstance(value, (int, float)) and not value > 0:
                raise ValueError(f"RouterLoss.{name} must be above 0, or None for off; got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """How a batch of sequences is learned from."""

    # L, tokens of a packed row; None: the longest sequence or comparison, twice that where it is short, up to 128
    row_length: int | None = None
    micro_batch_tokens: int = 8192  # tokens computed at once, over all batch shards
    sequences_per_row: int = 32  # S, most sequences of a packed row
    minibatches: int = 1  # optimizer steps in one pass over a batch
    epochs: int = 1  # passes over a batch
    logprob_chunk: int | None = None  # positions of a row whose logits exist at once; None: 128, more on TPUs
    # How log-probs are computed; auto: on TPUs vocab_parallel, which gathers the head once, for jrl's decoder.
    logprobs: Literal["auto", "reference", "vocab_parallel"] = "auto"
    layers: Literal["scanned", "unrolled"] = "scanned"  # scanned compiles faster, unrolled computes faster on CPU
    # A group's prompt is computed with each sample; once for each row; or once for all rows of a micro-batch.
    prefix_sharing: Literal["none", "in_row", "cross_row"] = "none"
    router: RouterLoss | None = None  # what a mixture of experts adds to the loss; None: nothing
    # Where tokens of a mixture go while they are learned from. computed: to the experts that its routers choose then;
    # replayed: to those that they went to while they were sampled, recorded by the sampler.
    routes: Literal["computed", "replayed"] = "computed"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"Learner.{field.name} must be at least 1; got {value}")

    @property
    def replays_routes(self) -> bool:
        return self.routes == "replayed"

    @property
    def chunk(self) -> int:
        """Positions of a row whose logits exist at once."""
        return LOGPROB_CHUNK if self.logprob_chunk is None else self.logprob_chunk

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.epochs


def divisible_length(length: int, shares: int) -> int:
    """Returns the least row length of at least `length` tokens that divides into two blocks for each share."""
    blocks = 2 * shares if shares > 1 else 1
    return -(-length // blocks) * blocks


def packed_shape(
    config: Learner,
    sequences: int,
    width: int,
    shards: int,
    *,
    shares: int = 1,
    prompt_length: int = 0,
    samples: int = 1,
    unit: int = 1,
    padded_rows: bool = False,
) -> Shape:
    """Returns the shape of one optimizer step on `sequences` rows of `width` tokens.

    Args:
      shards: batch shards. shares: sequence shares of a row, two blocks each.
      prompt_length, samples: the longest prompt and the number of rows that share one, if prompts may be shared.
      unit: adjacent sequences that are compared; they are in one row whatever their lengths.
      padded_rows: attention pads rows to a multiple of 128 tokens, so shorter rows cost the same.

    Raises: ValueError if sequences do not divide over shards and minibatches, or do not fit in a row.
    """
    items = "sequences" if unit == 1 else "comparisons"
    if sequences % (shards * config.minibatches * unit):
        raise ValueError(
            f"{sequences // unit} {items} a step do not divide into {shards} batch shards x {config.minibatches} "
            "minibatches; change Learner.minibatches, the mesh, or how many a step has (Online.prompts * samples, "
            "PretrainingMix.batch_size for stored rows beside them, or Offline.batch_size)"
        )
    if sequences % (shards * shares):
        raise ValueError(
            f"{sequences} sequences a step do not divide into {shards * shares} batch shards, of which "
            f"MeshShape.sequence = {shares} is a factor"
        )
    cross_row = config.prefix_sharing == "cross_row" and samples > 1
    prefix = prompt_length - 1
    longest = max(prefix, width - prefix) if cross_row else width * unit
    # Attention computes every pair of tokens in a row, so a row has room for two short sequences, not for ten; a row
    # that shares a prompt holds the group.
    min_length = 128 if padded_rows or config.prefix_sharing == "in_row" else min(2 * longest, 128)
    row_length = divisible_length(max(longest, min_length), shares) if config.row_length is None else config.row_length
    if (divisible := divisible_length(row_length, shares)) != row_length:
        raise ValueError(
            f"Learner.row_length={row_length} does not divide into two blocks for each of MeshShape.sequence = "
            f"{shares} shares; use {divisible}"
        )
    if row_length < longest:
        item = "prompt or completion" if cross_row else "sequence" if unit == 1 else f"comparison of {unit} sequences"
        raise ValueError(f"Learner.row_length={row_length} is shorter than the longest {item}, {longest} tokens")
    local = sequences // (shards * config.minibatches)
    places = min(config.sequences_per_row, local)
    if places < unit:
        raise ValueError(f"Learner.sequences_per_row={places} holds no comparison of {unit} sequences")
    # A minibatch may begin and end inside a group.
    groups = local // samples + (2 if local % samples else 0)
    min_rows = 2 if cross_row and row_length < width else 1  # a prefix, and a continuation that does not fit after it
    max_rows = max(min_rows, config.micro_batch_tokens // (row_length * shards))
    if cross_row:
        limits = dict(row_length=row_length, max_per_row=places)
        worst_rows = max_prefix_rows(groups, samples, prefix, width - prefix, **limits)
        rows = min(max_rows, worst_rows)
        micro_batches = max_micro_batches(groups, samples, prefix, width - prefix, rows=rows, **limits)
        columns = max(prefix, 1)
        return Shape(sequences, width, row_length, rows * shards, micro_batches, places, shards, samples, columns)
    # Rows needed for the worst lengths: every row but one holds at least as many sequences as fit at full width.
    per_row = min(row_length // (width * unit), places // unit) * unit
    worst_rows = -(-local // per_row)
    shared = samples if config.prefix_sharing == "in_row" else 1
    if shared > 1:
        # Every bundle but the last of a group holds at least this many samples.
        per_bundle = max(1, min((row_length - prefix) // (width - prefix), places))
        worst_rows = min(local, (local + groups * (per_bundle - 1)) // per_bundle)
    rows = min(worst_rows, max_rows)
    micro_batches = -(-worst_rows // rows)
    return Shape(sequences, width, row_length, rows * shards, micro_batches, places, shards, shared, unit=unit)


def more_than_asked(shape: Shape, config: Learner) -> str:
    """Returns a note on micro-batches that have more than Learner.micro_batch_tokens; "" if they have not."""
    tokens = shape.rows * shape.row_length
    if tokens <= config.micro_batch_tokens:
        return ""
    rows = "a row" if shape.rows == shape.shards else f"{shape.rows // shape.shards} rows"
    return (
        f" ({rows} on each of {shape.shards} batch shards, {tokens:,} tokens at once, are more than "
        f"Learner.micro_batch_tokens = {config.micro_batch_tokens:,})"
    )
