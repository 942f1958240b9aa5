"""The learner: log-probs of packed sequences, losses, and one optimizer step.

    plan (host) -> pack (device) -> recompute (old and reference log-probs, old values) -> finish (credit) -> update

Everything here is pure. Sums over sequences are local to a packed row. Numerators and denominators stay separate to
the end, so that loss and gradient depend neither on packing, nor on micro-batches, nor on the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrl.algos.contract import Needs, Objective, Tokens, ValueBins, other_of_pair
from jrl.device import row_shares
from jrl.device.sharding import SEQUENCE, axis_size, batch_axes, constrain, per_shard, row_axes
from jrl.learning import vocab_parallel
from jrl.learning.average import AVERAGE, moved_average
from jrl.learning.credit import sequences_of
from jrl.learning.layout import RouterLoss
from jrl.learning.optimizer import step
from jrl.learning.optimizers.contract import Optimizer, describe
from jrl.learning.optimizers.groups import trained_only
from jrl.learning.previous import with_previous
from jrl.learning.row_layout import RowLayout, model_inputs, row_layout, share_of_rows
from jrl.models.contract import MixedTokens, Model, merge_params, without_gradient
from jrl.models.heads import REWARD, VALUE, read_head, read_values
from jrl.ops import likelihood, reduce, segments
from jrl.ops import router as routers
from jrl.ops.divergence import token_divergence
from jrl.ops.logprobs import likeliest_tokens, squared_probabilities, state_values, token_logprobs
from jrl.ops.members import most_of_members, where_member
from jrl.ops.mismatch import mismatch_of_means, mismatch_terms, probability_difference
from jrl.ops.offline_advantage import r_gold
from jrl.ops.reference import averaged_reference, reset_due
from jrl.ops.token_regularization import token_contrast
from jrl.ops.two_hot import bins_of, two_hot_value
from jrl.types import (
    Array,
    ModelState,
    PackedBatch,
    PretrainingBatch,
    PyTree,
    TrainBatch,
    TrainState,
)

MISMATCH = "mismatch/"  # prefix of metric names
LARGEST = f"{MISMATCH}probability"  # a metric that is a maximum over tokens, not a mean
LIMITED_KL = "approx_kl_k3"  # the objective's metric that a KLLimit reads
KL_REACHED = "update/kl_reached"  # 1 for an update that a KLLimit has left out, else 0
# Named scopes of the loops over micro-batches, of samples and of stored rows: `jrl plan` counts by these names.
MICRO_BATCHES, PRETRAINING = "micro_batches", "pretraining_micro_batches"


def micro_batch(batch: PyTree, i: Array) -> PyTree:
    """Returns micro-batch `i` of a packed batch or a train batch: every [M, R, ...] field as [R, ...]."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) if x.ndim >= 3 else x,
        batch,
    )


def over_micro_batches(
    rows: PyTree, num_real: Array, sums_of: Callable[[PyTree], PyTree], zero: PyTree, join: Callable[..., PyTree]
) -> PyTree:
    """Returns `sums_of` of every micro-batch of `rows` that is not padding, accumulated by `join` from `zero` on.

    Args:
      num_real: [] int32, how many those are. join: (sums so far, sums of the next micro-batch) -> sums of both.
    """

    def add(i: Array, sums: PyTree) -> PyTree:
        return where_member(i < num_real, join(sums, sums_of(micro_batch(rows, i))), sums)

    return jax.lax.fori_loop(0, most_of_members(num_real), add, zero)


class Weights(NamedTuple):
    """The weights of one model, as its functions take them, and its heads."""

    params: PyTree
    heads: dict[str, Array]


def weights_of(models: dict[str, ModelState], role: str) -> Weights:
    """Returns the weights of the model in a role, frozen ones included. Copies nothing."""
    return Weights(merge_params(frozen_of(models, role), models[role].params), models[role].heads)


def frozen_of(models: dict[str, ModelState], role: str) -> PyTree | None:
    """Returns the frozen weights of the model in a role, its own or those that it shares with another role."""
    model = models[role]
    return model.frozen if model.shares is None else models[model.shares].frozen


class ModelOutputs(NamedTuple):
    """What a model computes for packed rows. A field that was not requested is None."""

    logprobs: Array | None  # [R, L]
    entropy: Array | None  # [R, L]
    router_logits: Array | None  # [sparse layers, R, L, experts], or by shares of rows; None: no experts
    values: Array | None  # [R, L], before each token
    value_logits: Array | None  # [R, L, K], of the bins of those values; None: the head gives numbers
    scores: Array | None  # [R, S], of the reward head at the last token of every sequence; [R, S, K] of K outputs
    divergence: Array | None = None  # [R, L], from a teacher
    state_values: Array | None = None  # [R, L], logsumexp of the logits
    sum_squared: Array | None = None  # [R, L], sum over the vocabulary of p_v^2


class Teacher(NamedTuple):
    """The model that Needs.divergence compares the trained one with."""

    params: PyTree
    model: Model
    cfg: Any


