"""The root Config of a run: one frozen section for each part of the house, and the tables that fill the open places."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Needs, Objective
from jrl.algos.online_vpo import OnlineVPO
from jrl.algos.reward_shaping import Shaping, check_shaping, components_read, replaces_infeasible
from jrl.algos.xpo import XPO
from jrl.device.sharding import MeshShape
from jrl.learning.average import AVERAGE
from jrl.learning.critic import CRITIC
from jrl.learning.layout import Learner
from jrl.learning.optimizers.adafactor import Adafactor
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.muon import Muon
from jrl.learning.previous import PREVIOUS, is_previous
from jrl.models.adapters.lora import LoRA
from jrl.models.heads import REWARD, VALUE
from jrl.models.pretrained.published import Published
from jrl.models.shape import Decoder
from jrl.rollout.corrector import Corrector
from jrl.rollout.ensembles import Ensemble
from jrl.rollout.pair_model import PairModel
from jrl.rollout.process_rewards import ProcessRewards
from jrl.rollout.rewards import RewardModel
from jrl.rollout.sampler import Sampler
from jrl.rollout.scoring import Scoring, rewards_spans
from jrl.rollout.strategies import strategy_of
from jrl.rollout.strategies.branching import Branching
from jrl.rollout.strategies.contract import Setting
from jrl.rollout.strategies.opponent import MixtureOpponent
from jrl.rollout.strategies.partial import Partial, num_segments
from jrl.rollout.strategies.reference_samples import ReferenceSamples
from jrl.rollout.strategies.refinement import Refinement
from jrl.rollout.strategies.reset import Reset
from jrl.rollout.strategies.roll_in import RollIn
from jrl.rollout.strategies.roll_out import RollOut
from jrl.rollout.strategies.self_correction import SelfCorrection
from jrl.run.checkpoints import Checkpoint
from jrl.run.report import Log
from jrl.tasks.data.comparisons import Comparisons
from jrl.tasks.data.corrections import Corrections
from jrl.tasks.data.curricula import (
    AdaptiveLevel,
    DifficultyBand,
    HardFocus,
    LearningImpact,
    MostVaried,
    Pilot,
    Prioritized,
    ProgressMixing,
    SizeMixing,
)
from jrl.tasks.data.prompts import Data
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.envs import ENVS
from jrl.tasks.judges import Judge, Pairwise
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.verifiers import VERIFIERS


def check_seed(seed: int, name: str) -> None:
    """Raises ValueError for a seed of which JAX would make the key of another."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} must be in [0, {2**32 - 1}], the keys of JAX; got {seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The randomness of a run."""

    seed: int = 0  # root of every random draw: weights, data order, tokens

    def __post_init__(self) -> None:
        check_seed(self.seed, "Run.seed")


