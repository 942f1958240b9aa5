"""Evaluation on held-out prompts: avg@k, pass@k, pass^k, majority@k, best of k, with intervals over prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jrl.device.placement import fetch, place_on_mesh
from jrl.device.processes import ONE, Processes
from jrl.device.sharding import replicated
from jrl.ops import statistics
from jrl.rollout.collect import ON_HOST
from jrl.rollout.prompts import EVAL_STREAM, place_prompts
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.scoring import Scorer, scores_of_all
from jrl.rollout.stop_strings import StopTable
from jrl.tasks.data.prompts import Visit
from jrl.tasks.stopping import Stop, check_stop, never
from jrl.tasks.verdict import Status
from jrl.types import Array, Finish, PyTree, Rollout

RIGHT = "\x00right"  # the one answer that all correct completions of a prompt vote for


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Samples and scores completions of held-out prompts. Random keys derive from the prompt and the sample's index, so
    that every evaluation uses the same noise."""

    program: Callable[..., Rollout]
    tokenizer: Any
    mesh: Mesh
    key: Array  # root of the keys of all samples
    params: SamplingParams
    stop_table: StopTable | None
    samples: int  # per prompt
    batch: int  # prompts sampled at once
    prompt_length: int
    processes: Processes = ONE  # of the run; each scores its own rows


class Samples(NamedTuple):
    """Scored completions of held-out prompts; those of a prompt are adjacent."""

    visits: list[Visit]  # [prompts]
    texts: list[str]  # [prompts * samples]
    answers: list[str]  # [prompts * samples], what the verifiers read in the texts
    tokens: list[list[int]]  # [prompts * samples], of the completions, the stop token included
    verdicts: np.ndarray  # [prompts, samples] int8, a Status
    rewards: np.ndarray  # [prompts, samples] float, NaN where there is none
    truncated: float  # share that reached the length limit
    weights_fingerprint: str

    @property
    def count(self) -> int:
        """Samples per prompt."""
        return self.verdicts.shape[1]

    def of_prompt(self, prompt: int) -> list[str]:
        """Returns the texts of a prompt."""
        return self.texts[prompt * self.count : (prompt + 1) * self.count]


