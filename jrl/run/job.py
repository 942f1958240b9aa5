"""What a run holds open: folder, device programs, data position, verifier pool, records. Opened and closed once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl import paths
from jrl.device.placement import place_on_mesh, rows_on_mesh
from jrl.device.processes import ONE, Processes
from jrl.device.program_cache import ProgramCache
from jrl.device.sharding import make_mesh, replicated, split_meshes
from jrl.experiment import (
    Config,
    Offline,
    Online,
    Stage,
    check_components,
    correction_length,
    optimizers,
    row_of,
    segments_of,
    stage_names,
    written_corrections,
)
from jrl.learning.critic import CRITIC
from jrl.learning.learner import weights_of
from jrl.learning.step import StageArrays, StagePrograms
from jrl.models.adapters.lora import without_adapters
from jrl.models.attention.kernels import check_attention, check_kernel
from jrl.models.contract import Model, split_params
from jrl.models.pretrained.published import Published, check_folder
from jrl.models.shape import Decoder
from jrl.plugins import Parts
from jrl.rollout.collect import PromptSampler
from jrl.rollout.corrector import corrector_source
from jrl.rollout.evaluate import Evaluator
from jrl.rollout.prompts import TRAIN_STREAM, place_prompts
from jrl.rollout.rewards import OpenClassifier, reward_model_source
from jrl.rollout.sampler import params_on_device, stop_table_on_device, untruncated
from jrl.rollout.scoring import Scorer, open_scoring
from jrl.rollout.sources import ROLE_ENSEMBLE, RewardSource, judge_source, roles_source
from jrl.rollout.strategies import strategy_of
from jrl.rollout.strategies.contract import FIRST_ATTEMPT
from jrl.run import programs
from jrl.run.agreement import (
    check_covered,
    check_shared_folder,
    facts,
    journal_name,
    other_journals,
    with_place,
)
from jrl.run.begin_from import Origin, manifest_entry, origin_of
from jrl.run.checkpoints.lock import hold_run
from jrl.run.checkpoints.run_state import RunState, open_run_state
from jrl.run.checks import check_host, check_model, check_routes_sent
from jrl.run.clock import RunClock
from jrl.run.identity import (
    check_not_foreign,
    identify,
    record_change,
    refuse_another,
    remove_unbegun,
    with_saved_model,
    write_run_metadata,
)
from jrl.run.kernels import Choice, choose_kernels, sentence
from jrl.run.offline import OfflineStage
from jrl.run.online import OnlineStage
from jrl.run.precompile import starts
from jrl.run.profile import Profile, Steps, profile_folder
from jrl.run.programs import Programs
from jrl.run.report.display import Display, no_display, open_display
from jrl.run.report.goodput import GoodputFile
from jrl.run.report.memory import PeakMemory
from jrl.run.report.metrics import Metrics
from jrl.run.report.rollouts import RolloutStore
from jrl.run.report.sinks import check_writers
from jrl.run.reward_model import open_reward_model
from jrl.run.sampler_devices import SamplerDevices
from jrl.run.signals import StopRequest
from jrl.run.teacher import check_mesh_of_teacher, check_teacher, check_vocabulary
from jrl.run.throughput import Speed, speed_of
from jrl.tasks.data.curricula import no_outcomes
from jrl.tasks.data.held_out import held_out
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stream import ENOUGH_SEEN, Stream, open_stream
from jrl.tasks.data.survey import answered_conversations, texts_of
from jrl.tasks.envs.contract import Source, digest_of, named_verifiers, tasks_of
from jrl.tasks.envs.mixture import open_source
from jrl.tasks.judges import OpenJudge, open_judges
from jrl.tasks.stopping import Stop
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.types import Array, PackedBatch, Rollout, TrainState

TOKENIZER_TEXTS = 4096  # most examples of the run whose texts a tokenizer is trained on


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is needed to run a policy: no optimizer, no verifiers."""

    config: Config
    parts: Parts
    mesh: Mesh
    tokenizer: Any
    cfg: Any  # a Decoder, but where the model is the user's own
    model: Model
    program_cache: ProgramCache
    programs: Programs
    chosen: tuple[Choice, ...] = ()  # what every 'auto' of the configuration became
    sampler_mesh: Mesh | None = None  # of training's draws, on devices of their own; None: `mesh`