MOST_SEQUENCES = 2**24  # of a step: what a configuration may ask for without being taken for a typo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offline:
    """A stage that learns from stored rows: demonstrations, pairs, labels."""

    source: Any = dataclasses.field(metadata={"table": "sources"})  # where rows come from
    objective: Any = dataclasses.field(metadata={"table": "algos"})  # how the stage learns from them
    # Where its examples come from; None: Config.task. Texts for a tokenizer and held-out prompts are Config.task's.
    task: Any | None = dataclasses.field(default=None, metadata={"table": "envs"})
    steps: int = 100  # batches; each is learned from in Learner.minibatches * epochs optimizer steps
    batch_size: int = 64  # rows a step; of a source of pairs, pairs
    trains: str = "policy"  # the role that learns; another begins as a copy of the policy, with the heads it needs
    optimizer: AdamW | Muon | Adafactor = dataclasses.field(default_factory=AdamW)  # of the role that learns
    learner: Learner = dataclasses.field(default_factory=Learner)  # how a batch becomes optimizer steps
    name: str | None = None  # in metrics and checkpoints; None: the objective's, in small letters

    def __post_init__(self) -> None:
        check_counts(self, ("steps", "batch_size"))
        check_role(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingMix:
    """Stored rows that the policy imitates beside what it learns from its samples (L17, PPO-ptx): the loss gets
    `coefficient` times the mean over their tokens of -log-prob."""

    source: Any = dataclasses.field(metadata={"table": "sources"})  # where rows come from; single ones, no pairs
    # Where its examples come from; None: Config.task.
    task: Any | None = dataclasses.field(default=None, metadata={"table": "envs"})
    batch_size: int = 64  # rows a step, shared out over Learner.minibatches as the samples are
    coefficient: float = 0.05  # weight of the term

    def __post_init__(self) -> None:
        check_counts(self, ("batch_size",))
        if not self.coefficient > 0:
            raise ValueError(f"PretrainingMix.coefficient = {self.coefficient} must be above 0; leave "
                             "Online.pretraining out for no term")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Online:
    """A stage that samples completions of prompts from the policy, has them scored, and trains on them: the policy, or
    a reward model."""

    objective: Any = dataclasses.field(metadata={"table": "algos"})  # how the stage learns from completions
    steps: int = 100  # each: sample, score, update
    prompts: int = 16  # B, prompts a step
    samples: int = 8  # G, completions of each prompt
    # Update t trains on rollouts of version max(0, t - lag); above 1 the objective must bound what that does.
    lag: int = 0
    # Most tokens of a completion in this stage, the stop token included; None: as Sampler says, the longest of all.
    completion_length: int | None = None
    # How the completions of a prompt come about; None: each is drawn by itself.
    strategy: (
        Branching
        | MixtureOpponent
        | Partial
        | ReferenceSamples
        | Refinement
        | Reset
        | RollIn
        | RollOut
        | SelfCorrection
        | None
    ) = None
    # Which prompts are visited, by the outcomes of those before; None: all of them in turn.
    curriculum: (
        Prioritized
        | DifficultyBand
        | HardFocus
        | MostVaried
        | LearningImpact
        | SizeMixing
        | ProgressMixing
        | AdaptiveLevel
        | None
    ) = None
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)  # role -> weight of its score in the reward
    judges: tuple[str, ...] | None = None  # names of those of Config.judges that are asked; None: all of them
    # Of reward heads with several outputs (AttributeRegression): each one's share in the role's score; None: the mean
    attribute_weights: tuple[float, ...] | None = None
    reset_reference_every: int | None = None  # steps after which the reference is the policy again; None: it stays
    # Share of the old reference that stays in the new one then: every step a moving average; None: nothing stays.
    reference_decay: float | None = None
    ensemble: Ensemble | None = None  # one score from those of the roles in `rewards`; None: all of them are added up
    # A role that rewrites every completion, and rewards the sampled tokens that it keeps; None: none does
    corrector: Corrector | None = None
    process: ProcessRewards | None = None  # a role that rewards the steps of every completion; None: none does
    # A role that compares every two completions of a prompt, and rewards each by its share of wins; None: none does
    pair_model: PairModel | None = None
    shaping: Shaping | None = None  # of the reward, before the objective sees it; None: as it is scored
    # The role that learns; a reward model, by OnlineBradleyTerry, begins as a copy of the policy, or where an earlier
    # stage left it.
    trains: str = "policy"
    optimizer: AdamW | Muon | Adafactor = dataclasses.field(default_factory=AdamW)  # of the role that learns
    # The role that a critic of its own begins as a copy of, such as 'policy' or 'reward'; 'critic': that of an earlier
    # stage goes on. None: the policy has the value head, where the objective needs one.
    critic: str | None = None
    critic_optimizer: AdamW | Muon | Adafactor | None = None  # of that critic; None: as the policy's
    critic_warmup: int = 0  # steps at the beginning in which that critic learns alone
    pretraining: PretrainingMix | None = None  # stored rows that the policy imitates as well; None: none
    learner: Learner = dataclasses.field(default_factory=Learner)  # how a batch becomes optimizer steps
    name: str = "rl"  # in metrics, checkpoints and evaluations

    def __post_init__(self) -> None:
        check_counts(self, ("prompts", "samples"))
        check_role(self)
        if not 0 <= self.lag <= MOST_LAG:
            raise ValueError(f"Online.lag must be 0 to {MOST_LAG} versions; got {self.lag}")
        if not 0 <= self.steps <= MOST_STEPS:
            raise ValueError(f"Online.steps must be 0 to {MOST_STEPS}; got {self.steps}")
        if self.prompts * self.samples > MOST_SEQUENCES:
            raise ValueError(f"Online.prompts * Online.samples is {self.prompts * self.samples} sequences a step; at "
                             f"most {MOST_SEQUENCES} are taken")  # fmt: skip
        if self.reset_reference_every is not None and self.reset_reference_every < 1:
            raise ValueError(
                f"Online.reset_reference_every must be at least 1, or None; got {self.reset_reference_every}"
            )
        if self.reference_decay is not None:
            if self.reset_reference_every is None:
                raise ValueError("Online.reference_decay is of a reference that moves; set "
                                 "Online.reset_reference_every, to 1 for a moving average of every step")  # fmt: skip
            if not 0 < self.reference_decay < 1:
                raise ValueError(f"Online.reference_decay must be above 0 and below 1, or None; got "
                                 f"{self.reference_decay}")  # fmt: skip
        if bad := [role for role, weight in self.rewards.items() if not abs(weight) <= LARGEST_REWARD]:
            raise ValueError(f"Online.rewards has the weight {self.rewards[bad[0]]} for {bad[0]!r}; it must be finite, "
                             "in float32 too")  # fmt: skip
        if self.ensemble is not None and len(set(self.rewards.values())) != 1:
            raise ValueError(f"Online.ensemble makes one score of the roles in Online.rewards, {self.rewards}: give at "
                             "least one, and all of them the same weight, that of the score in the reward")  # fmt: skip
        if self.shaping is not None:
            check_shaping(self.shaping)
        if self.completion_length is not None and self.completion_length < 1:
            raise ValueError(f"Online.completion_length must be at least 1, or None; got {self.completion_length}")
        if not 0 <= self.critic_warmup <= MOST_STEPS:
            raise ValueError(f"Online.critic_warmup must be 0 to {MOST_STEPS}; got {self.critic_warmup}")
        if self.critic is None and (self.critic_warmup or self.critic_optimizer is not None):
            name = "critic_warmup" if self.critic_warmup else "critic_optimizer"
            raise ValueError(f"Online.{name} is of a critic of its own; set Online.critic = 'policy', or leave it out")
        if self.critic_optimizer is not None and self.critic_optimizer.average is not None:
            raise ValueError("Online.critic_optimizer.average would be an average of the critic; set average in "
                             "Online.optimizer, for the policy's")  # fmt: skip


Stage = Offline | Online
MOST_STEPS = 10**9
MOST_LAG = 64  # draws in the queue
RESERVED_ROLES = ("reference", PREVIOUS, AVERAGE)


def is_reserved(role: str) -> bool:
    """Whether stages create a role of this name themselves."""
    return role in RESERVED_ROLES or is_previous(role)


def stored_rows_of(stage: Stage) -> Offline | PretrainingMix | None:
    """Returns what of a stage learns from stored rows: all of it, a part of it, or nothing (None)."""
    return stage if isinstance(stage, Offline) else stage.pretraining


def judges_of(stage: Stage, config: Config) -> tuple[Judge, ...]:
    """Returns the judges that are asked about the completions of a stage."""
    return () if isinstance(stage, Offline) else tuple(judge for judge in config.judges if asks(stage, judge))


def asks(stage: Online, judge: Judge) -> bool:
    """Whether a stage asks a judge of the run."""
    return stage.judges is None or judge.name in stage.judges


def trains_online(stage: Stage) -> bool:
    """Whether a stage trains the policy on its own samples: evaluations are made around such stages and in them."""
    return isinstance(stage, Online) and stage.trains == "policy"


def check_counts(stage: Any, names: Sequence[str]) -> None:
    """Raises ValueError for a count that is out of range."""
    for name in names:
        value, most = getattr(stage, name), MOST_STEPS if name == "steps" else MOST_SEQUENCES
        if not 1 <= value <= most:
            raise ValueError(f"{type(stage).__name__}.{name} must be 1 to {most}; got {value}")


def check_role(stage: Any) -> None:
    """Raises ValueError where a stage trains what has no name, or what stages create themselves."""
    if not stage.trains.isidentifier() or is_reserved(stage.trains) or stage.trains == CRITIC:
        raise ValueError(
            f"{type(stage).__name__}.trains is {stage.trains!r}; it names a role such as 'policy' or 'reward', and "
            f"none of {', '.join((*RESERVED_ROLES, CRITIC))}, which stages create"
        )


