"""Lowers the programs of a run from the shapes of their arguments, on a mesh of devices that need not exist."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl import paths
from jrl.algos.reward_shaping import components_read
from jrl.device.precision import full_precision
from jrl.device.program_cache import Program, ProgramCache
from jrl.device.sharding import make_mesh, split_meshes
from jrl.experiment import (
    Config,
    Online,
    Stage,
    Tables,
    configured_strategy,
    judges_of,
    row_of,
    stage_names,
    stored_attributes,
)
from jrl.models.pretrained.published import classifier_of
from jrl.plugins import Parts
from jrl.rollout import stop_strings
from jrl.rollout.corrector import KEPT
from jrl.rollout.pair_model import component_names as component_names_of_pairs
from jrl.rollout.process_rewards import WORST_STEP
from jrl.rollout.rewards import RewardModel
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.scoring import component_names, rewards_spans
from jrl.rollout.sources import ROLE_ENSEMBLE
from jrl.rollout.stop_strings import StopTable
from jrl.rollout.strategies.contract import FIRST_ATTEMPT
from jrl.run import precompile, programs
from jrl.run.precompile import Inputs
from jrl.run.stages import stage_arrays
from jrl.run.teacher import with_teacher
from jrl.tasks.example import Message
from jrl.tasks.judges import score_names
from jrl.tools.plan import compiled
from jrl.tools.plan.case import decoder_of_run, evaluates
from jrl.tools.plan.chips import Topology


class Lowered(Program):
    """A program that is lowered when the run would compile it."""

    lowered: Any = None

    def compile(self, *args: Any) -> Any:
        """Lowers the program for these arguments and returns the shape of its result."""
        self.lowered = self._jitted.lower(*args)
        return self.shape(*args)


class Lowering(ProgramCache):
    """A program cache whose programs are lowered and not compiled."""

    def program(self, name: str, fn: Any, **jit_options: Any) -> Program:
        self.programs[name] = Lowered(name, fn, self, jit_options)
        return self.programs[name]


@dataclasses.dataclass(frozen=True)
class StubTokenizer:
    """The tokenizer fields that programs read. The values of end and pad ids do not change shapes. A text has one token
    per byte, the most that is possible."""

    vocab_size: int
    filled: int = 0  # ids in use; the embedding may have more rows
    end_ids: tuple[int, ...] = (1,)
    pad_id: int = 0

    def encode_prompt(self, messages: Iterable[Message]) -> list[int]:
        return [id for message in messages for id in (*message.content.encode(), *self.end_ids)]

    def token_bytes(self) -> list[bytes]:
        return [b""] * self.vocab_size


def meshes_of(config: Config, devices: Sequence[Any] | None = None) -> tuple[Mesh, Mesh | None]:
    """Returns the learner's mesh over the devices, and the mesh that only samples; None if the learner samples."""
    if config.sampler_mesh is None:
        return make_mesh(config.mesh, devices), None
    return split_meshes(config.mesh, config.sampler_mesh, devices)


def topology_meshes(config: Config, topology: Topology) -> tuple[Mesh, Mesh | None]:
    """Returns the meshes of a run over the devices of a topology. Slices that only sample are a separate topology:
    libtpu compiles no program for later slices without the first ("Slice is empty")."""
    if config.sampler_mesh is None or topology.slices == 1:
        return meshes_of(config, compiled.topology_devices(topology))
    learner, sampler = (
        make_mesh(shape, compiled.topology_devices(dataclasses.replace(topology, slices=shape.slices)))
        for shape in (config.mesh, config.sampler_mesh)
    )
    return learner, sampler


def lower(
    config: Config, parts: Parts, mesh: Mesh, sampler_mesh: Mesh | None = None, stage: str | None = None
) -> dict[str, Any]:
    """Returns {name: lowered program} of a run's start and its steps: the functions that `jrl train` runs.

    Args:
      sampler_mesh: the mesh of devices that only sample; None: `mesh` samples.
      stage: the name of the stage whose programs are lowered; None: those of all stages.

    Raises: ValueError if shapes do not divide over the mesh.
    """
    program_cache, names = Lowering(), stage_names(config.stages)
    planned = [stage is None or name == stage for name in names]
    with full_precision(), jax.set_mesh(mesh):
        inputs = inputs_of(config, parts, mesh, program_cache, sampler_mesh)
        state = with_teacher(inputs.programs.init.compile(inputs.key), inputs.programs.teacher)
        for i, planned_stage in enumerate(planned):
            if planned_stage:
                state = precompile.compile_stage(inputs, i, state, begun=False)
            else:
                state = inputs.programs.stages[i].begin.shape(state)
        if evaluates(config, itertools.compress(config.stages, planned)):
            precompile.compile_eval(inputs, state)
    lowered = {name: p.lowered for name, p in program_cache.programs.items() if p.lowered is not None}
    return {"init": lowered.pop("init"), **lowered}


