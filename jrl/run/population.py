"""Runs that differ in floats and seeds only, trained in one program: the members of a population.

Every member is an open run in its own folder, with its own data, verdicts and metrics. Arrays on the device have a
leading axis of members, and a step calls each program once for all of them. Regular checkpoints hold all members; a
member's own folder gets a checkpoint at the end of each stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import paths
from jrl.device.program_cache import ProgramCache
from jrl.device.sharding import batch_sharding, members_mesh, replicated
from jrl.experiment import Config
from jrl.learning.learner import weights_of
from jrl.learning.step import Minibatch, StageArrays, learn_from_sampled, prepare
from jrl.models.pretrained.published import Published
from jrl.plugins import Parts
from jrl.rollout.collect import (
    Collected,
    Draw,
    Submitted,
    collect,
    filled,
    groups_with_signal,
    needs_another,
    next_visits,
    record_outcomes,
    unscored,
    unsubmitted,
)
from jrl.rollout.prompts import TRAIN_STREAM, padded_prompts
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.scoring import ScoringStopped, WorkersLost
from jrl.rollout.stop_strings import StopTable
from jrl.run import fault, offline, online, records
from jrl.run.batches import plan_shardings
from jrl.run.bucket_run import RunFolder
from jrl.run.checkpoints.run_state import NoIntactStep, RunState, newest_intact, open_run_state
from jrl.run.identity import PUBLISHED
from jrl.run.job import Job, SharedResources, open_job
from jrl.run.member_programs import MemberPrograms
from jrl.run.offline import OfflineStage
from jrl.run.online import OnlineStage
from jrl.run.precompile import state_shape
from jrl.run.records import STOP_AFTER_SKIPPED, Progress, Step, StopRun, draws_ahead
from jrl.run.report.display import Display
from jrl.run.stage_steps import stage_at, warms_up
from jrl.tasks.data.prompts import Visit
from jrl.tasks.stopping import Stop
from jrl.types import Array, PretrainingBatch, PyTree, Rollout, TrainState


class MembersDraw(NamedTuple):
    """A sampling call of all members, in progress."""

    rollout: Rollout  # of all members
    visits: Sequence[list[Visit]]  # of each member
    positions: Sequence[dict[str, Any]]  # of each member's data stream, as `Draw` has it


class PopulationProgress(NamedTuple):
    """What a population carries from step to step besides its members' data positions."""

    state: TrainState  # of all members
    waiting: tuple[MembersDraw, ...]  # the completions being drawn for each of the next steps
    stage: int  # the stage that the state belongs to; -1: none has begun


@dataclasses.dataclass(frozen=True)
class Population:
    """An open population."""

    members: MemberPrograms
    jobs: dict[str, Job]  # name of the member -> its run
    run_state: RunState  # checkpoints of all members
    arrays: tuple[StageArrays, ...]  # of all members, by stage
    temperatures: tuple[Array, ...]  # [members], by stage
    sampling_params: SamplingParams | None  # of all members; None: nothing is sampled
    keys: Array  # [members], the roots of all random draws
    streams: Array  # [members] uint32, TRAIN_STREAM
    stop_table: StopTable | None  # on all devices
    failed: dict[str, str]  # member -> why it cannot go on; its arrays stay, and are not read

    @property
    def first(self) -> Job:
        """The run of the first member, for all that members have in common."""
        return next(iter(self.jobs.values()))


class PopulationStep(NamedTuple):
    """A step of all members whose metrics are still on the device."""

    metrics: dict[str, Array]  # [members] each
    steps: list[Step]  # with the metrics that are already on the host
    seconds: float
    failed: frozenset[str]  # members that had failed by its end: their metrics are meaningless