def model_outputs(
    weights: Weights,
    micro: PackedBatch,
    mask: Array,
    model: Model,
    cfg: Any,
    chunk: int,
    needs: Needs,
    teacher: Teacher | None = None,
    sum_squared: bool = False,
) -> ModelOutputs:
    """Returns what a model computes for one micro-batch, per-token fields at the tokens in `mask`.

    Args:
      teacher: the model for Needs.divergence; None: no divergence.
      sum_squared: request ModelOutputs.sum_squared even if the objective does not need it.
    """
    squared = sum_squared or needs.log_sum_squared
    inputs = as_read(weights.params, micro, mask, model, cfg, chunk, needs)
    hidden, router_logits = hidden_of(weights.params, inputs, model, cfg)
    unembed = lambda h: model.unembed(weights.params, h, cfg)
    logprobs = entropy = None
    layout = row_layout()
    mask = layout.columns(mask)
    chunked = dict(temperature=micro.temperature, chunk=chunk, predictor=layout.predictor)
    if needs.logprobs:
        tokens = layout.columns(micro.tokens)
        if model.output_head is None:
            logprobs, entropy = token_logprobs(hidden, tokens, mask, unembed, **chunked)
        else:
            head = model.output_head(weights.params, cfg)
            logprobs, entropy = vocab_parallel.token_logprobs(hidden, tokens, mask, head, **chunked)
        logprobs, entropy = layout.rows(logprobs), layout.rows(entropy)
    values = read_values(weights.heads[VALUE], hidden, layout.joined) if needs.values else None
    value_logits = None
    if values is not None and needs.value_bins is not None:
        value_logits, values = values, two_hot_value(values, bins=bins_of(*needs.value_bins))
    divergence = None
    if teacher is not None:
        divergence = layout.rows(token_divergence(
            hidden,
            jax.lax.stop_gradient(hidden_of(teacher.params, without_routes(micro), teacher.model, teacher.cfg)[0]),
            mask,
            unembed,
            lambda h: teacher.model.unembed(teacher.params, h, teacher.cfg),
            kind=needs.divergence,
            **chunked,
        ))  # fmt: skip
    return ModelOutputs(
        logprobs=logprobs,
        entropy=entropy,
        router_logits=router_logits,
        values=values,
        value_logits=value_logits,
        scores=_read_scores(weights.heads[REWARD], hidden, micro, layout) if needs.score else None,
        divergence=divergence,
        state_values=layout.rows(state_values(hidden, mask, unembed, **chunked)) if needs.state_values else None,
        sum_squared=layout.rows(squared_probabilities(hidden, mask, unembed, **chunked)) if squared else None,
    )


def as_read(
    params: PyTree, micro: PackedBatch, mask: Array, model: Model, cfg: Any, chunk: int, needs: Needs
) -> PackedBatch:
    """Returns one micro-batch as the model reads it: where Needs.input_mix is set, the tokens in `mask` are mixed with
    the model's own likeliest tokens there (P34's IFT)."""
    if needs.input_mix is None:
        return micro
    fixed = jax.lax.stop_gradient(params)
    hidden, _ = hidden_of(fixed, micro, model, cfg)
    unembed, layout = lambda h: model.unembed(fixed, h, cfg), row_layout()
    tokens, token_mask = layout.columns(micro.tokens), layout.columns(mask)
    likeliest = likeliest_tokens(hidden, tokens, token_mask, unembed, chunk=chunk, predictor=layout.predictor)
    predicted = jnp.where(mask, layout.rows(likeliest), micro.tokens)
    return micro.replace(tokens=MixedTokens(micro.tokens, constrain(predicted, "rows", None), needs.input_mix))


def hidden_of(params: PyTree, micro: PackedBatch, model: Model, cfg: Any) -> tuple[Array, Array | None]:
    """Returns the last hidden states of one micro-batch, [R, L, D], and the logits of its routers; both by shares where
    rows are divided over devices. Routers replay the batch's routes if it has any."""
    routes = () if micro.routes is None else (share_of_rows(micro.routes),)
    return model.routed(params, *model_inputs(micro), cfg, *routes)


def without_routes(packed: PackedBatch) -> PackedBatch:
    """Returns rows for a model whose routers decide for themselves: any model but the one that drew the rows."""
    return packed.replace(routes=None)


def _read_scores(head: Array, hidden: Array, micro: PackedBatch, layout: RowLayout) -> Array:
    """Returns a reward head's output at the last token of every sequence, mean over its members, [R, S] float32;
    [R, S, K] for a head with K outputs."""
    values = read_head(head, hidden).mean(0).astype(jnp.promote_types(jnp.float32, hidden.dtype))
    values = layout.joined(values)
    last = micro.segment != segments.next_column(micro.segment, -1)
    at_last = lambda x: segments.segment_sum(x, last, micro.segment, num_segments=micro.sequence.shape[-1])
    by_output = [at_last(values[..., k]) for k in range(values.shape[-1])]
    return by_output[0] if len(by_output) == 1 else jnp.stack(by_output, axis=-1)


