"""The stages of a run, each with everything that its steps use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.compatibility import check_components
from jrl.device.placement import place_on_mesh, rows_on_mesh
from jrl.device.processes import ONE, Processes
from jrl.device.sharding import replicated
from jrl.experiment import (
    Offline,
    Online,
    Stage,
    configured_curriculum,
    configured_strategy,
    optimizers,
    row_of,
    segments_of,
    stage_names,
    stored_rows_of,
)
from jrl.learning.critic import CRITIC
from jrl.learning.learner import KLLimit
from jrl.learning.step import StageArrays, StagePrograms
from jrl.rollout.collect import PromptSampler
from jrl.rollout.evaluate import Evaluator
from jrl.rollout.rewards import OpenClassifier
from jrl.rollout.sampler import params_on_device, stop_table_on_device, untruncated
from jrl.rollout.scoring import Scorer
from jrl.rollout.sources import RewardSource
from jrl.rollout.strategies.contract import FIRST_ATTEMPT, ConfiguredStrategy
from jrl.run import programs
from jrl.run.data import RunData, open_streams, showing_rows
from jrl.run.offline import OfflineStage, PretrainingRows, chances_of
from jrl.run.online import OnlineStage
from jrl.run.policy import Policy, root_key
from jrl.run.report.display import Display
from jrl.run.rewards import (
    Judgement,
    open_corrector,
    open_judgement,
    open_pair_model,
    open_process_rewards,
    reward_sources,
)
from jrl.run.sampler_devices import SamplerDevices
from jrl.tasks.data.stream import Stream
from jrl.tasks.stopping import Stop
from jrl.types import Array


class RunningStages(NamedTuple):
    """The stages of a run and what they have in common."""

    stages: tuple[OfflineStage | OnlineStage, ...]
    stream: Stream  # of the prompts that Online stages sample
    scorer: Scorer
    classifier: OpenClassifier | None  # the published reward model


@contextlib.contextmanager
def open_stages(
    policy: Policy,
    data: RunData,
    folder: Path,
    display: Display,
    stop: Stop,
    processes: Processes,
    pool: Any,
) -> Iterator[RunningStages]:
    """Opens the run's stages with everything that their steps use, and closes it at the end.

    Args:
      pool: verifier workers to use; None: new ones.
    """
    # Several processes that are asked to stop all finish the step first.
    stops_alone = lambda: processes.count == 1 and stop()
    with contextlib.ExitStack() as stack:
        judgement = stack.enter_context(
            open_judgement(policy, data.source, folder, display, stops_alone, processes, pool)
        )
        reads = showing_rows(stops_alone, display.phase)
        streams = open_streams(policy.config, policy.parts.tables, data.source, data.stored, policy.tokenizer, reads)
        devices = None
        if policy.sampler_mesh is not None:
            devices = SamplerDevices(policy.mesh, policy.sampler_mesh, processes)
            stack.callback(devices.close)
        stages = stages_of(policy, streams, judgement, processes, devices, reads)
        yield RunningStages(stages, streams[0], judgement.scorer, judgement.classifier)


def stages_of(
    policy: Policy,
    streams: Sequence[Stream],
    judgement: Judgement,
    processes: Processes,
    devices: SamplerDevices | None,
    stop: Stop,
) -> tuple[OfflineStage | OnlineStage, ...]:
    """Returns the run's stages.

    Args:
      streams: as `open_streams` returns them.
      devices: separate devices that sample; None: the learner's devices do.
      stop: polled at every example that is read here; StopRequested is raised if it returns True.
    """
    config, tables, mesh = policy.config, policy.parts.tables, policy.mesh
    prompts, *stored = streams
    key = root_key(policy)
    stored_streams = iter(stored)
    stop_table = stop_table_on_device(config.sampler, policy.tokenizer, mesh)
    stages: list[OfflineStage | OnlineStage] = []
    for name, stage, stage_programs in zip(stage_names(config.stages), config.stages, policy.programs.stages):
        common = dict(
            name=name,
            config=stage,
            objective=row_of(tables, "algos", stage.objective),
            programs=stage_programs,
            arrays=stage_arrays(stage, functools.partial(number_on, mesh)),
            shape=programs.packed_shape(stage, config, tables, mesh),
        )
        stream = None if stored_rows_of(stage) is None else next(stored_streams)
        if isinstance(stage, Offline):
            stages.append(offline_stage(common, policy, stream, stop))
        else:
            sources = sources_of(stage, stage_programs, policy, judgement, processes)
            strategy = configured_strategy(stage, tables)
            components = components_of(stage, strategy, judgement, sources)
            sampler = PromptSampler(
                program=stage_programs.sample,
                stream=prompts,
                tokenizer=policy.tokenizer,
                mesh=mesh,
                place=functools.partial(rows_on_mesh, mesh),
                key=key,
                params=params_on_device(config.sampler, mesh),
                stop_table=stop_table,
                prompts=stage.prompts,
                samples=stage.samples,
                prompt_length=config.data.prompt_length,
                components=components,
                curriculum=configured_curriculum(stage, tables),
                strategy=strategy,
                segments=segments_of(stage, config),
                next_segment=stage_programs.next_segment,
                processes=processes,
                decodes_all=processes.writer and config.log.rollouts,
                devices=devices,
            )
            if devices is not None:
                stage_programs.sample.devices = devices
            common |= dict(sampler=sampler, scorer=judgement.scorer, sources=sources)
            stages.append(online_stage(common, policy, stream))
    return tuple(stages)


def offline_stage(common: dict[str, Any], policy: Policy, stream: Stream, stop: Stop) -> OfflineStage:
    """Returns a stage of stored rows, with the fields in `common`."""
    stage, objective = common["config"], common["objective"]
    source = row_of(policy.parts.tables, "sources", stage.source)
    return OfflineStage(
        **common,
        stream=stream,
        chances=chances_of(objective, stage, source, stream, policy.tokenizer, common["shape"].width, stop),
        source=source,
        tokenizer=policy.tokenizer,
        mesh=policy.mesh,
        temperature=number_on(policy.mesh, 1),
    )


def online_stage(common: dict[str, Any], policy: Policy, stream: Stream | None) -> OnlineStage:
    """Returns a stage that samples, with the fields in `common`.

    Args:
      stream: of the stored rows that it also imitates; None: there are none.
    """
    stage, pretraining = common["config"], None
    if stage.pretraining is not None:
        pretraining = PretrainingRows(
            config=stage.pretraining,
            shape=programs.pretraining_shape(stage, policy.config, policy.mesh),
            stream=stream,
            source=row_of(policy.parts.tables, "sources", stage.pretraining.source),
            tokenizer=policy.tokenizer,
        )
    temperature = number_on(policy.mesh, policy.config.sampler.temperature or 1.0)
    return OnlineStage(**common, temperature=temperature, pretraining=pretraining)


def sources_of(
    stage: Online, stage_programs: StagePrograms, policy: Policy, judgement: Judgement, processes: Processes
) -> tuple[RewardSource, ...]:
    """Returns the sources of a stage's rewards besides the verifiers."""
    sources = reward_sources(stage, stage_programs, judgement, processes)
    if stage.corrector is not None:
        sources = (*sources, open_corrector(stage, stage_programs, policy))
    if stage.process is not None:
        sources = (*sources, open_process_rewards(stage, stage_programs, policy))
    if stage.pair_model is not None:
        sources = (*sources, open_pair_model(stage, stage_programs, policy))
    return sources


