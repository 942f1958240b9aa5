"""Trains every recipe of configs/algos/ on their toy task: does it learn on every seed, how long does it take, and does
it learn nothing where nothing says what is right?

    python -m benchmarks.recipes --out F.json                     all, three seeds each, and three controls
    python -m benchmarks.recipes --out F.json --only grpo ppo     these
    python -m benchmarks.recipes --out F.json --seeds 1           one seed each
    python -m benchmarks.recipes --out F.json --minutes 4         no new program after 4 minutes; the same call goes on
    python -m benchmarks.recipes --out F.json --again             the seconds of what is in F.json, on an idle machine

The seeds of a recipe train in one program, as a population; one after the other where the recipe has what no
population has (a sampling strategy, rewards of roles). `together` says how many shared a program, and with it the
seconds.

For each run: the mean outcome (right or wrong, whatever else is rewarded) in the first and in the last five sampling
calls, of the prompts sampled in both, each prompt alike, and the interval of the difference (95 %, paired by prompt).
So it does not matter which prompts a recipe samples more often, or leaves out of its loss. Where the last five calls
have no prompt of the first five, since few were chosen in between, more calls count as first, until one has come. A
recipe has learned where the interval lies above 0 on every seed. Where the reward is that of reward models which the
recipe trains (`Online.rewards`), the policy can learn no more than their scores: of such a recipe the mean score is
compared in the same way, and the outcomes stand beside it in `outcomes`.

The control is the same program where nothing says which answer belongs to which prompt. At every step, what the
completions of the batch were scored with is dealt out anew among them, so that the batch's statistics stay and no
reward says anything of its completion; and the demonstrations of the warm-up, and the answers that a completion begins
with, are dealt out among the prompts. So the policy learns the form of an answer and starts at chance. From the warm
start, which is above chance, permuted rewards alone make most recipes worse: with Adam a step along noise is as long as
one along a signal, and undoes what imitation taught.

A control is measured above chance: of every outcome, the share of the batch's other prompts that the completion would
have answered is subtracted. Where the policy knows nothing of its prompt the mean of that is 0, whatever answers it
prefers, before and after. So the interval includes 0 in 95 of 100 controls, unless a recipe finds a signal where there
is none.

A recipe without an Online stage learns from stored rows. Of it, in the first and in the last five steps of its last
stage: the share of pairs in the right order; of labeled answers, by how much the good ones gained more than the bad
ones; of rows with advantages, the covariance of these and the log-prob of a token, or of their rewards where values are
learned; else the log-prob of what is imitated. The interval is Welch's, over steps; of a share that of the comparisons
of both windows, since a first window in which the share climbs from one half, where a policy is still its own
reference, has a variance between steps that is no noise. Its control deals the labels of every comparison out anew, or
the ratings of rated answers. Where the measure is the log-prob of what is imitated there is no control: that rises
whatever is imitated.

Seconds are those of a whole program, from opening its folders to its summaries, and of the processors as well: of this
process and of its verifiers. `warm`: the same programs had been compiled before, in this process or, with `--again`,
in the one that wrote F.json, since when the compilation cache has them. What is trained again must come out the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Literal
from unittest import mock

import numpy as np
from scipy.special import stdtrit

import jrl
from jrl import loop
from jrl.config import ConfigError
from jrl.device.compile_cache import use_compile_cache
from jrl.experiment import Config, Online
from jrl.plugins import Parts
from jrl.rollout import collect
from jrl.rollout.collect import Collected, PromptSampler
from jrl.run import offline, online
from jrl.run import population as populations
from jrl.run.batches import prompt_lengths
from jrl.run.bucket_run import RunFolder
from jrl.run.job import open_job
from jrl.run.report.display import open_display
from jrl.run.report.metrics import read_metrics
from jrl.tasks.data.stored import StoredRows, padded_rows, stack
from jrl.tasks.example import Example
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS
from jrl.tools.sweep import population as sweep_population

ROOT = Path(__file__).parents[1]
WINDOW = 5  # sampling calls
FEWEST = 10  # prompts in both; with fewer, the interval is of their completions, Welch's

Outcomes = dict[str, list[float]]  # prompt -> outcomes of its completions, in one sampling call


def recipes() -> dict[str, Path]:
    """Returns the recipes by name: every file beside toy.gin, which the others include."""
    return {path.stem: path for path in sorted((ROOT / "configs" / "algos").glob("*.gin")) if path.stem != "toy"}


def pooled(calls: list[Outcomes]) -> Outcomes:
    """Returns the outcomes of several sampling calls together."""
    together: Outcomes = {}
    for call in calls:
        for prompt, rewards in call.items():
            together.setdefault(prompt, []).extend(rewards)
    return together


def improvement(calls: list[Outcomes]) -> tuple[float, float, float]:
    """Returns (first mean, last mean, half width of the interval of their difference). Raises NothingCompares where no
    prompt of the last window was sampled before it."""
    last = pooled(calls[-WINDOW:])
    for number in range(WINDOW, max(len(calls) - WINDOW, WINDOW) + 1):
        first = pooled(calls[:number])
        both = sorted(first.keys() & last.keys())
        if both and min(sum(len(found[prompt]) for prompt in both) for found in (first, last)) > 1:
            break
    else:
        raise NothingCompares(f"no prompt of the last {WINDOW} sampling calls was sampled before: nothing compares")
    if len(both) < FEWEST:
        early, late = ([reward for prompt in both for reward in found[prompt]] for found in (first, last))
        return fmean(early), fmean(late), welch_width(early, late)
    early, late = ([fmean(found[prompt]) for prompt in both] for found in (first, last))
    differences = [b - a for a, b in zip(early, late)]
    width = stdtrit(len(both) - 1, 0.975) * stdev(differences) / math.sqrt(len(both))
    return fmean(early), fmean(late), float(width)


def welch_width(first: Sequence[float], last: Sequence[float]) -> float:
    """Returns the half width of Welch's 95 % interval of the difference of two means, of two values or more each; its
    degrees of freedom are those of Welch and Satterthwaite."""
    parts = [variance(values) / len(values) for values in (first, last)]
    squared = sum(parts)
    if squared == 0:
        return 0.0
    freedom = squared**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, last)))
    return float(stdtrit(freedom, 0.975)) * math.sqrt(squared)


def outcomes_of(batch: Collected, of: Literal["outcome", "reward"] = "outcome") -> Outcomes:
    """Returns the outcomes of a scored batch that count, or what they were rewarded with, by prompt."""
    found: Outcomes = {}
    for row, (outcome, valid) in enumerate(zip(getattr(batch.host_scores, of), batch.host_scores.valid)):
        if valid:  # padding is not
            prompt = batch.visits[row // batch.samples].example.messages[-1].content
            found.setdefault(prompt, []).append(float(outcome))
    return found


def above_chance(batch: Collected) -> Outcomes:
    """Returns by prompt, of every completion that counts, its outcome less its chance: the share of the batch's other
    prompts that it would have answered."""
    exact = VERIFIERS["Exact"]  # what decides an outcome in every recipe of the toy
    examples = {visit.example.messages[-1].content: visit.example for visit in batch.visits}
    would_answer: dict[tuple[str, str | None], float] = {}

    def outcome(text: str, example: Example) -> float:
        pair = (text, example.answer)
        if pair not in would_answer:
            would_answer[pair] = exact.score(exact.config(), text, example).reward
        return would_answer[pair]

    found: Outcomes = {}
    for row, (reached, valid) in enumerate(zip(batch.host_scores.outcome, batch.host_scores.valid)):
        if valid:
            prompt = batch.visits[row // batch.samples].example.messages[-1].content
            others = [outcome(batch.texts[row], example) for other, example in examples.items() if other != prompt]
            found.setdefault(prompt, []).append(float(reached) - (fmean(others) if others else 0.0))
    return found


def permuted(batch: Collected, sampler: PromptSampler, draws: np.random.Generator) -> Collected:
    """Returns a scored batch whose scores are dealt out anew among its completions; padding stays where it is."""
    scores = batch.host_scores
    rows = np.flatnonzero(scores.verdict != Status.PADDING)
    order = np.arange(len(scores.verdict))
    order[rows] = draws.permutation(rows)
    dealt = collect.chosen_scores([scores], [(0, int(row)) for row in order])
    return batch._replace(
        scores=collect.scores_to_learn_from(dealt, batch.visits, sampler),
        host_scores=dealt,
    )


def relabeled(rows: StoredRows, draws: np.random.Generator) -> StoredRows:
    """Returns stored rows with the labels and values of every comparison dealt out anew among its weighed rows."""
    label, value = rows.label.copy(), rows.value.copy()
    for unit in np.unique(rows.unit[rows.weight > 0]):
        members = np.flatnonzero((rows.unit == unit) & (rows.weight > 0))
        if len(members) == 1:  # one answer alone has nobody to change labels with: it is good or bad by a coin
            label[members] = draws.integers(2)
        else:
            order = draws.permutation(members)
            label[members], value[members] = label[order], value[order]
    return rows._replace(label=label, value=value)


def dealt(rows: StoredRows, draws: np.random.Generator) -> StoredRows:
    """Returns stored rows that do not say what is right: rated answers with the ratings of others, demonstrations with
    the completions of others, comparisons and labeled answers with new labels."""
    if len(np.unique(rows.unit)) < len(rows.unit) or not (rows.label == 1).all():
        return relabeled(rows, draws)
    if rows.value.any():
        return rows._replace(value=rows.value[draws.permutation(len(rows.value))])
    count, width = rows.tokens.shape
    starts = prompt_lengths(rows.length, rows.action_mask)
    of_prompt = [rows.tokens[i, : starts[i]].tolist() for i in range(count)]
    completions = [rows.tokens[i, starts[i] : rows.length[i]].tolist() for i in draws.permutation(count)]
    pairs = [(prompt, completion[: width - len(prompt)], 1.0) for prompt, completion in zip(of_prompt, completions)]
    return stack(pairs, 1, 0, width)


def stored_improvement(rows: list[dict], batch_size: int) -> tuple[float, float, float]:
    """Returns (first mean, last mean, half width of the interval of their difference) of a run's last stage, on stored
    rows.

    Args:
      batch_size: comparisons, or rows, of a step of that stage.
    """
    stage, name = last_stage_of(rows), measure_of(rows)
    values = [measured(row, name) for row in stage]
    first, last = values[:WINDOW], values[-WINDOW:]
    if name in SHARES:
        width = share_width(fmean(first), fmean(last), WINDOW * batch_size)
    else:
        width = welch_width(first, last)
    return fmean(first), fmean(last), width


def measured(row: dict, name: str) -> float:
    """Returns what is compared of a step on stored rows."""
    if name == "kto":
        return row["kto/good"] - row["kto/bad"]
    if name == "advantage/logprob":  # their covariance: the mean product rises too where all rows grow likelier
        return row[name] - row["advantage/mean"] * row["advantage/mean_logprob"]
    if name == "stored/reward_logprob":  # the same of tokens and the reward of their row
        return row[name] - row["stored/reward"] * row["policy/logprob"]
    return row[name]


def last_stage_of(rows: list[dict]) -> list[dict]:
    """Returns the metrics of a run's last stage."""
    return [row for row in rows if row["phase"] == rows[-1]["phase"]]