def completion_length(stage: Stage, config: Config) -> int:
    """Returns C of a stage: the tokens of its longest completion. Stages may differ, so that windows grow (F7)."""
    own = stage.completion_length if isinstance(stage, Online) else None
    return config.sampler.completion_length if own is None else own


def stored_attributes(stage: Stage, objective: Objective) -> int | None:
    """Returns of how many attributes the data of a stage say what each row is worth; None: of none, at most one number
    of each row of a pair."""
    needs = objective.needs(stage.objective)
    if not needs.row_values or objective.unit_size != 1:
        return None
    return len(needs.row_value_names) or needs.score_outputs


def check_row_values(name: str, stage: Offline, objective: Objective) -> None:
    """Raises ValueError where the source of a stage gives other numbers of a row than the objective reads."""
    source, needs = type(stage.source).__name__, objective.needs(stage.objective)
    values, read = getattr(stage.source, "values", None), " and ".join(needs.row_value_names)
    if values is not None and not needs.row_values:
        raise ValueError(
            f"{name} does not read what the data say that an answer is worth; set {source}.values to None, or use "
            "another source"
        )
    if values is None and needs.row_values:
        raise ValueError(
            f"{name} reads {read}, which {source} does not give; see `jrl list sources`"
            if read
            else f"{name} reads what the data say that an answer is worth, and {source}.values does not name the "
            "entries that say it; set it to two, such as ('value', 'rejected_value')"
        )
    if read and not getattr(stage.source, "complete", True):
        raise ValueError(f"{name} reads {read} of every row; set {source}.complete = True")
    outputs = stored_attributes(stage, objective)
    if outputs is not None and len(values) != outputs:
        raise ValueError(
            f"{name} reads {outputs} numbers of a row, {read}, and {source}.values names {len(values)}; name the "
            "entries that hold them, in this order"
            if read
            else f"{name} has a reward head with {outputs} outputs, and {source}.values names {len(values)} "
            "attributes; name as many as it has outputs"
        )


def attribute_weights_of(stages: Sequence[Stage], role: str) -> tuple[float, ...] | None:
    """Returns by which weights the last stage that weighs the outputs of a role's reward head makes one score of them,
    of the moving average as of the role that it follows; None where no stage does."""
    followed = [stage.trains for stage in stages if stage.optimizer.average is not None]
    role = followed[-1] if role == AVERAGE and followed else role
    reading = [stage for stage in stages if isinstance(stage, Online) and role in stage.rewards]
    weights = [stage.attribute_weights for stage in reading if stage.attribute_weights is not None]
    return weights[-1] if weights else None


def segments_of(stage: Online, config: Config) -> int:
    """Returns in how many steps a completion is drawn."""
    return num_segments(stage.strategy, completion_length(stage, config))


def optimizers(stage: Stage) -> dict[str, Any]:
    """Returns the optimizer of every role that a stage trains, the role that it is about first (O5).

    A critic of its own has a learning rate of its own, such as 1e-5 beside the policy's 1e-6.
    """
    if isinstance(stage, Offline) or stage.critic is None:
        return {stage.trains: stage.optimizer}
    of_critic = stage.critic_optimizer or dataclasses.replace(stage.optimizer, average=None)
    return {stage.trains: stage.optimizer, CRITIC: of_critic}


def trained_heads(stage: Stage, needs: Needs) -> dict[str, tuple[str, ...]]:
    """Returns the heads of every role that a stage trains. needs: those of its objective."""
    if CRITIC not in optimizers(stage):
        return {stage.trains: needs.heads}
    return {stage.trains: needs._replace(values=False).heads, CRITIC: (VALUE,)}


def stage_names(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Returns the name of every stage, all different: a second `sft` is `sft_2`, or the next number that is free. Names
    that Offline stages were given are theirs."""
    given = [stage.name if isinstance(stage, Offline) else None for stage in stages]
    taken, names = {*given}, []
    for stage, own in zip(stages, given):
        name = type(stage.objective).__name__.lower() if stage.name is None else stage.name
        numbered = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
        names.append(next(free for free in numbered if free not in taken) if own is None else own)
        taken.add(names[-1])
    return tuple(names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluation on held-out prompts, before every Online stage that trains the policy, after it, and between."""

    prompts: int = 512  # held-out prompts, distinct, disjoint by hash from every training prompt
    samples: int = 1  # completions of each
    batch: int = 64  # prompts sampled at once
    every: int | None = None  # also after so many steps of an Online stage; None: only before and after
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
    stages: tuple[Offline | Online, ...]  # what is learned, in this order
    parts: tuple[str, ...] = ()  # Python files that add rows to the tables, relative to where jrl is started
    run: Run = dataclasses.field(default_factory=Run)  # the seed
    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)  # devices along each axis
    # Devices of their own for sampling, in every process the ones behind those of `mesh`: completions are drawn while
    # the policy learns, with weights that are Online.lag versions older, at least 1. None: on those of `mesh`, in turn
    # with learning.
    sampler_mesh: MeshShape | None = None
    tokenizer: Any = dataclasses.field(
        default_factory=TOKENIZERS["Bytes"].config, metadata={"table": "tokenizers"}
    )  # text to ids
    # A decoder with random weights, a published model, or a model of your own.
    model: Decoder | Published | Any = dataclasses.field(default_factory=Decoder, metadata={"table": "models"})
    # A published folder of the policy's tokenizer, in the role `teacher`; None: a stage trains it, or there is none.
    teacher: Published | None = None
    adapter: LoRA | None = None  # adapters to train over frozen weights; None: all weights are trained
    scoring: Scoring = dataclasses.field(default_factory=Scoring)  # how completions are judged
    reward: RewardModel | None = None  # a classifier whose scores are added to the verifiers' rewards
    judges: tuple[Judge, ...] = ()  # language models behind an API whose scores are added, too
    eval: Eval | None = None  # evaluation on held-out prompts; None: none
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)  # when the run saves itself
    log: Log = dataclasses.field(default_factory=Log)  # what is written and shown

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("Config.stages is empty; give it at least one stage, such as [@Online()]")
        names = [stage.name for stage in self.stages if stage.name is not None and isinstance(stage, Offline)]
        if "" in names:
            raise ValueError("Offline.name is empty; leave it out for the name of the objective")
        if clashing := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages have the name {clashing[0]!r}; names of stages must differ")
        judges = [judge.name for judge in self.judges]
        if clashing := sorted({name for name in judges if judges.count(name) > 1}):
            raise ValueError(f"two judges have the name {clashing[0]!r}; give each its own Judge.name")
        for stage in self.stages:
            if unknown := sorted({*(getattr(stage, "judges", None) or ())} - {*judges}):
                raise ValueError(
                    f"Online.judges names {unknown[0]!r}, which is no judge of Config.judges. Available: "
                    f"{', '.join(judges) or 'none'}"
                )


