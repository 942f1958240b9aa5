"""What an open run holds: folder, device programs, data position, verifier pool, files. Opened and closed once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import paths
from jrl.compatibility import notes_of_start
from jrl.device.processes import ONE, Processes
from jrl.device.program_cache import ProgramCache
from jrl.experiment import Config, needs_of
from jrl.models.adapters.lora import without_adapters
from jrl.models.pretrained.published import Published, check_folder
from jrl.plugins import Parts
from jrl.rollout.evaluate import Evaluator
from jrl.rollout.rewards import OpenClassifier
from jrl.rollout.scoring import Scorer
from jrl.run.agreement import check_covered, facts, with_place
from jrl.run.begin_from import Origin, Request, check_fits, manifest_entry, origin_of
from jrl.run.best import Best
from jrl.run.bucket_run import RunFolder
from jrl.run.checkpoints.run_state import RunState, open_run_state
from jrl.run.checks import check_host, check_routes_sent
from jrl.run.clock import RunClock
from jrl.run.data import RunData, data_fingerprint, note_counts, open_data, preflight_data, showing_rows
from jrl.run.folder import held_folder
from jrl.run.identity import (
    check_not_foreign,
    continue_configuration,
    eval_identity,
    identify,
    record_change,
    refuse_another,
    with_saved_model,
    write_run_metadata,
)
from jrl.run.kernels import sentence
from jrl.run.offline import OfflineStage
from jrl.run.online import OnlineStage
from jrl.run.policy import Policy, open_policy, root_key
from jrl.run.profile import Profile, Steps, profile_folder
from jrl.run.report.display import Display, no_display, open_display
from jrl.run.report.goodput import GoodputFile
from jrl.run.report.memory import PeakMemory
from jrl.run.report.messages import LostSignal
from jrl.run.report.metrics import Metrics
from jrl.run.report.rollouts import RolloutStore
from jrl.run.report.sinks import check_writers
from jrl.run.signals import StopRequest
from jrl.run.stage_steps import ends
from jrl.run.stages import open_evaluator, open_stages
from jrl.run.teacher import check_mesh_of_teacher, check_teacher, check_vocabulary
from jrl.run.throughput import Speed, speed_of
from jrl.run.tokenizer import open_tokenizer, without_template
from jrl.tasks.data.held_out import held_out
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stream import Stream
from jrl.tasks.envs.contract import Source
from jrl.tasks.stopping import Stop
from jrl.types import Array


@dataclasses.dataclass
class Job:
    """An open run. Fields are set once, except the last group, which the loop changes."""

    policy: Policy
    folder: Path
    source: Source
    stored: Sequence[Source]  # of every stage with stored rows, in order
    stream: Stream  # of the prompts that Online stages sample
    stages: tuple[OfflineStage | OnlineStage, ...]
    scorer: Scorer
    classifier: OpenClassifier | None  # the published reward model
    evaluator: Evaluator | None
    run_state: RunState
    display: Display
    memory: PeakMemory
    stop: threading.Event  # set: the run was asked to stop
    key: Array  # root of all random draws
    processes: Processes
    published: Published | None  # the weights that the run begins with; None: random ones
    origin: Origin | None  # the other run whose weights it begins with
    speed: Speed
    profile: Profile
    eval_identity: str  # of what measures held-out accuracy
    # Changed by the loop.
    opened: float  # monotonic seconds
    run_clock: RunClock | None  # where the time of this process goes; None: a member of a population
    goodput: GoodputFile | None = None
    metrics: Metrics | None = None
    rollouts: RolloutStore | None = None
    done: int = 0  # steps completed, of all stages
    evals: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluated: tuple[int, dict[str, Any]] = (-1, {})  # the step of the last evaluation, and its result
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by stage or task, over all restarts
    skipped: int = 0  # consecutive steps whose update was skipped as not finite
    overflowed: dict[str, int] = dataclasses.field(default_factory=dict)  # {role: step} of an update of infinite norm
    unscored: int = 0  # consecutive steps of which no completion could be scored
    without_signal: int | None = 0  # steps since the start, all without a gradient; None: one had a gradient
    last_signal: tuple[int, float] | None = None  # (step, mean reward) of the newest step with a gradient; None: none
    lost_signal: LostSignal | None = None  # at the last step that was emitted
    best: Best | None = None  # of the saved steps
    final_reward: float | None = None  # mean reward of the last step that was emitted
    rollout_rows: int = 0  # committed to the store
    sampled_tokens: int = 0  # by training, over all restarts
    visits: list[Visit] | None = None  # held-out prompts, once made
    publish: Callable[[], None] = lambda: None  # commits the folder to the bucket, if the run is in one
    address: str | None = None  # gs://BUCKET/NAME of the run; None: it is in a local folder
    record_change: Callable[[int], None] | None = None  # writes the accepted changes, given the steps done before
    write_configuration: Callable[[], None] | None = None  # that a resumed run continues with; None: nothing to write

    location = property(lambda self: self.address or self.folder)  # where its user finds the run
    config = property(lambda self: self.policy.config)
    mesh = property(lambda self: self.policy.mesh)
    tokenizer = property(lambda self: self.policy.tokenizer)
    cfg = property(lambda self: self.policy.cfg)
    model = property(lambda self: self.policy.model)
    program_cache = property(lambda self: self.policy.program_cache)
    programs = property(lambda self: self.policy.programs)

    @property
    def total(self) -> int:
        """Steps of all stages."""
        return ends(self.config)[-1]

    @property
    def unproven(self) -> int:
        """The first step whose weights may not be finite: no later update has shown that they are."""
        return min(self.done - self.skipped, *self.overflowed.values(), self.done)

    def stopping(self) -> bool:
        """Whether any process was asked to stop. All processes must call this at the same points."""
        with self.spent("wait"):
            return self.processes.any("stop", self.stop.is_set())

    def spent(self, part: str) -> contextlib.AbstractContextManager:
        """Counts the time of the loop's thread inside the block as that of `part`."""
        return contextlib.nullcontext() if self.run_clock is None else self.run_clock.on(part)

    def stop_alone(self) -> bool:
        """Whether a run of one process was asked to stop. Several processes all finish the step first."""
        return self.processes.count == 1 and self.stop.is_set()

    def held_out(self, stop: Stop) -> list[Visit]:
        """Returns the held-out prompts of the evaluation; always the same. Raises StopRequested if `stop` says so."""
        if self.visits is None:
            config = self.config
            prompts = config.eval.prompts
            self.visits = held_out(self.source, self.tokenizer, config.data, prompts, config.run.seed, stop)
        return self.visits

    def all_seconds(self) -> dict[str, float]:
        """Returns the seconds by stage or task, over all restarts; "total" counts from opening the run."""
        return {**self.seconds, "total": self.seconds.get("total", 0.0) + time.monotonic() - self.opened}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time inside to `seconds[name]`, less that of such blocks nested in it: a step's time does not
        contain its evaluation."""
        start, before = time.monotonic(), sum(self.seconds.values())
        try:
            yield
        finally:
            nested = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start - nested


class SharedResources(NamedTuple):
    """What a run shares with the population that it is a member of."""

    programs_in: Callable[[ProgramCache], Any]  # as in `open_policy`
    beside: Job | None  # another open member, whose data, tokenizer, programs and verifier workers are used
    checkpoints: Path | None  # of all members; None: the run has its own alone


NOTHING_SHARED = SharedResources(lambda cache: cache, None, None)


@contextlib.contextmanager
def open_job(
    config: Config,
    parts: Parts,
    folder: RunFolder,
    stop: threading.Event,
    *,
    accept_change: bool = False,
    begin_from: Request | None = None,
    show: Callable[[Sequence[int]], Display] = open_display,
    shared: SharedResources = NOTHING_SHARED,
    processes: Processes = ONE,
    profile: Steps | None = None,
) -> Iterator[Job]:
    """Opens a run folder, new or old, and everything a run needs. Closes all of it, whatever happens.

    Args:
      folder: where the run is; made if it is new.
      accept_change: resume a run with another configuration, data or parts, and record that in its manifest.
      begin_from: another run, and its step; a new one begins with its weights and tokenizer.
      show: (the last step of every stage) -> the display.
      shared: what the run shares with the population that it is a member of.
      processes: the processes that train together, each with its own devices.
      profile: steps to write a trace of.

    Raises: RunIsHeld if another process trains in the folder; RefusedIdentity if it holds another run;
    ConfigError and ValueError for what cannot run.
    """
    opened, run_clock, beside = time.monotonic(), RunClock(), shared.beside
    initial_config = config  # `config` gets the path of the saved model and the chosen kernels
    with contextlib.ExitStack() as stack:
        stack.callback(run_clock.close)
        processes.agree("configuration and code", facts(config, parts, processes))
        check_start(config, folder.path, begin_from, processes)
        path = stack.enter_context(held_folder(folder, processes))
        display = stack.enter_context(shown(config, show, stop, processes))
        display.phase("data")
        polled = showing_rows(stop.is_set, display.phase)
        data = open_data(config, parts.tables, polled) if beside is None else RunData(beside.source, beside.stored)
        note_counts(config, data, display.note)
        digest = data_fingerprint(config, data.source, data.stored)
        processes.agree("data", {"data": digest, "examples": len(data.source)})
        origin = origin_of(path, begin_from, folder.address)
        processes.agree("the run to begin from", manifest_entry(origin).get("from", {}))
        tokenizer = None if beside is None else beside.tokenizer
        tokenizer = open_tokenizer(config, parts, data.source, path, origin, stop.is_set, processes, tokenizer)
        manifest = identify(config, parts, tokenizer, digest)
        changes = refuse_another(
            path, manifest, config, accept_change=accept_change, location=folder.address, checkpoints=shared.checkpoints
        )
        config = with_saved_model(config, path)  # a resumed run reads its own weights only
        policy = stack.enter_context(run_policy(config, parts, tokenizer, display, shared, run_clock))
        config = policy.config
        if origin is not None and origin.copy is not None:  # the run is new
            origin = origin._replace(weights=check_fits(origin, policy))  # it begins with these or none
        manifest |= manifest_entry(origin) | {"chosen": {choice.field: choice.value for choice in policy.chosen}}
        check_machine(policy, path, processes)
        pool = None if beside is None else beside.scorer.pool
        running = stack.enter_context(open_stages(policy, data, path, display, stop.is_set, processes, pool))
        run_state = open_run_state(
            path / "checkpoints",
            keep=config.checkpoint.keep,
            pinned=ends(config)[:-1],
            processes=processes,
            shared=folder.shared,
        )
        job = Job(
            policy=policy,
            folder=path,
            source=data.source,
            stored=data.stored,
            stream=running.stream,
            stages=running.stages,
            scorer=running.scorer,
            classifier=running.classifier,
            evaluator=None if config.eval is None else open_evaluator(policy, processes),
            run_state=run_state,
            display=display,
            memory=PeakMemory() if beside is None else beside.memory,  # measures the process
            stop=stop,
            key=root_key(policy),
            processes=processes,
            opened=opened,
            speed=speed_of(config, policy.mesh, policy.sampler_mesh, policy.model, policy.cfg),
            run_clock=run_clock,
            profile=Profile(
                profile, profile_folder(path, processes.index, processes.count), display.note, run_clock.on
            ),
            eval_identity=eval_identity(initial_config, manifest),
            published=initial_config.model if isinstance(initial_config.model, Published) else None,
            origin=origin,
            publish=folder.publish,
            address=folder.address,
        )
        if beside is None and (changes or not paths.exists(path / "manifest.json")):  # all members have the same data
            preflight_data(config, data, tokenizer, job.stages, job.scorer, job.held_out, polled)
        begin_folder(job, initial_config, manifest, changes)
        stack.callback(close_files, job)
        yield job


@contextlib.contextmanager
def run_policy(
    config: Config, parts: Parts, tokenizer: Any, display: Display, shared: SharedResources, run_clock: RunClock
) -> Iterator[Policy]:
    """Opens the policy of a run, and closes its programs at the end. Members of a population share the first's."""
    for text in notes_of_start(config, parts.tables):
        display.note(text)
    if shared.beside is not None:
        yield dataclasses.replace(shared.beside.policy, config=config)
        return
    policy = open_policy(config, parts, tokenizer, display.phase, shared.programs_in)
    with contextlib.closing(policy.program_cache):
        policy.program_cache.compiling = lambda: run_clock.on("compile")
        if (text := without_template(tokenizer)) is not None:
            display.note(text)
        if policy.chosen:
            display.note(f"chosen: {'; '.join(map(sentence, policy.chosen))}")
        if policy.config.adapter is not None and (bare := without_adapters(policy.model.spec(policy.cfg))):
            display.note(f"LoRA has no adapters to {', '.join(bare)}: these weights stay frozen")
        yield policy


