"""Advantages (section A) and reductions as loops over rows and tokens, in plain Python floats.

Written from docs/algorithms.md and the parts' names and inputs, before their functions were read, to be compared with
them: nothing here is shared with `jrl/ops`, nothing is vectorized, and what a formula does not ask for is not done. An
entry that is masked is never read. Every function takes the arrays of one case by the names of the part's inputs.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

Array = np.ndarray


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def sample_std(numbers: list[float]) -> float:
    center = mean(numbers)
    return math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - 1)) if len(numbers) > 1 else 0.0


def members(group: Array, valid: Array, row: int) -> list[int]:
    """Returns the rows with a verdict in the group of `row`."""
    return [j for j in range(len(group)) if group[j] == group[row] and valid[j]]


def all_equal(numbers: list[float]) -> bool:
    return all(x == numbers[0] for x in numbers)


def whitened(numbers: list[float]) -> list[float]:
    """Returns (x - mean) / sqrt(var + 1e-8) with the variance over n - 1; 0 throughout where all are equal."""
    if not numbers or all_equal(numbers):
        return [0.0 for _ in numbers]
    center, std = mean(numbers), sample_std(numbers)
    return [(x - center) / math.sqrt(std**2 + 1e-8) for x in numbers]


def whiten_where(x: Array, mask: Array) -> Array:
    places = [place for place in np.ndindex(mask.shape) if mask[place]]
    out = np.zeros(mask.shape)
    for place, value in zip(places, whitened([float(x[place]) for place in places])):
        out[place] = value
    return out


def discounted_returns(token_reward, action_mask, discount):
    out = np.zeros(action_mask.shape)
    for i in range(len(action_mask)):
        following = 0.0
        for t in reversed(range(action_mask.shape[1])):
            if action_mask[i, t]:
                following = float(token_reward[i, t]) + discount * following
                out[i, t] = following
    return out


def moving_baseline(reward, valid, baseline, decay):
    rows = [i for i in range(len(reward)) if valid[i]]
    out = np.zeros(len(reward))
    if not rows:
        return out, np.asarray(baseline)
    of_batch = mean([float(reward[i]) for i in rows])
    before = of_batch if math.isnan(baseline) else float(baseline)  # the first batch begins with its own mean
    for i in rows:
        out[i] = reward[i] - before
    return out, np.asarray(decay * before + (1 - decay) * of_batch)


def group_zscore(reward, group, valid, num_groups, epsilon):
    out = np.zeros(len(reward))
    for i in range(len(reward)):
        if valid[i]:
            rewards = [float(reward[j]) for j in members(group, valid, i)]
            if not all_equal(rewards):
                out[i] = (reward[i] - mean(rewards)) / (sample_std(rewards) + epsilon)
    return out


def group_centered(reward, group, valid, num_groups):
    out = np.zeros(len(reward))
    for i in range(len(reward)):
        if valid[i]:
            rewards = [float(reward[j]) for j in members(group, valid, i)]
            if not all_equal(rewards):
                out[i] = reward[i] - mean(rewards)
    return out


def leave_one_out(reward, group, valid, num_groups):
    out = np.zeros(len(reward))
    for i in range(len(reward)):
        if valid[i]:
            others = [float(reward[j]) for j in members(group, valid, i) if j != i]
            if others:
                out[i] = reward[i] - mean(others)
    return out


def greedy_baseline(reward, greedy, group, valid, num_groups):
    out = np.zeros(len(reward))
    for i in range(len(reward)):
        baselines = [float(reward[j]) for j in members(group, valid, i) if greedy[j]]
        if valid[i] and not greedy[i] and baselines:
            out[i] = reward[i] - baselines[0]
    return out


def whitened_returns(token_reward, action_mask, valid, discount):
    mask = action_mask & valid[:, None]
    return whiten_where(discounted_returns(token_reward, mask, discount), mask)


def whitened_centered(reward, group, valid, action_mask, num_groups):
    centered = group_centered(reward, group, valid, num_groups)
    mask = action_mask & valid[:, None]
    return whiten_where(np.repeat(centered[:, None], mask.shape[1], axis=1), mask)


def group_mean_batch_std(reward, group, valid, num_groups, epsilon):
    rewards = [float(reward[i]) for i in range(len(reward)) if valid[i]]
    centered = group_centered(reward, group, valid, num_groups)
    if not rewards or all_equal(rewards):
        return np.zeros(len(reward))
    return centered / (sample_std(rewards) + epsilon)


def length_weighted(reward, length, group, valid, num_groups):
    out = np.zeros(len(reward))
    counts = valid & (length > 0)
    for i in range(len(reward)):
        rows = members(group, counts, i)
        if counts[i] and not all_equal([float(reward[j]) for j in rows]):
            total = sum(float(length[j]) for j in rows)
            out[i] = reward[i] - sum(float(length[j]) * float(reward[j]) for j in rows) / total
    return out


def token_optimal(returns, probability, sum_squared, action_mask, group, valid, num_groups):
    weight = np.zeros(action_mask.shape)
    for i in range(len(group)):
        total = 0.0
        for t in range(action_mask.shape[1]):
            if action_mask[i, t] and valid[i]:
                total += 1 - 2 * float(probability[i, t]) + float(sum_squared[i, t])
            weight[i, t] = total
    out = np.zeros(action_mask.shape)
    for i, t in np.ndindex(action_mask.shape):
        if not (action_mask[i, t] and valid[i]):
            continue
        rows = [j for j in members(group, valid, i) if action_mask[j, t]]
        total = sum(weight[j, t] for j in rows)
        if total > 0 and not all_equal([float(returns[j, t]) for j in rows]):
            out[i, t] = returns[i, t] - sum(float(returns[j, t]) * weight[j, t] for j in rows) / total
    return out


def pass_at_k(correct, group, valid, num_groups, k):
    out = np.zeros(len(correct))
    for i in range(len(correct)):
        rows = members(group, valid, i)
        n, right = len(rows), sum(bool(correct[j]) for j in rows)
        if not valid[i] or n < k:
            continue
        missed = Fraction(math.comb(max(n - 1 - right, 0), k - 1), math.comb(n - 1, k - 1))
        wrong_gain = Fraction(k, n) * (1 - missed)
        gains = {j: Fraction(k, n) if correct[j] else wrong_gain for j in rows}
        out[i] = float(gains[i] - sum(gains.values()) / n)
    return out


def best_minus_second(reward, group, valid, num_groups):
    out = np.zeros(len(reward))
    for g in range(num_groups):
        rows = sorted((j for j in range(len(reward)) if group[j] == g and valid[j]), key=lambda j: -reward[j])
        if len(rows) > 1:
            out[rows[0]] = reward[rows[0]] - reward[rows[1]]
    return out


def relative_to_mean(reward, group, valid, num_groups):
    out = np.zeros(len(reward))
    for i in range(len(reward)):
        if valid[i]:
            rewards = [float(reward[j]) for j in members(group, valid, i)]
            if mean(rewards) > 0 and not all_equal(rewards):
                out[i] = (reward[i] - mean(rewards)) / mean(rewards)
    return out


def component_zscores(components, weights, group, valid, num_groups, epsilon):
    out = np.zeros(len(group))
    for k in range(len(components)):
        scored = valid & ~np.isnan(components[k])
        out += weights[k] * group_zscore(components[k], group, scored, num_groups, epsilon)
    return out


def moved_to_actions(token_reward, action_mask):
    """Returns the rewards with each that stands on a token of others moved to the sampled token before it, if any."""
    out = np.zeros(action_mask.shape)
    for i in range(len(action_mask)):
        last = None
        for t in range(action_mask.shape[1]):
            last = t if action_mask[i, t] else last
            if last is not None:
                out[i, last] += float(token_reward[i, t])
    return out


def gae(token_reward, values, action_mask, discount, gae_lambda):
    out = np.zeros(action_mask.shape)
    token_reward = moved_to_actions(token_reward, action_mask)
    lambdas = np.broadcast_to(gae_lambda, len(action_mask))
    for i in range(len(action_mask)):
        next_value = next_advantage = 0.0
        for t in reversed(range(action_mask.shape[1])):
            if action_mask[i, t]:
                delta = float(token_reward[i, t]) + discount * next_value - float(values[i, t])
                out[i, t] = next_advantage = delta + discount * float(lambdas[i]) * next_advantage
                next_value = float(values[i, t])
    return out


def length_adaptive_lambda(action_mask, alpha):
    out = np.zeros(len(action_mask))
    for i in range(len(action_mask)):
        length = sum(bool(sampled) for sampled in action_mask[i])
        out[i] = min(max(1 - 1 / (alpha * length), 0.0), 1.0) if length else 0.0
    return out


def decoupled_gae(token_reward, values, action_mask, discount, policy_lambda, critic_lambda):
    returns = gae(token_reward, values, action_mask, discount, critic_lambda)
    for place in np.ndindex(action_mask.shape):
        if action_mask[place]:
            returns[place] += values[place]
    return gae(token_reward, values, action_mask, discount, policy_lambda), returns


def ngram_starts(action_mask, size):
    out = np.zeros(action_mask.shape, bool)
    for i in range(len(action_mask)):
        since = 0
        for t in range(action_mask.shape[1]):
            if action_mask[i, t]:
                out[i, t] = since % size == 0
                since += 1
            else:
                since = 0
    return out


def random_starts(action_mask, noise, sizes):
    out = np.zeros(action_mask.shape, bool)
    for i in range(len(action_mask)):
        left = 0
        for t in range(action_mask.shape[1]):
            if not action_mask[i, t]:
                left = 0
                continue
            if left == 0:
                out[i, t] = True
                left = sizes[int(noise[i, t]) % len(sizes)]
            left -= 1
    return out


def macro_gae(token_reward, values, action_mask, macro_start, discount, gae_lambda):
    advantages, returns = np.zeros(action_mask.shape), np.zeros(action_mask.shape)
    token_reward = moved_to_actions(token_reward, action_mask)
    for i in range(len(action_mask)):
        macros: list[list[int]] = []
        for t in range(action_mask.shape[1]):
            if action_mask[i, t]:
                if macro_start[i, t] or t == 0 or not action_mask[i, t - 1]:
                    macros.append([])
                macros[-1].append(t)
        next_value = next_advantage = 0.0
        for macro in reversed(macros):
            value = mean([float(values[i, t]) for t in macro])
            reward = sum(float(token_reward[i, t]) for t in macro)
            next_advantage = reward + discount * next_value - value + discount * gae_lambda * next_advantage
            next_value = value
            for t in macro:
                advantages[i, t] = next_advantage
                returns[i, t] = next_advantage + value
    return advantages, returns


def vtrace(token_reward, values, weights, action_mask, discount, gae_lambda, max_weight, max_trace):
    advantages, targets = np.zeros(action_mask.shape), np.zeros(action_mask.shape)
    token_reward = moved_to_actions(token_reward, action_mask)
    for i in range(len(action_mask)):
        next_value = next_target = 0.0
        for t in reversed(range(action_mask.shape[1])):
            if action_mask[i, t]:
                r, v = float(token_reward[i, t]), float(values[i, t])
                rho = min(max_weight, float(weights[i, t]))
                trace = gae_lambda * min(max_trace, float(weights[i, t]))
                advantages[i, t] = rho * (r + discount * next_target - v)
                delta = rho * (r + discount * next_value - v)
                next_target = v + delta + discount * trace * (next_target - next_value)
                next_value = v
                targets[i, t] = next_target
    return advantages, targets


def step_advantages(success, estimated, rollouts):
    out = np.zeros((len(success), success.shape[1] - 1))
    for i, k in np.ndindex(out.shape):
        if estimated[i, k] and estimated[i, k + 1]:
            after, before = (round(float(success[i, place]) * rollouts) for place in (k + 1, k))
            if abs(after - before) >= 1:
                out[i, k] = success[i, k + 1] - success[i, k]
    return out


def sibling_advantages(value, parent, valid, num_nodes):
    out = np.zeros(len(value))
    for i in range(len(value)):
        if valid[i]:
            siblings = [float(value[j]) for j in members(parent, valid, i)]
            out[i] = value[i] - mean(siblings) if len(siblings) > 1 else 0.0
    return out


def spread_nodes(advantage, node, action_mask):
    out = np.zeros(action_mask.shape)
    for i, t in np.ndindex(action_mask.shape):
        if action_mask[i, t]:
            out[i, t] = advantage[node[i, t]]
    return out


def better_than_expected(reward, value, valid):
    return np.array([max(float(reward[i]) - float(value[i]), 0.0) if valid[i] else 0.0 for i in range(len(reward))])


def sampling_probabilities(advantage):
    total = sum(float(a) for a in advantage if a > 0)
    return np.array([max(float(a), 0.0) / total for a in advantage])


def turn_advantages(turn_reward, present, group, valid, discount, num_groups):
    returns, out = np.zeros(present.shape), np.zeros(present.shape)
    for i in range(len(present)):
        following = 0.0
        for k in reversed(range(present.shape[1])):
            if present[i, k]:
                returns[i, k] = following = float(turn_reward[i, k]) + discount * following
    for i, k in np.ndindex(present.shape):
        if valid[i] and present[i, k]:
            out[i, k] = returns[i, k] - mean([returns[j, k] for j in members(group, valid & present[:, k], i)])
    return out


def spread_turns(advantage, turn, action_mask):
    out = np.zeros(action_mask.shape)
    for i, t in np.ndindex(action_mask.shape):
        if action_mask[i, t]:
            out[i, t] = advantage[i, turn[i, t]]
    return out


def whiten_by_task(advantages, task, mask, num_tasks):
    out = np.zeros(mask.shape)
    for each in range(num_tasks):
        out += whiten_where(advantages, mask & (task == each)[:, None])
    return out


def clip_advantages(advantages, limit):
    return np.array([min(max(float(a), -limit), limit) for a in advantages.ravel()]).reshape(advantages.shape)


def whiten(x, mask):
    return whiten_where(x, mask)


def token_mean(loss, mask):
    terms = [float(loss[place]) for place in np.ndindex(mask.shape) if mask[place]]
    return sum(terms) / max(len(terms), 1)


def rows_of(loss, mask) -> list[list[float]]:
    """Returns the losses of each row that has a token in the loss."""
    rows = [[float(x) for x, counts in zip(loss[i], mask[i]) if counts] for i in range(len(mask))]
    return [row for row in rows if row]


def sequence_mean_token_mean(loss, mask):
    rows = rows_of(loss, mask)
    return sum(mean(row) for row in rows) / max(len(rows), 1)


def sequence_mean_token_sum(loss, mask):
    rows = rows_of(loss, mask)
    return sum(sum(row) for row in rows) / max(len(rows), 1)


def constant_mean(loss, mask, rows, max_completion):
    return sum(sum(row) for row in rows_of(loss, mask)) / (rows * max_completion)
