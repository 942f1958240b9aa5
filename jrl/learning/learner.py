"""The learner: log-probs of packed sequences, credit for what was rewarded, and one optimiser step.

    plan (host) -> pack (device) -> logprobs (old, reference), old values -> finish (advantages, returns) -> update

Everything here is pure. Sums over sequences are local to a packed row; numerators and denominators travel apart to
the end, so that loss and gradient depend neither on packing, nor on micro-batches, nor on the mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jrl.algos.contract import Algorithm, Groups, Tokens
from jrl.device.sharding import constrain
from jrl.learning.optimizer import AdamW, step
from jrl.learning.pack import Plan, Shape, pack, unpack
from jrl.learning.prefix_packing import most_micro_batches, most_rows
from jrl.models.contract import VALUE, Ahead, Model, trained, whole, without_gradient
from jrl.models.heads import read_values
from jrl.ops import router as routers
from jrl.ops.logprobs import token_logprobs
from jrl.ops.reduce import masked_mean
from jrl.ops.values import explained_variance
from jrl.types import Array, PyTree, Rollout, Scores, TrainBatch, TrainState, traced


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

    row_length: int | None = None  # L, tokens of a packed row; None: the longest that lies in one, at least 128
    micro_batch_tokens: int = 8192  # tokens computed at once, over all batch shards
    sequences_per_row: int = 32  # S, most sequences of a packed row
    minibatches: int = 1  # optimiser steps in one pass over a batch
    epochs: int = 1  # passes over a batch
    logprob_chunk: int = 128  # positions of a row whose logits exist at once
    layers: Literal["scanned", "unrolled"] = "scanned"  # scanned compiles faster, unrolled computes faster on CPU
    # A group's prompt is computed with each sample; once a row of them; or once, seen from all rows of a micro-batch.
    prefix_sharing: Literal["none", "in_row", "cross_row"] = "none"
    router: RouterLoss | None = None  # what a mixture of experts adds to the loss; None: nothing

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"Learner.{field.name} must be at least 1; got {value}")

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.epochs


def packed_shape(
    config: Learner, sequences: int, width: int, shards: int, *, prompt_length: int = 0, samples: int = 1
) -> Shape:
    """Returns the shape of one optimiser step on `sequences` rows of `width` tokens.

    Args:
      prompt_length, samples: the most tokens of a prompt, and how many rows share one; where prompts may be shared.

    Raises: ValueError where sequences do not divide over shards and minibatches, or do not fit a row.
    """
    if sequences % (shards * config.minibatches):
        raise ValueError(
            f"{sequences} sequences a step do not divide into {shards} batch shards x {config.minibatches} minibatches"
        )
    apart = config.prefix_sharing == "cross_row" and samples > 1
    trunk = prompt_length - 1
    longest = max(trunk, width - trunk) if apart else width
    row_length = max(longest, 128) if config.row_length is None else config.row_length
    if row_length < longest:
        what = "prompt or completion" if apart else "sequence"
        raise ValueError(f"Learner.row_length={row_length} is shorter than the longest {what}, {longest} tokens")
    local = sequences // (shards * config.minibatches)
    places = min(config.sequences_per_row, local)
    # A minibatch may begin and end inside a group.
    groups = local // samples + (2 if local % samples else 0)
    fewest = 2 if apart and row_length < width else 1  # a trunk, and a branch that does not fit behind it
    together = max(fewest, config.micro_batch_tokens // (row_length * shards))
    if apart:
        held = dict(row_length=row_length, max_per_row=places)
        one = most_rows(groups, samples, trunk, width - trunk, **held)
        rows = min(together, one)
        micro_batches = most_micro_batches(groups, samples, trunk, width - trunk, rows=rows, **held)
        ahead = max(trunk, 1)
        return Shape(sequences, width, row_length, rows * shards, micro_batches, places, shards, samples, ahead)
    # Rows that the worst lengths can need: every row but one holds at least `full` sequences of the longest kind.
    full = min(row_length // width, places)
    capacity = -(-local // full)
    shared = samples if config.prefix_sharing == "in_row" else 1
    if shared > 1:
        # A bundle holds at least so many samples, the last of each group aside.
        fit = max(1, min((row_length - trunk) // (width - trunk), places))
        capacity = min(local, (local + groups * (fit - 1)) // fit)
    rows = min(capacity, together)
    return Shape(sequences, width, row_length, rows * shards, -(-capacity // rows), places, shards, shared)


class Credit(NamedTuple):
    """What the rewards say about every token of the batch."""

    advantages: Array  # [N, T] float32
    loss_mask: Array  # [N, T] bool
    loss_weights: Array  # [N, T] float32
    baseline: Array  # [] float32, to be stored once the update is known to be sound
    metrics: dict[str, Array]
    returns: Array | None = None  # [N, T] float32, where the algorithm has a value head


def groups_of(
    rollout: Rollout, scores: Scores, num_groups: int, max_completion: int, values: Array | None = None
) -> Groups:
    """Returns what algorithms judge rows by. Groups may lie on different shards, so every shard gets all of it."""
    everywhere = lambda x: x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, PartitionSpec())
    return Groups(
        reward=everywhere(scores.reward),
        outcome=everywhere(scores.outcome),
        valid=everywhere(scores.valid),
        group=everywhere(rollout.group),
        num_groups=num_groups,
        action_mask=everywhere(rollout.action_mask),
        finish=everywhere(rollout.finish),
        max_completion=max_completion,
        values=None if values is None else everywhere(values),
    )


def kept_rows(
    rollout: Rollout, scores: Scores, algo: PyTree, *, algorithm: Algorithm, num_groups: int, max_completion: int
) -> Array:
    """Returns the rows that the algorithm would learn from, [N] bool."""
    groups = groups_of(rollout, scores, num_groups, max_completion)
    return algorithm.keep(algo, groups) & groups.valid


def credit(
    rollout: Rollout,
    scores: Scores,
    baseline: Array,
    algo: PyTree,
    old_values: Sequence[tuple[Array, Array]] = (),
    *,
    algorithm: Algorithm,
    num_groups: int,
    max_completion: int,
) -> Credit:
    """Returns advantages and loss weights of every token. Group statistics see the whole batch.

    Args:
      old_values: of every minibatch (TrainBatch.old_values, Plan.source), where the algorithm has a value head.
    """
    by_row = [unpack(packed, source, *rollout.tokens.shape[::-1]) for packed, source in old_values]
    groups = groups_of(rollout, scores, num_groups, max_completion, sum(by_row) if by_row else None)
    action_mask = groups.action_mask
    reward = algorithm.shape(algo, groups)
    advantages, new_baseline, counters = algorithm.advantages(algo, groups, reward, baseline)
    keep = algorithm.keep(algo, groups) & groups.valid
    loss_mask = action_mask & keep[:, None]
    weights = algorithm.weights(algo, loss_mask, max_completion)
    length = action_mask.sum(-1)
    rows = jnp.maximum((groups.valid).sum(), 1)
    over_valid = lambda x: jnp.where(groups.valid, x, 0).sum() / rows
    mean = over_valid(groups.reward)
    metrics = {
        "reward/mean": mean,
        "reward/std": jnp.sqrt(over_valid((groups.reward - mean) ** 2)),
        "reward/shaped": over_valid(reward),
        "rollout/completion_length": length.sum() / jnp.maximum((length > 0).sum(), 1),
        "rollout/valid_share": groups.valid.sum() / jnp.maximum((length > 0).sum(), 1),
        "loss/rows": keep.sum().astype(jnp.float32),
        "loss/tokens": loss_mask.sum().astype(jnp.float32),
        **{f"advantage/{name}": value.astype(jnp.float32) for name, value in counters.items()},
    }
    returns = None
    if algorithm.returns is not None:
        returns = algorithm.returns(algo, groups, reward)
        metrics["value/explained_variance"] = explained_variance(groups.values, returns, loss_mask)
        metrics["value/return"] = masked_mean(returns, loss_mask)
    return Credit(advantages, loss_mask, jnp.where(loss_mask, weights, 0), new_baseline, metrics, returns)


def finish(
    batch: TrainBatch,
    plan: Plan,
    credit: Credit,
    algo: PyTree,
    *,
    algorithm: Algorithm,
    max_completion: int,
) -> TrainBatch:
    """Returns the packed batch with what the rewards say in it."""
    mask = credit.loss_mask & plan.member[:, None]
    return batch.replace(
        loss_mask=pack(credit.loss_mask, plan.source),
        loss_weights=pack(credit.loss_weights, plan.source),
        advantages=pack(credit.advantages, plan.source),
        returns=None if credit.returns is None else pack(credit.returns, plan.source),
        denominator=algorithm.denominator(algo, mask, plan.member.sum(), max_completion).astype(jnp.float32),
    )


def _micro_batch(batch: TrainBatch, i: Array) -> TrainBatch:
    """Returns micro-batch `i`: every [M, R, .] field as [R, .]."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) if x.ndim == 3 else x,
        batch,
    )


