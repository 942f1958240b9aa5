"""Evaluates a saved policy again on the run's own held-out prompts with its verifiers, for `jrl eval`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import __version__, paths
from jrl.config import to_json
from jrl.experiment import Config
from jrl.ops.win_rates import win_rate
from jrl.rollout.evaluate import draw, interval_json, summary
from jrl.rollout.scoring import Scorer, open_scoring
from jrl.run.report.text import aligned
from jrl.run.stages import open_evaluator
from jrl.run.trained import Trained
from jrl.tasks.data.held_out import held_out
from jrl.tasks.data.prompts import Visit
from jrl.tasks.envs import open_source
from jrl.tasks.stopping import Stop, never
from jrl.tools import measures

# The name in a table and the key in a report: of measures of k samples, and of the measures besides the accuracy.
K_MEASURES = (("pass@", "pass_at_k"), ("pass^", "all_of_k"), ("majority@", "majority_at_k"))
OTHER_MEASURES = {"KL to reference (nats)": "kl", "KL by k3": "kl_k3", "embedding distance": "embedding_distance",
          "proxy reward": "proxy"}  # fmt: skip


class Asked(NamedTuple):
    """What to measure besides the accuracy."""

    diversity: bool = False
    reference: Trained | None = None  # the model to measure the policy's distance from
    proxy: Trained | None = None  # a model with a reward head, to score the samples


ACCURACY_ONLY = Asked()


def reevaluate(
    trained: Trained,
    visits: Sequence[Visit],
    announce: Callable[[int, int], None],
    asked: Asked = ACCURACY_ONLY,
    private: Sequence[Path] = (),
) -> dict[str, Any]:
    """Returns the report: `jrl.rollout.evaluate.summary` and the requested measures, with the step that was evaluated.

    Args:
      visits: the prompts, of `held_out_visits`.
      private: folders that workers of a root process cannot read, such as the evaluated runs'.

    Raises: ValueError if the reference or proxy has another tokenizer, or there is a reference and Eval.temperature is
      not 1.
    """
    policy = trained.policy
    table = policy.parts.tables["verifiers"]
    with open_scoring(policy.config.scoring, table, policy.parts.sources, private=private) as scorer:
        samples = draw(open_evaluator(policy), trained.params, visits, scorer, announce)
        described = protocol(trained, scorer)
    result = {**summary(samples), "profile": measures.profile(samples)}
    calibration = measures.calibration(policy.config.scoring.verifiers, samples)
    result |= {} if calibration is None else {"calibration": calibration}
    result |= {"diversity": measures.diversity(samples)} if asked.diversity else {}
    result |= {} if asked.reference is None else measures.against_reference(trained, asked.reference, samples)
    result |= {} if asked.proxy is None else measures.proxy(asked.proxy, samples, trained)
    digest = hashlib.sha256(b"".join(sorted(visit.example.prompt_digest() for visit in visits))).hexdigest()[:16]
    return {"step": trained.step, "prompts_digest": digest, "protocol": described, **result}


def protocol(trained: Trained, scorer: Scorer) -> dict[str, Any]:
    """Returns what a score depends on besides the weights (M20): versions, prompts, how completions were drawn, and
    which verifiers judged them. A hash keeps its prompts disjoint from those of training; `jrl data inspect --against`
    finds overlaps of n-grams."""
    config = trained.policy.config
    return {
        "jrl": __version__,
        "jax": jax.__version__,
        "task": type(config.task).__name__,
        "tokenizer_fingerprint": trained.policy.tokenizer.fingerprint,  # of the chat template, too
        "prompt_length": config.data.prompt_length,
        "completion_length": config.sampler.completion_length,
        "stop_strings": list(config.sampler.stop_strings),
        "temperature": config.eval.temperature,
        "seed": config.run.seed,
        "verifiers": list(scorer.component_names),
    }


def check_evaluated(config: Config | None, whose: str = "the configuration", example: str = "") -> None:
    """Raises ValueError for a configuration without an Eval section, or None. `whose`: its name in the message."""
    if config is None or config.eval is None:
        split = "" if config is not None and config.data.held_out_every is not None else " Data.held_out_every=10"
        raise ValueError(
            f"{whose} has no evaluation; give it one: jrl eval SOURCE 'Config.eval = @Eval()' Eval.prompts=100{split}, "
            f"or, for a published model, --config FILE.gin{example}"
        )


def held_out_visits(trained: Trained, stop: Stop = never) -> list[Visit]:
    """Returns the held-out prompts that a policy is evaluated on.

    Raises: ValueError if its configuration has no Eval section; StopRequested if `stop` returns True.
    """
    policy, config = trained.policy, trained.policy.config
    check_evaluated(config)
    source = open_source(config.task, policy.parts.tables["envs"], stop)
    return held_out(source, policy.tokenizer, config.data, config.eval.prompts, config.run.seed, stop)


def trained_prompts_warning(folder: str | Path, config: Config) -> str | None:
    """Returns a warning if a run may have trained on prompts that this configuration evaluates it on: the task is the
    same, but the run held out other prompts or none. Returns None otherwise."""
    saved_config = Path(folder) / "config.json"
    if paths.is_remote(folder) or not saved_config.is_file():
        return None
    saved, every = paths.read_object(saved_config), config.data.held_out_every
    before = saved.get("data", {}).get("held_out_every")
    task, other = ({**content.get("task", {}), "verifiers": None} for content in (saved, to_json(config)))
    if task != other or (before is not None and every is not None and every % before == 0):  # held out then too
        return None
    return (f"Warning: {folder} has trained with Data.held_out_every = {before}, perhaps on prompts that are held out "
            f"with {every}: these accuracies may be of prompts that it knows")  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Returns a report as text: one line per measure, shares in percent, with 95 % intervals."""
    lines = [("", "mean", "95 % interval", "prompts"), _line(f"avg@{result['samples']}", result)]
    for name, key in K_MEASURES:
        lines += [_line(f"{name}{k}", result[key][k]) for k in _shown_ks(result, key)]
    lines += [_line(task, value) for task, value in result.get("tasks", {}).items()]
    rows = aligned(lines)
    tail = f"{100 * result['parsed']:.1f} % of the answers could be read; {result['unscorable']} could not be judged"
    more = [_best_line(k, value) for k, value in result.get("best_of_k", {}).items() if value["mean"] is not None]
    if "distinct" in result:
        more.append(_distinct_line(result["samples"], result["distinct"]))
    more += measured(result)
    return "\n".join(
        [
            f"step {result['step']}, {_prompts(result)}, {result['samples']} samples each",
            *rows,
            *more,
            tail,
        ]
    )


