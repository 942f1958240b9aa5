"""Checks that the model, the meshes and the machine support the configuration, before anything is compiled."""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import Mesh

from jrl.device.host_memory import check_host_memory
from jrl.device.placement import processes_of
from jrl.device.sharding import EXPERT, OPTIONAL_AXES, SEQUENCE, batch_shards, rows_over_shards
from jrl.experiment import Config, Online, longest_row, optimizers
from jrl.learning.optimizer import keeps_on_host
from jrl.models.adapters.quantized import check_bytes
from jrl.models.attention.kernels import NO_KERNEL, check_ragged
from jrl.models.shape import Decoder, check_divides, check_length
from jrl.types import PyTree


def check_host(config: Config, mesh: Mesh) -> None:
    """Raises ValueError if training needs host memory that the devices do not have."""
    trained = [optimizer for stage in config.stages for optimizer in optimizers(stage).values()]
    on_host = ["AdamW.memory='host'"] * any(map(keeps_on_host, trained))
    if getattr(config.model, "remat", None) == "offload":
        on_host.append(f"{type(config.model).__name__}.remat='offload'")
    for binding in on_host:
        check_host_memory(binding, mesh.local_devices[0])


def check_routes_sent(config: Config, mesh: Mesh, processes: int) -> None:
    """Raises ValueError for replayed routes if some of the processes only sample."""
    if len(processes_of(mesh)) < processes and any(stage.learner.replays_routes for stage in config.stages):
        raise ValueError(
            "Learner.routes = 'replayed' where some processes only sample would send routes, hundreds of bytes a "
            "token, through the hosts with the completions; give every process devices of Config.mesh, or leave it out"
        )


def check_split(config: Config, mesh: Mesh, sampler_mesh: Mesh) -> None:
    """Raises ValueError if the prompts of a step do not divide over the devices that sample, or these shard weights
    along an axis that the learner's mesh does not have."""
    for axis in OPTIONAL_AXES:
        if sampler_mesh.shape[axis] > 1 and mesh.shape[axis] == 1:
            raise ValueError(
                f"Config.sampler_mesh has MeshShape.{axis} = {sampler_mesh.shape[axis]} and Config.mesh 1: weights are "
                f"published as they are cut over Config.mesh, so that every device that samples would hold all of what "
                f"{axis} divides; give Config.mesh that axis too, or sample with fsdp or tensor"
            )
    shards = {"Config.mesh": batch_shards(mesh), "Config.sampler_mesh": batch_shards(sampler_mesh)}
    for stage in config.stages:
        if isinstance(stage, Online) and rows_over_shards(stage.prompts, mesh) % batch_shards(sampler_mesh):
            raise ValueError(
                f"Online.prompts = {stage.prompts} cannot be divided over the batch shards (data x fsdp x expert x "
                f"sequence) of both meshes, {shards}; use a multiple of {math.lcm(*shards.values())}"
            )


def check_model(config: Config, cfg: Any, stored: PyTree, mesh: Mesh, sampler_mesh: Mesh | None = None) -> None:
    """Raises ValueError for a model that cannot train as configured, or not on these meshes.

    Args:
      cfg: of the policy: a Decoder, or a module of the user's own. stored: ParamSpecs of its weights as the run stores
        them. mesh: the learner's. sampler_mesh: separate devices for sampling.
    """
    if sampler_mesh is not None:
        check_split(config, mesh, sampler_mesh)
    for used_mesh in (mesh,) if sampler_mesh is None else (mesh, sampler_mesh):
        check_expert_axis(cfg, used_mesh)
        if isinstance(cfg, Decoder):
            check_divides(cfg, used_mesh)
        check_cache(config, cfg, used_mesh.shape["tensor"])
    if isinstance(cfg, Decoder):
        check_length(cfg, longest_row(config))
        check_bytes(stored, mesh)
    check_router(config, cfg)
    check_shared(config, cfg)
    check_sequence("model", cfg, mesh)
    check_logprobs(config, cfg)


def check_router(config: Config, cfg: Any) -> None:
    """Raises ValueError for a router loss, or routes to replay, if the model has no routers."""
    if any(stage.learner.router is not None for stage in config.stages) and getattr(cfg, "experts", None) is None:
        raise ValueError("Learner.router is for mixtures of experts, and this model has no experts; leave it out")
    replays = any(stage.learner.replays_routes for stage in config.stages)
    if replays and not (isinstance(cfg, Decoder) and cfg.experts is not None):
        raise ValueError(
            "Learner.routes = 'replayed' is for jrl's decoder with a mixture of experts, and this model has no "
            "experts; leave it out"
        )