def inputs_of(
    config: Config, parts: Parts, mesh: Mesh, program_cache: ProgramCache, sampler_mesh: Mesh | None = None
) -> Inputs:
    """Returns the abstract inputs of a run's programs. Concrete numbers stand for arrays of their shape."""
    vocab_size = decoder_of_run(config).vocab_size
    model = programs.model_of(config, parts.tables)
    built = programs.build(config, parts.tables, model, StubTokenizer(vocab_size), mesh, program_cache, sampler_mesh)
    evaluation = config.eval and SamplingParams(_number(config.eval.temperature), None, None, None)
    return Inputs(
        config=config,
        mesh=mesh,
        programs=built,
        key=programs.abstract(jax.eval_shape(jax.random.key, 0), mesh),
        sampling_params=sampling_params_shape(config),
        eval_params=evaluation,
        stop_table=stop_shape(config, vocab_size),
        arrays=tuple(stage_arrays(stage, np.float32) for stage in config.stages),
        strategies=tuple(configured_strategy(stage, parts.tables) for stage in config.stages),
        shapes=tuple(programs.packed_shape(stage, config, parts.tables, mesh) for stage in config.stages),
        components=tuple(map(functools.partial(components_of, config, parts.tables), config.stages)),
        rewards_tokens=tuple(
            rewards_spans(config.scoring, parts.tables["verifiers"])
            or any(getattr(stage, field, None) is not None for field in ("corrector", "process"))
            for stage in config.stages
        ),
        attributes=tuple(
            stored_attributes(stage, row_of(parts.tables, "algos", stage.objective)) for stage in config.stages
        ),
    )


def components_of(config: Config, tables: Tables, stage: Stage) -> tuple[str, ...]:
    """Returns the names of a stage's reward components: verifiers, the labels of a published reward model, judges,
    roles and others."""
    labels = () if config.reward is None else reward_components(config.reward)
    roles = tuple(f"role/{role}" for role in stage.rewards) if isinstance(stage, Online) else ()
    if isinstance(stage, Online) and stage.ensemble is not None:
        roles = (ROLE_ENSEMBLE,)
    corrected = (KEPT,) if isinstance(stage, Online) and stage.corrector is not None else ()
    judged_steps = (WORST_STEP,) if isinstance(stage, Online) and stage.process is not None else ()
    compared = isinstance(stage, Online) and stage.pair_model is not None
    compared = component_names_of_pairs(stage.samples) if compared else ()
    judged = itertools.chain.from_iterable(map(score_names, judges_of(stage, config)))
    first = [FIRST_ATTEMPT] if configured_strategy(stage, tables).row.attempts > 1 else []
    read = components_read(stage.shaping) if isinstance(stage, Online) else ()
    models = (*labels, *judged, *roles, *corrected, *judged_steps, *compared)
    return tuple(dict.fromkeys((*component_names(config.scoring), *models, *read, *first)))


def reward_components(reward: RewardModel) -> tuple[str, ...]:
    """Returns names for the components of a published reward model: one per label or, with a gate, the gated reward and
    its labels. The labels of a gate are read from the folder. If that is missing, the gate's coefficients define their
    number; without any, only the gated reward counts."""
    if reward.gate is None:
        return tuple(f"RewardModel/{i}" for i in range(len(reward.weights)))
    if paths.readable_file(reward.path, "config.json") is not None:
        labels = classifier_of(reward.published[0]).labels
    else:
        labels = tuple(map(str, range(len(reward.gate.coefficients))))
    return ("RewardModel", *(f"RewardModel/{label}" for label in labels))


def sampling_params_shape(config: Config) -> SamplingParams:
    """Returns the sampler's traced parameters."""
    s = config.sampler
    return SamplingParams(
        temperature=_number(s.temperature),
        top_k=None if s.top_k is None else np.int32(s.top_k),
        top_p=_number(s.top_p),
        min_p=_number(s.min_p),
    )


def stop_shape(config: Config, vocab_size: int) -> StopTable | None:
    """Returns the shape of the stop strings' automaton: its states do not depend on how a text is tokenized."""
    if not config.sampler.stop_strings:
        return None
    states = len(stop_strings.build(config.sampler.stop_strings, [b""]).accept)
    return StopTable(
        next=jax.ShapeDtypeStruct((states, vocab_size), np.int32), accept=jax.ShapeDtypeStruct((states,), bool)
    )


def _number(value: float | None) -> np.float32 | None:
    return None if value is None else np.float32(value)
