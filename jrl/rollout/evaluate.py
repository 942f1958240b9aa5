"""Evaluation on held-out prompts: avg@k, unbiased pass@k, majority@k, with intervals over prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jrl.device.sharding import replicated
from jrl.ops import statistics
from jrl.rollout.collect import completion_text, fields
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.scoring import Scorer
from jrl.rollout.stop_strings import StopTable
from jrl.run.job import Job, Policy
from jrl.run.programs import EVAL_STREAM, place_prompts
from jrl.tasks.data.prompts import Visit
from jrl.tasks.verdict import Status
from jrl.types import Array, PyTree

RIGHT = "\x00right"  # the one answer that all correct completions of a prompt vote for


def evaluate(job: Job, params: PyTree, said: str, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Returns `measure` of the policy on the run's held-out prompts.

    Args:
      said: what the display calls it.
      between: called before every batch; what it raises ends the evaluation.
    """

    def announce(done: int, total: int) -> None:
        between()
        job.display.phase(f"{said}: {done}/{total} prompts")

    with job.timed("eval"):
        found = measure(
            job.policy,
            params,
            job.held_out(),
            key=job.key,
            sampling_params=job.eval_sampling_params,
            stop_table=job.stop_table,
            scorer=job.scorer,
            announce=announce,
        )
    job.display.note(f"{said}, the first held-out prompt:")
    first = found["sample"]
    job.display.sample(first["prompt"], first["completion"], first["reward"])
    return found


def measure(
    policy: Policy,
    params: PyTree,
    visits: Sequence[Visit],
    *,
    key: Array,
    sampling_params: SamplingParams,
    stop_table: StopTable | None,
    scorer: Scorer,
    announce: Callable[[int, int], None],
) -> dict[str, Any]:
    """Returns {"mean","low","high","n","parsed","samples","tasks","sample",...} of the policy on given prompts.

    `mean` is the share of correct completions (avg@k), with a 95 % interval clustered by prompt. A completion whose
    verdict is not scorable does not count, and is counted. The draws are named by prompt and sample, so that the same
    weights are always judged on the same noise.

    Args:
      announce: told how many prompts of how many are being sampled.
    """
    e = policy.config.eval
    stream = jax.device_put(np.uint32(EVAL_STREAM), replicated(policy.mesh))
    version = jax.device_put(np.int32(0), replicated(policy.mesh))
    pending = []
    for start in range(0, len(visits), e.batch):
        announce(min(start + e.batch, len(visits)), len(visits))
        part = visits[start : start + e.batch]
        prompts = place_prompts(part, e.batch, policy.config.data.prompt_length, policy.tokenizer.pad_id, policy.mesh)
        rollout = policy.programs.sample_eval(params, prompts, key, stream, version, sampling_params, stop_table, None)
        host = jax.device_get(fields(rollout))
        rows = range(len(part) * e.samples)
        texts = [completion_text(policy.tokenizer, host, row) for row in rows]
        examples = [part[row // e.samples].example for row in rows]
        keys = [(part[row // e.samples].uid, int(host["sample"][row])) for row in rows]
        pending.append((scorer.submit(texts, examples, keys), texts))
    scores = [scorer.collect(ticket) for ticket, _ in pending]
    verdicts = np.concatenate([said.verdict for said in scores])
    texts = [text for _, part in pending for text in part]
    found = report(verdicts.reshape(len(visits), e.samples), texts, [v.example.task for v in visits])
    found["sample"] = {
        "prompt": "\n".join(message.content for message in visits[0].example.messages),
        "completion": texts[0],
        "reward": float(scores[0].reward[0]) if scores[0].valid[0] else None,
    }
    return found


def report(verdicts: np.ndarray, texts: list[str], tasks: list[str]) -> dict[str, Any]:
    """Returns the numbers of an evaluation.

    Args:
      verdicts: [prompts, samples] int8, a Status.
      texts: completions, samples of a prompt adjacent.
      tasks: the task of each prompt.
    """
    samples = verdicts.shape[1]
    scored = np.isin(verdicts, [s for s in Status if s.scorable])
    correct = (verdicts == Status.CORRECT) & scored
    out: dict[str, Any] = _interval(statistics.proportion_interval(correct, scored))
    out["samples"] = samples
    out["parsed"] = float(((verdicts != Status.UNPARSABLE) & scored).sum() / max(scored.sum(), 1))
    out["unscorable"] = int((~scored).sum())
    names = sorted(set(tasks))
    if len(names) > 1:
        chosen = {name: np.array([task == name for task in tasks]) for name in names}
        out["tasks"] = {
            name: _interval(statistics.proportion_interval(correct[rows], scored[rows]))
            for name, rows in chosen.items()
        }
    if samples > 1:
        out["pass_at_k"], out["majority_at_k"] = {}, {}
        k = 1
        while k <= samples:
            full = scored.all(axis=1)
            chance = statistics.pass_at_k(correct[full].sum(axis=1), samples, k)
            out["pass_at_k"][str(k)] = _interval(statistics.bootstrap_interval(chance))
            votes = [
                statistics.majority_at_k(_answers(texts, verdicts, p), correct[p].tolist(), k)
                for p in np.flatnonzero(full)
            ]
            out["majority_at_k"][str(k)] = _interval(statistics.bootstrap_interval(np.array(votes)))
            k *= 2
    return out


def numbers(result: dict[str, Any]) -> dict[str, float]:
    """Returns the flat numbers of a report that go into the metrics of a step."""
    flat = {f"eval/{name}": result[name] for name in ("mean", "low", "high", "parsed")}
    return flat | {f"eval_task/{task}": found["mean"] for task, found in result.get("tasks", {}).items()}


def _answers(texts: list[str], verdicts: np.ndarray, prompt: int) -> list[str | None]:
    """The answers of a prompt's samples. What could not be read does not vote; what the verifier calls correct votes as
    one answer, however it is worded; wrong answers vote by their text."""
    samples = verdicts.shape[1]
    answers: list[str | None] = []
    for k in range(samples):
        status = verdicts[prompt, k]
        text = texts[prompt * samples + k].strip()
        answers.append(None if status == Status.UNPARSABLE else RIGHT if status == Status.CORRECT else text)
    return answers


def _interval(interval: statistics.Interval) -> dict[str, float]:
    finite = lambda x: x if math.isfinite(x) else None  # of no problems: there is no mean
    return {"mean": finite(interval.mean), "low": finite(interval.low), "high": finite(interval.high), "n": interval.n}