def logprobs(weights: Weights, packed: PackedBatch, *, model: Model, cfg: Any, chunk: int) -> Array:
    """Returns the log-prob of every action, [M, R, L] float32; zero elsewhere."""
    recomputed = recompute(weights, packed, fields=("old_logprobs",), model=model, cfg=cfg, chunk=chunk)
    return recomputed["old_logprobs"]


def recompute(
    weights: Weights,
    packed: PackedBatch,
    *,
    fields: Sequence[str],
    model: Model,
    cfg: Any,
    chunk: int,
    value_bins: ValueBins | None = None,
) -> dict[str, Array]:
    """Returns fields of Recomputed under `weights`, in one pass, [M, R, L] float32 each.

    Args:
      fields: of "old_logprobs", "old_entropy", "old_sum_squared" and, with a value head, "old_values"; the others are
        not computed.
      value_bins: of that head (Needs.value_bins).
    """
    needs = Needs(
        logprobs=not {"old_logprobs", "old_entropy"}.isdisjoint(fields),
        values="old_values" in fields,
        value_bins=value_bins,
    )
    dtype = jnp.promote_types(jnp.float32, jnp.dtype(cfg.dtype))

    def read(micro: PackedBatch) -> dict[str, Array]:
        squared = "old_sum_squared" in fields
        outputs = model_outputs(weights, micro, micro.action_mask, model, cfg, chunk, needs, sum_squared=squared)
        fields_read = {
            "old_logprobs": outputs.logprobs,
            "old_entropy": outputs.entropy,
            "old_sum_squared": outputs.sum_squared,
        }
        if outputs.values is not None:
            fields_read["old_values"] = jnp.where(micro.action_mask, outputs.values, 0)
        return {name: fields_read[name] for name in fields}

    zeros = {name: jnp.zeros_like(packed.action_mask, dtype) for name in fields}
    return _read_by_micro_batch(packed, read, zeros)


def sequence_scores(
    weights: Weights,
    packed: PackedBatch,
    *,
    model: Model,
    cfg: Any,
    attribute_weights: tuple[float, ...] | None = None,
) -> Array:
    """Returns the reward head's score of every sequence, [M, R, S] float32; undefined where a place is empty.

    Args:
      attribute_weights: for a head with several outputs, the weight of each in the score (P3); None: their mean.
    """
    needs = Needs(logprobs=False, score=True)
    num_outputs = weights.heads[REWARD].shape[-1]
    mean = (1 / num_outputs,) * num_outputs
    output_weights = jnp.asarray(mean if attribute_weights is None else attribute_weights, jnp.float32)

    def read(micro: PackedBatch) -> dict[str, Array]:
        scores = model_outputs(weights, micro, micro.action_mask, model, cfg, 1, needs).scores
        return {"score": scores if num_outputs == 1 else scores @ output_weights}

    zeros = {"score": jnp.zeros_like(packed.sequence, jnp.promote_types(jnp.float32, jnp.dtype(cfg.dtype)))}
    return _read_by_micro_batch(packed, read, zeros)["score"]


def token_scores(weights: Weights, packed: PackedBatch, *, model: Model, cfg: Any) -> Array:
    """Returns the reward head's output at every token, [M, R, L] float32, the mean of several outputs; undefined on
    padding."""
    dtype = jnp.promote_types(jnp.float32, jnp.dtype(cfg.dtype))

    def read(micro: PackedBatch) -> dict[str, Array]:
        hidden, _ = hidden_of(weights.params, micro, model, cfg)
        values = row_layout().joined(read_head(weights.heads[REWARD], hidden).mean(0).astype(dtype))
        return {"score": values.mean(-1)}

    return _read_by_micro_batch(packed, read, {"score": jnp.zeros_like(packed.action_mask, dtype)})["score"]


def mean_scores(
    weights: dict[str, Weights],
    packed: PackedBatch,
    *,
    attribute_weights: Mapping[str, tuple[float, ...] | None],
    model: Model,
    cfg: Any,
) -> Array:
    """Returns the mean over roles of their reward heads' scores of every sequence, [M, R, S] float32; undefined where a
    place is empty.

    Args:
      weights: by role; it may have further roles.
      attribute_weights: role -> as `sequence_scores` takes them.
    """
    scores = [
        sequence_scores(weights[role], packed, model=model, cfg=cfg, attribute_weights=role_weights)
        for role, role_weights in attribute_weights.items()
    ]
    return sum(scores) / len(scores)