@dataclasses.dataclass
class Job:
    """A run that is open. Fields are set once, but for the last group, which the loop moves."""

    policy: Policy
    folder: Path
    source: Source
    stored: Sequence[Source]  # of every Offline stage, in their order
    stream: Stream  # of the prompts that Online stages sample
    stages: tuple[OfflineStage | OnlineStage, ...]
    scorer: Scorer
    classifier: OpenClassifier | None  # the published reward model
    evaluator: Evaluator | None
    run_state: RunState
    display: Display
    memory: PeakMemory
    stop: threading.Event  # someone asked the run to stop
    key: Array  # root of every draw
    processes: Processes
    published: Published | None  # the weights that the run begins with; None: random ones
    origin: Origin | None  # the other run whose weights it begins with
    speed: Speed
    profile: Profile
    # What the loop moves.
    opened: float  # monotonic seconds
    run_clock: RunClock | None  # where the time of this process goes; None: a member of a population
    goodput: GoodputFile | None = None
    metrics: Metrics | None = None
    rollouts: RolloutStore | None = None
    done: int = 0  # steps completed, of all stages
    evals: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # where the time went, earlier lives included
    skipped: int = 0  # steps in a row whose update was not finite
    unscored: int = 0  # steps in a row of which no completion could be scored
    without_signal: int | None = 0  # steps since the start, none with a gradient; None: one had a gradient
    final_reward: float | None = None  # mean reward of the last step that was emitted
    rollout_rows: int = 0  # committed to the store
    sampled_tokens: int = 0  # by training, of this and earlier lives
    visits: list[Visit] | None = None  # held-out prompts, once made
    publish: Callable[[], None] = lambda: None  # commits the folder, where the run is in a bucket
    address: str | None = None  # gs://BUCKET/NAME of the run; None: it is in a local folder
    record_change: Callable[[int], None] | None = None  # writes the accepted changes, given the steps done before

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
        return sum(stage.steps for stage in self.config.stages)

    def stopping(self) -> bool:
        """Whether any process was asked to stop. All of them ask, at the same places."""
        with self.spent("wait"):
            return self.processes.any("stop", self.stop.is_set())

    def spent(self, part: str) -> contextlib.AbstractContextManager:
        """Inside, the time of the loop's thread is that of a part."""
        return contextlib.nullcontext() if self.run_clock is None else self.run_clock.on(part)

    def stop_alone(self) -> bool:
        """Whether a run of one process was asked to stop. One of several ends its step first, as the others do."""
        return self.processes.count == 1 and self.stop.is_set()

    def held_out(self, stop: Stop) -> list[Visit]:
        """Returns the held-out prompts of the evaluation; always the same. Raises: StopRequested where `stop` says."""
        if self.visits is None:
            e = self.config.eval
            self.visits = held_out(self.source, self.tokenizer, self.config.data, e.prompts, self.config.run.seed, stop)
        return self.visits

    def clock(self) -> dict[str, float]:
        """Returns where the time went, of this and earlier lives: "total" is from opening the run on."""
        return {**self.seconds, "total": self.seconds.get("total", 0.0) + time.monotonic() - self.opened}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time inside to `seconds[name]`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