@contextlib.contextmanager
def open_population(
    configs: Mapping[str, Config],
    parts: Parts,
    folder: Path,
    stop: threading.Event,
    show: Callable[[str], Callable[[Sequence[int]], Display]],
    devices: Sequence[Any] | None = None,
    *,
    accept_change: bool = False,
) -> Iterator[Population]:
    """Opens the runs of a population, new or old. Closes all of them, whatever happens.

    Args:
      configs: member name -> its configuration. `check_population` has checked that they can train together.
      folder: holds a folder per member, by its name, and `population/` with the checkpoints of all members.
      show: member name -> the function that opens its display.
      devices: to distribute the members over, as `members_mesh` does; None: all.
      accept_change: as in `open_job`, for every member.
    """
    member_programs: list[MemberPrograms] = []
    first = next(iter(configs.values()))
    shares_base = first.adapter is not None and isinstance(first.model, Published)

    def programs_in(cache: ProgramCache) -> MemberPrograms:
        run_mesh = jax.sharding.get_mesh()  # as `open_policy` has set it
        mesh = members_mesh(len(configs), devices)
        member_programs.append(MemberPrograms(cache, len(configs), shares_base, run_mesh, mesh))
        return member_programs[0]

    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for name, config in configs.items():
            beside = next(iter(jobs.values()), None)
            opened = open_job(
                config, parts, RunFolder(folder / name), stop, show=show(name), accept_change=accept_change,
                shared=SharedResources(programs_in, beside, folder / FOLDER / "checkpoints"),
            )  # fmt: skip
            jobs[name] = stack.enter_context(opened)
            jobs[name].run_clock = None  # one thread does the steps of all members
            jobs[name].stages = tuple(map(held_on_host, jobs[name].stages))
        members, all_jobs = member_programs[0], list(jobs.values())
        run_state = open_run_state(folder / FOLDER / "checkpoints", keep=first.checkpoint.keep)
        first_job = all_jobs[0]
        online_index = next((i for i, stage in enumerate(first_job.stages) if isinstance(stage, OnlineStage)), None)
        sampling_params = stop_table = None
        if online_index is not None:
            sampling_params = members.stack([job.stages[online_index].sampler.params for job in all_jobs])
            stop_table = members.share(first_job.stages[online_index].sampler.stop_table)
        stream = jax.device_put(np.uint32(TRAIN_STREAM), replicated(first_job.mesh))
        stages = range(len(first_job.stages))
        yield Population(
            members=members,
            jobs=jobs,
            run_state=run_state,
            arrays=tuple(members.stack([job.stages[i].arrays for job in all_jobs]) for i in stages),
            temperatures=tuple(members.stack([job.stages[i].temperature for job in all_jobs]) for i in stages),
            sampling_params=sampling_params,
            keys=members.stack([job.key for job in all_jobs]),
            streams=members.stack([stream] * len(all_jobs)),
            stop_table=stop_table,
            failed={},
        )


def held_on_host(stage: OfflineStage | OnlineStage) -> OfflineStage | OnlineStage:
    """Returns a member's stage that leaves its data of sampled rows on the host: the data of all members are placed on
    the device together."""
    if isinstance(stage, OfflineStage):
        return stage
    return dataclasses.replace(stage, sampler=dataclasses.replace(stage.sampler, place=lambda x: x))


FOLDER = "population"  # in the folder of a sweep: what all members share


def restore(population: Population, *, again: bool = False) -> PopulationProgress:
    """Returns the progress of the newest intact checkpoint, or of a new population. Every file is truncated to match.

    Args:
      again: members failed in a population that has ended, and start over.

    Raises: CheckpointsRemoved if members have done steps and there is no checkpoint.
    """
    first, jobs = population.first, population.jobs
    inputs = records.inputs_of(first)

    def read(step: int) -> tuple[PyTree, dict[str, Any]]:
        state = state_shape(inputs, step)
        beside = {name: records.beside_state(job, inputs, step, state) for name, job in jobs.items()}
        target = {"state": population.members.shapes(state), "members": beside}
        return population.run_state.restore(target, step)[1:]

    if steps := population.run_state.steps():
        try:
            _, tree, host = newest_intact(first.folder.parent / FOLDER, steps, read, first.display.note)
        except NoIntactStep as error:
            raise NoIntactStep(
                f"{error}; nothing was changed. Put a good copy of one back, or sweep into another folder"
            ) from error
        return taken_up(population, tree, host)
    saved = first.folder.parent / FOLDER / "checkpoints"
    for job in jobs.values():
        if not again:
            records.check_not_removed(job, f"put one of the population back under {saved}")
    for job in jobs.values():
        records.begin_files(job)
    state = records.beginning(first, population.keys)
    if first.published is not None:  # all members begin with the weights that the first has read
        weights = json.loads(paths.read_bytes(first.folder / PUBLISHED / "weights.json"))
        for job in jobs.values():
            records.refuse_other_weights(job, int(weights["fingerprint"], 16))
    return PopulationProgress(state, (), stage=-1)


