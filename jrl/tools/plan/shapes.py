"""A run that is never opened: its programs and their arguments as shapes, on a mesh of devices that need not exist."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.algos.contract import Algorithm
from jrl.device.program_cache import Program, ProgramCache
from jrl.experiment import Config, row_of
from jrl.learning.pack import Shape
from jrl.plugins import Parts
from jrl.rollout import stop_strings
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.stop_strings import StopTable
from jrl.run import precompile, programs
from jrl.run.programs import Programs
from jrl.tools.plan.case import decoder_of_run
from jrl.types import PyTree


class Lowered(Program):
    """A program of the run that is lowered where the run would compile it."""

    lowered: Any = None

    def compile(self, *args: Any) -> Any:
        """Lowers for such arguments, and returns the result's shape."""
        self.lowered = self._jitted.lower(*args)
        return self.shape(*args)


class Lowering(ProgramCache):
    """The programs of a run, lowered and not compiled."""

    def program(self, name: str, fn: Any, **jit_options: Any) -> Program:
        self.programs[name] = Lowered(name, fn, self, jit_options)
        return self.programs[name]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What programs ask of a tokenizer. Which ids end and pad changes no shape."""

    vocab_size: int
    filled: int = 0  # ids in use; the embedding may have more rows
    end_ids: tuple[int, ...] = (1,)
    pad_id: int = 0


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What `jrl.run.precompile` asks of a job, where nothing is open. Numbers stand for arrays of their shape."""

    config: Config
    mesh: Mesh
    algorithm: Algorithm
    programs: Programs
    key: jax.ShapeDtypeStruct
    sampling_params: SamplingParams
    eval_sampling_params: SamplingParams | None
    stop_table: StopTable | None
    algo: PyTree
    adamw: PyTree
    sft_adamw: PyTree | None
    router: PyTree | None
    shape: Shape
    sft_shape: Shape | None


def lower(config: Config, parts: Parts, mesh: Mesh) -> dict[str, Any]:
    """Returns the lowered programs of a run's steps and of its start, by name: the functions that `jrl train` runs.

    Raises: ValueError where shapes do not divide over the mesh.
    """
    program_cache = Lowering()
    algorithm = row_of(parts.tables, "algos", config.algo)
    numbers = lambda tree: jax.tree.map(np.float32, tree)
    vocab_size = decoder_of_run(config).vocab_size
    model = programs.model_of(config, parts.tables)
    built = programs.build(config, algorithm, model, Vocabulary(vocab_size), mesh, program_cache)
    run = Shapes(
        config=config,
        mesh=mesh,
        algorithm=algorithm,
        programs=built,
        key=jax.eval_shape(jax.random.key, 0),
        sampling_params=sampling_params_shape(config),
        eval_sampling_params=None
        if config.eval is None
        else SamplingParams(_number(config.eval.temperature), None, None, None),
        stop_table=stop_shape(config, vocab_size),
        algo=numbers(config.algo),
        adamw=numbers(config.optimizer),
        sft_adamw=None if config.sft is None else numbers(config.sft.optimizer),
        router=numbers(config.learner.router),
        shape=programs.train_shape(config, mesh),
        sft_shape=None if config.sft is None else programs.sft_shape(config, mesh),
    )
    # The precision of a run; see job.open_policy.
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        state = built.init.compile(programs.abstract(run.key, mesh))
        if config.sft is not None:
            precompile.compile_sft(run, state)
        state = built.begin_rl.compile(state)
        precompile.compile_rl(run, state)
        if config.eval is not None:
            precompile.compile_eval(run, state)
    return {name: p.lowered for name, p in program_cache.programs.items() if p.lowered is not None}


def sampling_params_shape(config: Config) -> SamplingParams:
    """Returns the sampler's traced part."""
    s = config.sampler
    return SamplingParams(
        temperature=_number(s.temperature),
        top_k=None if s.top_k is None else np.int32(s.top_k),
        top_p=_number(s.top_p),
        min_p=_number(s.min_p),
    )


def stop_shape(config: Config, vocab_size: int) -> StopTable | None:
    """Returns the shape of the stop strings' automaton: its states do not depend on how tokens cut a text."""
    if not config.sampler.stop_strings:
        return None
    states = len(stop_strings.build(config.sampler.stop_strings, [b""]).accept)
    return StopTable(
        next=jax.ShapeDtypeStruct((states, vocab_size), np.int32), accept=jax.ShapeDtypeStruct((states,), bool)
    )


def _number(value: float | None) -> np.float32 | None:
    return None if value is None else np.float32(value)