# Fields that say by what a run computes: the same numbers to a rounding, in the same leaves of a checkpoint. They may
# differ when it is resumed, which says so.
ROUNDED = (
    "AdamW.memory",
    "Decoder.attention",
    "Published.attention",
    "Sampler.attention",
    "Sampler.layers",
    "Learner.logprobs",
    "Learner.logprob_chunk",
    "Sampler.prefill_chunk",
)
# All fields that may differ. The others change how long or how loudly it runs, never what it computes.
FREE = (
    "Data.on_bad_prompt",  # a run that a prompt stopped may go on without it
    "Data.max_dropped_share",  # or that too many of them did
    "Config.parts",  # the parts' sources are compared instead of their paths
    "Dataset.path",  # the name and the content of the file are compared instead
    "Jsonl.path",
    "Scoring.workers",
    "Scoring.stop_above",  # a run that these stopped may go on with others
    "Scoring.stop_above_verifier_errors",
    "Judge.address",  # the same model may move
    "Judge.api_key_env",
    "Judge.concurrency",
    "Judge.requests_per_second",
    "Judge.tokens_per_minute",
    "Judge.timeout_seconds",
    "Judge.attempts",
    "Judge.backoff_seconds",
    "Judge.patience_seconds",
    "Judge.stop_above",
    "Judge.input_price",
    "Judge.output_price",
    "Checkpoint.*",
    "Log.*",
    *ROUNDED,
    "MeshShape.*",  # the manifest names the mesh, and a resume on another says so
    "Config.sampler_mesh",
)

Tables = Mapping[str, Mapping[str, Any]]

TABLES: Tables = {"algos": ALGOS, "sources": SOURCES, "envs": ENVS, "verifiers": VERIFIERS, "tokenizers": TOKENIZERS,
                  "models": {}}  # fmt: skip


def config_classes(tables: Tables) -> dict[str, dict[str, type]]:
    """Returns name -> config class for each table: what the reader of gin text needs."""
    return {table: {name: row.config for name, row in rows.items()} for table, rows in tables.items()}


def row_of(tables: Tables, table: str, config: Any) -> Any:
    """Returns the row whose config class `config` is an instance of."""
    return tables[table][type(config).__name__]


def check(config: Config, tables: Tables) -> None:
    """Raises ValueError for a combination that cannot run, before any device is touched."""
    roles: dict[str, frozenset[str]] = {"policy": frozenset()}  # that there are by then, and the heads of each
    curriculum = None
    for stage in config.stages:
        check_stage(stage, config, tables, roles)
        if stage.learner.replays_routes:
            check_routes(stage)
        if isinstance(stage, Online) and stage.curriculum is not None:
            if curriculum is not None and isinstance(stage.curriculum, Pilot):
                raise ValueError(
                    f"{type(stage.curriculum).__name__} chooses by its first steps, which are counted from the first "
                    f"stage that has a curriculum, and an earlier stage has {curriculum}; leave that one out"
                )
            curriculum = type(stage.curriculum).__name__
        needs = row_of(tables, "algos", stage.objective).needs(stage.objective)
        for role, heads in trained_heads(stage, needs).items() if stage.steps else ():  # without steps none begins
            roles[role] = roles.get(role, frozenset()).union(heads)
    check_model(config)
    check_sampler_mesh(config)
    check_teacher(config, tables, roles.keys())
    if config.eval is not None and config.data.held_out_every is None:
        raise ValueError("Eval needs held-out prompts: set Data.held_out_every, or Config.eval = None")


