"""Losses of pairs and of answers (section P), as objectives have them, against TRL's trainers: from log-probs of tokens
to the mean over a batch, and its derivative."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.agreement.cases import Case
from jrl.algos import ALGOS
from jrl.algos.contract import Sequences
from jrl.ops import divergence, reduce

Array = jax.Array

PAIRS, COLUMNS, VOCABULARY = 4, 10, 7
LIBRARY = "trl_preferences"  # benchmarks/agreement/peers/trl_preferences.py


@dataclasses.dataclass(frozen=True)
class PreferenceRow:
    name: str  # what is asked of TRL, a name of its file
    id: str  # of the part
    objective: str  # a row of ALGOS
    # field of its configuration -> a number of the case by its name, or what it is in all cases
    fields: dict[str, str | float] = dataclasses.field(default_factory=lambda: {"beta": "beta"})
    numbers: dict[str, tuple[float, float]] = dataclasses.field(default_factory=lambda: {"beta": (0.05, 0.5)})
    reference: bool = True  # False: the reference's log-probs are 0, and TRL's trainer has none
    even: bool = False  # preferred answers are of one length
    note: str = ""  # where the two differ outside the cases that are compared


BETA = {"beta": (0.05, 0.5)}
NOISE = BETA | {"noise": (0.01, 0.4)}
BOTH = {"beta": "beta", "noise": "noise"}
SHORT = {"beta": (0.5, 5.0)}
PER_TOKEN = "means over the tokens, as in TRL's DPO trainer; our default sums"
ROWS = (
    PreferenceRow("sigmoid", "P5", "DPO"),
    PreferenceRow("cpo label_smoothing", "P6", "ConservativeDPO", BOTH, NOISE, reference=False,
                  note="TRL's DPO trainer has no label smoothing in its sigmoid loss; its CPO trainer has"),
    PreferenceRow("robust", "P7", "RobustDPO", BOTH, NOISE),
    PreferenceRow("ipo", "P8", "IPO", {"beta": "beta", "over_tokens": "mean"}, note=PER_TOKEN),
    PreferenceRow("cpo ipo", "P8", "IPO", reference=False),
    PreferenceRow("hinge", "P9", "HingeDPO"),
    PreferenceRow("kto", "P10", "KTO", {"beta": "beta", "good_weight": "good", "bad_weight": "bad"},
                  BETA | {"good": (0.5, 2.0), "bad": (0.5, 2.0)},
                  note="TRL takes z of a micro-batch, we of the optimizer step; here they are one"),
    PreferenceRow("orpo", "P11", "ORPO", {"weight": "weight"}, {"weight": (0.05, 1.0)}, reference=False, even=True,
                  note="TRL takes the NLL over all preferred tokens of the batch, and by default of the prompt too"),
    PreferenceRow("cpo simpo", "P12", "SimPO", {"beta": "beta", "gamma": "gamma"}, SHORT | {"gamma": (0.1, 2.0)},
                  reference=False),
    PreferenceRow("sigmoid_norm", "P13", "LengthNormalizedDPO", numbers=SHORT),
    PreferenceRow("forward_kl", "P14", "FDPO", {"beta": "beta", "alpha": 0.0}, note="we hold u at 20, TRL at 80"),
    PreferenceRow("js_divergence", "P14", "FDPO", {"beta": "beta", "divergence": "jensen_shannon"}),
    PreferenceRow("alpha_divergence", "P14", "FDPO", {"beta": "beta", "alpha": "alpha"}, BETA | {"alpha": (0.1, 0.9)}),
    PreferenceRow("exo_pair", "P15", "EXO", BOTH, NOISE),
    PreferenceRow("nca_pair", "P15", "NCA"),
    PreferenceRow("sppo_hard", "P15", "SPPO"),
    PreferenceRow("apo_zero", "P15", "APOZero"),
    PreferenceRow("apo_down", "P15", "APODown"),
    PreferenceRow("bco_pair", "P15", "BCO", note="TRL's shift is always 0, ours in the first step"),
    PreferenceRow("cpo sigmoid", "P30", "CPO", {"beta": "beta", "weight": 0.0}, reference=False,
                  note="without the NLL, which TRL adds in another function"),
    PreferenceRow("sigmoid and sft", "P30", "RPO", {"beta": "beta", "weight": "weight"}, BETA | {"weight": (0.1, 2.0)},
                  even=True, note="TRL takes the NLL over all preferred tokens of the batch, we of each answer"),
    PreferenceRow("use_weighting", "P30", "WPO",
                  note="no weight is above 1, where ours ends; sums of squared probabilities are drawn"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """A loss of scores or of distributions."""

    name: str
    id: str
    function: str
    compute: Callable[[Case], Array]  # [] of a case
    inputs: dict[str, tuple[int, ...]]  # name -> shape of normal numbers; what is differentiated by comes first
    numbers: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    note: str = ""


def bradley_terry(case: Case) -> Array:
    row = ALGOS["BradleyTerry"]
    sequences = pairs_of_rows(jnp.zeros((2 * PAIRS, 1)), None, jnp.ones((2 * PAIRS, 1), bool), score=case["score"])
    config = row.config(margin=case["margin"], center=case["center"])
    return row.sequence_loss(config, sequences, ())[0].sum() / PAIRS


def divergence_from(kind: str) -> Callable[[Case], Array]:
    compute = divergence.DIVERGENCES[kind]

    def total(case: Case) -> Array:
        return jnp.sum(compute(jax.nn.log_softmax(case["logits"]), jax.nn.log_softmax(case["teacher"])))

    return total


DISTRIBUTIONS = {"logits": (COLUMNS, VOCABULARY), "teacher": (COLUMNS, VOCABULARY)}
ARRAY_ROWS = (
    ArrayRow("reward", "P1", "jrl.algos.bradley_terry:sequence_loss", bradley_terry, {"score": (2 * PAIRS,)},
             {"margin": (0.0, 1.0), "center": (0.001, 0.1)}),
    ArrayRow("generalized_jsd_loss 0", "P37", "jrl.ops.divergence:forward_kl", divergence_from("forward"),
             DISTRIBUTIONS),
    ArrayRow("generalized_jsd_loss 1", "P37", "jrl.ops.divergence:reverse_kl", divergence_from("reverse"),
             DISTRIBUTIONS),
    ArrayRow("generalized_jsd_loss 0.5", "P37", "jrl.ops.divergence:jensen_shannon", divergence_from("jensen_shannon"),
             DISTRIBUTIONS),
)  # fmt: skip


def cases_of(row: PreferenceRow | ArrayRow, count: int, seed: int) -> list[Case]:
    rng = np.random.default_rng([seed, zlib.crc32(row.name.encode())])
    return [case_of(row, rng) for _ in range(count)]


def case_of(row: PreferenceRow | ArrayRow, rng: np.random.Generator) -> Case:
    """Returns one case: the preferred answers, then the others, ragged, masked entries NaN."""
    numbers = {name: np.float32(rng.uniform(*bounds)) for name, bounds in row.numbers.items()}
    if isinstance(row, ArrayRow):
        return {
            name: rng.normal(scale=2, size=shape).astype(np.float32) for name, shape in row.inputs.items()
        } | numbers
    ends = rng.integers(1, COLUMNS + 1, (2 * PAIRS, 1))
    if row.even:
        ends[:PAIRS] = ends[0]
    mask = np.arange(COLUMNS) < ends
    logprobs = -rng.exponential(1.0, mask.shape) - 0.01
    moved = (
        np.minimum(logprobs + rng.normal(scale=0.3, size=mask.shape), -0.001)
        if row.reference
        else np.zeros_like(logprobs)
    )
    masked = lambda x: np.where(mask, x, np.nan).astype(np.float32)
    case = {"logprobs": masked(logprobs), "ref_logprobs": masked(moved), "mask": mask}
    if row.objective == "KTO":
        good = rng.random(PAIRS) < 0.5
        case["good"], numbers["good_weight"] = good, numbers.pop("good")
        numbers["bad_weight"] = numbers.pop("bad")
    if ALGOS[row.objective].needs(ALGOS[row.objective].config()).log_sum_squared:
        case["log_sum_squared"] = masked(logprobs * rng.random(mask.shape))  # so that no weight is above 1
    return case | numbers


def pairs_of_rows(logprobs: Array, ref_logprobs: Array | None, mask: Array, score: Array | None = None) -> Sequences:
    """Returns pairs out of rows, the preferred answers first, as the learner gives them."""
    row = lambda x: None if x is None else jnp.asarray(x)[None]
    total = lambda x: None if x is None else jnp.sum(reduce.masked(x, mask), axis=-1)
    return Sequences(
        logprob=row(total(logprobs)),
        ref_logprob=row(total(ref_logprobs)),
        length=row(jnp.sum(mask, axis=-1)),
        score=row(score),
        label=row(jnp.repeat(jnp.array([1.0, 0.0]), PAIRS)),
        unit=row(jnp.tile(jnp.arange(PAIRS), 2)),
        mask=jnp.ones((1, 2 * PAIRS), bool),
    )


def of_objective(row: PreferenceRow) -> Callable[[Case], Array]:
    objective = ALGOS[row.objective]

    def mean(case: Case) -> Array:
        names = {"good": "good_weight", "bad": "bad_weight"} if row.objective == "KTO" else {}
        given = lambda value: case[names.get(value, value)] if value in row.numbers else value
        config = objective.config(**{field: given(value) for field, value in row.fields.items()})
        reference = case["ref_logprobs"] if objective.needs(config).reference else None
        sequences = pairs_of_rows(case["logprobs"], reference, case["mask"])
        if objective.needs(config).log_sum_squared:
            squared = jnp.sum(reduce.masked(case["log_sum_squared"], case["mask"]), axis=-1)
            sequences = sequences.replace(log_sum_squared=squared[None])
        if objective.sequence_baseline is not None:  # the second half are the mismatched answers
            label = jnp.concatenate([case["good"].astype(jnp.float32), jnp.full(PAIRS, -1.0)])
            sequences = sequences.replace(label=label[None])
            baseline = objective.sequence_baseline(config, jax.lax.stop_gradient(sequences))
            sequences = sequences.replace(baseline=jnp.broadcast_to(baseline, sequences.label.shape))
        loss, _ = objective.sequence_loss(config, sequences, objective.init_state(config))
        return jnp.sum(loss) / PAIRS

    return mean


def answers(row: PreferenceRow | ArrayRow, cases: list[Case]) -> tuple[np.ndarray, np.ndarray]:
    """Returns our losses of the cases, [cases], and their derivatives, [cases, ...]."""
    compute = row.compute if isinstance(row, ArrayRow) else of_objective(row)
    first = next(iter(cases[0]))
    given = {name: jnp.asarray(np.stack([case[name] for case in cases])) for name in cases[0]}
    at = lambda x, rest: compute({first: x, **rest})
    run = jax.jit(jax.vmap(jax.value_and_grad(at)))
    value, slope = run(given.pop(first), given)
    return np.asarray(value), np.asarray(slope)


def function_of(row: PreferenceRow | ArrayRow) -> str:
    """Returns what is compared, as module:name."""
    if isinstance(row, ArrayRow):
        return row.function
    return f"{ALGOS[row.objective].config.__module__}:{row.objective}"