def _read_by_micro_batch(
    packed: PackedBatch, read: Callable[[PackedBatch], dict[str, Array]], zeros: dict[str, Array]
) -> dict[str, Array]:
    """Returns `zeros`, [M, R, .] each, with `read` of every real micro-batch written in its place."""

    def body(i: Array, out: dict[str, Array]) -> dict[str, Array]:
        read_fields = read(micro_batch(packed, i))

        def write(all_: Array, x: Array) -> Array:
            x = constrain(x, "rows", None).astype(all_.dtype)  # reshaping a single row has lost its sharding
            x = where_member(i < packed.num_real, x, jnp.zeros_like(x))
            return jax.lax.dynamic_update_index_in_dim(all_, x, i, 0)

        return {name: write(out[name], read_fields[name]) for name in zeros}

    with jax.named_scope(MICRO_BATCHES):
        return jax.lax.fori_loop(0, most_of_members(packed.num_real), body, zeros)


class KLLimit(NamedTuple):
    """Ends the updates of a batch once the policy has moved too far from where they began (O6)."""

    most: Array  # [] float, nats: largest mean KL(weights before the step to the current ones) that updates go on from
    reached: Array  # [] float, not 0: an update of the step has found more


class Sums(NamedTuple):
    """Numerators of one optimizer step, summed over its micro-batches."""

    gradient: PyTree
    loss: Array  # [], weighted sum
    magnitude: Array  # [], sum of the absolute values of the loss's terms
    metrics: dict[str, Array]  # sums over tokens of the loss mask
    sequence_metrics: dict[str, Array]  # sums over sequences
    load: Array | None  # [sparse layers, experts], tokens of the loss mask routed to each; None: no experts
    largest: dict[str, Array]  # maxima over tokens of the loss mask, at least 0


def loss_sums(
    trainable: Weights,
    batch: TrainBatch,
    config: PyTree,
    state: PyTree,
    router: RouterLoss | None = None,
    *,
    objective: Objective,
    model: Model,
    cfg: Any,
    chunk: int,
    frozen: PyTree | None = None,
    teacher: PyTree | None = None,
    teacher_kind: tuple[Model, Any] | None = None,
) -> Sums:
    """Returns loss, gradient and metric numerators of a whole optimizer step: a loop over its real micro-batches.

    Args:
      trainable: trained leaves and heads, which the gradient is taken of. frozen: the weights under adapters.
      config, state: the objective's, floats as arrays.
      router: the loss terms of a mixture of experts, floats as arrays.
      teacher: the parameters of the teacher, where the objective needs the divergence from it.
      teacher_kind: the teacher's model and cfg; None: those of the model that learns.
    """
    batch, pretraining = batch.replace(pretraining=None), batch.pretraining
    needs, spec = objective.needs(config), model.spec(cfg)
    teacher_model = None if teacher is None else Teacher(teacher, *(teacher_kind or (model, cfg)))

    def loss_fn(trainable: Weights, micro: TrainBatch) -> tuple[Array, tuple[Array, ...]]:
        params = merge_params(frozen, without_gradient(trainable.params, spec))
        weights = Weights(params, trainable.heads)
        outputs = model_outputs(weights, micro.packed, micro.loss_mask, model, cfg, chunk, needs, teacher_model)
        if not needs.entropy_gradient and outputs.entropy is not None:
            outputs = outputs._replace(entropy=jax.lax.stop_gradient(outputs.entropy))
        loss = magnitude = jnp.zeros((), batch.denominator.dtype)
        metrics: dict[str, Array] = {}
        if objective.token_loss is not None:
            terms, metrics = token_terms(outputs, micro, config, state, objective)
            loss, magnitude = terms.sum(), jnp.abs(terms).sum()
        sequence_metrics: dict[str, Array] = {}
        if objective.sequence_loss is not None:
            terms, sequence_metrics = sequence_terms(outputs, micro, config, state, objective)
            # Rescaled to the batch's denominator, so that terms of sequences and of tokens add up.
            terms = terms * (batch.denominator / batch.targets.denominator)
            loss, magnitude = loss + terms.sum(), magnitude + jnp.abs(terms).sum()
        common_metrics, largest = _common(outputs, micro)
        metrics = {name: jnp.where(micro.loss_mask, x, 0).sum() for name, x in (metrics | common_metrics).items()}
        load = None
        if outputs.router_logits is not None:
            sums, load = _router_sums(outputs.router_logits, micro, cfg.experts.per_token)
            # Router terms are means over tokens: rescaled to the batch's denominator, they are sums too.
            share = batch.denominator / jnp.maximum(batch.loss_mask.sum(), 1)
            for name, weight in ({} if router is None else {"balance": router.balance, "z": router.z}).items():
                if weight is not None:
                    term = weight * share * sums[name]
                    loss, magnitude = loss + term, magnitude + term
            metrics |= {f"router/{name}": value for name, value in sums.items()}
        return loss, jax.lax.stop_gradient((magnitude, metrics, sequence_metrics, load, largest))

    def sums_of(micro: TrainBatch) -> Sums:
        (loss, rest), gradient = jax.value_and_grad(loss_fn, has_aux=True)(trainable, micro)
        return Sums(gradient, loss, *rest)

    # Only the forward pass is traced for shapes, which is faster: the gradient has the shapes of the weights.
    shapes = jax.eval_shape(functools.partial(loss_fn, trainable), micro_batch(batch, 0))
    loss, rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero = Sums(jax.tree.map(jnp.zeros_like, trainable), loss, *rest)

    def join(sums: Sums, more: Sums) -> Sums:
        added = jax.tree.map(jnp.add, sums, more)
        return added._replace(largest=jax.tree.map(jnp.maximum, sums.largest, more.largest))

    with jax.named_scope(MICRO_BATCHES):
        sums = over_micro_batches(batch, batch.packed.num_real, sums_of, zero, join)
    if pretraining is None:
        return sums
    gradient, loss, nll = pretraining_sums(
        trainable, pretraining, batch.denominator, model=model, cfg=cfg, chunk=chunk, frozen=frozen
    )
    # `update` divides every metric by the number of tokens in the loss, which the mean over stored tokens is multiplied
    # by.
    nll = nll / pretraining.num_tokens * jnp.maximum(batch.loss_mask.sum(), 1)
    return sums._replace(
        gradient=jax.tree.map(jnp.add, sums.gradient, gradient),
        loss=sums.loss + loss,
        magnitude=sums.magnitude + loss,
        metrics=sums.metrics | {"pretraining/nll": nll},
    )