def taken_up(population: Population, tree: PyTree, host: Mapping[str, Any]) -> PopulationProgress:
    """Returns the progress that a checkpoint of all members holds; their files are truncated to match."""
    draws = [
        records.take_up(job, tree["members"][name], host["members"][name]) for name, job in population.jobs.items()
    ]
    for name, why in host["failed"].items():
        fail(population, name, why)  # said at each start
    waiting = tuple(
        MembersDraw(
            population.members.stack([member_draw.rollout for member_draw in step_draws]),
            [member_draw.visits for member_draw in step_draws],
            [member_draw.position for member_draw in step_draws],
        )
        for step_draws in zip(*draws)
    )
    return PopulationProgress(tree["state"], waiting, stage_at(population.first.config, population.first.done))


def save(population: Population, progress: PopulationProgress) -> None:
    """Writes a checkpoint of all members."""
    start, jobs = time.monotonic(), population.jobs
    # The files of members are synced in parallel: while a disk waits for one it has time for others.
    with ThreadPoolExecutor(MOST_WRITERS) as writers:
        saved = list(writers.map(records.to_save, jobs.values(), draws_of_members(population, progress)))
    trees = {name: tree for name, (tree, _) in zip(jobs, saved)}
    hosts = {name: host for name, (_, host) in zip(jobs, saved)}
    population.run_state.save(
        population.first.done,
        {"state": progress.state, "members": trees},
        {"members": hosts, "failed": population.failed},
        unproven=min((job.unproven for name, job in jobs.items() if name not in population.failed), default=None),
    )
    add_seconds(population, "checkpoint", time.monotonic() - start)


def save_members(population: Population, progress: PopulationProgress) -> None:
    """Writes a checkpoint into the folder of every member that has not failed."""
    states, waiting = population.members.on_host(progress.state), draws_of_members(population, progress)
    for (name, job), state, draws in zip(population.jobs.items(), states, waiting):
        if name not in population.failed:
            records.save(job, Progress(state, tuple(draws), progress.stage))


TRAIN_ALONE = "Train it alone to look into them, or lower its learning rate"
MOST_WRITERS = 8  # threads that commit the files of members


def draws_of_members(population: Population, progress: PopulationProgress) -> list[list[Draw]]:
    """Returns each member's draws in progress, in the order of their steps."""
    draws_by_step = [members_draws(population, drawn) for drawn in progress.waiting]
    return [[draws[m] for draws in draws_by_step] for m in range(population.members.count)]


def members_draws(population: Population, drawn: MembersDraw) -> list[Draw]:
    """Waits for a draw of all members, and returns each member's, on the host."""
    rollouts = population.members.on_host(drawn.rollout)
    return [
        Draw(rollout, visits, position) for rollout, visits, position in zip(rollouts, drawn.visits, drawn.positions)
    ]


def begin_stage(population: Population, state: TrainState, i: int) -> TrainState:
    """Returns the state that stage `i` begins with."""
    jobs = list(population.jobs.values())
    state = jobs[0].programs.stages[i].begin(state)
    # An objective's initial state may depend on its floats, and the program has those of the first member.
    objective_states = [
        jax.device_put(job.stages[i].objective.init_state(job.config.stages[i].objective), replicated(job.mesh))
        for job in jobs
    ]
    return state.replace(objective=population.members.stack(objective_states))