def open_policy(
    config: Config,
    parts: Parts,
    tokenizer: Any,
    announce: Any = lambda what: None,
    programs_in: Callable[[ProgramCache], Any] = lambda cache: cache,
) -> Policy:
    """Returns mesh and programs; nothing is compiled yet. Raises ValueError where the mesh does not fit the devices.

    Args:
      programs_in: the program cache -> what makes programs in it, such as MemberPrograms.
    """
    sampler_mesh = None
    if config.sampler_mesh is None:
        mesh = make_mesh(config.mesh)
    else:
        mesh, sampler_mesh = split_meshes(config.mesh, config.sampler_mesh)
    jax.set_mesh(mesh)
    if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:
        raise ValueError(f"{type(config.model).__name__}.dtype='float64' needs JAX_ENABLE_X64=1 in the environment")
    # Accelerators multiply float32 in fewer bits by default; sampler and learner would differ by more than rounding.
    jax.config.update("jax_default_matmul_precision", "highest")
    platform = mesh.devices.flat[0].platform
    cache = ProgramCache(announce, platform if platform != "tpu" else mesh.devices.flat[0].device_kind)
    cfg = programs.model_config(config, tokenizer)
    model = programs.model_of(config, parts.tables)
    made_in = programs_in(cache)
    # The programs of a population are vmapped, which kernels are not.
    sampled_over = None if sampler_mesh is None else sampler_mesh.shape["tensor"]
    kernels_for = platform if made_in is cache else "cpu"
    config, chosen = choose_kernels(config, cfg, kernels_for, mesh.shape["tensor"], sampled_over)
    cfg = programs.model_config(config, tokenizer)
    check_kernel("Sampler.attention", config.sampler.attention, platform)
    if isinstance(cfg, Decoder):
        check_attention(cfg, platform)
    frozen, trained = split_params(model.spec(cfg))
    check_model(config, cfg, trained if frozen is None else frozen, mesh, sampler_mesh)
    built = programs.build(config, parts.tables, model, tokenizer, mesh, made_in, sampler_mesh)
    return Policy(config, parts, mesh, tokenizer, cfg, model, cache, built, tuple(chosen), sampler_mesh)


