"""Credit assignment: from rewards and labels to advantages, loss masks and targets, before and after packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrl.algos.contract import (
    Groups,
    Needs,
    Objective,
    Pairs,
    Sequences,
    eligible,
    shaped_reward,
)
from jrl.algos.reward_shaping import Shaping, shaped
from jrl.device.sharding import row_axes
from jrl.learning.pack import PackingPlan, by_place, pack, pack_tokens, unpack
from jrl.ops import reward_telemetry as telemetry
from jrl.ops.groups import count, first_group, to_rows
from jrl.ops.likelihood import positive_weights
from jrl.ops.reduce import count_tokens, masked_mean
from jrl.ops.segments import segment_count, segment_sum
from jrl.ops.staleness import token_staleness
from jrl.ops.values import explained_variance
from jrl.types import (
    Array,
    Finish,
    PackedBatch,
    PretrainingBatch,
    PyTree,
    Recomputed,
    Rollout,
    Scores,
    SequenceTargets,
    TrainBatch,
)


class Credit(NamedTuple):
    """What the rewards give every token of the batch, on the shard of its row; fields of rows are on every shard."""

    advantages: Array | None  # [N, T] float32; None: the loss compares sequences
    loss_mask: Array  # [N, T] bool
    loss_weights: Array  # [N, T] float32
    state: PyTree  # the objective's, which is stored only if no update is skipped
    metrics: dict[str, Array]
    returns: Array | None = None  # [N, T] float32, where the objective has a value head
    pairs: Pairs | None = None  # where sampled rows are compared
    selected: Array | None = None  # [N, T] bool, where the objective selects tokens
    positive: Array | None = None  # [N] bool, as Objective.positive returns it
    staleness: Array | None = None  # [N, T] int32, where the objective reads how old tokens are


def groups_of(
    rollout: Rollout, scores: Scores, num_groups: int, max_completion: int, **by_token: Array | None
) -> Groups:
    """Returns what objectives judge rows by, on every shard: the rows of a group may be on different shards.

    Args:
      by_token: further fields of Groups, [N, T] each, or None.
    """
    everywhere = lambda tree: jax.tree.map(_everywhere, tree)
    return Groups(
        reward=_everywhere(scores.reward),
        outcome=_everywhere(scores.outcome),
        valid=_everywhere(scores.valid),
        group=_everywhere(rollout.group),
        num_groups=num_groups,
        action_mask=_everywhere(rollout.action_mask),
        finish=_everywhere(rollout.finish),
        sample=_everywhere(rollout.sample),
        turn=_everywhere(rollout.turn),
        max_completion=max_completion,
        token_reward=everywhere(scores.token_reward),
        components=everywhere(scores.components),
        **everywhere(by_token),
    )


def kept_rows(
    rollout: Rollout,
    scores: Scores,
    config: PyTree,
    shaping: Shaping | None = None,
    *,
    objective: Objective,
    num_groups: int,
    max_completion: int,
) -> Array:
    """Returns the rows that the objective would learn from, [N] bool. shaping: that of the stage; None: none."""
    groups = groups_of(rollout, scores, num_groups, max_completion)
    groups = groups if shaping is None else shaped(shaping, groups)
    return objective.keep(config, groups) & groups.valid


def groups_with_needs(
    rollout: Rollout,
    scores: Scores,
    before: Sequence[tuple[Recomputed, Array]],
    needs: Needs,
    num_groups: int,
    max_completion: int,
) -> Groups:
    """Returns what an objective judges rows by, with everything that `needs` asks for. before: as in `credit`."""

    def by_row(field: str) -> Array:
        """Returns a field of Recomputed as [N, T]: every row is in one minibatch, and 0 in the others."""
        return sum(unpack(getattr(packed, field), source, *rollout.tokens.shape[::-1]) for packed, source in before)

    groups = groups_of(
        rollout,
        scores,
        num_groups,
        max_completion,
        values=by_row("old_values") if needs.values else None,
        old_logprobs=by_row("old_logprobs") if needs.credit_logprobs else None,
        behaviour_logprobs=rollout.behaviour_logprobs if needs.credit_logprobs else None,
        ref_logprobs=by_row("ref_logprobs") if needs.credit_logprobs and needs.reference else None,
        teacher_logprobs=by_row("teacher_logprobs") if needs.teacher else None,
        old_entropy=by_row("old_entropy") if needs.credit_entropy else None,
        old_sum_squared=by_row("old_sum_squared") if needs.credit_sum_squared else None,
        tokens=rollout.tokens if needs.credit_tokens else None,
    )
    if needs.task:
        groups = groups.replace(task=first_group(_everywhere(scores.task), groups.group, num_groups=num_groups))
    if needs.examples is not None:
        groups = groups.replace(example=_everywhere(scores.example))
    return groups


def credit(
    rollout: Rollout,
    scores: Scores,
    state: PyTree,
    config: PyTree,
    before: Sequence[tuple[Recomputed, Array]] = (),
    shaping: Shaping | None = None,
    version: Array | None = None,
    *,
    objective: Objective,
    num_groups: int,
    max_completion: int,
    newest_only: bool = False,
) -> Credit:
    """Returns advantages and loss weights of every token. Group statistics see the whole batch.

    Args:
      state, config: the objective's.
      before: for every minibatch, what the weights before the updates compute, and its PackingPlan.source.
      shaping: of rewards, applied before the objective's own; None: rewards are as scored.
      version: [] int32, of those weights; None: the age of tokens is not computed.
      newest_only: exclude tokens that older weights drew from the loss.
    """
    needs = objective.needs(config)
    groups = groups_with_needs(rollout, scores, before, needs, num_groups, max_completion)
    action_mask, scored, token_reward = groups.action_mask, groups.reward, groups.token_reward
    groups = groups if shaping is None else shaped(shaping, groups)
    reward = shaped_reward(objective, config, groups, state)
    advantages, counters, pairs = None, {}, None
    if objective.advantages is not None:
        advantages, state, counters = objective.advantages(config, groups, reward, state)
    keep = objective.keep(config, groups) & groups.valid
    if objective.pairs is not None:
        pairs = objective.pairs(config, groups, reward)
    loss_mask = action_mask & keep[:, None]
    if objective.keep_tokens is not None:
        loss_mask = loss_mask & objective.keep_tokens(config, groups)
    age = None if version is None else token_staleness(version, _everywhere(rollout.version), action_mask)
    if newest_only:
        loss_mask = loss_mask & (age == 0)
    if pairs is not None:
        keep = keep & compared(pairs, loss_mask.any(-1))
        loss_mask = loss_mask & keep[:, None]
    weights = objective.weights(config, loss_mask, max_completion)
    length = action_mask.sum(-1)
    rows = jnp.maximum(groups.valid.sum(), 1)
    mean_of_valid = lambda x: jnp.where(groups.valid, x, 0).sum() / rows
    mean = mean_of_valid(scored)
    nonempty, any_valid = length > 0, groups.valid.any()
    max_of_valid = lambda x: jnp.where(any_valid, jnp.where(groups.valid, x, -jnp.inf).max(), 0)
    metrics = {
        "reward/mean": mean,
        "reward/std": jnp.sqrt(mean_of_valid((scored - mean) ** 2)),
        "reward/min": -max_of_valid(-scored),
        "reward/max": max_of_valid(scored),
        "reward/shaped": mean_of_valid(reward),
        "rollout/completion_length": length.sum() / jnp.maximum(nonempty.sum(), 1),
        "rollout/completion_length_max": length.max().astype(jnp.float32),
        "rollout/truncated_share": masked_mean(groups.finish == jnp.int8(Finish.LENGTH), nonempty),
        "rollout/valid_share": groups.valid.sum() / jnp.maximum((nonempty | groups.valid).sum(), 1),
        "loss/rows": keep.sum().astype(jnp.float32),
        "loss/tokens": loss_mask.sum().astype(jnp.float32),
        **hacking_metrics(groups, scored, reward),
        **{f"advantage/{name}": value.astype(jnp.float32) for name, value in counters.items()},
    }
    if age is not None:
        metrics["rollout/staleness"] = masked_mean(age, action_mask)
        metrics["rollout/staleness_max"] = jnp.where(action_mask, age, 0).max().astype(jnp.float32)
    if token_reward is not None:
        metrics["reward/tokens"] = mean_of_valid(token_reward.sum(-1))
    returns = None
    if objective.returns is not None:
        returns = objective.returns(config, groups, reward)
        metrics["value/explained_variance"] = explained_variance(groups.values, returns, loss_mask)
        metrics["value/return"] = masked_mean(returns, loss_mask)
    selected = None if objective.select is None else objective.select(config, groups, advantages)
    positive = None if objective.positive is None else objective.positive(config, groups)
    by_token = dict(
        advantages=advantages,
        loss_mask=loss_mask,
        loss_weights=jnp.where(loss_mask, weights, 0),
        returns=returns,
        selected=selected,
        staleness=age if needs.staleness else None,
    )
    return Credit(state=state, metrics=metrics, pairs=pairs, positive=positive, **jax.tree.map(_by_rows, by_token))


def compared(pairs: Pairs, rows: Array) -> Array:
    """Returns the rows whose comparison still has a preferred row and another one, [N] bool: a pair that lost a side is
    dropped (P0), and so is a list that lost its best.

    Args:
      rows: [N] bool, those with a token in the loss.
    """
    rows, unit = rows & (pairs.unit >= 0), jnp.maximum(pairs.unit, 0)
    count_in_unit = lambda counted: count(unit, counted, num_groups=rows.shape[0])
    return rows & to_rows((count_in_unit(rows) > 1) & (count_in_unit(rows & (pairs.label > 0.5)) > 0), unit)


LENGTH_BUCKETS = 4  # equal ranges of a completion's length


def hacking_metrics(groups: Groups, scored: Array, reward: Array) -> dict[str, Array]:
    """Returns metrics of reward hacking (R28), {name: [] float32}, over eligible rows.

    reward/outcome: mean reward of the first verifier, which is held out where its weight is 0.
    reward/outcome_correlation: between that and the reward; it falls where the reward is hacked.
    reward/length_correlation: between the reward and the completion's length.
    reward/order_flipped: share of rows whose rank in their group shaping changed.
    reward/length_quarter_1 to 4, rollout/length_quarter_1 to 4: the mean of `scored` among rows whose length is in that
      quarter of the longest completion allowed, and the share of rows there.

    Args:
      scored: [N] float, rewards before shaping. reward: [N] float, those that advantages are computed from.
    """
    counts, length = eligible(groups), groups.action_mask.sum(-1)
    rows = jnp.maximum(counts.sum(), 1)
    buckets = telemetry.length_bucket_means(
        scored, length, counts, num_buckets=LENGTH_BUCKETS, max_completion=groups.max_completion
    )
    flipped = telemetry.order_flipped(scored, reward, groups.group, counts)
    metrics = {
        "reward/outcome": masked_mean(groups.outcome, counts),
        "reward/outcome_correlation": telemetry.correlation(reward, groups.outcome, counts),
        "reward/length_correlation": telemetry.correlation(reward, length, counts),
        "reward/order_flipped": flipped.sum() / rows,
    }
    for bucket, (mean, share) in enumerate(zip(*buckets), start=1):
        metrics |= {f"reward/length_quarter_{bucket}": mean, f"rollout/length_quarter_{bucket}": share}
    return {name: value.astype(jnp.float32) for name, value in metrics.items()}


def finish_sampled(
    packed: PackedBatch,
    recomputed: Recomputed,
    plan: PackingPlan,
    credit: Credit,
    config: PyTree,
    *,
    objective: Objective,
    max_completion: int,
) -> TrainBatch:
    """Returns the train batch of one minibatch of sampled rows, with its credit."""
    mask = _everywhere(credit.loss_mask) & plan.member[:, None]  # a denominator may depend on any row
    targets, positive = None, None
    if credit.positive is not None:
        positive = pack(positive_weights(credit.positive, mask), plan.source)
    if credit.pairs is not None:
        targets = targets_of(packed, mask.any(-1), credit.pairs, config, objective)
    pack_if_any = lambda x: None if x is None else pack(x, plan.source)
    return TrainBatch(
        packed=packed,
        recomputed=recomputed,
        loss_mask=pack(credit.loss_mask, plan.source),
        loss_weights=pack(credit.loss_weights, plan.source),
        advantages=pack_if_any(credit.advantages),
        returns=pack_if_any(credit.returns),
        selected=pack_if_any(credit.selected),
        positive_weights=positive,
        staleness=pack_if_any(credit.staleness),
        targets=targets,
        denominator=targets.denominator
        if targets is not None and objective.token_loss is None
        else objective.denominator(config, mask, plan.member.sum(), max_completion).astype(jnp.float32),
    )


def targets_of(packed: PackedBatch, mask: Array, pairs: Pairs, config: PyTree, objective: Objective) -> SequenceTargets:
    """Returns the targets of the sequences of a minibatch. mask: [N] bool, its sequences that enter the loss."""
    return SequenceTargets(
        counts=by_place(mask, packed.sequence),
        label=by_place(pairs.label, packed.sequence),
        weight=by_place(pairs.weight, packed.sequence),
        unit=by_place(pairs.unit + 1, packed.sequence) - 1,
        value=None if pairs.value is None else by_place(pairs.value, packed.sequence),
        denominator=objective.sequence_denominator(config, _everywhere(mask), _everywhere(pairs.unit)),
    )


class StoredLabels(NamedTuple):
    """The labels of stored rows."""

    mask: Array  # [N, T] bool, tokens that enter the loss
    label: Array  # [N] float32, 1: preferred, 0: not
    weight: Array  # [N] float32
    unit: Array  # [N] int32, the comparison that a row belongs to; its rows are adjacent
    # [N] float32, the row's value according to the data; [N, K] for K attributes; None: they have none
    value: Array | None = None


def finish_stored(
    packed: PackedBatch,
    recomputed: Recomputed,
    plan: PackingPlan,
    labels: StoredLabels,
    config: PyTree,
    *,
    objective: Objective,
    max_completion: int,
) -> TrainBatch:
    """Returns the train batch of one minibatch of stored rows: every action enters the loss."""
    targets = None
    mask = _everywhere(labels.mask) & plan.member[:, None]
    weights = objective.weights(config, labels.mask, max_completion)
    if objective.sequence_loss is not None or objective.needs(config).row_value_names:
        pairs = Pairs(labels.label, labels.unit, labels.weight, labels.value)
        targets = targets_of(packed, plan.member, pairs, config, objective)
        if recomputed.row_values is not None:
            targets = targets.replace(value=recomputed.row_values)
        if objective.sequence_baseline is not None:
            sequences = sequences_of(
                packed, targets, packed.action_mask, recomputed.old_logprobs, recomputed.ref_logprobs
            )
            baseline = objective.sequence_baseline(config, jax.tree.map(_everywhere, sequences))
            targets = targets.replace(baseline=baseline)
    return TrainBatch(
        packed=packed,
        recomputed=recomputed,
        loss_mask=packed.action_mask,
        loss_weights=pack(jnp.where(labels.mask, weights, 0), plan.source),
        advantages=None,
        returns=None,
        targets=targets,
        denominator=targets.denominator
        if objective.token_loss is None
        else objective.denominator(config, mask, plan.member.sum(), max_completion).astype(jnp.float32),
    )


def pack_pretraining(tokens: Array, mask: Array, plan: PackingPlan, coefficient: Array) -> PretrainingBatch:
    """Returns the stored rows that an optimizer step on samples also imitates, at temperature 1.

    Args:
      tokens: [N, T] int32. mask: [N, T] bool, tokens to imitate. coefficient: [] float32.
    """
    packed = pack_tokens(tokens, mask, plan, jnp.ones_like(coefficient))
    return PretrainingBatch(packed, count_tokens(_everywhere(mask) & plan.member[:, None]), coefficient)


def sequences_of(
    packed: PackedBatch, targets: SequenceTargets, mask: Array, logprobs: Array | None, ref_logprobs: Array | None
) -> Sequences:
    """Returns the sequences of packed rows, [..., S], with sums over their tokens in `mask`, and no scores.

    Args:
      mask: [..., L] bool. logprobs, ref_logprobs: [..., L]; None: the objective does not need them.
    """
    num_segments, baseline = packed.sequence.shape[-1], targets.baseline
    total = lambda x: None if x is None else segment_sum(x, mask, packed.segment, num_segments=num_segments)
    return Sequences(
        logprob=total(logprobs),
        ref_logprob=total(ref_logprobs),
        length=segment_count(mask, packed.segment, num_segments=num_segments),
        score=None,
        label=targets.label,
        unit=targets.unit,
        mask=targets.counts,
        value=targets.value,
        baseline=None if baseline is None else jnp.broadcast_to(baseline, targets.label.shape),
        behaviour_logprob=total(packed.behaviour_logprobs),
    )


def _everywhere(x: Array) -> Array:
    """Returns the array on every shard."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, PartitionSpec())


def _by_rows(x: Array) -> Array:
    """Returns an array of rows, each row on its own shard."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, PartitionSpec(row_axes()))