def _forward(
    params: PyTree, micro: TrainBatch, mask: Array, model: Model, cfg: Any, chunk: int
) -> tuple[Array, Array, Array | None, Array | None]:
    """Returns log-prob and entropy of the tokens in `mask`, the logits of the model's routers, and what the value head
    says before each token; None where there is none."""
    segment = micro.segment if micro.trunk is None else jnp.stack([micro.segment, micro.trunk], axis=-1)
    if micro.ahead is not None:
        segment = Ahead(segment, segment < micro.sequence.shape[-1], micro.ahead)
    hidden, logits = model.routed(params, micro.tokens, micro.positions, segment, cfg)
    unembed = lambda h: model.unembed(params, h, cfg)
    said = token_logprobs(hidden, micro.tokens, mask, unembed, temperature=micro.temperature, chunk=chunk)
    return *said, logits, read_values(params[VALUE], hidden) if VALUE in params else None


def logprobs(params: PyTree, batch: TrainBatch, *, model: Model, cfg: Any, chunk: int) -> Array:
    """Returns the log-prob of every action, [M, R, L] float32; zero elsewhere."""
    found = before_update(params, batch, fields=("old_logprobs",), model=model, cfg=cfg, chunk=chunk)
    return found["old_logprobs"]


def before_update(
    params: PyTree, batch: TrainBatch, *, fields: Sequence[str], model: Model, cfg: Any, chunk: int
) -> dict[str, Array]:
    """Returns fields of the batch as the weights before its update have them, in one pass, [M, R, L] float32 each.

    Args:
      fields: of "old_logprobs" and, where there is a value head, "old_values"; what is not wanted is not computed.
    """

    def body(i: Array, out: dict[str, Array]) -> dict[str, Array]:
        micro = _micro_batch(batch, i)
        new, _, _, values = _forward(params, micro, micro.action_mask, model, cfg, chunk)
        found = {"old_logprobs": new}
        if values is not None:
            found["old_values"] = jnp.where(micro.action_mask, values, 0)
        # Reshapes of a single row have lost its axes.
        put = lambda whole, x: jax.lax.dynamic_update_index_in_dim(
            whole, constrain(x, "batch", None).astype(whole.dtype), i, 0
        )
        return {name: put(out[name], found[name]) for name in fields}

    dtype = jnp.promote_types(jnp.float32, jnp.dtype(cfg.dtype))
    zeros = {name: jnp.zeros_like(batch.advantages, dtype) for name in fields}
    return jax.lax.fori_loop(0, batch.num_real, body, zeros)