@contextlib.contextmanager
def open_job(
    config: Config,
    parts: Parts,
    folder: Path,
    stop: threading.Event,
    *,
    accept_change: bool = False,
    begin_from: str | Path | None = None,
    show: Callable[[int], Display] = open_display,
    programs_in: Callable[[ProgramCache], Any] = lambda cache: cache,
    beside: Job | None = None,
    processes: Processes = ONE,
    profile: Steps | None = None,
    publish: Callable[[], None] = lambda: None,
    address: str | None = None,
    shared: bool = True,
) -> Iterator[Job]:
    """Opens a run folder, new or old, and everything a run needs. Closes all of it, whatever happens.

    Args:
      accept_change: a run of another configuration, data or parts goes on, and its manifest says so.
      begin_from: another run, whose weights and tokenizer a new one begins with.
      show: (steps of all stages) -> the display.
      programs_in: as in `open_policy`.
      beside: an open member of the same population, whose data, tokenizer, programs and verifier workers are used.
      processes: those that train together, each with its own devices.
      profile: steps to write a trace of.
      publish: called when a checkpoint is in the folder, with every file that belongs to it.
      address: of the run, for messages, where the folder is a local copy of it.
      shared: whether all processes see the folder; False: each has a copy, and `publish` puts together what they write.

    Raises: RunIsHeld where another process trains in the folder; RefusedIdentity where it holds another run;
    ConfigError and ValueError for what cannot run.
    """
    opened, run_clock = time.monotonic(), RunClock()
    with contextlib.ExitStack() as stack:
        stack.callback(run_clock.close)
        processes.agree("configuration and code", facts(config, parts, processes))
        if processes.writer:
            check_not_foreign(folder)
        check_writers(config.log.writers)
        if isinstance(config.model, Published) and begin_from is None and not paths.exists(folder / "manifest.json"):
            check_folder(config.model)
        if processes.writer:
            is_new = not paths.exists(folder)
            folder = Path(paths.make_private_dir(folder))
            lock = hold_run(folder)
            stack.callback(lock.release)
            if is_new:
                stack.callback(remove_unbegun, folder)
        if shared:
            check_shared_folder(folder, processes)
        display = show(sum(stage.steps for stage in config.stages)) if processes.writer else no_display()
        display = with_place(display, processes)
        stack.callback(display.close)
        if isinstance(stop, StopRequest):
            stack.enter_context(stop.routed_to(display.notice))
        display.phase("data")
        open_ = lambda task: open_source(task, parts.tables["envs"], stop.is_set)
        source = open_(config.task) if beside is None else beside.source
        stored = stored_sources(config, source, open_) if beside is None else beside.stored
        for name, one in {"": source, **of_their_own(config, stored)}.items():
            if one.counts:
                counts = ", ".join(f"{count} {cause}" for cause, count in sorted(one.counts.items()))
                display.note(f"{name}{': ' * bool(name)}{len(one)} examples; dropped or noticed: {counts}")
        data = data_fingerprint(config, source, stored)
        processes.agree("data", {"data": data, "examples": len(source)})
        origin = origin_of(folder, begin_from, address)
        processes.agree("the run to begin from", manifest_entry(origin).get("from", {}))
        if beside is not None:
            tokenizer = beside.tokenizer
            save_tokenizer(tokenizer, folder)
        elif origin is None:
            tokenizer = open_tokenizer(config, parts, source, folder, stop.is_set, processes)
        else:
            tokenizer = tokenizer_of_origin(origin, parts, folder, processes)
        manifest = {**identify(config, parts, tokenizer, data), **manifest_entry(origin)}
        changes = refuse_another(folder, manifest, config, accept_change=accept_change, location=address)
        started = config  # where weights come from, which a resumed run needs no more
        config = with_saved_model(config, folder)
        if beside is None:
            policy = open_policy(config, parts, tokenizer, display.phase, programs_in)
            stack.callback(policy.program_cache.close)
            policy.program_cache.compiling = lambda: run_clock.on("compile")
        else:
            policy = dataclasses.replace(beside.policy, config=config)
        config = policy.config
        if policy.chosen and beside is None:
            display.note(f"chosen: {'; '.join(map(sentence, policy.chosen))}")
        manifest["chosen"] = {choice.field: choice.value for choice in policy.chosen}
        check_host(config, policy.mesh)
        check_covered(policy.mesh, policy.sampler_mesh, processes)
        check_routes_sent(config, policy.mesh, processes.count)
        if config.teacher is not None:
            if not paths.exists(folder / "manifest.json"):
                check_teacher(config, tokenizer, parts.tables)
                needs = (row_of(parts.tables, "algos", one.objective).needs(one.objective) for one in config.stages)
                check_vocabulary(config, policy.cfg, needs)
            check_mesh_of_teacher(config, policy.mesh)  # a resume may have another
        if config.adapter is not None and (bare := without_adapters(policy.model.spec(policy.cfg))):
            display.note(f"LoRA has no adapters to {', '.join(bare)}: these weights stay frozen")
        display.phase("verifiers")
        scorer = open_scoring(
            config.scoring,
            parts.tables["verifiers"],
            parts.sources,
            folder / journal_name(processes.index),
            other_journals=other_journals(folder, processes.index),
            also=sorted(named_verifiers(source)),  # what stages learn from stored rows is not judged
            pool=None if beside is None else beside.scorer.pool,
        )
        stack.callback(scorer.close)
        classifier = None
        if config.reward is not None:
            answered = functools.partial(answered_conversations, source, config.data)
            classifier = open_reward_model(
                config.reward, policy.mesh, policy.program_cache, folder, display.phase, answered, processes
            )
        if config.judges:
            display.phase("judges")
        # One of several processes that is asked to stop ends its step first, as the others do.
        stops_alone = lambda: processes.count == 1 and stop.is_set()
        judges = open_judges(config.judges, folder, stops_alone, index=processes.index, count=processes.count)
        for opened_judge in judges:
            stack.callback(opened_judge.close)
        ends = [begins + stage.steps for begins, stage in zip(starts(config), config.stages)]
        run_state = open_run_state(
            folder / "checkpoints",
            keep=config.checkpoint.keep,
            pinned=ends[:-1],
            processes=processes,
            shared=shared,
        )
        stack.callback(run_state.close)
        key = place_on_mesh(jax.random.key(config.run.seed), replicated(policy.mesh))
        streams = open_streams(config, source, stored, tokenizer)
        devices = None
        if policy.sampler_mesh is not None:
            devices = SamplerDevices(policy.mesh, policy.sampler_mesh, processes)
            stack.callback(devices.close)
        stages = open_stages(policy, streams, scorer, classifier, judges, key, processes, devices)
        job = Job(
            policy=policy,
            folder=folder,
            source=source,
            stored=stored,
            stream=streams[0],
            stages=stages,
            scorer=scorer,
            classifier=classifier,
            evaluator=None if config.eval is None else open_evaluator(policy, key, processes),
            run_state=run_state,
            display=display,
            memory=PeakMemory() if beside is None else beside.memory,  # of one process
            stop=stop,
            key=key,
            processes=processes,
            opened=opened,
            speed=speed_of(config, policy.mesh, policy.sampler_mesh, policy.model, policy.cfg),
            run_clock=run_clock,
            profile=Profile(profile, profile_folder(folder, processes.index, processes.count), display.note),
            published=started.model if isinstance(started.model, Published) else None,
            origin=origin,
            publish=publish,
            address=address,
        )
        is_begun = paths.exists(folder / "manifest.json")
        if not is_begun and beside is None:  # another member has looked at the same data
            preflight_data(job)
        processes.barrier("opened")  # what a process has to refuse, it has refused before the run is written down
        if not is_begun:
            if processes.writer:
                write_run_metadata(started, parts, folder, manifest)
            processes.barrier("written")
        elif changes and processes.writer:
            job.record_change = functools.partial(record_change, started, parts, folder, manifest, changes)
        try:
            yield job
        finally:
            for resource in (job.metrics, job.rollouts, job.goodput):
                if resource is not None:
                    resource.close()