def measure_of(rows: list[dict]) -> str:
    """Returns the name of what is compared of a run whose last stage learns from stored rows."""
    first = last_stage_of(rows)[0]
    return "kto" if "kto/good" in first else next(name for name in MEASURES if name in first)


IMITATED = ("dft/probability", "policy/logprob")
SHARES = ("pairs/accuracy", "reward_model/accuracy")
MEASURES = (SHARES[0], IMITATED[0], "advantage/logprob", "stored/reward_logprob", IMITATED[1], SHARES[1])


class NothingCompares(ValueError):
    """No prompt was sampled at the beginning and at the end of a run."""


def share_width(first: float, last: float, count: int) -> float:
    """Returns the half width of the interval of the difference of two shares, each of `count` comparisons.

    A share is shrunk to a half as by two more comparisons, one in order and one not, so that none is certain.
    """
    shrunk = [(share * count + 1) / (count + 2) for share in (first, last)]
    return 1.96 * math.sqrt(sum(share * (1 - share) for share in shrunk) / count)


def learns_by_scores(config: Config) -> bool:
    """Whether a policy is rewarded by reward models that the recipe trains."""
    return any(isinstance(stage, Online) and stage.rewards for stage in config.stages)


@contextlib.contextmanager
def observed(
    calls: dict[int, list[Outcomes]],
    control: int | None,
    rewards: dict[int, list[Outcomes]],
    by_scores: bool = False,
) -> Iterator[None]:
    """Within it, the outcomes of every sampling call of this process are appended to those of its run in `calls`, and
    what was earned to `rewards`, by the identity of the run's stream of prompts.

    Args:
      by_scores: only calls count whose completions reward models of the run score.
      control: the seed by which everything is dealt out anew, and outcomes are those above chance; None: nothing is.
    """
    collects, prefixes = collect.collect, collect.prefix_of
    draws: dict[int, np.random.Generator] = {}  # a run's own, so that runs do not depend on who trains beside them
    stored = np.random.default_rng([control or 0, 1])
    seen: list[Example] = []

    def observe(submitted, scorer, sources, sampler, *rest):
        batch = collects(submitted, scorer, sources, sampler, *rest)
        if not by_scores or any(name.startswith("role/") for source in sources for name in source.names):
            found = calls.setdefault(id(sampler.stream), [])
            found.append(outcomes_of(batch) if control is None else above_chance(batch))
            rewards.setdefault(id(sampler.stream), []).append(outcomes_of(batch, "reward"))
        own = draws.setdefault(id(sampler.stream), np.random.default_rng([control or 0, 0, len(draws)]))
        return batch if control is None else permuted(batch, sampler, own)

    def prefix_of_another(sampler, visit):
        seen.append(visit.example)
        return prefixes(sampler, visit._replace(example=seen[stored.integers(len(seen))]))

    with contextlib.ExitStack() as stack_:
        for module in (online, populations):
            stack_.enter_context(mock.patch.object(module, "collect", observe))
        if control is not None:
            pad = lambda rows, count: padded_rows(dealt(rows, stored), count)
            stack_.enter_context(mock.patch.object(offline, "padded_rows", pad))
            stack_.enter_context(mock.patch.object(collect, "prefix_of", prefix_of_another))
        yield


