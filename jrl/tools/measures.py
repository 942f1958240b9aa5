"""What `jrl eval` measures on a policy's samples besides accuracy: calibration of the confidence that it states (M12),
diversity of its answers (M14), distance from another model (K1), and a proxy reward (M15)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.ops import statistics
from jrl.ops.calibration import auroc, brier, expected_calibration_error
from jrl.ops.over_optimization import over_optimization
from jrl.rollout.evaluate import Samples, interval_json
from jrl.run.trained import Trained
from jrl.tasks.data.diversity import distinct_ngrams, embedding_distance, mean_self_bleu
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers.calibration import Calibration, stated_confidence
from jrl.tasks.verifiers.calibration import score as score_calibration
from jrl.tools.score import embeddings, score, score_rewards

ORDERS = (1, 2, 3, 4)  # of n-grams
LARGEST_GAP = 20.0  # of log-probs, in nats: one token with exp(88) would hide all others
THRESHOLDS = np.linspace(0, 1, 101)  # of the profile


def profile(samples: Samples) -> dict[str, list[float]]:
    """Returns M8 over the prompts that have a verdict: for each threshold, the share of prompts with a larger share of
    correct samples."""
    scored = np.isin(samples.verdicts, [status for status in Status if status.scorable])
    means = statistics.problem_means(samples.verdicts == Status.CORRECT, scored)
    shares = statistics.performance_profile(means, THRESHOLDS) if len(means) else []
    return {"thresholds": THRESHOLDS.tolist() if len(means) else [], "shares": [*map(float, shares)]}


def calibration(verifiers: Sequence[Any], samples: Samples) -> dict[str, Any] | None:
    """Returns M12 of the samples that state a confidence: {"brier", "ece", "auroc": intervals over prompts, "stated":
    how many such samples were judged}; None if no verifier reads a confidence."""
    config = next((verifier for verifier in verifiers if isinstance(verifier, Calibration)), None)
    if config is None:
        return None
    problems = []
    for prompt in range(len(samples.visits)):
        example = samples.visits[prompt].example
        stated = [(stated_confidence(config, text), score_calibration(config, text, example).status)
                  for text in samples.of_prompt(prompt)]  # fmt: skip
        judged = [(confidence, status == Status.CORRECT) for confidence, status in stated
                  if confidence is not None and status in (Status.CORRECT, Status.WRONG)]  # fmt: skip
        problems.append(np.array(judged, np.float64).reshape(len(judged), 2))
    measures = {"brier": brier, "ece": expected_calibration_error, "auroc": auroc}
    intervals = {
        name: interval_json(statistics.clustered_bootstrap(problems, lambda rows, fn=fn: fn(rows[:, 0], rows[:, 1])))
        for name, fn in measures.items()
    }
    return {**intervals, "stated": sum(map(len, problems))}


def diversity(samples: Samples) -> dict[str, Any]:
    """Returns M14 over words: {"distinct": {n: share of distinct n-grams among a prompt's samples}, "self_bleu": of a
    prompt's samples}, both with intervals over prompts, and "across_prompts": {n: that share among the first samples of
    all prompts}, single numbers."""
    words = [[text.split() for text in samples.of_prompt(prompt)] for prompt in range(len(samples.visits))]
    number = lambda x: x if math.isfinite(x) else None
    return {
        "distinct": {str(n): _over_prompts([distinct_ngrams(texts, n) for texts in words]) for n in ORDERS},
        "self_bleu": _over_prompts([mean_self_bleu(texts) for texts in words]),
        "across_prompts": {str(n): number(distinct_ngrams([texts[0] for texts in words], n)) for n in ORDERS},
    }


def against_reference(trained: Trained, reference: Trained, samples: Samples) -> dict[str, Any]:
    """Returns how far a policy is from a reference on its own samples: {"kl": K1's k1 summed over a completion, in
    nats, "kl_k3": the same of k3, which is never negative, "embedding_distance": M14 of a prompt's samples, on the
    reference's hidden state at their last token}, with intervals over prompts.

    Raises: ValueError if the tokenizers differ, or if the temperature is not 1: samples are then not the policy's own.
    """
    check_same_tokenizer(trained, reference, "--reference")
    if (temperature := trained.policy.config.eval.temperature) != 1:
        raise ValueError(f"a KL is measured on samples of the policy itself, and Eval.temperature is {temperature}; "
                         "set it to 1.0, or leave --reference out")  # fmt: skip
    rows = sequences(samples)
    differences = [
        (own - other)[len(row) - len(completion) :]
        for row, completion, own, other in zip(rows, samples.tokens, score(trained, rows), score(reference, rows))
    ]
    k1 = [float(delta.sum()) for delta in differences]
    bounded = [np.clip(delta.astype(np.float64), -LARGEST_GAP, LARGEST_GAP) for delta in differences]
    k3 = [float((np.expm1(-delta) + delta).sum()) for delta in bounded]
    distances = {"kl": _of_samples(k1, samples), "kl_k3": _of_samples(k3, samples)}
    if samples.count > 1:
        vectors = embeddings(reference, rows).reshape(len(samples.visits), samples.count, -1)
        distances["embedding_distance"] = _over_prompts([embedding_distance(of_prompt) for of_prompt in vectors])
    return distances


def proxy(trained: Trained, samples: Samples, of: Trained) -> dict[str, Any]:
    """Returns {"proxy": interval} of the mean score that a reward head gives the samples.

    Args:
      trained: the model with the reward head. of: the policy that drew the samples.

    Raises: ValueError if their tokenizers differ.
    """
    check_same_tokenizer(of, trained, "--proxy")
    return {"proxy": _of_samples(score_rewards(trained, sequences(samples)).tolist(), samples)}


def check_same_tokenizer(one: Trained, other: Trained, option: str) -> None:
    """Raises ValueError if two models have different tokenizers."""
    if one.policy.tokenizer.fingerprint != other.policy.tokenizer.fingerprint:
        raise ValueError(f"{option}: it has another tokenizer than the model that is evaluated, and tokens of one are "
                         "not those of the other")  # fmt: skip


def sequences(samples: Samples) -> list[list[int]]:
    """Returns the token ids of every sample: its prompt, then its completion."""
    return [
        [*samples.visits[row // samples.count].prompt, *completion] for row, completion in enumerate(samples.tokens)
    ]


FEWEST_CHECKPOINTS = 5  # for a curve of over-optimization (M15)


def has_curve(result: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint has what M15 reads: a KL, a proxy reward and an accuracy."""
    measured = all(result.get(key, {}).get("mean") is not None for key in ("kl_k3", "proxy"))
    return measured and result["mean"] is not None


def over_optimized(results: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns M15 over the evaluated checkpoints that have a KL, a proxy reward and an accuracy, which is the gold
    score; None if fewer than FEWEST_CHECKPOINTS have them: the peak of two points is always an end."""
    curve_results = [*filter(has_curve, results)]
    if len(curve_results) < FEWEST_CHECKPOINTS:
        return None
    arrays = [np.array([value(r) for r in curve_results]) for value in
              (lambda r: r["kl_k3"]["mean"], lambda r: r["proxy"]["mean"], lambda r: r["mean"])]  # fmt: skip
    curve = over_optimization(*arrays)._asdict()
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in curve.items()}


def improvement(row: Mapping[str, Any], column: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns M9 of two results on the same prompts: the probability that a sample of the first has a higher reward
    than one of the second, ties counting half; the mean over prompts, with an interval over prompts."""
    wins = []
    for prompt, mine in row["rewards"].items():
        theirs = column["rewards"].get(prompt, [])
        x, y = (np.array([v for v in values if v is not None]) for values in (mine, theirs))
        if len(x) and len(y):
            wins.append(statistics.pairwise_wins(x, y).mean())
    return interval_json(statistics.share_interval(np.array(wins, np.float64)))


def _of_samples(values: Sequence[float], samples: Samples) -> dict[str, float | None]:
    return _over_prompts(np.reshape(np.asarray(values, np.float64), (-1, samples.count)).mean(axis=1).tolist())


def _over_prompts(values: Sequence[float]) -> dict[str, float | None]:
    """Returns the mean of the finite values, with its interval."""
    finite = np.array([value for value in values if math.isfinite(value)], np.float64)
    return interval_json(statistics.bootstrap_interval(finite))