def stored_sources(config: Config, source: Source, open_: Callable[[Any], Source]) -> list[Source]:
    """Returns the examples of every Offline stage: of its own task, each of which is opened once, or of the run's.

    Args:
      source: of Config.task.
    """
    tasks = [stage.task for stage in config.stages if isinstance(stage, Offline)]
    opened: list[tuple[Any, Source]] = [(None, source), (config.task, source)]
    for task in tasks:
        if all(task != other for other, _ in opened):
            opened.append((task, open_(task)))
    return [next(one for other, one in opened if task == other) for task in tasks]


def of_their_own(config: Config, stored: Sequence[Source]) -> dict[str, Source]:
    """Returns the examples of the Offline stages that have a task of their own, by the name of the stage."""
    offline = [(name, s) for name, s in zip(stage_names(config.stages), config.stages) if isinstance(s, Offline)]
    return {name: one for (name, stage), one in zip(offline, stored) if stage.task is not None}


def data_fingerprint(config: Config, source: Source, stored: Sequence[Source]) -> str:
    """Returns what names the examples of a run: those of Config.task, and of stages with tasks of their own."""
    fingerprint = lambda one: getattr(one, "fingerprint", "")
    own = of_their_own(config, stored)
    if not own:
        return fingerprint(source)
    return digest_of("stages", fingerprint(source), *(f"{name}={fingerprint(one)}" for name, one in own.items()))


def open_streams(config: Config, source: Source, stored: Sequence[Source], tokenizer: Any) -> list[Stream]:
    """Returns the walks over the training split: first that of the prompts that Online stages sample, then one for each
    Offline stage, in their order, over its examples in `stored`."""
    count = 1 + len(stored)
    seeds = np.random.SeedSequence(config.run.seed).generate_state(max(count, 2))[:count]
    streams = [
        open_stream(one, tokenizer, config.data, seed=int(seed), split="train")
        for one, seed in zip((source, *stored), seeds)
    ]
    curricula = [stage.curriculum for stage in config.stages if isinstance(stage, Online) and stage.curriculum]
    if curricula:
        streams[0].outcomes = no_outcomes(tasks_of(source), curricula)
    return streams


