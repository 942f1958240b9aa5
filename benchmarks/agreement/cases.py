"""Seeded random cases: arrays by the names of a part's inputs, ragged masks, NaN wherever an entry is masked."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray
Case = dict[str, Any]

ROWS, COLUMNS, GROUPS, SEGMENTS, TASKS, NODES, TURNS, COMPONENTS, BINS = 6, 10, 3, 3, 2, 9, 4, 3, 5
# Shapes and counts are part of a program, so they are the same in all cases of a function.
STATIC = {
    "num_groups": GROUPS,
    "num_segments": SEGMENTS,
    "num_tasks": TASKS,
    "num_nodes": NODES,
    "k": 2,
    "size": 3,
    "sizes": (1, 2, 4),
    "max_kept": 2,
    "rows": ROWS,
    "max_completion": COLUMNS,
    "count": BINS,
}
# Inputs that are numbers, uniform between two bounds.
NUMBERS = {
    "alpha": (0.05, 1.0),
    "baseline": (-1.0, 1.0),
    "beta": (0.2, 2.0),
    "cap": (1.0, 3.0),
    "clip": (0.05, 0.5),
    "clip_high": (0.05, 0.5),
    "clip_low": (0.05, 0.5),
    "coefficient": (0.01, 1.0),
    "critic_lambda": (0.5, 1.0),
    "decay": (0.5, 1.0),
    "delta": (1.6, 4.0),
    "discount": (0.5, 1.0),
    "dual_clip": (1.6, 4.0),
    "epsilon": (1e-6, 1e-4),
    "floor": (0.05, 0.5),
    "gae_lambda": (0.0, 1.0),
    "high": (1.1, 4.0),
    "horizon": (1000.0, 20000.0),
    "kl": (0.0, 0.5),
    "largest": (0.2, 1.0),
    "limit": (0.01, 1.0),
    "log_clip_high": (0.05, 0.6),
    "log_clip_low": (0.05, 0.6),
    "low": (0.2, 0.9),
    "max_trace": (0.5, 1.5),
    "max_weight": (1.0, 5.0),
    "negative_temperature": (0.5, 2.0),
    "policy_lambda": (0.0, 1.0),
    "positive_temperature": (0.5, 2.0),
    "share": (0.05, 0.5),
    "target": (0.05, 0.5),
    "tau": (0.05, 1.0),
    "threshold": (-0.5, 1.0),
}
# Where a name means another quantity in a part.
NUMBERS_OF = {
    "pretraining_nll": {"num_tokens": (1.0, 60.0), "denominator": (1.0, 60.0)},
    "dppo": {"delta": (0.05, 0.4)},
    "within_probability": {"delta": (0.05, 0.4)},
    "near_policy": {"delta": (0.05, 0.4)},
    "clip_cov": {"low": (-0.1, 0.1), "high": (0.2, 1.0)},
    "entropy_bonus": {"coefficient": (0.001, 0.1)},
    "adapted_entropy_coefficient": {"step": (0.001, 0.3), "entropy": (0.0, 1.0)},
}
# Losses of a sequence, whose advantage is one number for all of its tokens.
ONE_ADVANTAGE = ("gspo", "sequence_clipped", "mirror_descent", "mean_mirror_descent", "gmpo", "a_lol", "near_policy")
# Where log-ratios beyond the clamp would show the rounding of float32 alone: a sum of them that cancels, and exp(20)
# times what float32 makes of a small k3.
SMALL = ("mirror_descent", "mean_mirror_descent", "corrected_k3")


def case(function: str, inputs: list[str], rng: np.random.Generator, shared: bool = False) -> Case:
    """Returns the arrays of one case of a part, by its inputs' names.

    Args:
      shared: only what other libraries define alike: every row has a token and a verdict, every group two rows, a row
        is one sequence, and no log-ratio needs a clamp. See the rules E1 to E9 of docs/algorithms.md for the rest.
    """
    mask = masks(rng)
    if shared:
        mask = shared_mask(inputs, rng)
    if {"success", "turn_reward"} & set(inputs) or function in ("spread_turns", "spread_nodes", "sibling_advantages"):
        return steps_and_nodes(function, inputs, mask, rng)
    if "bins" in inputs or function in ("symlog", "symexp"):
        return bins(function, inputs, mask, rng)
    if function in ("averaged_reference", "base_share", "mixed_kl", "reset_due"):
        return references(inputs, rng)
    valid, group = rng.random(ROWS) < rng.choice([0.0, 0.85, 1.0], p=[0.1, 0.6, 0.3]), rng.integers(0, GROUPS, ROWS)
    if shared:
        valid, group = np.ones(ROWS, bool), rng.permutation(np.arange(ROWS) % rng.integers(1, GROUPS + 1))
    reward = numbers(rng, ROWS)
    drawn: Case = {name: value for name, value in STATIC.items() if name in inputs}
    bounds = NUMBERS | NUMBERS_OF.get(function, {})
    drawn |= {name: np.float32(rng.uniform(*bounds[name])) for name in inputs if name in bounds and name not in drawn}
    segment = np.sort(rng.integers(0, 1 if shared else SEGMENTS, (ROWS, COLUMNS)), axis=1)
    small = shared or function in SMALL
    logprobs = -rng.exponential(1.0, (ROWS, COLUMNS)) - 0.01
    logprobs -= 0 if small else 26 * (rng.random((ROWS, 1)) < 0.1)  # else nothing moves up by more than the clamp
    of_tokens = {
        "token_reward": numbers(rng, (ROWS, COLUMNS)),
        "returns": numbers(rng, (ROWS, COLUMNS)),
        "values": numbers(rng, (ROWS, COLUMNS)),
        "old_values": rng.normal(size=(ROWS, COLUMNS)),
        "weights": rng.exponential(1.0, (ROWS, COLUMNS)),
        "advantages": advantages(function, segment, rng),
        "x": numbers(rng, (ROWS, COLUMNS)),
        "loss": rng.normal(size=(ROWS, COLUMNS)),
        "entropy": rng.exponential(1.0, (ROWS, COLUMNS)),
        "logprobs": logprobs,
        **{
            name: np.minimum(logprobs + moves(rng, small), -0.001)
            for name in ("old_logprobs", "behaviour_logprobs", "ref_logprobs", "sampled_logprobs")
        },
    }
    probability = np.exp(logprobs)
    if function in ("gae", "decoupled_gae", "macro_gae", "vtrace"):
        rewards = of_tokens.pop("token_reward")  # those on tokens of others count too
        drawn["token_reward"] = np.where(mask.any(axis=1, keepdims=True), rewards, 0).astype(np.float32)
    of_tokens |= {
        "probability": probability,
        "sum_squared": probability**2 + (1 - probability) ** 2 * rng.random((ROWS, COLUMNS)),
    }
    counts = mask if {"mask", "action_mask"} & set(inputs) else np.ones_like(mask)
    drawn |= {
        name: np.where(counts, value, np.nan).astype(np.float32)
        for name, value in of_tokens.items()
        if name in inputs and name not in drawn and not (name == "weights" and "components" in inputs)
    }
    version, old = 10, rng.integers(6, 11)
    rest = {
        "action_mask": mask,
        "mask": mask,
        "loss_mask": mask,
        "macro_start": mask & ((rng.random((ROWS, COLUMNS)) < 0.4) | first_of_runs(mask)),
        "segment": np.where(mask, segment, SEGMENTS),
        "selected": mask & (rng.random((ROWS, COLUMNS)) < 0.3),
        "noise": rng.integers(0, 2**32, (ROWS, COLUMNS), dtype=np.uint32),
        "behaviour_version": np.where(mask, rng.integers(0, old + 1, (ROWS, COLUMNS)), 0),
        "old_version": np.int32(old),
        "version": np.int32(version),
        "valid": valid,
        "group": group,
        "reward": np.where(valid, reward, np.nan).astype(np.float32),
        "value": np.where(valid, numbers(rng, ROWS), np.nan).astype(np.float32),
        "correct": rng.random(ROWS) < 0.4,
        "greedy": first_of_groups(group, rng),
        "length": np.sum(mask, axis=1),
        "task": rng.integers(0, TASKS, ROWS),
        "components": components(valid, rng),
        "weights": rng.uniform(0.2, 2.0, COMPONENTS).astype(np.float32),
        "advantage": np.maximum(numbers(rng, ROWS), 0).astype(np.float32) + np.float32(1e-3) * (np.arange(ROWS) == 0),
    }
    if "sample" in inputs:  # drawn for those alone, so that the cases of others stay as they were
        rest["sample"] = rng.permutation(ROWS)
    if "tokens" in inputs:  # half of the rows are the answers of others
        other = np.where(rng.random(ROWS) < 0.5, rng.integers(0, ROWS, ROWS), np.arange(ROWS))
        rest["tokens"], rest["action_mask"] = rng.integers(0, 4, (ROWS, COLUMNS))[other], mask[other]
    if function == "positive_nll":
        rest["correct"] = np.broadcast_to(rest["correct"][:, None], mask.shape)
    if function == "moving_baseline" and rng.random() < 0.2:
        drawn["baseline"] = np.float32(np.nan)  # before the first batch
    if function == "adapted_kl_coefficient":
        drawn["rows"] = np.int32(rng.integers(1, 512))
    if function == "decoupled_gae":
        drawn["policy_lambda"] = rng.random(ROWS).astype(np.float32)
    if function == "interpolated_logprobs":
        rest["logprobs"] = drawn["logprobs"]
    return {name: drawn[name] if name in drawn else rest[name] for name in inputs}


def masks(rng: np.random.Generator) -> Array:
    """Returns a mask with ragged ends, gaps, now and then an empty row, and rarely nothing at all."""
    ends = rng.integers(0, COLUMNS + 1, (ROWS, 1))
    mask = (np.arange(COLUMNS) < ends) & (rng.random((ROWS, COLUMNS)) < rng.choice([0.7, 1.0], (ROWS, 1)))
    return mask & (rng.random() > 0.02)


def shared_mask(inputs: list[str], rng: np.random.Generator) -> Array:
    """Returns a mask with a token in every row, and with gaps where the part is one of tokens."""
    ends = rng.integers(1, COLUMNS + 1, (ROWS, 1))
    gaps = (rng.random((ROWS, COLUMNS)) < 0.2) & ("group" not in inputs) & (np.arange(COLUMNS) > 0)
    return (np.arange(COLUMNS) < ends) & ~gaps


def numbers(rng: np.random.Generator, shape: int | tuple[int, ...]) -> Array:
    """Returns reward-like numbers: of 0 and 1, of few levels, or any; now and then all the same."""
    kind = rng.integers(0, 4)
    if kind == 0:
        return rng.integers(0, 2, shape).astype(float)
    if kind == 1:
        return rng.integers(-2, 3, shape) / 4
    return np.full(shape, rng.integers(-2, 3) / 4) if kind == 2 and rng.random() < 0.1 else rng.normal(size=shape)


def moves(rng: np.random.Generator, small: bool) -> Array:
    """Returns differences of log-probs: small, and now and then beyond the clamp of a log-ratio."""
    moved = rng.normal(scale=rng.choice([0.05, 0.5]), size=(ROWS, COLUMNS))
    if small:
        return moved
    far = (rng.random((ROWS, COLUMNS)) < 0.01) | (rng.random((ROWS, 1)) < 0.03)
    return np.where(far, rng.choice([-1, 1], (ROWS, 1)) * rng.uniform(20.5, 25, (ROWS, COLUMNS)), moved)


def advantages(function: str, segment: Array, rng: np.random.Generator) -> Array:
    drawn = numbers(rng, (ROWS, COLUMNS))
    return np.take_along_axis(drawn, segment, axis=1) if function in ONE_ADVANTAGE else drawn


def first_of_runs(mask: Array) -> Array:
    return mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]


def first_of_groups(group: Array, rng: np.random.Generator) -> Array:
    """Returns the first row of every group, in most cases: the greedy one."""
    first = np.array([i == np.flatnonzero(group == g)[0] for i, g in enumerate(group)])
    return first & (rng.random(GROUPS) < 0.85)[group]


def components(valid: Array, rng: np.random.Generator) -> Array:
    scores = np.stack([numbers(rng, ROWS) for _ in range(COMPONENTS)])
    present = valid & (rng.random(scores.shape) < 0.9)
    return np.where(present, scores, np.nan).astype(np.float32)


def steps_and_nodes(function: str, inputs: list[str], mask: Array, rng: np.random.Generator) -> Case:
    """Returns a case of a part whose unit is a step, a node of a tree, or a turn of a dialogue."""
    if function == "step_advantages":
        rollouts = rng.integers(2, 17)
        success = rng.integers(0, rollouts + 1, (ROWS, TURNS + 1)) / rollouts
        estimated = rng.random(success.shape) < 0.8
        success = np.where(estimated, success, np.nan).astype(np.float32)
        return {"success": success, "estimated": estimated, "rollouts": np.int32(rollouts)}
    if function == "sibling_advantages":
        valid = rng.random(NODES) < 0.85
        parent = np.array([-1, *(rng.integers(0, i) for i in range(1, NODES))])
        value = np.where(valid, numbers(rng, NODES), np.nan).astype(np.float32)
        return {"value": value, "parent": parent, "valid": valid, "num_nodes": NODES}
    if function == "spread_nodes":
        node = np.where(mask, rng.integers(0, NODES, mask.shape), -1)
        return {"advantage": numbers(rng, NODES).astype(np.float32), "node": node, "action_mask": mask}
    present = np.arange(TURNS) < rng.integers(0, TURNS + 1, (ROWS, 1))
    if function == "spread_turns":
        turn = np.where(mask, rng.integers(0, TURNS, mask.shape), -1)
        return {"advantage": numbers(rng, present.shape).astype(np.float32), "turn": turn, "action_mask": mask}
    return {
        "turn_reward": np.where(present, numbers(rng, present.shape), np.nan).astype(np.float32),
        "present": present,
        "group": rng.integers(0, GROUPS, ROWS),
        "valid": rng.random(ROWS) < 0.85,
        "discount": np.float32(rng.uniform(0, 1)),
        "num_groups": GROUPS,
    }


def bins(function: str, inputs: list[str], mask: Array, rng: np.random.Generator) -> Case:
    """Returns a case of a value that is a distribution over bins."""
    edges = np.cumsum(rng.uniform(0.2, 1.0, BINS))
    drawn = {
        "bins": (edges - edges.mean()).astype(np.float32),
        "x": rng.normal(scale=1.5, size=COLUMNS).astype(np.float32),
        "mask": mask,
        "returns": np.where(mask, rng.normal(scale=4.0, size=mask.shape), np.nan).astype(np.float32),
        "logits": rng.normal(scale=2.0, size=(COLUMNS, BINS)).astype(np.float32),
    }
    if "mask" in inputs and "logits" in inputs:
        logits = rng.normal(scale=2.0, size=(*mask.shape, BINS))
        drawn["logits"] = np.where(mask[..., None], logits, np.nan).astype(np.float32)
    return {name: drawn[name] for name in inputs}


def references(inputs: list[str], rng: np.random.Generator) -> Case:
    drawn = {
        **{name: rng.normal(size=5).astype(np.float32) for name in ("reference", "params", "kl_base", "kl_previous")},
        "decay": np.float32(rng.uniform(0.5, 1.0)),
        "step": np.int32(rng.integers(0, 13 if "every" in inputs else 201)),
        "every": np.int32(rng.integers(1, 7)),
    }
    return {name: drawn[name] for name in inputs}