def side_by_side(results: Sequence[dict[str, Any]]) -> str:
    """Returns the reports of several sources as one table: a row for each, in percent with 95 % intervals.

    Raises: ValueError if the sources were evaluated on different prompts: their numbers cannot be compared.
    """
    digests = {result["source"]: result["prompts_digest"] for result in results}
    first = results[0]
    if different := [source for source, digest in digests.items() if digest != first["prompts_digest"]]:
        raise ValueError(f"{different[0]} is evaluated on other prompts than {first['source']}: their tasks, Data "
                         "or Run.seed differ; set the same with NAME=VALUE")  # fmt: skip
    columns = {"avg": lambda result: result}
    for name, key in K_MEASURES:
        for k in _shown_ks(first, key):
            columns[f"{name}{k}"] = lambda result, key=key, k=k: result.get(key, {}).get(k)

    rows = [["source", "step", *columns]]
    rows += [[r["source"], str(r["step"]), *(percent_cell(column(r)) for column in columns.values())] for r in results]
    counts = sorted({result["samples"] for result in results})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    head = f"{_prompts(first)}, {samples} samples each; percent, 95 % intervals"
    lines = [head, *aligned(rows), *_other_measures_table(results)]
    if all("by_prompt" in result for result in results):
        lines += win_rates(results)
    if all("rewards" in result for result in results) and max(counts) > 1:
        lines += improvements(results)
    return "\n".join(lines + over_optimization_lines(measures.over_optimized(results), results))


def _prompts(result: dict[str, Any]) -> str:
    return f"{result['n']} held-out prompts of {result['protocol']['task']}"


def _shown_ks(result: dict[str, Any], key: str) -> list[str]:
    """Returns the k that a table shows for a measure of k samples. pass^1 is left out: it equals pass@1."""
    return [k for k in result.get(key, {}) if (key, k) != ("all_of_k", "1")]


def _other_measures_table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table of the other measures, a row for each source; [] if there are none."""
    names = list(dict.fromkeys(name for result in results for name in measured_intervals(result)))
    if not names:
        return []
    cells = [measured_intervals(result) for result in results]
    rows = [[r["source"], *(_number_cell(row.get(name)) for name in names)] for r, row in zip(results, cells)]
    return ["", *aligned([["measure", *names], *rows])]


def measured_intervals(result: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Returns the intervals of the measures besides the accuracy, by their name in a table."""
    named = {name: result[key] for name, key in OTHER_MEASURES.items() if key in result}
    if (calibration := result.get("calibration")) is not None:
        named |= {name: calibration[key] for name, key in (("Brier", "brier"), ("ECE", "ece"), ("AUROC", "auroc"))}
    if (words := result.get("diversity")) is not None:
        named |= {f"distinct-{n}": value for n, value in words["distinct"].items()} | {"self-BLEU": words["self_bleu"]}
    return named