def components_of(
    stage: Online, strategy: ConfiguredStrategy, judgement: Judgement, sources: Sequence[RewardSource]
) -> tuple[str, ...]:
    """Returns the names of a stage's reward components. Raises ValueError if the stage reads one that is not there."""
    components = (*judgement.scorer.component_names, *(name for source in sources for name in source.names))
    if strategy.row.attempts > 1:
        components = (*components, FIRST_ATTEMPT)
    check_components(stage, components)
    return components


def number_on(mesh: Mesh, x: Any) -> Array:
    return place_on_mesh(np.float32(x), replicated(mesh))


def stage_arrays(stage: Stage, number: Callable[[Any], Any]) -> StageArrays:
    """Returns the floats of a stage's hyperparameters, each converted by `number`."""
    as_numbers = lambda tree: jax.tree.map(number, tree)
    arrays = StageArrays(
        objective=as_numbers(stage.objective),
        optimizer=as_numbers(stage.optimizer),
        critic_optimizer=as_numbers(optimizers(stage).get(CRITIC)),
        router=as_numbers(stage.learner.router),
    )
    if isinstance(stage, Offline):
        return arrays
    return arrays._replace(
        shaping=as_numbers(stage.shaping),
        reference_decay=as_numbers(stage.reference_decay),
        pretraining=None if stage.pretraining is None else number(stage.pretraining.coefficient),
        kl_limit=None if stage.max_kl is None else as_numbers(KLLimit(stage.max_kl, 0.0)),
    )


def open_evaluator(policy: Policy, processes: Processes = ONE) -> Evaluator:
    """Returns the evaluator of a policy on held-out prompts. The configuration must have an Eval section."""
    config = policy.config
    return Evaluator(
        program=policy.programs.sample_eval,
        tokenizer=policy.tokenizer,
        mesh=policy.mesh,
        key=root_key(policy),
        params=untruncated(config.eval.temperature, policy.mesh),
        stop_table=stop_table_on_device(config.sampler, policy.tokenizer, policy.mesh),
        samples=config.eval.samples,
        batch=config.eval.batch,
        prompt_length=config.data.prompt_length,
        processes=processes,
    )
