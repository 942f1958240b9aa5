"""The teacher of a run, from a published folder: its model config, its weights, and a check of its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl import paths
from jrl.algos.contract import Needs
from jrl.device.sharding import TRAIN, replicated, shardings
from jrl.experiment import Config, longest_row
from jrl.models import decoder
from jrl.models.contract import abstract, axes
from jrl.models.pretrained.published import check_folder, decoder_of, load
from jrl.models.pretrained.tokenizer import published_tokenizer
from jrl.models.shape import Decoder, check_divides, check_length, for_length
from jrl.run.checks import check_sequence
from jrl.types import ModelState, PyTree, TrainState

TEACHER = "teacher"  # the role


def teacher_shape(config: Config) -> Decoder:
    """Returns the shape of the model in Config.teacher. Raises ValueError for a run's folder."""
    if paths.exists(paths.readable_without_weights(config.teacher.path) / "manifest.json"):
        raise ValueError(f"Config.teacher: {config.teacher.path} is a run; `jrl export` writes its policy to a folder, "
                         "and that one can teach")  # fmt: skip
    cfg = decoder_of(config.teacher)[1]
    if cfg.attention == "auto":
        cfg = dataclasses.replace(cfg, attention="reference")
    return for_length(cfg, longest_row(config))


def check_mesh_of_teacher(config: Config, mesh: Mesh) -> None:
    """Raises ValueError for a mesh that the teacher cannot be sharded over."""
    cfg = teacher_shape(config)
    check_divides(cfg, mesh)
    check_sequence("teacher", cfg, mesh)


def check_teacher(config: Config, tokenizer: Any, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError for a folder that cannot teach: no published model, or another tokenizer.

    Args:
      tokenizer: the run's.
    """
    where = f"Config.teacher: {config.teacher.path}"
    check_folder(config.teacher)
    check_length(teacher_shape(config), longest_row(config))
    teacher_tokenizer = published_tokenizer(paths.readable_without_weights(config.teacher.path), tables["tokenizers"])
    if teacher_tokenizer is None:
        raise ValueError(f"{where} holds no tokenizer, so nothing says that its ids mean what the policy's mean; put "
                         "the one that it was trained with beside its weights")  # fmt: skip
    theirs, ours = teacher_tokenizer.token_bytes(), tokenizer.token_bytes()
    if theirs != ours:
        same = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
        raise ValueError(
            f"{where} has another tokenizer than the policy: {len(theirs)} tokens and {len(ours)}, of which the first "
            f"{same} are the same. A teacher judges the policy's own tokens; imitate its text instead (SFT), or take "
            "a teacher of the policy's family"
        )


def check_vocabulary(config: Config, policy: Any, needs: Iterable[Needs]) -> None:
    """Raises ValueError if distributions over different numbers of ids would be compared.

    Args:
      policy: the shape of the run's model. needs: of the stages' objectives.
    """
    cfg = teacher_shape(config)
    if cfg.vocab_size != policy.vocab_size and any(stage_needs.divergence is not None for stage_needs in needs):
        raise ValueError(
            f"Config.teacher: {config.teacher.path} has logits of {cfg.vocab_size} ids and the policy of "
            f"{policy.vocab_size}: their distributions cannot be compared. OnPolicyDistillation compares sampled "
            "tokens alone"
        )


def state_of(params: PyTree, version: Any) -> ModelState:
    """Returns the state of a model that is not trained."""
    return ModelState(params=params, frozen=None, heads={}, opt_state=None, version=version)


def abstract_teacher(cfg: Decoder, mesh: Mesh) -> ModelState:
    """Returns the state of a teacher of this shape, as shapes."""
    spec = decoder.spec(cfg)
    placed = shardings(axes(spec), mesh, TRAIN)
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    params = jax.tree.map(place, abstract(spec), placed)
    return state_of(params, jax.ShapeDtypeStruct((), np.int32, sharding=replicated(mesh)))


def open_teacher(config: Config, mesh: Mesh) -> ModelState:
    """Returns the state of the teacher with the weights of its folder, on `mesh`."""
    version = jax.device_put(np.int32(0), replicated(mesh))
    return state_of(load(config.teacher, mesh), version)


def with_teacher(state: TrainState, teacher: ModelState | None) -> TrainState:
    """Returns the state with the teacher added, if there is one. Both may be shapes."""
    return state if teacher is None else state.replace(models={**state.models, TEACHER: teacher})