def draw(
    evaluator: Evaluator,
    weights: PyTree,
    visits: Sequence[Visit],
    scorer: Scorer,
    announce: Callable[[int, int], None],
    stop: Stop = never,
) -> Samples:
    """Returns a policy's completions of prompts, scored.

    Args:
      weights: the policy's.
      announce: called before each batch with (prompts sampled after it, total prompts).
      stop: checked before each batch and while the verifiers run.

    Raises: StopRequested if `stop` requests it.
    """
    e = evaluator
    stream = place_on_mesh(np.uint32(EVAL_STREAM), replicated(e.mesh))
    version = place_on_mesh(np.int32(0), replicated(e.mesh))
    pending, truncated, tokens, answers = [], 0, [], []
    for start in range(0, len(visits), e.batch):
        check_stop(stop, "evaluating")
        announce(min(start + e.batch, len(visits)), len(visits))
        part = visits[start : start + e.batch]
        prompts = place_prompts(part, e.batch, e.prompt_length, e.tokenizer.pad_id, e.mesh)
        rollout = e.program(weights, prompts, e.key, stream, version, e.params, e.stop_table, None)
        host = fetch({name: getattr(rollout, name) for name in (*ON_HOST, "finish", "weights_fingerprint")})
        truncated += int((host["finish"][: len(part) * e.samples] == Finish.LENGTH).sum())
        share = e.processes.share(len(part))
        rows = range(share.start * e.samples, share.stop * e.samples)
        ids = [host["tokens"][row][host["action_mask"][row]].tolist() for row in range(len(part) * e.samples)]
        texts = [e.tokenizer.decode(completion) for completion in ids]
        tokens += ids
        answers += [scorer.answer_in(text, part[row // e.samples].example) for row, text in enumerate(texts)]
        examples = [part[row // e.samples].example for row in rows]
        # With the weights: a text that another evaluation could not score may be scored in this one.
        weights_key = int(host["weights_fingerprint"])
        keys = [((*part[row // e.samples].uid, weights_key), row % e.samples) for row in rows]
        pending.append((scorer.submit(texts[rows.start : rows.stop], examples, keys), texts))
    scores = [scores_of_all(scorer.collect(ticket, stop, processes=e.processes), e.processes) for ticket, _ in pending]
    by_prompt = lambda name: np.concatenate([getattr(batch, name) for batch in scores]).reshape(len(visits), e.samples)
    return Samples(
        visits=[*visits],
        texts=[text for _, batch_texts in pending for text in batch_texts],
        answers=answers,
        tokens=tokens,
        verdicts=by_prompt("verdict"),
        rewards=np.where(by_prompt("valid"), by_prompt("reward"), np.nan),
        truncated=truncated / (len(visits) * e.samples),
        weights_fingerprint=f"{int(host['weights_fingerprint']):08x}",
    )


def summary(samples: Samples) -> dict[str, Any]:
    """Returns {"mean","low","high","n","parsed","samples","tasks","sample","by_prompt",...} of samples.

    `mean` is the share of correct completions (avg@k), with a 95 % interval clustered by prompt. Completions whose
    verdict is not scorable are left out, and `unscorable` is their number. Three entries are keyed by the digest of a
    prompt's text: `by_prompt`, the mean reward of its samples, None if none has a reward; `rewards`, those of all its
    samples; and `completions`, its first one. `truncated` is the share of completions that reached the length limit.
    """
    visits, rewards = samples.visits, samples.rewards
    result = report(samples.verdicts, samples.answers, [v.example.task for v in visits], rewards)
    digests = [visit.example.prompt_digest().hex() for visit in visits]
    # In float64: float32 rounds by the order of the samples, and the same rewards in another order are to be a tie.
    result["by_prompt"] = {
        digest: float(row[np.isfinite(row)].mean(dtype=np.float64)) if np.isfinite(row).any() else None
        for digest, row in zip(digests, rewards)
    }
    result["rewards"] = {
        digest: [float(x) if np.isfinite(x) else None for x in row] for digest, row in zip(digests, rewards)
    }
    result["truncated"] = samples.truncated
    result["weights_fingerprint"] = samples.weights_fingerprint
    result["completions"] = dict(zip(digests, samples.texts[:: samples.count]))
    result["sample"] = {
        "prompt": "\n".join(message.content for message in visits[0].example.messages),
        "completion": samples.texts[0],
        "reward": float(rewards[0, 0]) if np.isfinite(rewards[0, 0]) else None,
    }
    return result


def report(
    verdicts: np.ndarray, answers: list[str], tasks: list[str], rewards: np.ndarray | None = None
) -> dict[str, Any]:
    """Returns the numbers of an evaluation.

    "distinct" is the number of different answers among a prompt's samples (M14, per input). All correct answers count
    as one; an answer that could not be parsed counts as none. Like pass@k, it covers only prompts whose samples all
    have a scorable verdict.

    Args:
      verdicts: [prompts, samples] int8, a Status.
      answers: texts of the samples' answers, those of a prompt adjacent. Equal ones get one vote.
      tasks: the task of each prompt.
      rewards: [prompts, samples] float, NaN where there is none; None: the report has no "best_of_k".
    """
    samples = verdicts.shape[1]
    scored = np.isin(verdicts, [s for s in Status if s.scorable])
    correct = (verdicts == Status.CORRECT) & scored
    out: dict[str, Any] = interval_json(statistics.proportion_interval(correct, scored))
    out["samples"] = samples
    out["parsed"] = float(((verdicts != Status.UNPARSABLE) & scored).sum() / max(scored.sum(), 1))
    out["unscorable"] = int((~scored).sum())
    names = sorted(set(tasks))
    if len(names) > 1:
        task_rows = {name: np.array([task == name for task in tasks]) for name in names}
        out["tasks"] = {
            name: interval_json(statistics.proportion_interval(correct[rows], scored[rows]))
            for name, rows in task_rows.items()
        }
    if samples > 1:
        out["pass_at_k"], out["all_of_k"], out["majority_at_k"] = {}, {}, {}
        full = np.flatnonzero(scored.all(axis=1))
        votes = [_votes(answers, verdicts, p) for p in full]
        num_distinct = [len({*prompt_votes} - {None}) for prompt_votes in votes]
        out["distinct"] = interval_json(statistics.bootstrap_interval(np.array(num_distinct, np.float64)))
        k = 1
        while k <= samples:
            for name, estimate in (("pass_at_k", statistics.pass_at_k), ("all_of_k", statistics.all_of_k)):
                per_prompt = estimate(correct[full].sum(axis=1), samples, k)
                out[name][str(k)] = interval_json(statistics.share_interval(per_prompt))
            majority = [statistics.majority_at_k(v, correct[p].tolist(), k) for p, v in zip(full, votes)]
            out["majority_at_k"][str(k)] = interval_json(statistics.share_interval(np.array(majority)))
            k *= 2
        if rewards is not None:
            out["best_of_k"] = {str(k): best_of(rewards, k) for k in map(int, out["pass_at_k"]) if k > 1}
    return out


def best_of(rewards: np.ndarray, k: int) -> dict[str, float]:
    """Returns the mean over prompts of the expected largest reward of k samples (M4), with its interval, and "kl": an
    upper bound on the KL divergence of best-of-k from the policy, in nats.

    Args:
      rewards: [prompts, samples] float, NaN where there is none; only prompts with a reward for every sample count.
    """
    full = rewards[np.isfinite(rewards).all(axis=1)]
    best = np.array([statistics.expected_best_of_k(prompt_rewards, k) for prompt_rewards in full], np.float64)
    return {**interval_json(statistics.bootstrap_interval(best)), "kl": statistics.best_of_n_kl(k)}


def numbers(result: dict[str, Any]) -> dict[str, float | None]:
    """Returns the flat numbers of a report that go into the metrics of a step; None if nothing could be scored."""
    flat = {f"eval/{name}": result[name] for name in ("mean", "low", "high", "parsed")}
    return flat | {f"eval_task/{task}": interval["mean"] for task, interval in result.get("tasks", {}).items()}


def _votes(answers: list[str], verdicts: np.ndarray, prompt: int) -> list[str | None]:
    """Returns the votes of a prompt's samples: None (no vote) for an answer that could not be parsed, RIGHT for every
    correct answer however it is worded, and the text of a wrong one."""
    samples = verdicts.shape[1]
    votes: list[str | None] = []
    for k in range(samples):
        status = verdicts[prompt, k]
        text = answers[prompt * samples + k].strip()
        votes.append(None if status == Status.UNPARSABLE else RIGHT if status == Status.CORRECT else text)
    return votes


def interval_json(interval: statistics.Interval) -> dict[str, float | None]:
    """Returns an interval as JSON values, with None for numbers that are not finite."""
    finite = lambda x: x if math.isfinite(x) else None  # without prompts there is no mean
    return {"mean": finite(interval.mean), "low": finite(interval.low), "high": finite(interval.high), "n": interval.n}
