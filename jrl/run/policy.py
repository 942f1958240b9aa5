"""A policy that can run: mesh, model, tokenizer and the programs of all stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jrl.device.program_cache import ProgramCache
from jrl.device.sharding import make_mesh, split_meshes
from jrl.experiment import Config
from jrl.models.attention.kernels import check_attention, check_kernel
from jrl.models.contract import Model, split_params
from jrl.models.shape import Decoder
from jrl.plugins import Parts
from jrl.run import programs
from jrl.run.checks import check_model
from jrl.run.kernels import Choice, choose_kernels
from jrl.run.programs import Programs


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
    platform = mesh.devices.flat[0].platform
    cache = ProgramCache(announce, platform if platform != "tpu" else mesh.devices.flat[0].device_kind)
    cfg = programs.model_config(config, tokenizer)
    model = programs.model_of(config, parts.tables)
    made_in = programs_in(cache)
    # The programs of a population are vmapped, which kernels are not.
    sampled_over = None if sampler_mesh is None else sampler_mesh.shape
    kernels_for = platform if made_in is cache else "cpu"
    config, chosen = choose_kernels(config, cfg, kernels_for, mesh.shape, sampled_over)
    cfg = programs.model_config(config, tokenizer)
    check_kernel("Sampler.attention", config.sampler.attention, platform)
    if isinstance(cfg, Decoder):
        check_attention(cfg, platform)
    frozen, trained = split_params(model.spec(cfg))
    check_model(config, cfg, trained if frozen is None else frozen, mesh, sampler_mesh)
    built = programs.build(config, parts.tables, model, tokenizer, mesh, made_in, sampler_mesh)
    return Policy(config, parts, mesh, tokenizer, cfg, model, cache, built, tuple(chosen), sampler_mesh)