class Sums(NamedTuple):
    """Numerators of one optimiser step, summed over its micro-batches."""

    gradient: PyTree
    loss: Array  # [], weighted sum
    magnitude: Array  # [], sum of the absolute values of the loss's terms
    metrics: dict[str, Array]  # sums over tokens of the loss mask
    load: Array | None  # [sparse layers, experts], tokens of the loss mask that went to each; None without experts


def loss_sums(
    params: PyTree,
    batch: TrainBatch,
    algo: PyTree,
    router: RouterLoss | None = None,
    *,
    algorithm: Algorithm,
    model: Model,
    cfg: Any,
    chunk: int,
    base: PyTree | None = None,
) -> Sums:
    """Returns loss, gradient and metric numerators of a whole optimiser step: a loop over its real micro-batches.

    Args:
      params: what is trained, and what the gradient is of; `base` is frozen under it.
      router: what a mixture of experts adds to the loss, its floats as arrays.
    """
    places = batch.sequence.shape[-1]
    # The terms of routers are means over tokens: said as a share of the algorithm's own denominator they are sums too.
    share = batch.denominator / jnp.maximum(batch.loss_mask.sum(), 1)

    def loss_fn(params: PyTree, micro: TrainBatch) -> tuple[Array, tuple[Array, dict[str, Array], Array | None]]:
        params = without_gradient(params, model.spec(cfg))
        new, entropy, logits, values = _forward(whole(base, params), micro, micro.loss_mask, model, cfg, chunk)
        entropy = entropy if algorithm.needs_entropy_gradient(algo) else jax.lax.stop_gradient(entropy)
        old = jax.lax.stop_gradient(new) if micro.old_logprobs is None else micro.old_logprobs
        tokens = Tokens(
            logprobs=new,
            old_logprobs=old,
            behaviour_logprobs=micro.behaviour_logprobs,
            ref_logprobs=micro.ref_logprobs,
            entropy=entropy,
            advantages=micro.advantages,
            mask=micro.loss_mask,
            segment=micro.segment,
            num_segments=places,
            values=values,
            old_values=micro.old_values,
            returns=micro.returns,
        )
        per_token, metrics = algorithm.token_loss(algo, tokens)
        # Select, do not multiply: a masked token's loss may be anything.
        terms = jnp.where(micro.loss_mask, micro.loss_weights * per_token, 0)
        difference = jnp.abs(new - micro.sampler_logprobs)
        metrics = {**metrics, "policy/entropy": entropy, "policy/logprob": new, "policy/sampler_difference": difference}
        sums = {name: jnp.where(micro.loss_mask, value, 0).sum() for name, value in metrics.items()}
        loss, magnitude, load = terms.sum(), jnp.abs(terms).sum(), None
        if logits is not None:
            own, load = _router_sums(logits, micro, places, cfg.experts.per_token)
            weights = {} if router is None else {"balance": router.balance, "z": router.z}
            for name, weight in weights.items():
                if weight is not None:
                    term = weight * share * own[name]
                    loss, magnitude = loss + term, magnitude + term
            sums |= {f"router/{name}": value for name, value in own.items()}
        return loss, jax.lax.stop_gradient((magnitude, sums, load))

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    shapes = jax.eval_shape(grad_fn, params, _micro_batch(batch, 0))
    (loss_shape, (_, metric_shapes, load_shape)), _ = shapes
    zero = Sums(
        gradient=jax.tree.map(jnp.zeros_like, params),
        loss=jnp.zeros((), loss_shape.dtype),
        magnitude=jnp.zeros((), loss_shape.dtype),
        metrics={name: jnp.zeros((), s.dtype) for name, s in metric_shapes.items()},
        load=None if load_shape is None else jnp.zeros(load_shape.shape, load_shape.dtype),
    )

    def body(i: Array, sums: Sums) -> Sums:
        (loss, (magnitude, metrics, load)), gradient = grad_fn(params, _micro_batch(batch, i))
        return jax.tree.map(jnp.add, sums, Sums(gradient, loss, magnitude, metrics, load))

    return jax.lax.fori_loop(0, batch.num_real, body, zero)