def pretraining_sums(
    trainable: Weights,
    batch: PretrainingBatch,
    denominator: Array,
    *,
    model: Model,
    cfg: Any,
    chunk: int,
    frozen: PyTree | None,
) -> tuple[Weights, Array, Array]:
    """Returns gradient and loss of the stored rows that an optimizer step also imitates (L17), as sums to be divided by
    the `denominator` of its samples, and the sum of -log-prob over their tokens. Router terms are not included.

    Args:
      trainable, frozen: as in `loss_sums`.
    """
    spec, rows = model.spec(cfg), batch.packed

    def loss_fn(trainable: Weights, micro: PackedBatch) -> tuple[Array, Array]:
        weights = Weights(merge_params(frozen, without_gradient(trainable.params, spec)), trainable.heads)
        stored_logprobs = model_outputs(weights, micro, micro.action_mask, model, cfg, chunk, Needs()).logprobs
        terms = likelihood.pretraining_nll(
            stored_logprobs,
            micro.action_mask,
            coefficient=batch.coefficient,
            num_tokens=batch.num_tokens,
            denominator=denominator,
        )
        return terms.sum(), -jax.lax.stop_gradient(reduce.masked(stored_logprobs, micro.action_mask)).sum()

    def sums_of(micro: PackedBatch) -> tuple[Weights, Array, Array]:
        (loss, nll), gradient = jax.value_and_grad(loss_fn, has_aux=True)(trainable, micro)
        return gradient, loss, nll

    loss, nll = jax.eval_shape(functools.partial(loss_fn, trainable), micro_batch(rows, 0))
    zero = (jax.tree.map(jnp.zeros_like, trainable), jnp.zeros((), loss.dtype), jnp.zeros((), nll.dtype))

    with jax.named_scope(PRETRAINING):
        return over_micro_batches(rows, rows.num_real, sums_of, zero, functools.partial(jax.tree.map, jnp.add))


def token_terms(
    outputs: ModelOutputs, micro: TrainBatch, config: PyTree, state: PyTree, objective: Objective
) -> tuple[Array, dict[str, Array]]:
    """Returns weight times loss of every token, [R, L], and the objective's metrics, [R, L] each."""
    packed, before, needs = micro.packed, micro.recomputed, objective.needs(config)
    old = before.old_logprobs
    if not needs.old_logprobs:
        old = None
    elif old is None and outputs.logprobs is not None:
        old = jax.lax.stop_gradient(outputs.logprobs)
    tokens = Tokens(
        logprobs=outputs.logprobs,
        old_logprobs=old,
        behaviour_logprobs=packed.behaviour_logprobs,
        ref_logprobs=before.ref_logprobs,
        entropy=outputs.entropy,
        advantages=micro.advantages,
        mask=micro.loss_mask,
        segment=packed.segment,
        num_segments=packed.sequence.shape[-1],
        values=outputs.values,
        value_logits=outputs.value_logits,
        old_values=before.old_values,
        returns=micro.returns,
        selected=micro.selected,
        positive_weights=micro.positive_weights,
        divergence=outputs.divergence,
        staleness=micro.staleness,
        state_values=outputs.state_values,
        row_values=_of_rows(micro) if needs.row_value_names else None,
    )
    per_token, metrics = objective.token_loss(config, tokens, state)
    # Select, do not multiply: a masked token's loss may be anything.
    return jnp.where(micro.loss_mask, micro.loss_weights * per_token, 0), metrics


def _of_rows(micro: TrainBatch) -> Array:
    """Returns the values that the data give the stored row of every token, [R, L, K]; 0 on padding."""
    values = jnp.moveaxis(micro.targets.value, -1, 0)
    return jnp.stack([segments.to_tokens(value, micro.packed.segment) for value in values], axis=-1)