def open_stages(
    policy: Policy,
    streams: Sequence[Stream],
    scorer: Scorer,
    classifier: OpenClassifier | None,
    judges: Sequence[OpenJudge],
    key: Array,
    processes: Processes = ONE,
    devices: SamplerDevices | None = None,
) -> tuple[OfflineStage | OnlineStage, ...]:
    """Returns the run's stages with all that their steps use.

    Args:
      devices: those that sample alone; None: the learner's sample too.
    """
    config, tables, mesh = policy.config, policy.parts.tables, policy.mesh
    everywhere = replicated(mesh)
    number = lambda x: place_on_mesh(np.float32(x), everywhere)
    names, stored = stage_names(config.stages), iter(streams[1:])
    table = stop_table_on_device(config.sampler, policy.tokenizer, mesh)
    stages: list[OfflineStage | OnlineStage] = []
    for name, stage, own in zip(names, config.stages, policy.programs.stages):
        common = dict(
            name=name,
            config=stage,
            objective=row_of(tables, "algos", stage.objective),
            programs=own,
            arrays=stage_arrays(stage, number),
            shape=programs.packed_shape(stage, config, tables, mesh),
        )
        if isinstance(stage, Offline):
            row = row_of(tables, "sources", stage.source)
            stages.append(
                OfflineStage(
                    **common,
                    stream=next(stored),
                    source=row,
                    tokenizer=policy.tokenizer,
                    mesh=mesh,
                    temperature=number(1),
                )
            )
            continue
        sources = reward_sources(stage, own, classifier, judges, processes)
        if stage.corrector is not None:
            sources = (*sources, open_corrector(stage, own, policy, key))
        components = (*scorer.component_names, *(name for source in sources for name in source.names))
        if strategy_of(stage.strategy).attempts > 1:
            components = (*components, FIRST_ATTEMPT)
        check_components(stage, components)
        if devices is not None:
            own.sample.devices = devices
        sampler = PromptSampler(
            program=own.sample,
            stream=streams[0],
            tokenizer=policy.tokenizer,
            mesh=mesh,
            place=functools.partial(rows_on_mesh, mesh),
            key=key,
            params=params_on_device(config.sampler, mesh),
            stop_table=table,
            prompts=stage.prompts,
            samples=stage.samples,
            prompt_length=config.data.prompt_length,
            components=components,
            curriculum=stage.curriculum,
            strategy=stage.strategy,
            segments=segments_of(stage, config),
            next_segment=own.next_segment,
            processes=processes,
            decodes_all=processes.writer and config.log.rollouts,
            devices=devices,
        )
        stages.append(
            OnlineStage(
                **common,
                sampler=sampler,
                scorer=scorer,
                sources=sources,
                temperature=number(config.sampler.temperature or 1.0),
            )
        )
    return tuple(stages)


def stage_arrays(stage: Stage, number: Callable[[Any], Any]) -> StageArrays:
    """Returns the floats of a stage's hyper-parameters, each as `number` makes it."""
    as_numbers = lambda tree: jax.tree.map(number, tree)
    return StageArrays(
        objective=as_numbers(stage.objective),
        optimizer=as_numbers(stage.optimizer),
        critic_optimizer=as_numbers(optimizers(stage).get(CRITIC)),
        router=as_numbers(stage.learner.router),
        shaping=as_numbers(stage.shaping) if isinstance(stage, Online) else None,
    )


def reward_sources(
    stage: Online,
    own: StagePrograms,
    classifier: OpenClassifier | None,
    judges: Sequence[OpenJudge],
    processes: Processes,
) -> tuple[RewardSource, ...]:
    """Returns the sources of a stage's rewards beside the verifiers."""
    scores_of = lambda role, state, packed: own.scores(weights_of(state.models, role), packed)

    def from_role(role: str, weight: float) -> RewardSource:
        return roles_source(f"role/{role}", weight, functools.partial(scores_of, role))

    def together(state: TrainState, packed: PackedBatch) -> Array:
        return own.combine([scores_of(role, state, packed) for role in stage.rewards])

    if stage.ensemble is None:
        from_roles = [from_role(role, weight) for role, weight in stage.rewards.items()]
    else:
        from_roles = [roles_source(ROLE_ENSEMBLE, next(iter(stage.rewards.values())), together)]
    from_judges = [judge_source(judge, processes) for judge in judges]
    return (*([] if classifier is None else [reward_model_source(classifier)]), *from_judges, *from_roles)


def open_corrector(stage: Online, own: StagePrograms, policy: Policy, key: Array) -> RewardSource:
    """Returns a stage's corrector as a source of rewards of tokens."""
    config, mesh, tokenizer, role = policy.config, policy.mesh, policy.tokenizer, stage.corrector.role
    longest, stream = correction_length(stage, config), place_on_mesh(np.uint32(TRAIN_STREAM), replicated(mesh))

    def draw(state: TrainState, visits: Sequence[Visit]) -> Rollout:
        prompts = place_prompts(visits, stage.prompts * stage.samples, longest, tokenizer.pad_id, mesh)
        weights, version = weights_of(state.models, role).params, state.models[role].version
        return own.correct(weights, prompts, key, stream, version, untruncated(None, mesh), None, None)

    written = written_corrections(stage, config.stages)
    return corrector_source(stage.corrector, written, draw, tokenizer, longest)


