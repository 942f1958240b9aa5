"""Section P, and R20, against plain Python: losses of stored pairs, labeled answers, tokens, numbers; preferences.

Written from docs/algorithms.md, one pair or number at a time in float64. Derivatives are central differences of these
loops; what carries no gradient is given to them a second time, as it is (`held`).
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.algos.contract import Sequences, Tokens
from jrl.algos.parts import Part
from jrl.ops.divergence import teacher_advantage
from jrl.ops.preferences import pair_strength, win_share
from jrl.ops.win_rate import win_probability

Array = np.ndarray
STEP = 1e-5  # of a central difference
OBJECTIVE_FUNCTIONS = ("loss", "sequence_loss", "token_loss")  # what a part's function is called where it has a config


class Answer(NamedTuple):
    logprob: float
    ref_logprob: float
    length: float
    log_sum_squared: float  # sum over its tokens of the log of the probability that two draws agree there


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def gain(answer: Answer) -> float:
    return answer.logprob - answer.ref_logprob


def mean(answer: Answer) -> float:
    return answer.logprob / answer.length


def margin(w: Answer, l: Answer) -> float:
    return gain(w) - gain(l)


def log_odds(answer: Answer) -> float:
    return mean(answer) - math.log(1 - math.exp(mean(answer)))


def plain(c: dict, w: Answer, l: Answer) -> float:
    return -log_sigmoid(c["beta"] * margin(w, l))


def conservative_dpo(c, w, l, held):
    m = c["beta"] * margin(w, l)
    return -(1 - c["noise"]) * log_sigmoid(m) - c["noise"] * log_sigmoid(-m)


def robust_dpo(c, w, l, held):
    m = c["beta"] * margin(w, l)
    return (-(1 - c["noise"]) * log_sigmoid(m) + c["noise"] * log_sigmoid(-m)) / (1 - 2 * c["noise"])


def ipo(c, w, l, held):
    by_mean = c["over_tokens"] == "mean"
    m = gain(w) / w.length - gain(l) / l.length if by_mean else margin(w, l)
    return (m - 1 / (2 * c["beta"])) ** 2


def f_dpo(c, w, l, held):
    if c["divergence"] == "jensen_shannon":
        link = log_sigmoid
    else:
        link = lambda u: math.exp((c["alpha"] - 1) * u) / (c["alpha"] - 1)
    return -log_sigmoid(c["beta"] * (link(gain(w)) - link(gain(l))))


def exo(c, w, l, held):
    m = c["beta"] * margin(w, l)
    first = sigmoid(m) * (log_sigmoid(m) - math.log(1 - c["noise"]))
    return first + sigmoid(-m) * (log_sigmoid(-m) - math.log(c["noise"]))


def nca(c, w, l, held):
    u, v = c["beta"] * gain(w), c["beta"] * gain(l)
    return -log_sigmoid(u) - 0.5 * log_sigmoid(-u) - 0.5 * log_sigmoid(-v)


def sppo(c, w, l, held):
    return (gain(w) - 1 / (2 * c["beta"])) ** 2 + (gain(l) + 1 / (2 * c["beta"])) ** 2


def bco(c, w, l, held):
    return -log_sigmoid(c["beta"] * gain(w) - c["shift"]) - log_sigmoid(c["shift"] - c["beta"] * gain(l))


def cpl(c, w, l, held):
    better, worse = c["alpha"] * w.logprob, c["bias"] * c["alpha"] * l.logprob
    return -math.log(math.exp(better) / (math.exp(better) + math.exp(worse)))


def wpo(c, w, l, held):
    aligned = [(answer.logprob - answer.log_sum_squared) / answer.length for answer in held]
    return min(1.0, math.exp(aligned[0] + aligned[1])) * plain(c, w, l)


def bradley_terry(c, w, l, held):  # an answer's score is in the place of its log-prob
    pulled = 0.0 if c["center"] is None else c["center"] * (w.logprob + l.logprob) ** 2
    return -log_sigmoid(w.logprob - l.logprob - c["margin"]) + pulled


# Part -> loss of a pair, from the fields of its configuration, the preferred answer and the other one.
PAIRS: dict[str, Callable[[dict, Answer, Answer, tuple[Answer, Answer]], float]] = {
    "bradley_terry": bradley_terry,
    "dpo": lambda c, w, l, held: plain(c, w, l),
    "conservative_dpo": conservative_dpo,
    "robust_dpo": robust_dpo,
    "ipo": ipo,
    "hinge_dpo": lambda c, w, l, held: max(0.0, 1 - c["beta"] * margin(w, l)),
    "orpo": lambda c, w, l, held: -mean(w) - c["weight"] * log_sigmoid(log_odds(w) - log_odds(l)),
    "simpo": lambda c, w, l, held: -log_sigmoid(c["beta"] * (mean(w) - mean(l)) - c["gamma"]),
    "length_normalized_dpo": lambda c, w, l, held: -log_sigmoid(c["beta"] * (gain(w) / w.length - gain(l) / l.length)),
    "f_dpo": f_dpo,
    "exo": exo,
    "nca": nca,
    "sppo": sppo,
    "apo_zero": lambda c, w, l, held: 1 - sigmoid(c["beta"] * gain(w)) + sigmoid(c["beta"] * gain(l)),
    "apo_down": lambda c, w, l, held: sigmoid(c["beta"] * gain(w)) + 1 - sigmoid(c["beta"] * margin(w, l)),
    "bco": bco,
    "vpo": lambda c, w, l, held: plain(c, w, l) - c["weight"] * c["beta"] * gain(w),
    "cpl": cpl,
    "wpo": wpo,
    "rpo": lambda c, w, l, held: plain(c, w, l) - c["weight"] * mean(w),
    "online_ipo": ipo,
    "online_simpo": lambda c, w, l, held: -log_sigmoid(c["beta"] * (mean(w) - mean(l)) - c["gamma"]),
}
# Fields that are a part of the program, one set after the other; {} elsewhere.
SETTINGS: dict[str, list[dict]] = {
    "ipo": [{"over_tokens": "sum"}, {"over_tokens": "mean"}],
    "online_ipo": [{"over_tokens": "sum"}, {"over_tokens": "mean"}],
    "f_dpo": [{"divergence": "alpha"}, {"divergence": "jensen_shannon"}],
    "bradley_terry": [{"center": None}, {}],
}
# What the other fields are drawn from.
RANGES = {
    "beta": (0.05, 0.5), "noise": (0.01, 0.4), "weight": (0.1, 2), "gamma": (0, 2), "alpha": (0.05, 0.9),
    "bias": (0.1, 1), "decay": (0.5, 0.99), "margin": (-1, 1), "center": (0.01, 0.1), "good_weight": (0.5, 2),
    "bad_weight": (0.5, 2), "shift": (-1, 1),
}  # fmt: skip


def slopes(at: Callable[[Array], float], x: Array) -> Array:
    """Returns the derivatives of a number by the entries of x, by central differences; 0 where an entry is NaN."""
    found = np.zeros(len(x))
    for i in np.flatnonzero(np.isfinite(x)):
        step = STEP * (np.arange(len(x)) == i)
        found[i] = (at(x + step) - at(x - step)) / (2 * STEP)
    return found


# Pairs: two in a row of four places, in any order.


def draw_fields(config: type, settings: dict, rng: np.random.Generator) -> dict[str, Any]:
    drawn = {field.name: float(np.float32(rng.uniform(*RANGES[field.name])))
             for field in dataclasses.fields(config) if field.name in RANGES}  # fmt: skip
    return drawn | settings


def draw_answers(rng: np.random.Generator) -> dict[str, Array]:
    """Returns a row of four answers, their log-probs multiples of 1/64, so that differences are exact."""
    exact = lambda low, high: (np.round(rng.uniform(low, high, 4) * 64) / 64).astype(np.float32)
    logprob = exact(-12, -0.5)
    length = rng.integers(1, 13, 4).astype(np.int32)
    return {"logprob": logprob, "ref_logprob": logprob + exact(-3, 3), "length": length}


def draw_pairs(rng: np.random.Generator) -> dict[str, Array]:
    """Returns a row of two pairs; of one in five, one answer is empty, and one in five is masked and holds NaN."""
    row = draw_answers(rng)
    order = rng.permutation(4)
    row |= {"label": np.float32([1, 0, 1, 0])[order], "unit": np.int32([0, 0, 1, 1])[order], "mask": np.ones(4, bool)}
    for unit in (0, 1):
        chance, places = rng.uniform(), np.flatnonzero(row["unit"] == unit)
        if chance < 0.2:
            row["length"][places[0]], row["logprob"][places[0]], row["ref_logprob"][places[0]] = 0, 0, 0
        elif chance < 0.4:
            row["mask"][places] = False
            row["logprob"][places] = row["ref_logprob"][places] = np.nan
    draws = np.round(rng.spawn(1)[0].uniform(-9, -0.5, 4) * 64) / 64  # the rows of others stay what they were
    return row | {"log_sum_squared": np.where(row["mask"], draws, np.nan).astype(np.float32)}


def pair_losses(name: str, fields: dict, row: dict[str, Array]) -> tuple[Array, Array]:
    """Returns the loss at every place of a row of pairs, and its derivatives by the log-probs."""
    given = row["logprob"].astype(np.float64)
    given_of = ("ref_logprob", "length", "log_sum_squared")
    answer = lambda x, i: Answer(float(x[i]), *(float(row[name][i]) for name in given_of))

    def losses(x: Array) -> Array:
        found = np.zeros(4)
        for i in range(4):
            partner = next(j for j in range(4) if j != i and row["unit"][j] == row["unit"][i])
            whole = row["mask"][i] and row["mask"][partner] and row["length"][i] > 0 and row["length"][partner] > 0
            if whole and row["label"][i] == 1:
                held = answer(given, i), answer(given, partner)
                found[i] = PAIRS[name](fields, answer(x, i), answer(x, partner), held)
        return found

    return losses(given), slopes(lambda x: float(losses(x).sum()), given)


# KTO: answers that are good, bad, or mismatched with their prompt.


def draw_labeled(rng: np.random.Generator) -> dict[str, Array]:
    row = draw_answers(rng)
    mask = rng.uniform(size=4) < 0.8
    row |= {"label": rng.choice([-1, 0, 1], 4).astype(np.float32), "unit": np.arange(4, dtype=np.int32), "mask": mask}
    row["logprob"][~mask] = row["ref_logprob"][~mask] = np.nan
    return row


def labeled_losses(name: str, fields: dict, row: dict[str, Array]) -> tuple[Array, Array]:
    given = row["logprob"].astype(np.float64)
    reference, label = row["ref_logprob"], row["label"]
    mismatched = [float(given[i] - reference[i]) for i in range(4) if row["mask"][i] and label[i] == -1]
    z = max(0.0, sum(mismatched) / len(mismatched)) if mismatched else 0.0  # carries no gradient

    def losses(x: Array) -> Array:
        found = np.zeros(4)
        for i in range(4):
            if row["mask"][i] and label[i] == 1:
                found[i] = fields["good_weight"] * (1 - sigmoid(fields["beta"] * (x[i] - reference[i] - z)))
            elif row["mask"][i] and label[i] == 0:
                found[i] = fields["bad_weight"] * (1 - sigmoid(fields["beta"] * (z - x[i] + reference[i])))
        return found

    return losses(given), slopes(lambda x: float(losses(x).sum()), given)


# Tokens: SFT and DFT.


def draw_tokens(rng: np.random.Generator) -> dict[str, Array]:
    mask = rng.uniform(size=6) < 0.7
    return {"logprobs": np.where(mask, -rng.exponential(2, 6), np.nan).astype(np.float32), "mask": mask}


def token_losses(name: str, fields: dict, row: dict[str, Array]) -> tuple[Array, Array]:
    found, slope = np.zeros(6), np.zeros(6)
    for t in np.flatnonzero(row["mask"]):
        lp = float(row["logprobs"][t])
        weight = math.exp(lp) if name == "dft" else 1.0  # carries no gradient
        found[t], slope[t] = -weight * lp, -weight
    return found, slope


def objective_answers(module: str, configs: Sequence[Any], rows: Sequence[dict[str, Array]], shifts: Array) -> list:
    """Returns (losses, derivatives) of an objective for rows, each with a configuration of its own."""
    objective = importlib.import_module(module).OBJECTIVE
    config = configs[0]
    needs = objective.needs(config)
    stacked = {key: jnp.asarray(np.stack([row[key] for row in rows])) for key in rows[0]}
    configs = jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), *configs)

    def of_sequences(config: Any, row: dict, shift: Array) -> tuple:
        scored = module.endswith("bradley_terry")
        sequences = Sequences(
            logprob=None if scored else row["logprob"],
            ref_logprob=row["ref_logprob"] if needs.reference else None,
            length=row["length"],
            score=row["logprob"] if scored else None,
            label=row["label"],
            unit=row["unit"],
            mask=row["mask"],
            log_sum_squared=row.get("log_sum_squared") if needs.log_sum_squared else None,
        )
        if objective.sequence_baseline is not None:
            sequences = sequences.replace(baseline=jnp.full(4, objective.sequence_baseline(config, sequences)))
        by = "score" if scored else "logprob"
        state = {"shift": shift} if module.endswith("bco") else objective.init_state(config)

        def total(x: jax.Array) -> tuple:
            found = objective.sequence_loss(config, sequences.replace(**{by: x}), state)[0]
            return found.sum(), found

        slope, found = jax.grad(total, has_aux=True)(row["logprob"])
        return found, slope

    def of_tokens(config: Any, row: dict, shift: Array) -> tuple:
        fields = {field.name: None for field in dataclasses.fields(Tokens)}
        tokens = Tokens(**fields | row | {"segment": jnp.zeros(6, jnp.int32), "num_segments": 1})

        def total(x: jax.Array) -> tuple:
            found = objective.token_loss(config, tokens.replace(logprobs=x), objective.init_state(config))[0]
            return found.sum(), found

        slope, found = jax.grad(total, has_aux=True)(row["logprobs"])
        return found, slope

    compute = of_tokens if "logprobs" in rows[0] else of_sequences
    return [np.asarray(x) for x in jax.jit(jax.vmap(compute))(configs, stacked, jnp.asarray(shifts, jnp.float32))]


Answers = tuple[list[Array], list[Array]]  # ours and the loops': one array for each way in which cases are made


def of_objective(part: Part, count: int, rng: np.random.Generator) -> tuple[Answers, Answers]:
    """Returns the losses of an objective and their derivatives by the log-probs, for each of its SETTINGS."""
    module = part["function"].partition(":")[0]
    name = module.rpartition(".")[2]
    if name == "kto":
        draw, loop = draw_labeled, labeled_losses
    elif name in PAIRS:
        draw, loop = draw_pairs, pair_losses
    else:
        draw, loop = draw_tokens, token_losses
    config = importlib.import_module(module).OBJECTIVE.config
    losses, derivatives = ([], []), ([], [])
    settings = SETTINGS.get(name, [{}])
    for fixed in settings:
        fields = [draw_fields(config, fixed, rng) for _ in range(count // len(settings))]
        shifts = np.float32(rng.uniform(*RANGES["shift"], len(fields)))
        rows = [draw(rng) for _ in fields]
        ours = objective_answers(module, [config(**each) for each in fields], rows, shifts)
        theirs = [loop(name, each | {"shift": float(s)}, row) for each, s, row in zip(fields, shifts, rows)]
        for given, column, (mine, other) in zip(ours, zip(*theirs), (losses, derivatives)):
            mine.append(given)
            other.append(np.stack(column))
    return losses, derivatives


# Functions of numbers and lists.


def numbers(*ranges: tuple[float, float]) -> Callable[[np.random.Generator], list[Any]]:
    return lambda rng: [np.float32(rng.uniform(*each)) for each in ranges]


def noisy_preference(m, strength, flip_below, soft_below, noise):
    if strength < flip_below:
        return -log_sigmoid(-m)
    if strength < soft_below:
        return -(1 - noise) * log_sigmoid(m) - noise * log_sigmoid(-m)
    return -log_sigmoid(m - strength)


def inpo(m, ref, previous, eta, tau):
    return (m - tau / eta * ref - (eta - tau) / eta * previous - 1 / (2 * eta)) ** 2


def pro(s, r, mask):
    there = [i for i in range(len(s)) if mask[i]]
    total = 0.0
    for k in there:
        below = [i for i in there if r[i] < r[k]]
        if below:
            own = s[k] * max(float(r[k] - r[i]) for i in below)
            total -= math.log(math.exp(own) / (math.exp(own) + sum(math.exp(s[i] * (r[k] - r[i])) for i in below)))
    return total


def rrhf(s, r, mask):
    there = [i for i in range(len(s)) if mask[i]]
    return sum(max(0.0, s[i] - s[j]) for i in there for j in there if r[i] < r[j])


def conservative_q(logits, action):
    return -math.log(math.exp(logits[action]) / sum(math.exp(x) for x in logits))


def kl(p, q):
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q))


def jensen_shannon(p, q, share):
    m = [math.log(share * math.exp(b) + (1 - share) * math.exp(a)) for a, b in zip(p, q)]
    return share * kl(q, m) + (1 - share) * kl(p, m)


def draw_distributions(rng: np.random.Generator) -> list[Any]:
    drawn = rng.normal(scale=1.5, size=(2, 5))
    return list((drawn - np.log(np.exp(drawn).sum(1, keepdims=True))).astype(np.float32))


def draw_list(rng: np.random.Generator) -> list[Any]:
    mask = rng.uniform(size=5) < 0.8
    hidden = lambda x: np.where(mask, x, np.nan).astype(np.float32)
    return [hidden(-rng.uniform(0.1, 3, 5)), hidden(rng.integers(0, 4, 5)), mask]


# Part -> (arguments of a case, loop). The derivative is by the first argument.
NUMBERS: dict[str, tuple[Callable[[np.random.Generator], list[Any]], Callable[..., float]]] = {
    "noisy_preference": (numbers((-3, 3), (-1, 2), (-0.5, 0), (0, 0.5), (0.01, 0.4)), noisy_preference),
    "soft_preference": (
        numbers((-3, 3), (0, 1)), lambda m, p: -p * log_sigmoid(m) - (1 - p) * log_sigmoid(-m)
    ),
    "step_apo": (numbers((-3, 3), (0, 1), (0, 1), (0, 2)), lambda m, q, other, a: -log_sigmoid(m - a * (q - other))),
    "inpo": (numbers((-3, 3), (-3, 3), (-3, 3), (0.5, 1), (0, 0.5)), inpo),
    "expectile": (numbers((-3, 3), (0.05, 0.95)), lambda e, tau: abs(tau - (1 if e < 0 else 0)) * e**2),
    "q_error": (numbers((-3, 3), (-1, 1), (-3, 3), (0.5, 1)), lambda q, r, v, d: (r + d * v - q) ** 2),
    "inverse_soft_q": (
        numbers((-3, 0), (-3, 3), (-3, 3), (0.5, 1), (0, 0.5)),
        lambda lp, v, after, d, w: -lp + w * (v + lp - d * after) ** 2,
    ),
    "conservative_q": (
        lambda rng: [rng.uniform(-3, 3, 5).astype(np.float32), np.int32(rng.integers(5))], conservative_q
    ),
    "pro": (draw_list, pro),
    "rrhf": (draw_list, rrhf),
    "xpo": (numbers((-3, 3), (-20, -1), (0.001, 0.1)), lambda m, lp, a: -log_sigmoid(m) + a * lp),
    "reverse_kl": (draw_distributions, kl),
    "forward_kl": (draw_distributions, lambda p, q: kl(q, p)),
    "jensen_shannon": (lambda rng: [*draw_distributions(rng), np.float32(rng.uniform(0.1, 0.9))], jensen_shannon),
}  # fmt: skip


def of_numbers(part: Part, count: int, rng: np.random.Generator) -> tuple[Answers, Answers]:
    """Returns the values of a function and their derivatives by its first argument."""
    module, name = part["function"].split(":")
    compute = vars(importlib.import_module(module))[name]
    draw, loop = NUMBERS[name]
    cases = [draw(rng) for _ in range(count)]
    stacked = [jnp.asarray(np.stack(column)) for column in zip(*cases)]
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(lambda *x: compute(*x))))(*stacked)
    wide = [[np.asarray(x, np.float64) if np.asarray(x).dtype.kind == "f" else x for x in case] for case in cases]
    at = lambda case: lambda x: loop(x if np.ndim(case[0]) else float(x[0]), *case[1:])
    theirs = [at(case)(np.atleast_1d(case[0])) for case in wide]
    by_first = [slopes(at(case), np.atleast_1d(case[0])).reshape(np.shape(case[0])) for case in wide]
    return ([np.asarray(value)], [np.asarray(theirs)]), ([np.asarray(slope)], [np.stack(by_first)])


# P18: the share of its opponents that an answer beats.


def of_win_probability(part: Part, count: int, rng: np.random.Generator) -> tuple[Answers]:
    """Returns the shares, which have no derivative."""
    n = 8
    cases = []
    for _ in range(count):
        players, opponents = rng.uniform(size=n) < 0.6, rng.uniform(size=n) < 0.6
        reward = np.where(players | opponents, rng.integers(0, 4, n), np.nan).astype(np.float32)
        cases.append((reward, rng.integers(0, 3, n).astype(np.int32), players, opponents))
    stacked = [jnp.asarray(np.stack(column)) for column in zip(*cases)]
    ours = jax.jit(jax.vmap(lambda *x: win_probability(*x, num_groups=3)))(*stacked)
    theirs = np.full((count, n), 0.5)
    for case, (reward, group, players, opponents) in enumerate(cases):
        for i in np.flatnonzero(players):
            met = [j for j in range(n) if j != i and opponents[j] and group[j] == group[i]]
            if met:
                wins = [1.0 if reward[i] > reward[j] else 0.5 if reward[i] == reward[j] else 0.0 for j in met]
                theirs[case, i] = sum(wins) / len(met)
    return (([np.asarray(ours)], [theirs]),)


# R20 and P17: what a pair model says of the samples of a prompt, in both orders.


def both_orders(first: Array, i: int, j: int) -> float:
    """Returns P_ij, the mean of both orders; NaN where one of them was not asked."""
    return (float(first[i, j]) + (1 - float(first[j, i]))) / 2


def draw_compared(rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Returns (preferences of all rows [8, 8], prompts, samples) of three prompts, of up to four samples each. Some
    comparisons are NaN, and so is every row with itself and with those of other prompts."""
    order = rng.permutation(12)[:8]
    group, sample = (order // 4).astype(np.int32), (order % 4).astype(np.int32)
    first = np.where(rng.uniform(size=(8, 8)) < 0.8, rng.uniform(size=(8, 8)), np.nan).astype(np.float32)
    first[(group[:, None] != group[None, :]) | np.eye(8, dtype=bool)] = np.nan
    return first, group, sample


def by_sample(first: Array, group: Array, sample: Array) -> Array:
    """Returns the preferences by sample of a row's prompt, [8, 4]; NaN where that sample is missing."""
    found = np.full((8, 4), np.nan, np.float32)
    for i, j in np.ndindex(8, 8):
        if group[i] == group[j]:
            found[i, sample[j]] = first[i, j]
    return found


def of_win_share(part: Part, count: int, rng: np.random.Generator) -> tuple[Answers]:
    """Returns the shares, which carry no derivative."""
    cases, theirs = [], np.full((count, 8), 0.5)
    for case in range(count):
        first, group, sample = draw_compared(rng)
        players, opponents = rng.uniform(size=(2, 8)) < 0.7
        cases.append((by_sample(first, group, sample), group, sample, players, opponents))
        for i in np.flatnonzero(players):
            others = [j for j in range(8) if j != i and group[j] == group[i] and opponents[j]]
            verdicts = [both_orders(first, i, j) for j in others]
            verdicts = [verdict for verdict in verdicts if not math.isnan(verdict)]
            if verdicts:
                theirs[case, i] = sum(verdicts) / len(verdicts)
    stacked = [jnp.asarray(np.stack(column)) for column in zip(*cases)]
    ours = jax.jit(jax.vmap(lambda *x: win_share(*x, num_groups=3)))(*stacked)
    return (([np.asarray(ours)], [theirs]),)


def of_pair_strength(part: Part, count: int, rng: np.random.Generator) -> tuple[Answers]:
    """Returns the strengths, which carry no derivative; of pairs that were not compared NaN on both sides."""
    cases, theirs = [], np.full((count, 8), 0.5)
    for case in range(count):
        first, group, sample = draw_compared(rng)
        paired = np.zeros(8, bool)
        for prompt in range(3):
            rows = np.flatnonzero(group == prompt)
            if len(rows) > 1 and rng.uniform() < 0.8:
                i, j = rng.permutation(rows)[:2]
                paired[[i, j]] = True
                theirs[case, i], theirs[case, j] = both_orders(first, i, j), both_orders(first, j, i)
        cases.append((by_sample(first, group, sample), group, sample, paired))
    stacked = [jnp.asarray(np.stack(column)) for column in zip(*cases)]
    ours = jax.jit(jax.vmap(lambda *x: pair_strength(*x, num_groups=3)))(*stacked)
    return (([np.asarray(ours)], [theirs]),)


# P37: what a teacher gives a sampled token more.


def of_teacher_advantage(part: Part, count: int, rng: np.random.Generator) -> tuple[Answers]:
    """Returns the advantages, which carry no derivative."""
    mask = rng.uniform(size=(count, 6)) < 0.7
    old, teacher = (np.where(mask, -rng.exponential(2, mask.shape), np.nan).astype(np.float32) for _ in range(2))
    theirs = np.zeros(mask.shape)
    for place in np.ndindex(mask.shape):
        if mask[place]:
            theirs[place] = float(teacher[place]) - float(old[place])
    return (([np.asarray(teacher_advantage(old, teacher, mask))], [theirs]),)


def name_of(part: Part) -> str:
    """Returns a part's function without its module, or the module of an objective's loss."""
    module, function = part["function"].split(":")
    return module.rpartition(".")[2] if function in OBJECTIVE_FUNCTIONS else function


COMPARED = {
    "win_probability": of_win_probability,
    "win_share": of_win_share,
    "pair_strength": of_pair_strength,
    "teacher_advantage": of_teacher_advantage,
}


def comparison_of(name: str) -> Callable[[Part, int, np.random.Generator], tuple[Answers, ...]] | None:
    """Returns what compares a part of section P with its loop, from the part, a number of cases and a generator."""
    if name in COMPARED:
        return COMPARED[name]
    if name in NUMBERS:
        return of_numbers
    return of_objective if name in (*PAIRS, "kto", "sequence_baseline", "sft", "dft") else None