def check_stage(stage: Stage, config: Config, tables: Tables, earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError for a stage that cannot run.

    Args:
      earlier: roles that there are when it begins, and the heads of each.
    """
    objective, name = row_of(tables, "algos", stage.objective), type(stage.objective).__name__
    online = isinstance(stage, Online)
    sampled = objective.advantages is not None or objective.pairs is not None
    if online and not sampled:
        raise ValueError(f"{name} learns from stored rows, not from sampled ones; use it in an Offline stage")
    if online and objective.sequence_loss is not None and objective.pairs is None:
        raise ValueError(f"{name} has a loss over sequences, and no pairs that say which samples are compared")
    if online and objective.pairs is not None and stage.learner.prefix_sharing != "none":
        raise ValueError(f"{name} compares the samples of a prompt, which are packed whole into one row; set "
                         "Learner.prefix_sharing = 'none'")  # fmt: skip
    if not online:
        check_stored_rows(stage, objective, tables)
    objective.check(
        stage.objective,
        Facts(
            samples=stage.samples if online else 1,
            lag=stage.lag if online else 0,
            updates_per_batch=stage.learner.updates_per_batch,
            truncated_sampling=any(
                v is not None for v in (config.sampler.top_k, config.sampler.top_p, config.sampler.min_p)
            ),
            greedy=config.sampler.temperature is None,
            max_completion=completion_length(stage, config),
            attempts=strategy_of(stage.strategy).attempts if online else 1,
            branches=strategy_of(stage.strategy).branches(stage.strategy) if online else None,
            replaces_infeasible=online and replaces_infeasible(stage.shaping),
            without_spans=online
            and not (rewards_spans(config.scoring, tables["verifiers"]) and stage.process is stage.corrector is None),
            pair_model=online and stage.pair_model is not None,
        ),
    )
    if online:
        check_strategy(stage, objective, config, earlier)
    if online and stage.lag > 1 and not objective.corrects_staleness(stage.objective):
        raise ValueError(
            f"Online.lag = {stage.lag}, and {name} as configured has no bound on importance weights: tokens of weights "
            f"{stage.lag} versions older would count as if the newest had drawn them. Set {name}.importance = "
            "@TruncatedImportance() where it has that field, use DecoupledPPO, M2PO or IcePop, or Online.lag = 0 or 1"
        )
    if completion_length(stage, config) > config.sampler.completion_length:
        raise ValueError(
            f"Online.completion_length = {stage.completion_length} exceeds Sampler.completion_length = "
            f"{config.sampler.completion_length}, which is the longest of all stages; raise that one"
        )
    check_needs(stage, objective, config, earlier)
    if online:
        check_learner_of_samples(stage, objective)
    if online and stage.critic is not None:
        check_critic(stage, objective, earlier)
    asked = judges_of(stage, config)
    alone = [j for j in asked if isinstance(j.grading, Pairwise) and j.grading.against == "group"]
    if online and stage.samples == 1 and alone:
        raise ValueError(
            f"the judge {alone[0].name!r} compares the completions of a prompt, and Online.samples = 1 gives it one; "
            f"use at least 2, usually 8, or {type(alone[0].grading).__name__}.against = 'answer'"
        )
    if online and stage.curriculum is not None and config.data.on_bad_prompt == "drop":
        raise ValueError(
            "Online.curriculum does not go with Data.on_bad_prompt = 'drop': prompts are dropped and counted on the "
            "first walk through all of them, which a curriculum does not make; set 'refuse', and leave such prompts "
            "out of the data"
        )
    if online:
        check_reward_roles("Online.rewards", sorted(stage.rewards), earlier)
        check_attribute_weights(stage, config, tables)
    if online and stage.corrector is not None:
        check_corrector(stage, objective, config)
    if online and stage.process is not None:
        check_process_rewards(stage, objective, earlier)
    if online and stage.pair_model is not None:
        check_pair_model(stage, objective, config, earlier)
    if online and stage.pretraining is not None:
        check_pretraining(stage, tables)
    if online and stage.shaping is not None and stage.shaping.potential is not None:
        check_potential(stage, objective, config, tables)
    if online and isinstance(stage.strategy, RollOut) and rewards_spans(config.scoring, tables["verifiers"]):
        raise ValueError("RollOut learns from the tokens before the guide's words, and a verifier that rewards spans "
                         "rewards those words, which are not learned from; use one that rewards the completion, such "
                         "as Calibration for ConfidenceSpan")  # fmt: skip


def check_potential(stage: Online, objective: Objective, config: Config, tables: Tables) -> None:
    """Raises ValueError where there are no rewards of tokens that could be potentials, or nobody reads them."""
    spans = rewards_spans(config.scoring, tables["verifiers"])
    if not (spans or stage.process is not None or stage.corrector is not None):
        raise ValueError("Shaping.potential is of rewards of tokens, and nothing gives any; set Online.process or "
                         "Online.corrector, use a verifier that rewards spans, or leave it out")  # fmt: skip
    if not objective.needs(stage.objective).token_rewards:
        raise ValueError(f"Shaping.potential is of rewards of tokens, and {type(stage.objective).__name__} reads the "
                         "reward of a completion alone; use PPO, Reinforce or ReinforcePlusPlus")  # fmt: skip


def check_pretraining(stage: Online, tables: Tables) -> None:
    """Raises ValueError where the role that learns has no tokens to imitate, or a source gives rows to compare."""
    source, name = stage.pretraining.source, type(stage.pretraining.source).__name__
    if stage.trains != "policy":
        raise ValueError(f"Online.pretraining is imitated by the policy, and this stage trains {stage.trains!r}; leave "
                         "it out")  # fmt: skip
    row = row_of(tables, "sources", source)
    if row.unit_size != 1 or row.mismatched or getattr(source, "values", None) is not None:
        raise ValueError(f"PretrainingMix.source = @{name}() gives rows that are compared or rated; use "
                         "single ones that are to be imitated, such as @Demonstrations()")  # fmt: skip


def check_stored_rows(stage: Offline, objective: Objective, tables: Tables) -> None:
    """Raises ValueError where an objective cannot learn from what a source of stored rows gives."""
    name = type(stage.objective).__name__
    if objective.advantages is not None or objective.pairs is not None:
        raise ValueError(f"{name} learns from sampled rows; use it in an Online stage")
    source = row_of(tables, "sources", stage.source)
    if source.unit_size != objective.unit_size:
        takes = {1: "single rows", 2: "pairs", 3: "pairs with a rationale", 6: "pairs after three prompts",
                 8: "pairs of one user"}  # fmt: skip
        raise ValueError(
            f"{name} takes {takes[objective.unit_size]}, and {type(stage.source).__name__} gives "
            f"{takes[source.unit_size]}"
        )
    if source.mismatched != (objective.sequence_baseline is not None):
        raise ValueError(f"{name} learns from {'single answers' if objective.sequence_baseline else 'pairs'}, and "
                         f"{type(stage.source).__name__} gives {'single answers' if source.mismatched else 'pairs'}"
                         "; Labeled gives single answers, Preferences pairs")  # fmt: skip
    if getattr(stage.source, "strength", None) is not None and not objective.strengths:
        raise ValueError(f"{name} takes every preference for certain, and {type(stage.source).__name__}.strength "
                         "says how strong each is; use ConservativeDPO, or set it to None")  # fmt: skip
    check_row_values(name, stage, objective)


def check_strategy(stage: Online, objective: Objective, config: Config, earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError where a stage cannot draw its rows as it asks, or its objective cannot learn from such rows.

    Args:
      earlier: as in `check_stage`.
    """
    name = type(stage.objective).__name__
    longest = completion_length(stage, config)
    has_average = stage.optimizer.average is not None and stage.trains == "policy"
    roles = {*earlier, *(AVERAGE,) * has_average}
    roles |= {"reference"} if objective.needs(stage.objective).reference else set()
    setting = Setting(stage.samples, longest, config.sampler.stop_strings, frozenset(roles))
    strategy_of(stage.strategy).check(stage.strategy, setting)
    rewritten = strategy_of(stage.strategy).asked is not None
    if rewritten and not objective.corrects_staleness(stage.objective):
        raise ValueError(
            f"@{type(stage.strategy).__name__}() draws after other prompts than rows are learned after, and {name} as "
            f"configured has no bound on importance weights. Use RAFT or ExpertIteration, which imitate, or set {name}"
            ".importance = @TruncatedImportance() where it has that field"
        )
    if stage.learner.prefix_sharing != "none" and not strategy_of(stage.strategy).shares_prompt:
        raise ValueError(f"{type(stage.strategy).__name__} draws rows of a prompt that begin differently, which cannot "
                         "share a prefix; set Learner.prefix_sharing = 'none'")  # fmt: skip
    if stage.shaping is not None and strategy_of(stage.strategy).attempts > 1:
        raise ValueError("Online.shaping changes the reward of a row; with two attempts in it (SelfCorrection) the "
                         "first one would be compared unshaped; set Online.shaping = None")  # fmt: skip
    if stage.shaping is not None and isinstance(stage.strategy, MixtureOpponent):
        raise ValueError("Online.shaping reads how long the policy's own completions are, and an opponent's tokens "
                         "(MixtureOpponent) are not: wins would depend on it; set Online.shaping = None")  # fmt: skip
    if isinstance(stage.strategy, ReferenceSamples) != isinstance(stage.objective, XPO | OnlineVPO):
        raise ValueError(f"{name} with Online.strategy = {type(stage.strategy).__name__}: XPO and OnlineVPO compare "
                         "the policy's samples with the reference's, which @ReferenceSamples() draws, and no other "
                         "objective reads those; use the two together")  # fmt: skip
    if isinstance(stage.strategy, Partial):
        check_partial(stage, objective, config)


def check_needs(stage: Stage, objective: Objective, config: Config, earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError where the model or earlier stages do not have what an objective needs.

    Args:
      earlier: as in `check_stage`.
    """
    name = type(stage.objective).__name__
    needs, model = objective.needs(stage.objective), type(config.model).__name__
    if needs.heads and not isinstance(config.model, Decoder | Published):
        raise ValueError(
            f"{name} trains a {needs.heads[0]} head, which reads the hidden states of a Decoder and not those of "
            f"{model}; use an objective without one, such as GRPO"
        )
    if needs.row_values and isinstance(stage, Online):
        raise ValueError(f"{name} reads what the data say that an answer is worth (Needs.row_values), and samples have "
                         "no such number; use it in an Offline stage")  # fmt: skip
    if (needs.staleness or needs.task) and not isinstance(stage, Online):
        raise ValueError(f"{name} reads the age or the task of samples (Needs.staleness, Needs.task), which stored "
                         "rows do not have; use it in an Online stage")  # fmt: skip
    if needs.input_mix is not None and not isinstance(config.model, Decoder | Published):
        raise ValueError(f"{name} mixes the embeddings of tokens, which a Decoder reads and {model} does not; use "
                         f"{name}.share = None, or SFT")  # fmt: skip
    if isinstance(stage, Online) and stage.reset_reference_every is not None and not needs.reference:
        raise ValueError(
            f"Online.reset_reference_every = {stage.reset_reference_every}, and {name} as it is configured compares "
            "with no reference; give it a KL, such as GRPO.kl = 0.01, or leave it out"
        )
    if needs.has_teacher and config.teacher is None and "teacher" not in earlier:
        raise ValueError(
            f"{name} learns from the role 'teacher', which no earlier stage trains; set Config.teacher = @Published() "
            "with its folder, or train one with Offline.trains = 'teacher'"
        )
    check_reward_roles(f"{name}.models", needs.scored_by, earlier)


def check_learner_of_samples(stage: Online, objective: Objective) -> None:
    """Raises ValueError where another role than the policy would learn from the policy's samples as if they were its
    own, or the policy as a reward model."""
    name, needs = type(stage.objective).__name__, objective.needs(stage.objective)
    scores = needs.score and not needs.logprobs
    if scores and stage.trains == "policy":
        raise ValueError(f"{name} trains a reward model on samples of the policy; name its role: Online.trains = "
                         "'reward'")  # fmt: skip
    if stage.trains == "policy":
        return
    if not scores or objective.refill(stage.objective) is not None:
        raise ValueError(
            f"Online.trains = {stage.trains!r}: {name} trains on log-probs of the model that learns, which must be the "
            "policy that drew the samples; another role learns as a reward model, by OnlineBradleyTerry"
        )
    if stage.learner.replays_routes:
        raise ValueError(f"Learner.routes = 'replayed' replays the policy's routes, and {name} trains a model whose "
                         "routers choose for themselves; leave it out")  # fmt: skip
    if stage.trains in stage.rewards:
        raise ValueError(f"Online.rewards = {stage.rewards} would let {stage.trains!r} label the pairs that it learns "
                         "from; leave it out")  # fmt: skip
    if getattr(stage.objective, "ranks_by", None) == "outcome" and (stage.rewards or stage.shaping is not None):
        raise ValueError(f"{name}.ranks_by = 'outcome' takes pairs by the first verifier alone, and Online.rewards and "
                         "Online.shaping change the reward; leave them out, or set it to 'reward'")  # fmt: skip


def check_attribute_weights(stage: Online, config: Config, tables: Tables) -> None:
    """Raises ValueError where there is not one weight for each output of the reward heads that a stage reads."""
    if stage.attribute_weights is None:
        return
    count = len(stage.attribute_weights)
    if not stage.rewards:
        raise ValueError("Online.attribute_weights is of the reward models in Online.rewards, which names none; name "
                         "one, or leave it out")  # fmt: skip
    if not all(abs(weight) <= LARGEST_REWARD for weight in stage.attribute_weights):
        raise ValueError(f"Online.attribute_weights = {stage.attribute_weights} must be finite, in float32 too")
    outputs = {}
    for other in itertools.takewhile(lambda other: other is not stage, config.stages):
        needs = row_of(tables, "algos", other.objective).needs(other.objective)
        if needs.score:
            outputs[other.trains] = needs.score_outputs
    for role in stage.rewards:
        if outputs[role] != count:
            raise ValueError(f"Online.attribute_weights has {count} weights, and the reward head of {role!r} has "
                             f"{outputs[role]} outputs; give one weight for each, or None")  # fmt: skip


def correction_length(stage: Online, config: Config) -> int:
    """Returns the most tokens of a prompt with a completion in it, of which a corrector writes another: a row of the
    run has room for both."""
    return config.data.prompt_length + config.sampler.completion_length - completion_length(stage, config)


def written_corrections(stage: Online, stages: Sequence[Stage]) -> Corrections:
    """Returns the rows on which the last stage before trained a stage's corrector. Raises ValueError without one."""
    role = stage.corrector.role
    for other in reversed([*itertools.takewhile(lambda other: other is not stage, stages)]):
        if other.trains == role and isinstance(other, Offline) and isinstance(other.source, Corrections):
            return other.source
    raise ValueError(f"Corrector.role is {role!r}, which no earlier stage trains on corrections; add one with "
                     f"Offline.source = @Corrections(), SFT and Offline.trains = {role!r}")  # fmt: skip


def check_corrector(stage: Online, objective: Objective, config: Config) -> None:
    """Raises ValueError where nothing could be rewritten, or nothing would be learned from it."""
    name, length = type(stage.objective).__name__, completion_length(stage, config)
    written_corrections(stage, config.stages)
    if not objective.needs(stage.objective).token_rewards:
        raise ValueError(f"Online.corrector rewards tokens, and {name} reads the reward of a completion alone; use "
                         "PPO, Reinforce or ReinforcePlusPlus")  # fmt: skip
    if strategy_of(stage.strategy).attempts > 1:
        raise ValueError(f"Online.corrector rewrites one answer, and @{type(stage.strategy).__name__}() draws "
                         "two in a row; leave one of them out")  # fmt: skip
    if correction_length(stage, config) <= config.data.prompt_length:
        raise ValueError(
            f"Online.corrector reads a prompt and its answer and writes another answer, and there is room for one of "
            f"{length} tokens: set Online.completion_length = {length}, and Sampler.completion_length, the longest of "
            f"all stages, to at least {2 * length} and the tokens of Corrections.ask"
        )


def question_length(config: Config) -> int:
    """Returns the most tokens of a question which of two completions is better: a row of the run."""
    return config.data.prompt_length + config.sampler.completion_length


def asked_comparisons(stage: Online, stages: Sequence[Stage]) -> Comparisons:
    """Returns how a stage's pair model is asked. Raises ValueError where nothing says so."""
    pair_model = stage.pair_model
    if pair_model.comparisons is not None:
        return pair_model.comparisons
    for other in reversed([*itertools.takewhile(lambda other: other is not stage, stages)]):
        if other.trains == pair_model.role and isinstance(other, Offline) and isinstance(other.source, Comparisons):
            return other.source
    raise ValueError(f"PairModel.role is {pair_model.role!r}, which no earlier stage trains on comparisons; add one "
                     f"with Offline.source = @Comparisons(), SFT and Offline.trains = {pair_model.role!r}, or say how "
                     "it is asked: PairModel.comparisons = @Comparisons()")  # fmt: skip


def check_pair_model(
    stage: Online, objective: Objective, config: Config, earlier: Mapping[str, frozenset[str]]
) -> None:
    """Raises ValueError where there is no such role, nothing to compare, or nothing would be learned from it."""
    name, pair_model = type(stage.objective).__name__, stage.pair_model
    roles = {*earlier, *("reference",) * objective.needs(stage.objective).reference}
    roles |= {"teacher"} if config.teacher is not None else set()
    if pair_model.role not in roles:
        raise ValueError(f"PairModel.role is {pair_model.role!r}, which no earlier stage trains. Available: "
                         f"{', '.join(sorted(roles))}")  # fmt: skip
    asked_comparisons(stage, config.stages)
    if stage.samples == 1:
        raise ValueError("Online.pair_model compares the completions of a prompt, and Online.samples = 1 gives it one; "
                         "use at least 2, usually 8")  # fmt: skip
    if pair_model.weight == 0 and getattr(stage.objective, "preference", None) != "pair_model":
        raise ValueError(f"PairModel.weight is 0, and {name} does not read preferences: nothing would be learned from "
                         f"the pair model. Set the weight, or {name}.preference = 'pair_model' where it has that "
                         "field")  # fmt: skip
    if strategy_of(stage.strategy).attempts > 1:
        raise ValueError(f"Online.pair_model compares single answers, and @{type(stage.strategy).__name__}() draws "
                         "two in a row; leave one of them out")  # fmt: skip
    if stage.trains == pair_model.role and stage.trains != "policy":
        raise ValueError(f"Online.trains = {stage.trains!r} would let it label the pairs that it learns from; train "
                         "another role")  # fmt: skip
    longest = completion_length(stage, config)
    if 2 * longest >= question_length(config):
        raise ValueError(
            f"Online.pair_model reads a prompt and two answers, and there is no room for two of {longest} tokens: set "
            f"Online.completion_length = {longest}, and Sampler.completion_length, the longest of all stages, to at "
            f"least {2 * longest} and the tokens of Comparisons.ask"
        )


def check_process_rewards(stage: Online, objective: Objective, earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError where no role judges the steps of a stage, or nothing would be learned from it."""
    name = type(stage.objective).__name__
    check_reward_roles("ProcessRewards.role", [stage.process.role], earlier)
    if not objective.needs(stage.objective).token_rewards:
        raise ValueError(f"Online.process rewards tokens, and {name} reads the reward of a completion alone; use "
                         "PPO, Reinforce or ReinforcePlusPlus")  # fmt: skip
    if strategy_of(stage.strategy).attempts > 1:
        raise ValueError(f"Online.process judges the steps of one answer, and @{type(stage.strategy).__name__}() draws "
                         "two in a row; leave one of them out")  # fmt: skip
    if stage.trains == stage.process.role:
        raise ValueError(f"Online.trains = {stage.trains!r} is the role that Online.process judges steps by; train "
                         "another one")  # fmt: skip


def check_reward_roles(field: str, names: Sequence[str], earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError where a field names a role that is no reward model by then."""
    models = [role for role, heads in earlier.items() if REWARD in heads]
    for name in names:
        if name not in models:
            what = "has no reward head" if name in earlier else "no earlier stage trains"
            raise ValueError(
                f"{field} names the role {name!r}, which {what}; train a reward model, such as BradleyTerry with "
                f"Offline.trains = {name!r}. Reward models by then: {', '.join(models) or 'none'}"
            )


def check_partial(stage: Online, objective: Objective, config: Config) -> None:
    """Raises ValueError where completions that are drawn over several steps do not go with the rest of a stage."""
    name, partial = type(stage.objective).__name__, stage.strategy
    if stage.lag:
        raise ValueError(f"Online.lag = {stage.lag} does not go with Online.strategy = @Partial(), which declares the "
                         "version of every segment; leave it out")  # fmt: skip
    if objective.refill(stage.objective) is not None:
        raise ValueError(f"{name} as configured draws more prompts within a step, which @Partial() cannot: it draws "
                         f"completions over several. Set {name}.max_refills = None")  # fmt: skip
    oldest = segments_of(stage, config) - 1
    if oldest > 1 and not partial.newest_only and not objective.corrects_staleness(stage.objective):
        raise ValueError(
            f"Partial.tokens = {partial.tokens}: the first tokens of completions are {oldest} versions old, and {name} "
            f"as configured has no bound on importance weights; set {name}.importance = @TruncatedImportance() where it"
            " has that field, Partial.newest_only = True, or Partial.tokens to half of Sampler.completion_length"
        )


def check_routes(stage: Stage) -> None:
    """Raises ValueError where the rows of a stage have no routes of the policy that could be replayed."""
    if isinstance(stage, Offline):
        raise ValueError("Learner.routes = 'replayed' takes what the sampler recorded, and an Offline stage learns "
                         "from stored rows; set it for the stage that samples alone, such as rl/Learner.routes where "
                         "that stage has Online.learner = @rl/Learner()")  # fmt: skip
    if isinstance(stage.strategy, MixtureOpponent | ReferenceSamples | Refinement | RollOut):
        raise ValueError(
            f"Learner.routes = 'replayed' does not go with Online.strategy = @{type(stage.strategy).__name__}(): "
            "rows of it are drawn with other weights than the policy's, or after another prompt, where routers choose "
            "otherwise; leave it out"
        )


def check_components(stage: Online, components: Sequence[str]) -> None:
    """Raises ValueError where shaping reads a component of the reward that no source of it has."""
    for name in components_read(stage.shaping):
        if name not in components:
            near = difflib.get_close_matches(name, components, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Online.shaping reads the component {name!r}, which no source of rewards has.{hint} "
                             f"Available: {', '.join(components)}")  # fmt: skip


def check_critic(stage: Online, objective: Objective, earlier: Collection[str]) -> None:
    """Raises ValueError where a critic of its own has nothing to learn, or nothing to begin with."""
    name = type(stage.objective).__name__
    if not objective.needs(stage.objective).values:
        raise ValueError(f"Online.critic = {stage.critic!r}, and {name} reads no values; leave it out, or use PPO")
    if objective.value_loss is None:
        raise ValueError(f"Online.critic = {stage.critic!r}, and {name} has no value_loss beside its token_loss: the "
                         "value head must be on the policy; leave Online.critic out")  # fmt: skip
    if stage.critic not in earlier:
        raise ValueError(f"Online.critic names the role {stage.critic!r}, which no earlier stage trains. Available: "
                         f"{', '.join(sorted(earlier))}")  # fmt: skip


def check_sampler_mesh(config: Config) -> None:
    """Raises ValueError where devices of their own for sampling would never sample while the others learn."""
    if config.sampler_mesh is None:
        return
    online = [(name, stage) for name, stage in zip(stage_names(config.stages), config.stages)
              if isinstance(stage, Online)]  # fmt: skip
    if not online:
        raise ValueError("Config.sampler_mesh gives sampling its own devices, and no stage of the run samples; set it "
                         "to None")  # fmt: skip
    for name, stage in online:
        if isinstance(stage.strategy, Partial):
            raise ValueError(
                "Config.sampler_mesh does not go with Online.strategy = @Partial(): the last segment of a completion "
                "is drawn by the newest weights, which learning waits for; set it to None"
            )
        if stage.lag < 1:
            raise ValueError(
                f"Config.sampler_mesh needs Online.lag of at least 1, and that of stage {name!r} is {stage.lag}: with "
                "the newest weights nothing is sampled while they learn, and half of the devices would always wait. "
                "Set Online.lag = 1, or Config.sampler_mesh = None"
            )


def check_teacher(config: Config, tables: Tables, trained: Collection[str]) -> None:
    """Raises ValueError where Config.teacher has nobody to teach, or a stage trains that role too."""
    if config.teacher is None:
        return
    if "teacher" in trained:
        raise ValueError(
            "Config.teacher puts a published model in the role 'teacher', which a stage trains; leave one out"
        )
    needs = [row_of(tables, "algos", stage.objective).needs(stage.objective) for stage in config.stages]
    compared = [getattr(stage, "pair_model", None) for stage in config.stages]
    compares = any(pair_model is not None and pair_model.role == "teacher" for pair_model in compared)
    if not any(each.has_teacher for each in needs) and not compares:
        raise ValueError("Config.teacher is read by no objective of the run; use OnPolicyDistillation, GKD or "
                         "Distillation, set PairModel.role = 'teacher', or leave it out")  # fmt: skip


def check_model(config: Config) -> None:
    """Raises ValueError for weights that cannot be trained as they are kept."""
    name = type(config.model).__name__
    if config.adapter is not None and not isinstance(config.model, Decoder | Published):
        raise ValueError(f"LoRA supports the matrices of a Decoder, not those of {name}; leave Config.adapter out")
    if config.adapter is not None and config.adapter.base is not None and config.model.remat == "none":
        raise ValueError(
            f"LoRA.base = {config.adapter.base!r} quantizes frozen matrices, and without {name}.remat = 'layer' the "
            "backward pass would store all of them dequantized; set it, or LoRA.base = None"
        )
    check_master_weights(config)


def check_master_weights(config: Config) -> None:
    """Raises ValueError where weights that are trained would be in bfloat16 (O4): master weights are float32 or wider.

    From 1 on the numbers of bfloat16 are 2^-7 apart, and an update of less than half of that changes nothing:
    Adam's at a learning rate of 1e-6 never does. Frozen weights under adapters may be narrow.

    Source: mixed precision training, 1710.03740 section 3.1.
    """
    name = type(config.model).__name__
    if config.model.param_dtype == "bfloat16" and config.adapter is None:
        raise ValueError(
            f"{name}.param_dtype='bfloat16' cannot be trained: bfloat16 rounds small updates away. "
            f"Use {name}.dtype='bfloat16' for the computation and keep float32 parameters, or train adapters: "
            "Config.adapter = @LoRA()"
        )