def check_expert_axis(cfg: Any, mesh: Mesh) -> None:
    """Raises ValueError for a policy without experts, or a model of the user's own, on a mesh with an axis for them."""
    if mesh.shape[EXPERT] > 1 and not (isinstance(cfg, Decoder) and cfg.experts is not None):
        raise ValueError(
            f"MeshShape.expert = {mesh.shape[EXPERT]} is for jrl's decoder with a mixture of experts, which this model "
            "is not; use fsdp"
        )


def check_shared(config: Config, cfg: Any) -> None:
    """Raises ValueError for shared prefixes that the model's attention does not support."""
    for stage in config.stages:
        if isinstance(stage, Online):
            check_prefix_sharing(stage.learner.prefix_sharing, cfg)


def check_prefix_sharing(prefix_sharing: str, cfg: Any) -> None:
    """Raises ValueError for a kind of prefix sharing that the model's attention does not support."""
    attention = getattr(cfg, "attention", "reference")
    if prefix_sharing != "none" and attention == "splash":
        raise ValueError(
            f"Learner.prefix_sharing={prefix_sharing!r} needs attention='reference', or 'cudnn' on GPUs: with "
            f"{attention!r} a token sees its own segment only"
        )
    if prefix_sharing == "cross_row" and not isinstance(cfg, Decoder):
        raise ValueError("Learner.prefix_sharing='cross_row' needs jrl's decoder: a module of your own sees one row; "
                         "use 'in_row'")  # fmt: skip
    if prefix_sharing == "cross_row" and cfg.linear is not None:
        raise ValueError("Learner.prefix_sharing='cross_row' is not supported by linear attention, which sees one row; "
                         "use 'in_row'")  # fmt: skip


def check_sequence(name: str, cfg: Any, mesh: Mesh) -> None:
    """Raises ValueError for rows sharded over the axis `sequence` if the model cannot work on a part of a row.

    Args:
      name: of the model's field in Config. mesh: the learner's.
    """
    shares = f"MeshShape.sequence = {mesh.shape[SEQUENCE]}"
    if mesh.shape[SEQUENCE] == 1:
        return
    if not isinstance(cfg, Decoder):
        raise ValueError(f"{shares} divides rows, which jrl's decoder gathers keys and values for; Config.{name} is a "
                         "model of your own, which sees rows alone; use MeshShape.fsdp")  # fmt: skip
    if cfg.linear is not None:
        raise ValueError(f"{shares} divides rows, and linear attention of Config.{name} reads a row from its first "
                         "token to its last; use MeshShape.fsdp")  # fmt: skip
    if cfg.attention == "cudnn":
        raise ValueError(f"{shares} has fewer queries than keys on a device, which attention='cudnn' has never been "
                         "tried with; use attention='reference'")  # fmt: skip


def check_logprobs(config: Config, cfg: Any) -> None:
    """Raises ValueError for log-probs by the decoder's head if the model is not a Decoder."""
    for stage in config.stages:
        if stage.learner.logprobs == "vocab_parallel" and not isinstance(cfg, Decoder):
            raise ValueError(
                f"Learner.logprobs='vocab_parallel' reads the head of jrl's decoder, and {type(cfg).__name__} is a "
                "model of your own; use 'auto' or 'reference'"
            )


def check_cache(config: Config, cfg: Any, tensor: int) -> None:
    """Raises ValueError for a cache layout or kernel that the model does not support.

    Args:
      tensor: devices along the tensor axis of a mesh that samples.
    """
    kv_layout, attention = config.sampler.kv_layout, config.sampler.attention
    if kv_layout != "token_major" and not isinstance(cfg, Decoder):
        raise ValueError(
            f"Sampler.kv_layout={kv_layout!r} is a layout of jrl's cache; this model has a cache of its own"
        )
    if attention not in NO_KERNEL and not isinstance(cfg, Decoder):
        raise ValueError(f"Sampler.attention={attention!r} reads jrl's cache; this model has a cache of its own")
    if attention not in NO_KERNEL and cfg.dtype == "float64":
        raise ValueError(f"Sampler.attention={attention!r} computes in float32; float64 needs 'reference'")
    if attention == "ragged":
        check_ragged(cfg, tensor)