def take_step(
    population: Population, progress: PopulationProgress, stop: Stop
) -> tuple[PopulationProgress, PopulationStep]:
    """Returns the progress after one step of all members.

    Raises: StopRequested if `stop` says so; the data streams have moved.
    """
    i, first, jobs = progress.stage, population.first, list(population.jobs.values())
    stages, start = [job.stages[i] for job in jobs], time.monotonic()
    if isinstance(stages[0], OfflineStage):
        batches, host_metrics, _ = zip(
            *(offline.next_on_host(stage, stage.config.learner.minibatches) for stage in stages)
        )
        batch = population.members.place(batches, offline.shardings(batches[0], first.mesh))
        state, metrics, _ = offline.learn(
            stages[0], progress.state, batch, population.arrays[i], population.temperatures[i]
        )
        progress, sampled = progress._replace(state=state), [None] * len(jobs)
    else:
        progress, metrics, sampled, host_metrics = _online_step(population, progress, stages, stop)
    seconds = time.monotonic() - start
    add_seconds(population, stages[0].name, seconds)
    steps = []
    for name, job, stage, batch, values in zip(population.jobs, jobs, stages, sampled, host_metrics):
        step = Step(first.done + 1, stage.name, {**values, **records.dropped_metrics(job, stage)}, batch)
        if name not in population.failed:
            records.keep(job, step)
        steps.append(step)
    return progress, PopulationStep(metrics, steps, seconds, frozenset(population.failed))


def _online_step(
    population: Population, progress: PopulationProgress, stages: Sequence[OnlineStage], stop: Stop
) -> tuple[PopulationProgress, dict[str, Array], list[Any], list[dict[str, float]]]:
    """Returns the progress after a step of an Online stage, its metrics, what each member sampled, and the metrics
    that each has on the host."""
    state, first, members, i = progress.state, population.first, population.members, progress.stage
    phase, p, config, names = first.display.phase, stages[0].programs, stages[0].config, list(population.jobs)
    phase("sampling")
    newest = weights_of(state.models, "policy").params, state.models["policy"].version
    missing = range(len(progress.waiting), 1 + draws_ahead(first.config, first.done + 1))
    current, *following = [*progress.waiting, *(draw(population, stages, *newest) for _ in missing)]

    rollout, draws = current.rollout, members_draws(population, current)
    stopped: dict[str, ScoringStopped] = {}  # members whose completions cannot be scored in this step

    def send(m: int, drawn: Draw) -> Submitted:
        has_failed = names[m] in population.failed or names[m] in stopped
        return unsubmitted(drawn) if has_failed else online.send(stages[m], state, drawn)

    def wait(m: int, sent: Submitted) -> Collected:
        stage = stages[m]
        if sent.ticket is not None:
            try:
                return collect(sent, stage.scorer, stage.sources, stage.sampler, stop)
            except WorkersLost:  # all members share the workers
                raise
            except ScoringStopped as error:
                stopped[names[m]] = error
        return unscored(sent, stage.sampler, rewards_tokens=stage.rewards_tokens)

    submitted = [send(m, drawn) for m, drawn in enumerate(draws)]
    phase("scoring")
    temperature = population.temperatures[i]
    minibatches = pack_and_prepare(members, stages, state, rollout, [sent.host for sent in submitted], temperature)
    rounds = [[wait(m, sent)] for m, sent in enumerate(submitted)]
    batches = [first_round for (first_round,) in rounds]
    if (most := stages[0].objective.refill(config.objective)) is not None:
        judged = lambda m: names[m] not in population.failed and names[m] not in stopped
        batches = _refilled(population, state, stages, population.arrays[i], rollout, rounds, most, send, wait, judged)
        if any(len(member_rounds) > 1 for member_rounds in rounds):
            rollout = placed_rows(population, [batch.rollout for batch in batches])
            hosts = [batch.host for batch in batches]
            minibatches = pack_and_prepare(members, stages, state, rollout, hosts, temperature)

    if stopped and {*population.failed, *stopped} >= {*names}:
        raise next(iter(stopped.values()))  # the verifiers are at fault, not the members
    for name, error in stopped.items():
        fail(population, name, str(error))

    phase("updating")
    only_critic = warms_up(first.config, first.done + 1)
    pretraining, left_out = pretraining_rows(population, stages, i, only_critic)
    state, metrics, _ = learn_from_sampled(
        p,
        state,
        minibatches,
        rollout,
        placed_rows(population, [batch.scores for batch in batches]),
        population.arrays[i],
        role=config.trains,
        epochs=config.learner.epochs,
        warms_up=only_critic,
        pretraining=pretraining,
    )
    host_metrics = [
        {**batch.metrics, **record_outcomes(stage.sampler, member_rounds), **counts}
        for stage, batch, member_rounds, counts in zip(stages, batches, rounds, left_out)
    ]
    return progress._replace(state=state, waiting=tuple(following)), metrics, batches, host_metrics


