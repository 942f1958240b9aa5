"""Evaluates a saved policy again, with the run's own held-out prompts and verifiers: what `jrl eval` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jrl.experiment import row_of
from jrl.rollout.evaluate import measure
from jrl.rollout.scoring import open_scoring
from jrl.run.job import open_evaluator
from jrl.run.policy import Trained
from jrl.tasks.data.held_out import held_out


def reevaluate(trained: Trained, announce: Callable[[int, int], None]) -> dict[str, Any]:
    """Returns the report of `jrl.rollout.evaluate.measure`, with the step it speaks of.

    Raises: ValueError where the configuration has no Eval section.
    """
    policy = trained.policy
    config, tables = policy.config, policy.parts.tables
    if config.eval is None:
        raise ValueError(
            "the configuration has no evaluation; give it one: jrl eval SOURCE 'Config.eval = @Eval()' Eval.prompts=100"
            ", or, for a published model, --config FILE.gin"
        )
    source = row_of(tables, "envs", config.task).open(config.task)
    visits = held_out(source, policy.tokenizer, config.data, config.eval.prompts, config.run.seed)
    scorer = open_scoring(config.scoring, tables["verifiers"], policy.parts.sources)
    try:
        result = measure(open_evaluator(policy, trained.key), trained.params, visits, scorer, announce)
    finally:
        scorer.close()
    return {"step": trained.step, **result}


def table(result: dict[str, Any]) -> str:
    """Returns the report as text: a line for each number, in percent with its 95 % interval."""
    lines = [("", "mean", "95 % interval", "prompts"), _line(f"avg@{result['samples']}", result)]
    for name, key in (("pass", "pass_at_k"), ("majority", "majority_at_k")):
        lines += [_line(f"{name}@{k}", value) for k, value in result.get(key, {}).items()]
    lines += [_line(task, value) for task, value in result.get("tasks", {}).items()]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    rows = [
        f"{line[0]:<{widths[0]}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:]))
        for line in lines
    ]
    tail = f"{100 * result['parsed']:.1f} % of the answers could be read; {result['unscorable']} could not be judged"
    best = [_best_line(k, value) for k, value in result.get("best_of_k", {}).items() if value["mean"] is not None]
    return "\n".join(
        [f"step {result['step']}, {result['n']} held-out prompts, {result['samples']} samples each", *rows, *best, tail]
    )


def _best_line(k: str, value: dict[str, float]) -> str:
    mean, low, high, kl = (f"{value[key]:.2f}" for key in ("mean", "low", "high", "kl"))
    return f"mean reward of the best of {k}: {mean} [{low}, {high}], at most {kl} nats from the policy"


def _line(name: str, interval: dict[str, float | None]) -> tuple[str, str, str, str]:
    percent = lambda x: "-" if x is None else f"{100 * x:.1f}"  # of no problems there is no mean
    mean, low, high = (percent(interval[key]) for key in ("mean", "low", "high"))
    return name, f"{mean} %", f"[{low}, {high}]", str(interval["n"])
