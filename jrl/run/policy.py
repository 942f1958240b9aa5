"""A policy that can run: mesh, model, tokenizer and the programs of all stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jrl.device.placement import place_on_mesh
from jrl.device.program_cache import ProgramCache
from jrl.device.sharding import make_mesh, replicated, split_meshes
from jrl.experiment import Config
from jrl.models.attention.kernels import check_attention, check_kernel
from jrl.models.contract import Model, split_params
from jrl.models.shape import Decoder
from jrl.plugins import Parts
from jrl.run import programs
from jrl.run.checks import check_model
from jrl.run.kernels import Choice, choose_kernels
from jrl.run.programs import Programs
from jrl.types import Array


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is needed to run a policy: no optimizer, no verifiers."""

    config: Config
    parts: Parts
    mesh: Mesh
    tokenizer: Any
    cfg: Any  # a Decoder, unless the model is the user's own
    model: Model
    program_cache: ProgramCache
    programs: Programs
    chosen: tuple[Choice, ...] = ()  # the values chosen for every 'auto' in the configuration
    sampler_mesh: Mesh | None = None  # separate devices that sample during training; None: those of `mesh` do


def root_key(policy: Policy) -> Array:
    """Returns the root of all random draws of a run, on its mesh."""
    return place_on_mesh(jax.random.key(policy.config.run.seed), replicated(policy.mesh))


def open_policy(
    config: Config,
    parts: Parts,
    tokenizer: Any,
    announce: Any = lambda what: None,
    programs_in: Callable[[ProgramCache], Any] = lambda cache: cache,
) -> Policy:
    """Returns mesh and programs; nothing is compiled yet. Raises ValueError if the mesh does not fit the devices.

    Args:
      programs_in: the program cache -> an object that makes programs in it, such as MemberPrograms.
    """
    sampler_mesh = None
    if config.sampler_mesh is None:
        mesh = make_mesh(config.mesh)
    else:
        mesh, sampler_mesh = split_meshes(config.mesh, config.sampler_mesh)
    jax.set_mesh(mesh)
    if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:
        raise ValueError(f"{type(config.model).__name__}.dtype='float64' needs JAX_ENABLE_X64=1 in the environment")
    platform = mesh.devices.flat[0].platform
    cache = ProgramCache(announce, platform if platform != "tpu" else mesh.devices.flat[0].device_kind)
    cfg = programs.model_config(config, tokenizer)
    model = programs.model_of(config, parts.tables)
    program_maker = programs_in(cache)
    # A population's programs are vmapped, which kernels do not support: it gets the choices for a CPU, without kernels.
    kernel_platform = platform if program_maker is cache else "cpu"
    sampler_shape = None if sampler_mesh is None else sampler_mesh.shape
    config, chosen = choose_kernels(config, cfg, kernel_platform, mesh.shape, sampler_shape)
    cfg = programs.model_config(config, tokenizer)
    check_kernel("Sampler.attention", config.sampler.attention, platform)
    if isinstance(cfg, Decoder):
        check_attention(cfg, platform)
    frozen, trained = split_params(model.spec(cfg))
    check_model(config, cfg, trained if frozen is None else frozen, mesh, sampler_mesh)
    run_programs = programs.build(config, parts.tables, model, tokenizer, mesh, program_maker, sampler_mesh)
    return Policy(config, parts, mesh, tokenizer, cfg, model, cache, run_programs, tuple(chosen), sampler_mesh)
