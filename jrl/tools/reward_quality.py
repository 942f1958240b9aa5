"""Measures a reward on pairs of answers with a known preference (M13), for `jrl eval --pairs`. The reward is a run's
reward head, a published classifier, or a policy's implicit reward: its log-probs minus those of a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.models.heads import REWARD
from jrl.ops import statistics
from jrl.ops.reward_model_quality import best_of_many, instruction_consistency, pair_accuracy
from jrl.rollout.evaluate import interval_json
from jrl.run.bucket_run import readable
from jrl.run.report.text import aligned
from jrl.run.trained import Trained
from jrl.tasks.data.stored import completion_of
from jrl.tasks.envs.contract import REPEATED_PROMPT
from jrl.tasks.example import Example, Message
from jrl.tasks.stopping import Stop, never
from jrl.tools import inspect_data
from jrl.tools.evaluate_sources import Source
from jrl.tools.evaluation import percent_cell
from jrl.tools.measures import check_same_tokenizer
from jrl.tools.score import is_classifier, judge_conversations, score, score_rewards

NOT_LEFT_OUT = (REPEATED_PROMPT, "unread_column", "unread_field")  # what a source counts besides rows without a pair
CONTRAST = "contrast"  # the column whose value two rows with similar prompts share
COLUMNS = {
    "pairs": "pair accuracy", "best_of_many": "best of many", "instructions": "instructions", "responses": "responses"
}  # fmt: skip
Reward = Callable[[Sequence[tuple[tuple[Message, ...], str]]], np.ndarray]  # of (prompt, answer), [n] float


class PreferencePairs(NamedTuple):
    """The answers that a reward scores, and how they compare. Answers are given by their index in `asked`."""

    asked: list[tuple[tuple[Message, ...], str]]  # distinct (prompt, answer)
    problems: list[tuple[int, list[int]]]  # the better answer of a prompt, and all the worse ones
    contrasts: list[tuple[tuple[int, int], tuple[int, int]]]  # [i][j]: answer j under prompt i
    left_out: dict[str, int]  # rows that give no pair, by cause


def preference_pairs(examples: Sequence[Example]) -> PreferencePairs:
    """Returns the pairs of the examples that have an answer and a worse one (`rejected`). Rows with the same prompt and
    the same better answer are one problem. Two rows with the same `contrast` have similar prompts.

    Raises: ValueError if no example gives a pair, or a `contrast` does not name two rows with different prompts.
    """
    indices: dict[tuple[tuple[Message, ...], str], int] = {}
    problems: dict[int, list[int]] = {}
    alike: dict[str, list[Example]] = {}
    left_out: dict[str, int] = {}
    index_of = lambda prompt, text: indices.setdefault((tuple(prompt), text), len(indices))
    for example in examples:
        rejected = example.info.get("rejected")
        cause = (
            "no_answer" if example.answer is None
            else "no_rejected" if not isinstance(rejected, str)
            else "same_answers" if rejected == example.answer
            else None
        )  # fmt: skip
        if cause is not None:
            left_out[cause] = left_out.get(cause, 0) + 1
            continue
        worse_answers = problems.setdefault(index_of(example.messages, example.answer), [])
        if (other := index_of(example.messages, rejected)) not in worse_answers:
            worse_answers.append(other)
        if CONTRAST in example.info:
            alike.setdefault(str(example.info[CONTRAST]), []).append(example)
    if not problems:
        raise ValueError(f"--pairs: none of {len(examples)} rows has an answer and one that was rejected: {left_out}")
    contrasts = []
    for name, rows in alike.items():
        if len(rows) != 2 or rows[0].messages == rows[1].messages:
            raise ValueError(f"--pairs: {CONTRAST} {name!r} is of {len(rows)} rows; it names two, of different prompts")
        cell = lambda i, j, rows=rows: index_of(rows[i].messages, rows[j].answer)
        contrasts.append(((cell(0, 0), cell(0, 1)), (cell(1, 0), cell(1, 1))))
    return PreferencePairs([*indices], [*problems.items()], contrasts, left_out)


def measured(reward: Reward, compared: PreferencePairs) -> dict[str, Any]:
    """Returns M13: {"pairs", "best_of_many", "instructions", "responses": intervals, "left_out"}. "instructions" and
    "responses" need contrasts. Intervals are over problems, or over contrasts; NaN rewards do not count."""
    values = np.asarray(reward(compared.asked), np.float64)
    pairs = [np.array([(values[right], values[wrong]) for wrong in worse]) for right, worse in compared.problems]
    width = max(len(worse) for _, worse in compared.problems)
    best_of = [
        np.array([[values[right], *values[worse], *[np.nan] * (width - len(worse))]])
        for right, worse in compared.problems
    ]
    results = {
        "pairs": share_over(pairs, lambda rows: pair_accuracy(rows[:, 0], rows[:, 1])),
        "best_of_many": share_over(best_of, lambda rows: best_of_many(rows[:, 0], rows[:, 1:])),
    }
    if compared.contrasts:
        cells = [values[np.array([cells])] for cells in compared.contrasts]
        for name in ("instructions", "responses"):
            results[name] = share_over(cells, lambda x, name=name: instruction_consistency(x)[name])
    return {**{name: interval_json(value) for name, value in results.items()}, "left_out": compared.left_out}


def share_over(problems: Sequence[np.ndarray], share: statistics.Statistic) -> statistics.Interval:
    """Returns a share of all rows of all problems with an interval over problems: the bootstrap's, or Wilson's where
    all have the same share, as `statistics.share_interval`."""
    shares = np.array([share(rows) for rows in problems])
    shares = shares[np.isfinite(shares)]
    if len(shares) and shares.min() == shares.max():
        return statistics.share_interval(shares)
    return statistics.clustered_bootstrap(problems, share)


def reward_of(trained: Trained, reference: Trained | None) -> Reward:
    """Returns the reward of a model: that of its head, or sum over the answer of log pi - log pi_reference.

    Raises: ValueError if there is neither a reward head nor a reference, or the reference has another tokenizer.
    """
    tokenizer = trained.policy.tokenizer

    def sequences(asked: Sequence[tuple[tuple[Message, ...], str]]) -> tuple[list[list[int]], list[int]]:
        prompts = [[*tokenizer.encode_prompt(prompt)] for prompt, _ in asked]
        rows = [[*ids, *completion_of(text, tokenizer)] for ids, (_, text) in zip(prompts, asked)]
        return rows, [*map(len, prompts)]

    if REWARD in trained.heads:
        return lambda asked: score_rewards(trained, sequences(asked)[0])
    if reference is None:
        raise ValueError("--pairs: the model has no reward head. --role names one that has, a published classifier is "
                         "measured as it is, and with --reference the implicit reward of a policy")  # fmt: skip
    check_same_tokenizer(trained, reference, "--reference")

    def implicit(asked: Sequence[tuple[tuple[Message, ...], str]]) -> np.ndarray:
        rows, lengths = sequences(asked)
        gains = [own - other for own, other in zip(score(trained, rows), score(reference, rows))]
        return np.array([gain[length:].sum() for gain, length in zip(gains, lengths)])

    return implicit


def measure_classifier(folder: Path, compared: PreferencePairs, announce: Callable[[int, int], None]) -> dict[str, Any]:
    """Returns {label: `measured`} of a published classifier. It formats each conversation with its own chat template
    and tokenizer, which may differ from the policies'.

    Raises: ValueError for a folder that cannot judge conversations.
    """
    conversations = [[*prompt, Message("assistant", text)] for prompt, text in compared.asked]
    by_label = judge_conversations(folder, conversations, announce)
    return {label: measured(lambda asked, values=values: values, compared) for label, values in by_label.items()}


def read_pairs(file: Path, layout: str | None, bindings: Sequence[str] = (), stop: Stop = never) -> PreferencePairs:
    """Returns the pairs in a data file, in a layout; None: with the columns prompt, answer and rejected. Raises
    StopRequested if `stop` returns True.

    Args:
      bindings: of the fields of Dataset, or of Jsonl without a layout.
    """
    read = inspect_data.Read(layout, "all_pairs" if layout is not None else None, bindings=bindings)
    source = inspect_data.open_file(str(file), None, None, None, read, stop).source
    pairs = preference_pairs([source[index] for index in range(len(source))])
    dropped = {cause: count for cause, count in source.counts.items() if cause not in NOT_LEFT_OUT}
    return pairs._replace(left_out={**dropped, **pairs.left_out})


def measure_sources(
    sources: Sequence[Source],
    compared: PreferencePairs,
    open_reference: Callable[[], Trained] | None,
    announce: Callable[[int, int], None] | None,
    *,
    chosen: bool,
) -> list[dict[str, Any]]:
    """Returns `measured` of the reward of each source, one per label for a classifier, with the source's name, its step
    and the kind of reward: "head", "implicit", or the label.

    Args:
      open_reference: opens the reference of implicit rewards; None: there is none.
      announce: called with (bytes read, total bytes) of a classifier's weights.
      chosen: whether bindings, a step, a stage or a role were given, which no classifier has.

    Raises: ValueError for a reference that no source uses, and for a classifier if `chosen`.
    """
    pairs = sum(len(worse) for _, worse in compared.problems)
    result = lambda name, step, kind, values: {"source": name, "step": step, "reward": kind, "n_pairs": pairs, **values}
    results = []
    folders = {source.address: readable(source.address) for source in sources}
    classifiers = {address for address, folder in folders.items() if is_classifier(folder)}
    unused = open_reference is not None  # whether no source has used the reference so far
    refusal = (
        "--reference is for the implicit reward of a policy, and every source has a reward of its own; leave it out"
    )
    if unused and len(classifiers) == len(folders):
        raise ValueError(refusal)
    reference = None if open_reference is None else open_reference()
    for i, source in enumerate(sources):
        if source.address in classifiers:
            if chosen:
                raise ValueError(
                    f"{source.address} is a classifier: it takes no bindings and has no steps, stages or roles"
                )
            by_label = measure_classifier(folders[source.address], compared, announce)
            results += [result(source.name, 0, label, values) for label, values in by_label.items()]
            continue
        model = source.open()
        kind = "head" if REWARD in model.heads else "implicit"
        unused = unused and kind == "head"
        if unused and all(other.address in classifiers for other in sources[i + 1 :]):
            raise ValueError(refusal)
        results.append(result(source.name, model.step, kind, measured(reward_of(model, reference), compared)))
        model.policy.program_cache.close()
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the measures of several rewards as a table: one row each, in percent with 95 % intervals."""
    columns = {key: name for key, name in COLUMNS.items() if any(key in result for result in results)}
    rows = [["source", "step", "reward", *columns.values()]]
    for r in results:
        rows.append([r["source"], str(r["step"]), r["reward"], *(percent_cell(r.get(key)) for key in columns)])
    first = results[0]
    causes = ", ".join(f"{count} {cause}" for cause, count in first["left_out"].items())
    head = f"{first['n_pairs']} pairs of {first['pairs']['n']} problems; percent, 95 % intervals over problems"
    return "\n".join([head + (f"; left out: {causes}" if causes else ""), *aligned(rows)])