def pretraining_rows(
    population: Population, stages: Sequence[OnlineStage], i: int, only_critic: bool
) -> tuple[list[PretrainingBatch], Sequence[dict[str, float]]]:
    """Returns the next stored rows that stage `i` of all members imitates, as `online.pretraining_rows` does."""
    if stages[0].pretraining is None or only_critic:
        return [], [{}] * len(stages)
    batches, left_out, _ = zip(
        *(offline.next_on_host(stage.pretraining, stage.config.learner.minibatches) for stage in stages)
    )
    batch = population.members.place(batches, offline.shardings(batches[0], population.first.mesh))
    return offline.pretraining_batches(stages[0].programs, batch, population.arrays[i].pretraining), left_out


def pack_and_prepare(
    members: MemberPrograms,
    stages: Sequence[OnlineStage],
    state: TrainState,
    rollout: Rollout,
    hosts: Sequence[dict[str, np.ndarray]],
    temperature: Array,
) -> list[Minibatch]:
    """Returns the minibatches of all members with what the weights before the step compute for them.

    Args:
      rollout: of all members. hosts: its fields on the host, of each.
    """
    p, member_plans = stages[0].programs, [online.sampled_plans(stage, host) for stage, host in zip(stages, hosts)]
    plans = members.place(member_plans, plan_shardings(member_plans[0], stages[0].sampler.mesh))
    return [prepare(p, state, stages[0].config.trains, p.pack(rollout, plan, temperature), plan) for plan in plans]


def placed_rows(population: Population, trees: Sequence[PyTree]) -> PyTree:
    """Returns members' data of sampled rows, moved from the host to the device; scalars are replicated."""
    mesh = population.first.mesh
    shardings = jax.tree.map(lambda x: batch_sharding(mesh, x.ndim) if x.ndim else replicated(mesh), trees[0])
    return population.members.place(trees, shardings)


def _refilled(
    population: Population,
    state: TrainState,
    stages: Sequence[OnlineStage],
    arrays: StageArrays,
    rollout: Rollout,
    rounds: list[list[Collected]],
    most: int,
    send: Callable[[int, Draw], Submitted],
    wait: Callable[[int, Submitted], Collected],
    judged: Callable[[int], bool],
) -> list[Collected]:
    """Returns each member's batch, as `collect.refilled` does for one run. Appends what members sample to `rounds`. A
    member that needs no more takes part in the others' rounds with its last prompts; the result is dropped.

    Args:
      judged: whether a member's completions can be scored.
    """
    p = stages[0].programs
    kept: list[list[list[int]]] = [[] for _ in stages]

    def note_kept(rollout: Rollout, places: Sequence[int]) -> None:
        scores = placed_rows(population, [member_rounds[-1].scores for member_rounds in rounds])
        keep = jax.device_get(p.keep(rollout, scores, arrays.objective, arrays.shaping))
        for m in places:
            kept[m].append(groups_with_signal(rounds[m][-1], keep[m]))

    note_kept(rollout, range(len(stages)))
    needs_more = lambda m: judged(m) and needs_another(rounds[m], kept[m], most)
    while unfilled := [m for m in range(len(stages)) if needs_more(m)]:
        again = [None if m in unfilled else member_rounds[-1].visits for m, member_rounds in enumerate(rounds)]
        drawn = draw(population, stages, *online.refill_weights(stages[0], state), again)
        draws = members_draws(population, drawn)
        sent = {m: send(m, draws[m]) for m in unfilled}
        for m in unfilled:
            rounds[m].append(wait(m, sent[m]))
        note_kept(drawn.rollout, unfilled)
    return [
        filled(member_rounds, member_kept, stage.sampler)
        for stage, member_rounds, member_kept in zip(stages, rounds, kept)
    ]