def processor_seconds() -> float:
    """Returns what this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run(path: Path, seeds: Sequence[int], *, control: bool, warm: bool) -> tuple[list[dict], list[list[float]], bool]:
    """Trains one recipe with several seeds and returns what came of each: in one program where a population can. Where
    the recipe learns by scores, also what became of the outcomes: first mean, last mean, half width; [] elsewhere.
    And whether the measure is of what is imitated."""
    name = path.relative_to(ROOT).as_posix()
    loaded = {f"seed={seed}": jrl.load_config(name, [f"Run.seed={seed}"]) for seed in seeds}
    configs, parts = {member: config for member, (config, _) in loaded.items()}, next(iter(loaded.values()))[1]
    try:
        if len(seeds) > 1:
            sweep_population.check_population(configs, parts.tables)
    except ConfigError:
        single = lambda seed: run(path, [seed], control=control, warm=warm or seed != seeds[0])
        every = [single(seed) for seed in seeds]
        found, outcomes = ([one for run_ in every for one in run_[part]] for part in (0, 1))
        return found, outcomes, every[0][2]
    by_scores = learns_by_scores(next(iter(configs.values())))
    start, used = time.perf_counter(), processor_seconds()
    calls: dict[int, list[Outcomes]] = {}
    rewards: dict[int, list[Outcomes]] = {}
    with tempfile.TemporaryDirectory() as folder, observed(calls, seeds[0] if control else None, rewards, by_scores):
        streams = train(configs, parts, Path(folder))
        rows = [list(read_metrics(Path(folder) / member / "metrics.jsonl")) for member in configs]
    seconds, processor = time.perf_counter() - start, processor_seconds() - used
    found, outcomes, last_stage = [], [], next(iter(configs.values())).stages[-1]
    for seed, stream, own in zip(seeds, streams, rows):
        compared = rewards if by_scores and not control else calls
        first, last, width = improvement(compared[stream]) if calls else stored_improvement(own, last_stage.batch_size)
        if by_scores and not control:
            outcomes.append([round(value, 4) for value in improvement(calls[stream])])
        found.append({
            "seed": seed, "together": len(seeds), "warm": warm, "seconds": round(seconds, 1),
            "processor_seconds": round(processor, 1),
            "first": round(first, 4), "last": round(last, 4), "half_width": round(width, 4),
        })  # fmt: skip
    return found, outcomes, not calls and measure_of(rows[0]) in IMITATED


def train(configs: Mapping[str, Config], parts: Parts, folder: Path) -> list[int]:
    """Trains runs below a folder, in one program if there are several; returns the identity of each one's stream of
    prompts."""
    stop = threading.Event()
    show = lambda ends: open_display(ends, open(os.devnull, "w", encoding="utf-8"), live=False)
    if len(configs) == 1:
        ((name, config),) = configs.items()
        with open_job(config, parts, RunFolder(folder / name), stop, show=show) as job:
            for _ in loop.steps(job):
                pass
            return [id(job.stream)]
    with populations.open_population(configs, parts, folder, stop, lambda _: show) as population:
        sweep_population.run(population, stop, lambda: None)
        if population.failed:
            raise RuntimeError(f"members have failed: {population.failed}")
        return [id(job.stream) for job in population.jobs.values()]


def again(name: str, path: Path, runs: list[dict]) -> list[dict]:
    """Returns the runs of a recipe with the seconds that they take once everything is compiled, or as they are where
    they do not come out the same."""
    found, _, _ = run(path, [one["seed"] for one in runs], control=False, warm=True)
    if not same(found, runs):
        print(f"{name:<30} NOT THE SAME: {shown(found)}, and before {shown(runs)}: measure it anew", flush=True)
        return runs
    print(f"{name:<30} {found[0]['seconds']:6.1f} s  {found[0]['processor_seconds']:6.1f} s of processors", flush=True)
    return found


def same(found: list[dict], before: list[dict]) -> bool:
    """Whether runs of one recipe came out with the same digits."""
    results = lambda runs: [tuple(one[name] for name in ("seed", "first", "last", "half_width")) for one in runs]
    return results(found) == results(before)


def is_warm(runs: list[dict]) -> bool:
    """Whether the seconds of every run hold no compiling."""
    return all(one["warm"] for one in runs)


def shown(runs: list[dict]) -> str:
    return "  ".join(f"{one['first']:.2f} -> {one['last']:.2f} +- {one['half_width']:.2f}" for one in runs)


def learned(one: dict) -> bool:
    """Whether a run's interval lies above 0."""
    return one["last"] - one["first"] > one["half_width"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; what is in it is not measured again")
    parser.add_argument("--only", nargs="*", choices=list(recipes()), metavar="NAME", help="names of recipes")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    parser.add_argument("--controls", type=int, default=3, help="runs of each recipe where nothing says what is right")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further program begins")
    parser.add_argument("--again", action="store_true", help="only measure the seconds of what is in the file")
    args = parser.parse_args()
    start = time.monotonic()
    use_compile_cache()
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    results = report.setdefault("recipes", {})
    for name, path in recipes().items():
        if args.only and name not in args.only:
            continue
        entry = results.get(name, {"runs": [], "controls": []})
        if args.again:
            if entry["runs"] and not is_warm(entry["runs"]) and time.monotonic() - start <= 60 * args.minutes:
                entry["runs"] = again(name, path, entry["runs"])
                args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            continue
        warm = False
        for kind, count in (("runs", args.seeds), ("controls", args.controls)):
            if len(entry[kind]) >= count or (kind == "controls" and entry.get("imitates")):
                continue
            if time.monotonic() - start > 60 * args.minutes:
                return
            try:
                entry[kind], outcomes, imitates = run(path, range(count), control=kind == "controls", warm=warm)
            except NothingCompares as error:
                print(f"{name:<30} not measured: {error}", flush=True)
                break
            if outcomes:
                entry["outcomes"] = outcomes
            if imitates:
                entry["imitates"] = True
            warm = True
            results[name] = entry
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if not entry["runs"]:
            continue
        found = "learned" if all(map(learned, entry["runs"])) else "NOT"
        print(f"{name:<30} {found:<8} {shown(entry['runs'])}  | control {shown(entry['controls'])}", flush=True)
    made = [entry for entry in results.values() if entry["runs"]]
    if args.again:
        cold = [name for name, entry in results.items() if not is_warm(entry["runs"])]
        sys.exit(f"still with compiling: {', '.join(cold)}" if cold else 0)
    print(f"{sum(all(map(learned, entry['runs'])) for entry in made)} of {len(made)} recipes learn on every seed")


if __name__ == "__main__":
    main()