def sequence_terms(
    outputs: ModelOutputs, micro: TrainBatch, config: PyTree, state: PyTree, objective: Objective
) -> tuple[Array, dict[str, Array]]:
    """Returns weight times loss of every sequence, [R, S], and sums of the objective's metrics over them, [] each."""
    targets, ref_logprobs = micro.targets, micro.recomputed.ref_logprobs
    sequences = sequences_of(micro.packed, targets, micro.loss_mask, outputs.logprobs, ref_logprobs)

    def by_sequence(x: Array, mask: Array = micro.loss_mask) -> Array:
        return segments.segment_sum(x, mask, micro.packed.segment, num_segments=targets.label.shape[-1])

    contrast = None
    if objective.needs(config).contrast:
        reward = token_contrast(
            ref_logprobs, micro.loss_mask, micro.packed.segment, targets.label, targets.unit, targets.counts
        )
        contrast = by_sequence(reward * reduce.masked(outputs.logprobs, micro.loss_mask))
    floored, floor = None, objective.needs(config).probability_floor
    if floor is not None:
        ones = jnp.ones_like(outputs.logprobs)
        floored = by_sequence(-r_gold(outputs.logprobs, ones, micro.loss_mask, floor=floor))
    squared = None
    if objective.needs(config).log_sum_squared:
        by_token = jnp.log(jnp.where(micro.loss_mask, outputs.sum_squared, 1))
        squared = by_sequence(jax.lax.stop_gradient(by_token))
    common = None
    if objective.needs(config).common_length:
        shorter = jnp.minimum(sequences.length, other_of_pair(sequences.length, sequences))
        first = segments.first_tokens(shorter, micro.loss_mask, micro.packed.segment)
        gain = reduce.masked(outputs.logprobs, micro.loss_mask) - reduce.masked(ref_logprobs, micro.loss_mask)
        common = by_sequence(gain, first)
    sequences = sequences.replace(
        score=outputs.scores, contrast=contrast, floored_logprob=floored, common_gain=common, log_sum_squared=squared
    )
    per_sequence, metrics = objective.sequence_loss(config, sequences, state)
    sums = {name: jnp.where(targets.counts, value, 0).sum() for name, value in metrics.items()}
    return jnp.where(targets.counts, targets.weight * per_sequence, 0), sums