def draw(
    population: Population,
    stages: Sequence[OnlineStage],
    weights: PyTree,
    version: Array,
    again: Sequence[list[Visit] | None] | None = None,
) -> MembersDraw:
    """Dispatches one sampling call on the next prompts of every member, and returns at once.

    Args:
      again: for each member, prompts to draw in place of its next ones, or None; None: no member has any.
    """
    samplers = [stage.sampler for stage in stages]
    again = again or [None] * len(stages)
    positions, visits = zip(*(next_visits(s) if old is None else ({}, old) for s, old in zip(samplers, again)))
    prompts = [
        padded_prompts(member_visits, s.prompts, s.prompt_length, s.tokenizer.pad_id, s.mesh)
        for s, member_visits in zip(samplers, visits)
    ]
    rollout = stages[0].programs.sample(
        weights,
        placed_rows(population, prompts),
        population.keys,
        population.streams,
        version,
        population.sampling_params,
        population.stop_table,
        None,
    )
    return MembersDraw(rollout, visits, positions)


def emit(population: Population, step: PopulationStep) -> None:
    """Fetches the metrics of a step and writes each member's. A member that cannot learn any more fails, and the others
    go on."""
    start = time.monotonic()
    fetched = jax.device_get(step.metrics)
    waited = time.monotonic() - start
    add_seconds(population, step.steps[0].phase, waited)
    for i, (member_step, (name, job)) in enumerate(zip(step.steps, population.jobs.items())):
        if name in step.failed:
            continue
        device_metrics = {metric: values[i] for metric, values in fetched.items()}
        member_step.metrics = {**device_metrics, **member_step.metrics}
        records.note_step(job, member_step, step.seconds + waited)
        try:
            records.emit(job, member_step)
            why = not_finite(member_step) if job.skipped >= STOP_AFTER_SKIPPED else ""
        except StopRun as error:
            why = str(error)
        if why:
            fail(population, name, why)


def check_end(population: Population, state: TrainState) -> None:
    """Fails the members whose weights after a stage are not finite; checks those whose updates leave them in doubt."""
    doubtful = {name for name, job in population.jobs.items() if fault.in_doubt(job)} - population.failed.keys()
    states = population.members.unstack(state) if doubtful else ()
    for (name, job), member_state in zip(population.jobs.items(), states):
        if name in doubtful and (where := fault.bad_end(job, member_state)) is not None:
            fail(population, name, f"after step {job.done} its weights are not finite: {where}. {TRAIN_ALONE}")


def fail(population: Population, name: str, why: str) -> None:
    """Marks a member as failed, and says why."""
    if name not in population.failed:
        population.failed[name] = why
        population.jobs[name].display.note(f"jrl: {why}")


def not_finite(step: Step) -> str:
    """Returns why a member whose updates are not finite has failed."""
    return (
        f"{STOP_AFTER_SKIPPED} updates in a row were not finite, the last at step {step.step}: loss "
        f"{step.metrics['loss']}, gradient norm {step.metrics['grad_norm']}. {TRAIN_ALONE}"
    )


def add_seconds(population: Population, name: str, seconds: float) -> None:
    """Adds time that all members spent together to the time of each."""
    for job in population.jobs.values():
        job.seconds[name] = job.seconds.get(name, 0.0) + seconds