def measured(result: dict[str, Any]) -> list[str]:
    """Returns the lines on the measures besides the accuracy."""
    lines = [f"{name}: {_number_cell(value)}" for name, value in measured_intervals(result).items()]
    if (calibration := result.get("calibration")) is not None:
        lines.append(f"{calibration['stated']} samples state a confidence")
    if (diversity := result.get("diversity")) is not None:
        shown = ", ".join(f"{n}: {'-' if x is None else f'{x:.3f}'}" for n, x in diversity["across_prompts"].items())
        lines.append(f"distinct-n across prompts, of n = {shown}")
    return lines


def improvements(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table of M9: the probability in percent that a sample of the row has a higher reward than
    one of the column on the same prompt, ties counting half, with 95 % intervals over prompts."""
    rows = [["P(sample higher)", *(r["source"] for r in results)]]
    for row in results:
        intervals = [None if row is other else measures.improvement(row, other) for other in results]
        rows.append([row["source"], *("" if value is None else percent_cell(value) for value in intervals)])
    return ["", *aligned(rows)]


def over_optimization_lines(curve: dict[str, Any] | None, results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines on M15 over all sources; [] if at most one has a KL, a proxy reward and a mean."""
    known = sum(map(measures.has_curve, results))
    if curve is None and known < 2:
        return []
    if curve is None:
        return ["", f"over-optimization: {known} checkpoints with a KL and a proxy reward; a curve takes at least "
                f"{measures.FEWEST_CHECKPOINTS} (--steps)"]  # fmt: skip
    return ["", f"over-optimization: the share of right answers is highest, {100 * curve['peak']:.1f} %, at "
            f"sqrt(KL) {curve['peak_distance']:.3f}; at the farthest of {len(curve['gold'])} it is "
            f"{100 * curve['lost']:.1f} lower; proxy and share go opposite ways in {100 * curve['mismatch']:.1f} % "
            "of the steps"]  # fmt: skip


def percent_cell(interval: dict[str, float | None] | None) -> str:
    """Returns an interval {"mean", "low", "high"} of shares in percent; the mean alone if there is no interval, as of a
    single prompt; '-' if nothing was measured."""
    return _cell(interval, 1, scale=100)


def _number_cell(interval: dict[str, float | None] | None) -> str:
    return _cell(interval, 3)


def _cell(interval: dict[str, float | None] | None, digits: int, *, scale: int = 1) -> str:
    if interval is None or interval["mean"] is None:
        return "-"
    shown = lambda x: f"{scale * x:.{digits}f}"
    ends = "" if interval["low"] is None else f" [{shown(interval['low'])}, {shown(interval['high'])}]"
    return shown(interval["mean"]) + ends


def win_rates(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table of win rates (M11): the percentage of the prompts judged for both on which the row's
    mean reward is higher than the column's, ties counting half, with 95 % intervals over prompts."""

    def cell(row: dict[str, Any], column: dict[str, Any]) -> str:
        if row is column:
            return ""
        pairs = [(value, column["by_prompt"].get(prompt)) for prompt, value in row["by_prompt"].items()]
        judged = np.array([pair for pair in pairs if None not in pair], np.float64).reshape(-1, 2)
        return percent_cell(interval_json(win_rate((1 + np.sign(judged[:, 0] - judged[:, 1])) / 2)))

    table = [["wins over", *(r["source"] for r in results)]]
    table += [[r["source"], *(cell(r, other) for other in results)] for r in results]
    return ["", *aligned(table)]


def _best_line(k: str, value: dict[str, float]) -> str:
    return f"mean reward of the best of {k}: {_cell(value, 2)}, at most {value['kl']:.2f} nats from the policy"


def _distinct_line(samples: int, value: dict[str, float]) -> str:
    return f"different answers of a prompt's {samples} samples: {_cell(value, 2)}"


def _line(name: str, interval: dict[str, float | None]) -> tuple[str, str, str, str]:
    percent = lambda x: "-" if x is None else f"{100 * x:.1f}"  # no problems have no mean
    mean, low, high = (percent(interval[key]) for key in ("mean", "low", "high"))
    return name, f"{mean} %", "none" if interval["low"] is None else f"[{low}, {high}]", str(interval["n"])