def _common(outputs: ModelOutputs, micro: TrainBatch) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the per-token metrics that every objective has, [R, L] each, and those that are maxima, [] each.

    The sampler is compared with the weights before the batch's updates; where their log-probs were not recomputed, with
    the current weights.
    """
    if outputs.logprobs is None:
        return {}, {}
    metrics = {"policy/entropy": outputs.entropy, "policy/logprob": outputs.logprobs}
    sampled, largest = micro.packed.sampler_logprobs, {}
    if sampled is not None:
        metrics["policy/sampler_difference"] = jnp.abs(outputs.logprobs - sampled)
        old = micro.recomputed.old_logprobs
        learner = outputs.logprobs if old is None else old
        terms = mismatch_terms(sampled, learner, micro.loss_mask)
        metrics |= {f"{MISMATCH}{name}": value for name, value in terms.items()}
        largest = {LARGEST: probability_difference(sampled, learner, micro.loss_mask).max()}
    return metrics, largest


def _with_mismatch(metrics: dict[str, Array]) -> dict[str, Array]:
    """Returns the metrics of an update, with the means of the mismatch terms replaced by M17 and M18."""
    means = {name.removeprefix(MISMATCH): metrics.pop(name) for name in list(metrics) if name.startswith(MISMATCH)}
    mismatch = mismatch_of_means(means) if means else {}
    return metrics | {f"{MISMATCH}{name}": value for name, value in mismatch.items()}


def _router_sums(logits: Array, micro: TrainBatch, per_token: int) -> tuple[dict[str, Array], Array]:
    """Returns sums over the tokens in the loss, mean over sparse layers, and each expert's load.

    A router's decision at a token helps to predict the next one, so each token in the loss counts at the column before.

    Args:
      logits: [sparse layers, R, L, experts], or by shares of rows.
      per_token: experts per token.

    Returns:
      name -> []; load: [sparse layers, experts].
    """
    mask, packed = segments.next_column(micro.loss_mask), micro.packed
    routes = [] if packed.routes is None else [routers.by_layer(share_of_rows(packed.routes), len(logits))]

    def sums_of(
        logits: Array, mask: Array, segment: Array, *routes: Array, summed: Callable[[Array], Array] = lambda x: x
    ) -> tuple[dict[str, Array], Array]:
        balance = lambda z: routers.balance_sum(
            z, mask, segment, num_segments=packed.sequence.shape[-1], per_token=per_token, summed=summed
        )
        sums = {
            "balance": jax.vmap(balance)(logits).mean(),
            "z": jax.vmap(lambda z: routers.z_sum(z, mask))(logits).mean(),
            "entropy": jax.vmap(lambda z: routers.entropy_sum(z, mask))(logits).mean(),
        }
        if routes:
            sums["mismatch"] = jax.vmap(lambda z, ids: routers.changed_sum(z, mask, ids))(logits, *routes).mean()
        return sums, jax.vmap(lambda z, *ids: routers.load(z, mask, per_token, *ids))(logits, *routes)

    if axis_size(SEQUENCE) == 1:
        return sums_of(logits, mask, packed.segment, *routes)

    def sums_of_share(logits: Array, mask: Array, segment: Array, *routes: Array) -> tuple[Array, ...]:
        sums, load = sums_of(logits, mask, segment, *routes, summed=lambda x: jax.lax.psum(x, SEQUENCE))
        # Every device along `sequence` already has the balance of complete rows.
        axes = {name: row_axes() if name == "balance" else batch_axes() for name in sums}
        return *(jax.lax.psum(x, axes[name]) for name, x in sums.items()), jax.lax.psum(load, batch_axes())

    shares = (logits, row_shares.cut(mask), row_shares.cut(packed.segment), *routes)
    by_layer, names = (None, "batch", None, None), ("balance", "z", "entropy", *(["mismatch"] if routes else []))
    in_axes = (by_layer, ("batch", None), ("batch", None), *[by_layer] * len(routes))
    out_axes = (*[()] * len(names), (None, None))
    *sums, load = per_shard(sums_of_share, shares, in_axes, out_axes)
    return dict(zip(names, sums)), load


def teacher_of(state: TrainState, config: PyTree, objective: Objective) -> PyTree | None:
    """Returns the parameters of the role `teacher` if the objective needs the divergence from it, else None."""
    return None if objective.needs(config).divergence is None else weights_of(state.models, "teacher").params


def update(
    state: TrainState,
    batch: TrainBatch,
    config: PyTree,
    optimizer: Any,
    router: RouterLoss | None = None,
    kl_limit: KLLimit | None = None,
    *,
    role: str,
    objective: Objective,
    optimizer_row: Optimizer,
    model: Model,
    cfg: Any,
    chunk: int,
    teacher_kind: tuple[Model, Any] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after one optimizer step of the model in `role`, and its metrics.

    A step whose loss or gradient is not finite, or that has no token to learn from, leaves parameters, optimizer and
    moving average unchanged, bit for bit, and is counted. So does, without being skipped, one that `kl_limit` ends; one
    after it is not computed, and is of 0 tokens.

    Args:
      config: the objective's. optimizer: its configuration. router: as in `loss_sums`. All with floats as arrays.
      kl_limit: reads the objective's metric LIMITED_KL; None: no limit.
      optimizer_row: the row of OPTIMIZERS for `optimizer`.
      teacher_kind: as in `loss_sums`.

    Raises: ValueError when traced if there is a limit, and the objective has no such metric.
    """
    trained = state.models[role]
    trainable = Weights(trained.params, trained.heads)
    if kl_limit is not None:
        batch = _none_after(kl_limit.reached != 0, batch)
    sums = loss_sums(
        trainable,
        batch,
        config,
        state.objective,
        router,
        objective=objective,
        model=model,
        cfg=cfg,
        chunk=chunk,
        frozen=frozen_of(state.models, role),
        teacher=teacher_of(state, config, objective),
        teacher_kind=teacher_kind,
    )
    leaves = Weights(*describe(model.spec(cfg), trained.heads))
    gradient = trained_only(optimizer, sums.gradient, leaves)
    gradient = jax.tree.map(lambda g: (g / batch.denominator).astype(g.dtype), gradient)
    norm = optax.tree.norm(gradient)
    loss = sums.loss / batch.denominator
    num_tokens = batch.loss_mask.sum()
    tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    sound = finite & (num_tokens > 0)
    skipped, of_limit = ~sound, {}
    if kl_limit is not None:
        ended = kl_limit.reached != 0
        skipped &= ~ended
        if LIMITED_KL not in sums.metrics:
            raise ValueError(
                f"Online.max_kl reads the metric {LIMITED_KL!r}, which the objective's token_loss does not return; "
                "jrl.algos.common.common_metrics(tokens) has it"
            )
        ended |= sums.metrics[LIMITED_KL] / tokens > kl_limit.most
        sound &= ~ended
        of_limit = {KL_REACHED: ended}

    trainable, opt_state, updates = step(
        optimizer_row, optimizer, gradient, trained.opt_state, trainable, leaves, sound
    )
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "update/skipped_nonfinite": (~finite).astype(jnp.float32),
        "update/skipped_empty": (finite & skipped).astype(jnp.float32),
        **of_limit,
        "update/norm": jnp.where(sound, optax.tree.norm(updates), 0),
        **_with_mismatch({name: value / tokens for name, value in sums.metrics.items()}),
        **sums.largest,
        **{name: value / batch.targets.denominator for name, value in sums.sequence_metrics.items()},
        **({} if sums.load is None else _load_metrics(sums.load)),
        "update/tokens": num_tokens,
    }
    trained = trained.replace(params=trainable.params, heads=trainable.heads, opt_state=opt_state)
    models = {**state.models, role: trained}
    if optimizer.average is not None:
        models[AVERAGE] = moved_average(models[AVERAGE], trained, optimizer.average, sound)
    state = state.replace(models=models, skipped=state.skipped + skipped.astype(jnp.int32))
    return state, {name: value.astype(jnp.float32) for name, value in metrics.items()}