def _router_sums(logits: Array, micro: TrainBatch, places: int, per_token: int) -> tuple[dict[str, Array], Array]:
    """Returns sums over the tokens that are learned from, mean over sparse layers, and each expert's load.

    A router decides on the token before the one that it helps to predict: that is where it is judged.

    Args:
      logits: [sparse layers, R, L, experts].

    Returns:
      name -> []; load: [sparse layers, experts].
    """
    mask = jnp.concatenate([micro.loss_mask[:, 1:], jnp.zeros_like(micro.loss_mask[:, :1])], axis=1)
    balance = lambda z: routers.balance_sum(z, mask, micro.segment, num_segments=places, per_token=per_token)
    sums = {
        "balance": jax.vmap(balance)(logits).mean(),
        "z": jax.vmap(lambda z: routers.z_sum(z, mask))(logits).mean(),
        "entropy": jax.vmap(lambda z: routers.entropy_sum(z, mask))(logits).mean(),
    }
    return sums, jax.vmap(lambda z: routers.load(z, mask, per_token))(logits)


def update(
    state: TrainState,
    batch: TrainBatch,
    algo: PyTree,
    adamw: AdamW,
    router: RouterLoss | None = None,
    *,
    algorithm: Algorithm,
    model: Model,
    cfg: Any,
    chunk: int,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after one optimiser step, and its metrics.

    A step whose loss or gradient is not finite, or that has no token to learn from, leaves parameters and optimiser
    as they were, bit for bit, and is counted.
    """
    static = dict(algorithm=algorithm, model=model, cfg=cfg, chunk=chunk)
    sums = loss_sums(state.params, batch, algo, router, **static, base=state.base)
    gradient = jax.tree.map(lambda g: (g / batch.denominator).astype(g.dtype), sums.gradient)
    norm = optax.tree.norm(gradient)
    loss = sums.loss / batch.denominator
    num_tokens = batch.loss_mask.sum()
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    sound = finite & (num_tokens > 0)

    params, opt_state, updates = step(adamw, gradient, state.opt_state, state.params, trained(model.spec(cfg)), sound)
    tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "update/skipped_nonfinite": (~finite).astype(jnp.float32),
        "update/skipped_empty": (finite & (num_tokens == 0)).astype(jnp.float32),
        "update/norm": jnp.where(sound, optax.tree.norm(updates), 0),
        **{name: value / tokens for name, value in sums.metrics.items()},
        **({} if sums.load is None else _load_metrics(sums.load)),
        "update/tokens": num_tokens,
    }
    state = state.replace(
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + (~sound).astype(jnp.int32),
    )
    return state, {name: value.astype(jnp.float32) for name, value in metrics.items()}


def _load_metrics(load: Array) -> dict[str, Array]:
    """Returns what the experts' loads of a whole optimiser step say, mean over sparse layers.

    Args:
      load: [sparse layers, experts], tokens that went to each.
    """
    mean = jnp.maximum(load.mean(-1), 1e-9)
    return {
        "router/load_max": (load.max(-1) / mean).mean(),  # busiest expert over the mean: 1 where load is even
        "router/unused": (load == 0).mean(),  # share of experts without a token
    }


def close_step(state: TrainState, before: PyTree | None, baseline: Array, skipped: Array) -> TrainState:
    """Returns the state at the end of a step of RL: counters advance, moving averages only if no update was skipped.

    Args:
      before: the parameters the step began with, where refills of the next step may need them (lag = 1).
      skipped: [] int32, state.skipped before the step's updates.
    """
    sound = state.skipped == skipped
    return state.replace(
        step=state.step + 1,
        version=state.version + 1,
        baseline=jnp.where(sound, baseline, state.baseline).astype(jnp.float32),
        behaviour=before,
    )


def close_sft_step(state: TrainState) -> TrainState:
    """Returns the state at the end of a supervised step: nothing but its counter advances."""
    return state.replace(step=state.step + 1)


def mean_metrics(metrics: list[dict[str, Array]]) -> dict[str, Array]:
    """Returns the metrics of a step from those of its updates: skips and tokens are summed, the rest is a mean weighted
    by each update's tokens, so that an update with nothing to learn from does not count."""
    tokens = jnp.stack([m["update/tokens"] for m in metrics])
    out = {}
    for name in metrics[0]:
        values = jnp.stack([m[name] for m in metrics])
        if name in ("update/tokens", "update/skipped_nonfinite", "update/skipped_empty"):
            out[name] = values.sum()
        else:
            out[name] = (values * tokens).sum() / jnp.maximum(tokens.sum(), 1)
    return out
