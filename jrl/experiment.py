"""The root Config of a run: one frozen section for each part of the house, and the tables that fill the open places."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.device.sharding import MeshShape
from jrl.learning.learner import Learner
from jrl.learning.optimizer import AdamW
from jrl.models.adapters.lora import LoRA
from jrl.models.pretrained.published import Published
from jrl.models.shape import Decoder
from jrl.rollout.rewards import RewardModel
from jrl.rollout.sampler import Sampler
from jrl.rollout.scoring import Scoring
from jrl.run.checkpoints import Checkpoint
from jrl.run.report import Log
from jrl.tasks.data.prompts import Data
from jrl.tasks.data.supervised import PLACES
from jrl.tasks.envs import ENVS
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.verifiers import VERIFIERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What names the run."""

    seed: int = 0  # root of every random draw: weights, data order, tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """The reinforcement-learning loop."""

    steps: int = 100  # steps of RL
    prompts: int = 16  # B, prompts a step
    samples: int = 8  # G, completions of each prompt
    lag: Literal[0, 1] = 0  # update t trains on rollouts of version max(0, t - lag)

    def __post_init__(self) -> None:
        for name in ("prompts", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"Loop.{name} must be at least 1; got {getattr(self, name)}")
        if self.steps < 0:
            raise ValueError(f"Loop.steps must not be negative; got {self.steps}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFT:
    """The supervised warm start, on gold answers of the training split, before RL."""

    steps: int  # optimiser steps
    sequences: int = 64  # examples a step
    template: str = "{answer}"  # what is imitated: {answer}, or the {solution} that it was taken out of
    optimizer: AdamW = dataclasses.field(default_factory=AdamW)

    def __post_init__(self) -> None:
        if not any(place in self.template for place in PLACES):
            raise ValueError(f"SFT.template is {self.template!r}; it must hold {' or '.join(PLACES)}")
        if self.steps < 1 or self.sequences < 1:
            raise ValueError(f"SFT needs steps and sequences of at least 1; got {self.steps}, {self.sequences}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluation on held-out prompts, before RL, after it, and between."""

    prompts: int = 512  # held-out prompts, distinct, disjoint by hash from every training prompt
    samples: int = 1  # completions of each
    batch: int = 64  # prompts sampled at once
    every: int | None = None  # also after so many RL steps; None: only before and after
    temperature: float | None = 1.0  # None: greedy

    def __post_init__(self) -> None:
        if min(self.prompts, self.samples, self.batch) < 1 or (self.every is not None and self.every < 1):
            raise ValueError("Eval.prompts, samples, batch and every must be at least 1")
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError(f"Eval.temperature must be above 0, or None for greedy; got {self.temperature}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run."""

    task: Any = dataclasses.field(metadata={"table": "envs"})  # where examples come from
    data: Data  # how examples become prompts
    sampler: Sampler  # how completions are drawn
    algo: Any = dataclasses.field(metadata={"table": "algos"})  # how they are learned from
    parts: tuple[str, ...] = ()  # Python files that add rows to the tables, relative to where jrl is started
    run: Run = dataclasses.field(default_factory=Run)
    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)
    tokenizer: Any = dataclasses.field(
        default_factory=TOKENIZERS["Bytes"].config, metadata={"table": "tokenizers"}
    )  # text to ids
    model: Decoder | Published | Any = dataclasses.field(default_factory=Decoder, metadata={"table": "models"})
    adapter: LoRA | None = None  # what is trained beside frozen weights; None: all weights are trained
    sft: SFT | None = None  # warm start; None: RL from the first step
    scoring: Scoring = dataclasses.field(default_factory=Scoring)
    reward: RewardModel | None = None  # a classifier whose word is added to that of the verifiers
    optimizer: AdamW = dataclasses.field(default_factory=AdamW)
    learner: Learner = dataclasses.field(default_factory=Learner)
    loop: Loop = dataclasses.field(default_factory=Loop)
    eval: Eval | None = None
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    log: Log = dataclasses.field(default_factory=Log)


# Fields that say by what a run computes: the same numbers to a rounding, in the same leaves of a checkpoint. They may
# differ when it is resumed, which says so.
ROUNDED = ("AdamW.memory", "Sampler.attention")
# All fields that may differ. The others change how long or how loudly it runs, never what it computes.
FREE = (
    "Loop.steps",
    "Data.on_bad_prompt",  # a run that a prompt stopped may go on without it
    "Data.max_dropped_share",  # or that too many of them did
    "Config.parts",  # the parts' sources are compared instead of their paths
    "Scoring.workers",
    "Scoring.stop_above",  # a run that these stopped may go on with others
    "Scoring.stop_above_verifier_errors",
    "Checkpoint.*",
    "Log.*",
    *ROUNDED,
    "MeshShape.*",  # the manifest names the mesh, and a resume on another says so
)

Tables = Mapping[str, Mapping[str, Any]]

TABLES: Tables = {"algos": ALGOS, "envs": ENVS, "verifiers": VERIFIERS, "tokenizers": TOKENIZERS,
                  "models": {}}  # fmt: skip


def config_classes(tables: Tables) -> dict[str, dict[str, type]]:
    """Returns name -> config class for each table: what the reader of gin text needs."""
    return {table: {name: row.config for name, row in rows.items()} for table, rows in tables.items()}


def row_of(tables: Tables, table: str, config: Any) -> Any:
    """Returns the row whose config class `config` is an instance of."""
    return tables[table][type(config).__name__]


def check(config: Config, tables: Tables) -> None:
    """Raises ValueError for a combination that cannot run, before any device is touched."""
    row_of(tables, "algos", config.algo).check(
        config.algo,
        Facts(
            samples=config.loop.samples,
            lag=config.loop.lag,
            updates_per_batch=config.learner.updates_per_batch,
            truncated_sampling=any(
                v is not None for v in (config.sampler.top_k, config.sampler.top_p, config.sampler.min_p)
            ),
            greedy=config.sampler.temperature is None,
            max_completion=config.sampler.completion_length,
        ),
    )
    name = type(config.model).__name__
    if row_of(tables, "algos", config.algo).returns is not None and not isinstance(config.model, Decoder | Published):
        raise ValueError(
            f"{type(config.algo).__name__} trains a value head, which reads the hidden states of a Decoder and not "
            f"those of {name}; use an algorithm without one, such as GRPO"
        )
    if config.adapter is not None and not isinstance(config.model, Decoder | Published):
        raise ValueError(f"LoRA knows the matrices of a Decoder, and not those of {name}; leave Config.adapter out")
    if config.adapter is not None and config.adapter.base is not None and config.model.remat == "none":
        raise ValueError(
            f"LoRA.base = {config.adapter.base!r} keeps matrices in few bits, and without {name}.remat = 'layer' the "
            "backward pass would keep every one of them whole; set that, or LoRA.base = None"
        )
    if config.model.param_dtype == "bfloat16" and config.adapter is None:
        raise ValueError(
            f"{name}.param_dtype='bfloat16' cannot train: updates are smaller than its steps. "
            f"Use {name}.dtype='bfloat16' for the computation and keep float32 parameters, or train adapters beside "
            "frozen ones: Config.adapter = @LoRA()"
        )
    if config.eval is not None and config.data.held_out_every is None:
        raise ValueError("Eval needs held-out prompts: set Data.held_out_every, or Config.eval = None")
