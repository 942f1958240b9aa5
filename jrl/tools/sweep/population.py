"""Trains sweep members that differ only in floats and seeds in one program, in this process, for `jrl sweep
--population`."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax

from jrl import config as gin
from jrl import loop, paths
from jrl.config.errors import COMMAND_LINE, ConfigError
from jrl.device.compile_cache import use_compile_cache
from jrl.device.sharding import make_mesh, members_mesh
from jrl.exit_codes import DONE, PREEMPTED, STOPPED
from jrl.experiment import Config, Offline, Online, Tables, config_classes, optimizers, trains_online
from jrl.learning.optimizer import keeps_on_host
from jrl.models.attention.kernels import NO_KERNEL
from jrl.plugins import Parts, load_parts
from jrl.resolve import PATH_FIELDS, checked, find_config, part_names
from jrl.rollout.evaluate import numbers
from jrl.rollout.scoring import ScoringStopped
from jrl.run import population as populations
from jrl.run import records
from jrl.run.checkpoints.run_state import list_steps
from jrl.run.population import FOLDER, Population, PopulationProgress, PopulationStep
from jrl.run.records import Preempted
from jrl.run.report.display import open_display
from jrl.run.report.messages import saved_message
from jrl.run.stage_steps import ends, evaluates_after, saves_after, stage_at
from jrl.tasks.stopping import StopRequested
from jrl.tools.sweep.launch import Ended, ProgressCallbacks, is_finished
from jrl.tools.sweep.manifest import LOGS
from jrl.tools.sweep.members import Member, Sweep
from jrl.tools.sweep.settings import SEED, settings_of_config
from jrl.types import TrainState

MEMBERS = "members.json"  # the members in a population's checkpoints, in order
AGAIN = "again"  # key in it: the members failed, and start over when the sweep runs again


def read_configs(sweep: Sweep) -> tuple[dict[str, Config], Parts]:
    """Returns {member name: its configuration}, and the parts that all members share."""
    file = find_config(sweep.config)
    parts = load_parts(part_names(file, sweep.bindings))
    tables = config_classes(parts.tables)
    read = lambda member: checked(gin.load(file, [*member.fixed, *member.bindings], Config, tables, PATH_FIELDS), parts)
    return {member.name: read(member) for member in sweep.members}, parts


def check_population(configs: Mapping[str, Config], tables: Tables, swept: Sequence[str] = ()) -> None:
    """Raises ConfigError if members cannot train in one program, naming what differs or what populations lack.

    Args:
      swept: of the fields that differ, the message names one of these if possible.
    """
    names = list(configs)
    first = configs[names[0]]
    for name in names[1:]:
        if with_traced_of(configs[name], first) == first:
            continue
        ours, theirs = (settings_of_config(config, config_classes(tables))[1] for config in
                        (first, with_traced_of(configs[name], first)))  # fmt: skip
        differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if differing:
            field = next((name for name in swept if name in differing), differing[0])
            raise ConfigError(
                COMMAND_LINE,
                f"--population trains members in one program, and {field} is part of the program or of the data: "
                f"{ours.get(field)} in {names[0]}, {theirs.get(field)} in {name}. Members may differ in {SEED} and in "
                "the floats of objectives, optimizers and the sampler; leave --population out, or sweep each value of "
                f"{field} into a folder of its own",
            )
    if reason := unsupported(first):
        raise ConfigError(COMMAND_LINE, f"--population does not support {reason}; leave --population out")


def with_traced_of(config: Config, other: Config) -> Config:
    """Returns `config` with the seed of `other`, and with the floats of `other` that programs take as arrays."""

    def floats(own: Any, theirs: Any) -> Any:
        return theirs if jax.tree.structure(own) == jax.tree.structure(theirs) else own

    def stage(own: Online | Offline, theirs: Online | Offline) -> Online | Offline:
        if type(own) is not type(theirs):
            return own
        replaced = {name: floats(getattr(own, name), getattr(theirs, name)) for name in ("objective", "optimizer")}
        replaced["learner"] = dataclasses.replace(own.learner, router=floats(own.learner.router, theirs.learner.router))
        if isinstance(own, Online):
            replaced["critic_optimizer"] = floats(own.critic_optimizer, theirs.critic_optimizer)
            replaced["shaping"] = floats(own.shaping, theirs.shaping)
            replaced["reference_decay"] = floats(own.reference_decay, theirs.reference_decay)
            replaced["max_kl"] = floats(own.max_kl, theirs.max_kl)
            if own.pretraining is not None and theirs.pretraining is not None:
                coefficient = theirs.pretraining.coefficient
                replaced["pretraining"] = dataclasses.replace(own.pretraining, coefficient=coefficient)
        return dataclasses.replace(own, **replaced)

    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, seed=other.run.seed),
        sampler=floats(config.sampler, other.sampler),
        stages=tuple(map(stage, config.stages, other.stages)) if len(config.stages) == len(other.stages)
        else config.stages,
    )  # fmt: skip


def unsupported(config: Config) -> str | None:
    """Returns the feature of a configuration that populations do not support; None if it can train."""
    if config.sampler_mesh is not None:
        return "devices of their own for sampling (Config.sampler_mesh)"
    if make_mesh(config.mesh).size > 1:
        return "several devices for one member (MeshShape); members are dealt out over devices, each on one of them"
    if config.reward is not None:
        return "a published reward model (Config.reward)"
    if config.teacher is not None:
        return "a teacher from a folder (Config.teacher)"
    if config.judges:
        return "judges (Config.judges)"
    if getattr(config.model, "remat", None) == "offload":
        return f"{type(config.model).__name__}.remat = 'offload'"
    if {getattr(config.model, "attention", "auto"), config.sampler.attention} - set(NO_KERNEL):
        return "attention kernels; set attention = 'reference'"
    for stage in config.stages:
        if stage.learner.replays_routes:
            return "replayed routes (Learner.routes = 'replayed')"
        if any(map(keeps_on_host, optimizers(stage).values())):
            return "AdamW.memory = 'host'"
        if isinstance(stage, Offline):
            continue
        if stage.strategy is not None:
            return f"sampling strategies (Online.strategy = @{type(stage.strategy).__name__}())"
        if stage.rewards:
            return "rewards of roles (Online.rewards)"
        if stage.corrector is not None:
            return "a corrector (Online.corrector)"
        if stage.process is not None:
            return "rewards of steps by a role (Online.process)"
        if stage.pair_model is not None:
            return "a pair model (Online.pair_model)"
    return None


def dealt_out(count: int) -> str:
    """Returns a description of how `count` members are distributed over devices."""
    used, present = members_mesh(count).size if count else 1, len(jax.devices())
    if present == 1 or not count:
        return "in one program"
    if used == 1:
        return f"in one program, on 1 device of {present}: no larger number of them divides {count}"
    unused = f", which divide them; there are {present}" if used < present else ""
    return f"in one program, {count // used} on each of {used} devices{unused}"


def train_population(
    sweep: Sweep,
    folder: Path,
    configs: Mapping[str, Config],
    parts: Parts,
    stop: threading.Event,
    progress: ProgressCallbacks,
    *,
    accept_change: bool = False,
) -> dict[str, Ended]:
    """Trains the unfinished members of a sweep in one program. Returns {name: how it ended}.

    Args:
      accept_change: continue members whose data or parts have changed, and record the change in their manifests.

    Raises: ConfigError if a member has checkpoints of its own: a population cannot continue from them.
    """
    use_compile_cache()
    members = {member.name: member for member in sweep.members}
    names, again = begin_together(folder, members)
    if not names:
        return {}
    paths.make_dir(folder / LOGS)
    start = time.monotonic()
    logs: dict[str, TextIO] = {name: open(folder / LOGS / f"{name}.log", "w", encoding="utf-8") for name in names}
    show = lambda name: lambda ends: open_display(ends, logs[name], live=False)
    for name in names:
        progress.began(members[name])
    ended: dict[str, Ended] = {}

    def end(name: str, code: int, why: str) -> None:
        ended[name] = Ended(members[name], code, time.monotonic() - start, why)
        progress.ended(ended[name])

    try:
        chosen = {name: configs[name] for name in names}
        with populations.open_population(chosen, parts, folder, stop, show, accept_change=accept_change) as population:
            tick = lambda: progress.tick([members[name] for name in names])
            try:
                run(population, stop, tick, again=again)
            except Preempted:
                pass
            for name in names:
                finished = is_finished(folder, members[name])
                code = STOPPED if name in population.failed else DONE if finished else PREEMPTED
                end(name, code, population.failed.get(name, ""))
        if all(name in population.failed or ended[name].code == DONE for name in names):
            failed = [name for name in names if ended[name].code != DONE]
            if failed:
                write_members(folder, {"members": failed, AGAIN: True})
                paths.remove_tree(folder / FOLDER / "checkpoints")
            else:
                paths.remove_file(folder / FOLDER / MEMBERS)  # first: without it the folder belongs to no population
                paths.remove_tree(folder / FOLDER)
    finally:
        for log in logs.values():
            log.close()
        progress.close()
    return ended


def interrupted(folder: Path) -> list[str]:
    """Returns the members of an interrupted population, of which some may have ended; [] if there is none."""
    record = folder / FOLDER / MEMBERS
    recorded = paths.read_object(record) if paths.exists(record) else {AGAIN: True}
    return [] if AGAIN in recorded else recorded["members"]


def begin_together(folder: Path, members: Mapping[str, Member]) -> tuple[list[str], bool]:
    """Returns the members that train together, and whether they start over: the members of an interrupted population;
    those that failed in a population that has ended, which start over; else all unfinished ones."""
    if names := interrupted(folder):
        return names, False
    record = folder / FOLDER / MEMBERS
    recorded = paths.read_object(record) if paths.exists(record) else None
    unfinished = sorted(name for name, member in members.items() if not is_finished(folder, member))
    names = unfinished if recorded is None else [name for name in recorded["members"] if name in unfinished]
    if recorded is not None:  # left by the population that has ended, if it was killed before it removed them
        paths.remove_tree(folder / FOLDER / "checkpoints")
    for name in names:
        saved = folder / name / "checkpoints"
        if paths.exists(saved) and list_steps(saved):
            raise ConfigError(
                COMMAND_LINE,
                f"--population: {folder / name} has checkpoints of its own, from which a population cannot continue; "
                "leave --population out, or choose another --out",
            )
    return names, recorded is not None


def write_members(folder: Path, content: Mapping[str, Any]) -> None:
    """Records which members train together."""
    paths.make_dir(folder / FOLDER)
    paths.write_bytes_atomic(folder / FOLDER / MEMBERS, json.dumps(content).encode() + b"\n")


def run(population: Population, stop: threading.Event, tick: Callable[[], None], *, again: bool = False) -> None:
    """Trains an open population to the end, as `jrl.loop.steps` trains one run.

    Args:
      again: see `populations.restore`.

    Raises: Preempted if it was asked to stop, and ScoringStopped if no member's completions can be scored; both after
      saving.
    """
    first, jobs = population.first, population.jobs.values()
    expected = max(population.run_state.steps(), default=0)
    loop.precompile(first, expected)
    progress = populations.restore(population, again=again)
    for job in jobs:
        records.record_continuation(job)
    # Not earlier: a population that is refused while it is opened, or killed while it compiles, has not begun.
    write_members(first.folder.parent, {"members": list(population.jobs)})
    if first.done < expected:
        loop.precompile(first, first.done)
    for job in jobs:
        job.display.note(loop.shapes(job))
    pending: PopulationStep | None = None
    began, scoring_error = first.done, None

    def save(*, ended: bool = False) -> None:
        nonlocal pending
        if pending is not None:
            populations.emit(population, pending)
            pending = None
            if ended:
                populations.check_end(population, progress.state)
                if first.done < first.total:  # before the checkpoint of all: a resume from it does not come here again
                    populations.save_members(population, progress)
            populations.save(population, progress)

    while first.done < first.total:
        progress = begin_stage(population, progress)
        data_positions = [job.stream.get_state() for job in jobs]
        try:
            with jax.transfer_guard("disallow"):
                next_progress, step = populations.take_step(population, progress, stop.is_set)
        except (StopRequested, ScoringStopped) as error:
            scoring_error = error if isinstance(error, ScoringStopped) else None
            for job, data_position in zip(jobs, data_positions):
                job.stream.set_state(data_position)  # the step is abandoned
            break
        if pending is not None:
            populations.emit(population, pending)
        pending, progress = step, next_progress
        for job in jobs:
            job.done += 1
        evaluate_if_due(population, progress, pending)
        tick()
        first.program_cache.check()
        if first.done == began + 2:
            first.program_cache.freeze()
        ended = first.done == ends(first.config)[progress.stage]
        if saves_after(first.config, first.done):
            save(ended=ended)
        if stop.is_set() or population.failed.keys() >= population.jobs.keys():
            break
    save()
    if scoring_error is not None:
        raise scoring_error
    if first.done < first.total:
        raise Preempted(saved_message(first.done, first.total) if first.done else "Stopped before the first step.")
    evaluate_all(population, progress.state, f"after_{first.stages[-1].name}")
    populations.save_members(population, progress)
    first.memory.sample(now=True)  # all members share one process
    for name, job in population.jobs.items():
        if name not in population.failed:
            records.summarize(job)


def begin_stage(population: Population, progress: PopulationProgress) -> PopulationProgress:
    """Returns the progress that the next step starts from, as `jrl.loop.begin_stage` does for one run."""
    first, stage = population.first, progress.stage
    next_stage = stage_at(first.config, first.done + 1)
    if next_stage == stage:
        return progress
    if stage >= 0 and trains_online(first.config.stages[stage]):
        evaluate_all(population, progress.state, f"after_{first.stages[stage].name}")
    if trains_online(first.config.stages[next_stage]):
        evaluate_all(population, progress.state, f"before_{first.stages[next_stage].name}")
    return PopulationProgress(populations.begin_stage(population, progress.state, next_stage), (), stage=next_stage)


def evaluate_all(population: Population, state: TrainState, name: str) -> None:
    """Evaluates every member that has not failed, one after the other, under a name such as "before_rl"."""
    if population.first.config.eval is not None:
        for (member, job), member_state in zip(population.jobs.items(), population.members.unstack(state)):
            if member not in population.failed:
                loop.evaluate_once(job, member_state, name)


def evaluate_if_due(population: Population, progress: PopulationProgress, step: PopulationStep) -> None:
    """Adds an evaluation of every member to the metrics of a step if one is due."""
    if not evaluates_after(population.first.config, population.first.done):
        return
    states = population.members.unstack(progress.state)
    for (name, job), state, member_step in zip(population.jobs.items(), states, step.steps):
        if name not in population.failed:
            member_step.metrics |= numbers(loop.evaluate_step(job, state, job.done))