def close_files(job: Job) -> None:
    """Closes the files that the loop has opened."""
    for file in (job.metrics, job.rollouts, job.goodput):
        if file is not None:
            file.close()


def check_start(config: Config, folder: Path, begin_from: Request | None, processes: Processes) -> None:
    """Raises ValueError for what cannot run here, before anything is created: a folder of something else, a metrics
    writer that is not installed, a model that does not exist."""
    if processes.writer:
        check_not_foreign(folder)
    check_writers(config.log.writers)
    if isinstance(config.model, Published) and begin_from is None and not paths.exists(folder / "manifest.json"):
        check_folder(config.model)


@contextlib.contextmanager
def shown(
    config: Config, show: Callable[[Sequence[int]], Display], stop: threading.Event, processes: Processes
) -> Iterator[Display]:
    """Opens the display of this process; a request to stop is shown in it."""
    display = show(ends(config)) if processes.writer else no_display()
    display = with_place(display, processes)
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        if isinstance(stop, StopRequest):
            stack.enter_context(stop.routed_to(display.notice))
        yield display


def begin_folder(job: Job, config: Config, manifest: dict[str, Any], changes: Sequence[str]) -> None:
    """Writes the metadata of a new run, once every process has accepted it. What a resumed run changes is
    written when its checkpoint is restored.

    Args:
      config: as the run was started; the job's also has the kernels chosen since.
    """
    parts, folder, processes = job.policy.parts, job.folder, job.processes
    is_new = not paths.exists(folder / "manifest.json")
    processes.barrier("opened")
    if is_new:
        if processes.writer:
            write_run_metadata(config, parts, folder, manifest)
        processes.barrier("written")
    elif changes and processes.writer:
        job.record_change = functools.partial(record_change, config, parts, folder, manifest, changes)
    elif processes.writer:
        job.write_configuration = functools.partial(continue_configuration, config, parts, folder)


def check_machine(policy: Policy, folder: Path, processes: Processes) -> None:
    """Raises ValueError if the configuration does not fit the devices, the processes or the teacher."""
    config = policy.config
    check_host(config, policy.mesh)
    check_covered(policy.mesh, policy.sampler_mesh, processes)
    check_routes_sent(config, policy.mesh, processes.count)
    if config.teacher is None:
        return
    if not paths.exists(folder / "manifest.json"):
        tables = policy.parts.tables
        check_teacher(config, policy.tokenizer, tables)
        needs = (needs_of(stage, tables) for stage in config.stages)
        check_vocabulary(config, policy.cfg, needs)
    check_mesh_of_teacher(config, policy.mesh)  # a resumed run may have another mesh