def open_evaluator(policy: Policy, key: Array, processes: Processes = ONE) -> Evaluator:
    """Returns what evaluates a policy on held-out prompts, of a configuration with an Eval section."""
    config = policy.config
    return Evaluator(
        program=policy.programs.sample_eval,
        tokenizer=policy.tokenizer,
        mesh=policy.mesh,
        key=key,
        params=untruncated(config.eval.temperature, policy.mesh),
        stop_table=stop_table_on_device(config.sampler, policy.tokenizer, policy.mesh),
        samples=config.eval.samples,
        batch=config.eval.batch,
        prompt_length=config.data.prompt_length,
        processes=processes,
    )


def open_tokenizer(config: Config, parts: Parts, source: Source, folder: Path, stop: Stop, processes: Processes) -> Any:
    """Returns the run's tokenizer: the one in the folder, or one trained on the run's own texts and saved there."""
    saved = folder / "tokenizer"
    # Before the manifest, a folder belongs to no run. A tokenizer that was lost since is trained again; the manifest
    # holds its fingerprint.
    if paths.exists(folder / "manifest.json") and paths.exists(saved):
        return load_tokenizer(saved, parts.tables["tokenizers"])
    texts = texts_of(source, config.data, TOKENIZER_TEXTS, stop)
    tokenizer = row_of(parts.tables, "tokenizers", config.tokenizer).build(config.tokenizer, texts)
    return shared_tokenizer(tokenizer, folder, processes)


def tokenizer_of_origin(origin: Origin, parts: Parts, folder: Path, processes: Processes) -> Any:
    """Returns the tokenizer of another run, saved in the folder of the one that begins with its weights."""
    saved = folder / "tokenizer"
    if paths.exists(folder / "manifest.json") and paths.exists(saved):
        return load_tokenizer(saved, parts.tables["tokenizers"])
    tokenizer = load_tokenizer(origin.folder / "tokenizer", parts.tables["tokenizers"])
    return shared_tokenizer(tokenizer, folder, processes)


def shared_tokenizer(tokenizer: Any, folder: Path, processes: Processes) -> Any:
    """Returns the tokenizer, which one process saves. Raises ProcessesDisagree where another has a different one."""
    processes.agree("tokenizer", {"tokenizer": tokenizer.fingerprint})
    if processes.writer:
        save_tokenizer(tokenizer, folder)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a run's tokenizer into its folder, unless the run has begun with one."""
    saved = folder / "tokenizer"
    if not (paths.exists(folder / "manifest.json") and paths.exists(saved)):
        paths.make_dir(saved)
        tokenizer.save(saved)


def preflight_data(job: Job) -> None:
    """Raises ValueError for data that a new run would stumble over later: no usable prompt, no stored row, nothing held
    out for evaluation, or nobody to judge the first. What it reads is read again by the run, from the start."""
    config, seed = job.config, job.config.run.seed
    open_ = lambda source=job.source: open_stream(
        source, job.tokenizer, config.data, seed=seed, split="train", stop=job.stop.is_set
    )
    stored = iter(job.stored)
    looked_at = min(len(job.source), ENOUGH_SEEN)
    for stage in job.stages:
        if isinstance(stage, OnlineStage) and stage.config.steps:
            job.scorer.rows_for(open_().next(looked_at)[0].example)
        elif isinstance(stage, OfflineStage):
            source, given = next(stored), (job.tokenizer, stage.shape.width)
            rows, left_out = stage.source.rows(stage.config.source, open_(source).next(LOOKED_AT), *given)
            if not len(rows.length):
                causes = ", ".join(f"{count} {cause}" for cause, count in sorted(left_out.items()))
                raise ValueError(
                    f"stage {stage.name}: none of the first {LOOKED_AT} examples gives a row to "
                    f"{type(stage.config.source).__name__} ({causes})"
                )
            # Of more rows some would be left out, and the ones that teach may be among those.
            if stage.objective.check_stored is not None and len(source) <= ENOUGH_SEEN:
                visits = open_(source).next(len(source))
                rows, _ = stage.source.rows(stage.config.source, visits, *given)
                stage.objective.check_stored(stage.config.objective, rows.value)
    if config.eval is not None:
        for visit in job.held_out(job.stop.is_set):
            job.scorer.rows_for(visit.example)


LOOKED_AT = 16  # examples of a source of stored rows that are tried before a run begins
