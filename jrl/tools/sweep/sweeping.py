"""Runs a sweep: takes its folder, trains its members, and compares and reports them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from jrl import paths
from jrl.bucket.client import shown
from jrl.exit_codes import DONE, PREEMPTED
from jrl.run.bucket_run import readable
from jrl.run.checkpoints.lock import RunIsHeld, RunLock, hold_run
from jrl.tools.sweep import manifest
from jrl.tools.sweep.comparison import Comparison, compare, find_variant, group, to_json
from jrl.tools.sweep.launch import Ended, ProgressCallbacks, is_finished, last_words
from jrl.tools.sweep.members import Member, Sweep, train_arguments
from jrl.tools.sweep.page import write_page
from jrl.tools.sweep.progress import open_progress
from jrl.tools.sweep.runs import COMPARED, RunResult, default_metrics, find_runs, missing_metrics, read_run


class ComparisonOptions(NamedTuple):
    """How to compare runs."""

    metrics: tuple[str, ...]  # empty: `default_metrics`
    by: tuple[str, ...]
    baseline: str | None
    statistic: str


def commands_of(sweep: Sweep, folder: Path, options: Sequence[str]) -> dict[str, list[str]]:
    """Returns {member name: the arguments of `jrl` that train it}."""
    return {m.name: train_arguments(sweep, m, shown(folder / m.name), options) for m in sweep.members}


def planned(sweep: Sweep, folder: Path) -> list[RunResult]:
    """Returns the members as runs that have not begun."""
    return [RunResult(folder / m.name, m.seed, m.settings, (), {}, finished=False) for m in sweep.members]


def check_is_local(folder: Path) -> None:
    """Raises ValueError for a bucket: members can train there and be compared, but not as one sweep."""
    if paths.is_remote(folder):
        raise ValueError(
            f"{shown(folder)} is in a bucket, and a sweep needs a local --out: locks, logs and summaries there tell "
            "which members train, fail and are finished. With --print this command prints the commands that train them "
            "in the bucket, each of which continues its own run, on any machine; `jrl compare gs://... gs://...` then "
            "compares them"
        )


def check_options(sweep: Sweep, folder: Path, options: ComparisonOptions, *, accept_change: bool) -> None:
    """Raises ValueError, before any member is trained or printed, for a --by or --baseline that the comparison would
    refuse, and RefusedIdentity for a local folder that contains something else, members with other settings, or, unless
    `accept_change`, members with other parts files."""
    if not paths.is_remote(folder):
        manifest.check_folder(folder, sweep)
        manifest.check_settings(folder, sweep)
        if not accept_change:
            manifest.check_parts(folder, sweep)
    variants, compared, _ = group(planned(sweep, folder), options.by)
    if options.baseline is not None:
        find_variant(variants, compared, options.baseline)


def train_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    train: Callable[[Sequence[Member], ProgressCallbacks], dict[str, Ended]],
    jobs: int | None,
    how: Callable[[int], str],
    metrics: Sequence[str],
    stream: TextIO,
    together: Collection[str] = (),
) -> tuple[dict[str, Ended], int]:
    """Trains the unfinished members. Returns how they ended, and how many of all members are finished now.

    Args:
      train: trains members and reports progress. jobs: members that train at a time; None: all together. how: describes
        how a number of members train.
      metrics: what members will be compared by; empty: the default metrics.
      together: members that train again, finished or not.
    """
    waiting = [member for member in sweep.members if member.name in together or not is_finished(folder, member)]
    finished = len(sweep.members) - len(waiting)
    count = f"{len(sweep.members)} members" if len(sweep.members) > 1 else "1 member"
    before = f", {finished} of them finished before" if finished else ""
    print(f"{count} in {folder}{before}; {how(len(waiting))}", file=stream, flush=True)
    for note in notes_on(waiting):
        print(note, file=stream, flush=True)
    progress = open_progress(folder, len(sweep.members), finished, jobs, metrics, stream)
    ended = train(waiting, progress)
    return ended, sum(is_finished(folder, member) for member in sweep.members)


def notes_on(members: Sequence[Member]) -> list[str]:
    """Returns the notes on members that are to be trained, each once, with the members that it is about."""
    about: dict[str, list[str]] = {}
    for member in members:
        for note in member.notes:
            about.setdefault(note, []).append(member.name)
    who = lambda names: names[0] if len(names) == 1 else (
        "all members" if len(names) == len(members) else f"{names[0]} and {len(names) - 1} more")  # fmt: skip
    return [f"{who(names)}: {note}" for note, names in about.items()]


def hold_sweep(folder: Path, sweep: Sweep) -> RunLock:
    """Locks the folder for this process, writes its sweep.json if there is none, and returns the lock.

    Raises: RefusedIdentity for a folder of another sweep, ValueError if another process holds the folder.
    """
    manifest.check_folder(folder, sweep)
    try:
        lock = hold_run(folder)
    except RunIsHeld as error:
        who = f"process {error.holder['pid']} on {error.holder['host']}" if error.holder else "another process"
        raise ValueError(f"{folder} is being swept by {who}; wait for it, or stop it") from error
    if not paths.exists(folder / manifest.FILE):
        manifest.write(folder, manifest.describe(sweep))
    return lock


def report_sweep(
    sweep: Sweep, folder: Path, ended: Mapping[str, Ended], options: ComparisonOptions
) -> Comparison | None:
    """Compares the finished members, writes sweep.json and the page, and returns the comparison; None if no member is
    finished.

    sweep.json records for every member whether it is finished, and its last exit code.

    Raises: RefusedIdentity for a member with other settings.
    """
    manifest.check_settings(folder, sweep)
    done = [member for member in sweep.members if is_finished(folder, member)]
    content = manifest.describe(sweep)
    for entry, member in zip(content["members"], sweep.members):
        entry["finished"] = member in done
        entry["exit_code"] = ended[member.name].code if member.name in ended else (DONE if member in done else None)
    manifest.write(folder, content)
    if not done:
        return None
    missing = [f"{member.name} is not finished, and is left out" for member in sweep.members if member not in done]
    variants, compared, _ = group(planned(sweep, folder), options.by)
    if options.baseline is not None:
        base = find_variant(variants, compared, options.baseline)
        if not {run.folder for run in base.runs} & {folder / member.name for member in done}:
            missing.append(f"no run of the baseline {options.baseline} is finished, so nothing is compared with it")
            options = options._replace(baseline=None)
    try:
        variants, names, _ = group([read_run(folder / member.name) for member in done], options.by, compared)
        if options.baseline is not None:
            find_variant(variants, names, options.baseline)
    except ValueError as error:  # members are not finished, or were trained with other data or parts files
        missing.append(f"--by and --baseline are left out: {error}")
        options = options._replace(by=(), baseline=None)
    comparison = compare_folders([folder / member.name for member in done], options, missing, compared)
    manifest.write(folder, content | {"comparison": to_json(comparison)})
    lists = [f"{axis.name}=[{', '.join(axis.values)}]" for axis in sweep.axes]
    write_page(folder, comparison, f"Sweep of {sweep.config}", " ".join([sweep.config, *sweep.bindings, *lists]))
    return comparison


def compare_folders(
    folders: Sequence[Path], options: ComparisonOptions, notes: Sequence[str] = (), swept: Sequence[str] = ()
) -> Comparison:
    """Returns the comparison of runs in folders or at gs:// addresses. A sweep's folder stands for its members."""
    remote = {shown(folder).rstrip("/") for folder in folders if paths.is_remote(folder)}
    if len(remote) < sum(map(paths.is_remote, folders)):
        raise ValueError(f"a run is given twice: {', '.join(sorted(remote))}")
    copies = [readable(folder, COMPARED) for folder in folders]
    addresses = {copy: shown(folder).rstrip("/") for folder, copy in zip(folders, copies) if paths.is_remote(folder)}
    run_folders, missing = find_runs(copies)
    runs = [read_run(folder, addresses.get(folder)) for folder in run_folders]
    if not runs:
        raise ValueError(f"no run has begun: {'; '.join(missing)}")
    metrics = options.metrics or default_metrics(runs)
    if missing_names := missing_metrics(metrics, runs):
        raise ValueError("; ".join(f"no run has the {name}" for name in missing_names))
    return compare(
        runs,
        metrics,
        by=options.by,
        swept=swept,
        baseline=options.baseline,
        statistic=options.statistic,
        notes=[*notes, *missing],
    )


def failures(folder: Path, sweep: Sweep, ended: Mapping[str, Ended]) -> list[str]:
    """Returns a line for every failed member: its name, its exit code, its last message and the path of its log."""
    lines = []
    for member in sweep.members:
        code = ended[member.name].code if member.name in ended else DONE
        if code not in (DONE, PREEMPTED):
            log = folder / manifest.LOGS / f"{member.name}.log"
            lines.append(
                f"{member.name} failed with exit code {code}: {last_words(folder, ended[member.name])} ({log})"
            )
    return lines


def shell(arguments: Sequence[str]) -> str:
    """Returns a `jrl` command quoted for a shell."""
    return shlex.join(["jrl", *arguments])