def _none_after(ended: Array, batch: TrainBatch) -> TrainBatch:
    """Returns the batch, or where `ended`, [] bool, one of no token, of which nothing is computed."""
    none, stored = lambda num_real: jnp.where(ended, 0, num_real), batch.pretraining
    if stored is not None:
        stored = stored.replace(packed=stored.packed.replace(num_real=none(stored.packed.num_real)))
    return batch.replace(
        packed=batch.packed.replace(num_real=none(batch.packed.num_real)),
        loss_mask=batch.loss_mask & ~ended,
        pretraining=stored,
    )


def _load_metrics(load: Array) -> dict[str, Array]:
    """Returns metrics of the experts' loads over a whole optimizer step, mean over sparse layers.

    Args:
      load: [sparse layers, experts], tokens routed to each.
    """
    mean = jnp.maximum(load.mean(-1), 1e-9)
    return {
        "router/load_max": (load.max(-1) / mean).mean(),  # busiest expert over the mean: 1 where load is even
        "router/unused": (load == 0).mean(),  # share of experts without a token
    }


def close_step(
    state: TrainState,
    previous: PyTree | None,
    objective_state: PyTree,
    metrics: dict[str, Array],
    config: PyTree,
    skipped: Array,
    reference_decay: Array | None = None,
    *,
    roles: Sequence[str],
    objective: Objective,
    reset_reference_every: int | None = None,
) -> TrainState:
    """Returns the state at the end of a step: counters advance, the objective's state only if no update was skipped.

    Args:
      previous: the trained parameters of the first role before the step, if refills of a later step may need them.
      objective_state: as Credit has it. metrics: means over the step's updates. config: the objective's.
      skipped: [] int32, state.skipped before the step's updates.
      reference_decay: [] float, share of the old reference that is kept when it is reset; None: nothing.
      roles: those that the stage trains.
      reset_reference_every: steps of the stage after which the reference becomes a copy of the first role (K6).
    """
    sound = state.skipped == skipped
    following = objective.next_state(config, objective_state, metrics)
    select = lambda new, old: jnp.where(sound, new, old).astype(old.dtype)
    learned = {role: state.models[role] for role in roles}
    models = {**state.models, **{role: model.replace(version=model.version + 1) for role, model in learned.items()}}
    if reset_reference_every is not None:
        trained = models[roles[0]]
        due = reset_due(trained.version, every=reset_reference_every)
        old, new = models["reference"].params, trained.params
        if reference_decay is not None:
            new = averaged_reference(old, new, decay=reference_decay)
        moved = jax.tree.map(lambda new, old: jnp.where(due, new, old), new, old)
        models["reference"] = models["reference"].replace(params=moved)
    if previous is not None:
        models = with_previous(models, previous, learned[roles[0]].version)
    return state.replace(step=state.step + 1, models=models, objective=jax.tree.map(select, following, state.objective))


def step_metrics(metrics: list[dict[str, Array]], critic: list[dict[str, Array]]) -> dict[str, Array]:
    """Returns the metrics of a step from those of its updates.

    Args:
      metrics: of the policy's updates, or of the only role's; [] where only the critic learns: its metrics then also
        have the policy's names.
      critic: of a separate critic's updates; []: there is none. Its metrics value/... keep their names, the others are
        named critic/...; its skipped updates count in the policy's names too.
    """
    if not critic:
        return mean_metrics(metrics)
    critic_means = mean_metrics(critic)
    means = mean_metrics(metrics) if metrics else critic_means
    skips = ("update/skipped_nonfinite", "update/skipped_empty")
    total_skips = {name: means[name] + critic_means[name] for name in skips} if metrics else {}
    renamed = {name if name.startswith("value/") else f"critic/{name}": value for name, value in critic_means.items()}
    return {**means, **total_skips, **renamed}


def mean_metrics(metrics: list[dict[str, Array]]) -> dict[str, Array]:
    """Returns the metrics of several updates of a role as one: skips and tokens are summed, maxima stay maxima, and the
    others are means weighted by each update's tokens, so that an update with nothing to learn from does not count."""
    tokens = jnp.stack([m["update/tokens"] for m in metrics])
    out = {}
    for name in metrics[0]:
        values = jnp.stack([m[name] for m in metrics])
        if name in ("update/tokens", "update/skipped_nonfinite", "update/skipped_empty", KL_REACHED):
            out[name] = values.sum()
        elif name == LARGEST:
            out[name] = values.max()
        else:
            out[name] = (values * tokens).sum() / jnp.maximum(tokens.sum(), 1)
    return out
