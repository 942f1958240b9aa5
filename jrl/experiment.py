"""The root Config of a run: a frozen section for each part of jrl, and the tables of algorithms, tasks and so on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jrl.algos import ALGOS
from jrl.algos.contract import Needs, Objective
from jrl.algos.reward_shaping import Shaping, check_shaping
from jrl.device.sharding import MeshShape
from jrl.learning.average import AVERAGE
from jrl.learning.critic import CRITIC
from jrl.learning.layout import Learner
from jrl.learning.optimizers import OPTIMIZERS
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import ConfiguredOptimizer
from jrl.learning.previous import PREVIOUS, is_previous
from jrl.models.adapters.lora import LoRA
from jrl.models.heads import VALUE
from jrl.models.pretrained.published import Published
from jrl.models.shape import Decoder
from jrl.rollout.corrector import Corrector
from jrl.rollout.ensembles import Ensemble
from jrl.rollout.pair_model import PairModel
from jrl.rollout.process_rewards import ProcessRewards
from jrl.rollout.rewards import RewardModel
from jrl.rollout.sampler import Sampler, check_temperature
from jrl.rollout.scoring import Scoring
from jrl.rollout.strategies import STRATEGIES
from jrl.rollout.strategies.contract import PLAIN, ConfiguredStrategy
from jrl.rollout.strategies.partial import num_segments
from jrl.run.checkpoints import Checkpoint
from jrl.run.report import Log
from jrl.tasks.data.comparisons import Comparisons
from jrl.tasks.data.corrections import Corrections
from jrl.tasks.data.curricula import CURRICULA, ConfiguredCurriculum
from jrl.tasks.data.prompts import Data
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.envs import ENVS
from jrl.tasks.judges import Judge
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.verifiers import VERIFIERS


def check_seed(seed: int, name: str) -> None:
    """Raises ValueError for a seed that JAX would wrap to the key of another seed."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} must be in [0, {2**32 - 1}], the range of JAX seeds; got {seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The randomness of a run."""

    seed: int = 0  # root of every random draw: weights, data order, tokens

    def __post_init__(self) -> None:
        check_seed(self.seed, "Run.seed")


MOST_SEQUENCES = 2**24  # per step; more is probably a typo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offline:
    """A stage that learns from stored rows: demonstrations, pairs, labels."""

    source: Any = dataclasses.field(metadata={"table": "sources"})  # where rows come from
    objective: Any = dataclasses.field(metadata={"table": "algos"})  # how the stage learns from them
    # Where its examples come from; None: Config.task. Held-out prompts and texts for a tokenizer come from Config.task.
    task: Any | None = dataclasses.field(default=None, metadata={"table": "envs"})
    steps: int = 100  # batches; each takes Learner.minibatches * epochs optimizer steps
    batch_size: int = 64  # rows per step, or pairs if the source gives pairs
    trains: str = "policy"  # the role that learns; another begins as a copy of the policy, with the heads it needs
    # Of the role that learns
    optimizer: Any = dataclasses.field(default_factory=AdamW, metadata={"table": "optimizers"})
    learner: Learner = dataclasses.field(default_factory=Learner)  # how a batch becomes optimizer steps
    name: str | None = None  # in metrics and checkpoints; None: the objective's, in lowercase

    def __post_init__(self) -> None:
        check_counts(self, ("steps", "batch_size"))
        check_role(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingMix:
    """Stored rows that the policy imitates in addition to learning from its samples (L17, PPO-ptx): the loss gets
    `coefficient` times the mean over their tokens of -log-prob."""

    source: Any = dataclasses.field(metadata={"table": "sources"})  # where rows come from; single rows, not pairs
    # Where its examples come from; None: Config.task.
    task: Any | None = dataclasses.field(default=None, metadata={"table": "envs"})
    batch_size: int = 64  # rows per step, split over Learner.minibatches like the samples
    coefficient: float = 0.05  # weight of the term

    def __post_init__(self) -> None:
        check_counts(self, ("batch_size",))
        if not self.coefficient > 0:
            raise ValueError(f"PretrainingMix.coefficient = {self.coefficient} must be above 0; leave "
                             "Online.pretraining out for no term")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Online:
    """A stage that samples completions from the policy, scores them, and trains the policy or a reward model on
    them."""

    objective: Any = dataclasses.field(metadata={"table": "algos"})  # how the stage learns from completions
    steps: int = 100  # each: sample, score, update
    prompts: int = 16  # B, prompts per step
    samples: int = 8  # G, completions per prompt
    # Update t trains on rollouts of version max(0, t - lag); above 1, the objective must correct for staleness.
    lag: int = 0
    # Most tokens of a completion in this stage, the stop token included; None: Sampler.completion_length.
    completion_length: int | None = None
    # How the completions of a prompt are drawn; None: each independently.
    strategy: Any | None = dataclasses.field(default=None, metadata={"table": "strategies"})
    # Chooses prompts by the outcomes of earlier visits; None: all of them in turn.
    curriculum: Any | None = dataclasses.field(default=None, metadata={"table": "curricula"})
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)  # role -> weight of its score in the reward
    judges: tuple[str, ...] | None = None  # names of the judges of Config.judges to use; None: all of them
    # Weights of the outputs of a reward head with several (AttributeRegression) in its score; None: their mean
    attribute_weights: tuple[float, ...] | None = None
    reset_reference_every: int | None = None  # steps between resets of the reference to the policy; None: never
    # Nats: where a batch has several updates, those that would begin with a mean KL (approx_kl_k3, from the weights
    # before the batch to the current ones) above this are left out. 0.015 is usual for PPO; None: no limit
    max_kl: float | None = None
    # Weight of the old reference in the new one at a reset; with a reset every step, a moving average. None: 0.
    reference_decay: float | None = None
    ensemble: Ensemble | None = None  # makes one score of those of the roles in `rewards`; None: their weighted sum
    # A role that rewrites every completion, and rewards the sampled tokens that it keeps; None: no role
    corrector: Corrector | None = None
    process: ProcessRewards | None = None  # a role that rewards the steps of every completion; None: no role
    # A role that compares every two completions of a prompt, and rewards each by its share of wins; None: no role
    pair_model: PairModel | None = None
    shaping: Shaping | None = None  # changes the reward before the objective reads it; None: unchanged
    # The role that learns. A reward model (OnlineBradleyTerry) begins as a copy of the policy, or as an earlier stage
    # left it.
    trains: str = "policy"
    # Of the role that learns
    optimizer: Any = dataclasses.field(default_factory=AdamW, metadata={"table": "optimizers"})
    # 'continued': it begins with the moments and the count of updates of the stage before, which trained the same role
    # with the same kind of optimizer; 'new': with none
    optimizer_state: Literal["new", "continued"] = "new"
    # The role that a separate critic is initialized from, such as 'policy' or 'reward'; 'critic': continue that of an
    # earlier stage. None: the policy has the value head, if the objective needs one.
    critic: str | None = None
    # Of a separate critic; None: `optimizer`, without average
    critic_optimizer: Any | None = dataclasses.field(default=None, metadata={"table": "optimizers"})
    critic_warmup: int = 0  # first steps of the stage, in which only the separate critic learns
    pretraining: PretrainingMix | None = None  # stored rows that the policy also imitates; None: none
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
                             f"most {MOST_SEQUENCES} are allowed")  # fmt: skip
        if self.reset_reference_every is not None and self.reset_reference_every < 1:
            raise ValueError(
                f"Online.reset_reference_every must be at least 1, or None; got {self.reset_reference_every}"
            )
        if self.max_kl is not None and not self.max_kl > 0:
            raise ValueError(f"Online.max_kl must be above 0, or None for no limit; got {self.max_kl}. 0.015 is usual")
        if self.max_kl is not None and self.learner.updates_per_batch == 1:
            raise ValueError(
                "Online.max_kl ends the updates of a batch, and Learner.epochs * Learner.minibatches is 1: the only "
                "update begins with a KL of 0; set Learner.epochs, or leave Online.max_kl out"
            )
        if self.reference_decay is not None:
            if self.reset_reference_every is None:
                raise ValueError("Online.reference_decay needs a reference that moves; set "
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
            raise ValueError(f"Online.{name} needs a separate critic; set Online.critic = 'policy', or leave it out")
        if self.critic_optimizer is not None and self.critic_optimizer.average is not None:
            raise ValueError("Online.critic_optimizer.average would be an average of the critic; set average in "
                             "Online.optimizer for one of the policy")  # fmt: skip


Stage = Offline | Online
MOST_STEPS = 10**9
MOST_LAG = 64  # draws in the queue
RESERVED_ROLES = ("reference", PREVIOUS, AVERAGE)


def is_reserved(role: str) -> bool:
    """Returns whether stages create a role of this name themselves."""
    return role in RESERVED_ROLES or is_previous(role)


def stored_rows_of(stage: Stage) -> Offline | PretrainingMix | None:
    """Returns the section of a stage that learns from stored rows: the stage itself, its pretraining mix, or None."""
    return stage if isinstance(stage, Offline) else stage.pretraining


def judges_of(stage: Stage, config: Config) -> tuple[Judge, ...]:
    """Returns the judges that score the completions of a stage."""
    return () if isinstance(stage, Offline) else tuple(judge for judge in config.judges if asks(stage, judge))


def asks(stage: Online, judge: Judge) -> bool:
    """Returns whether a stage uses a judge of the run."""
    return stage.judges is None or judge.name in stage.judges


def trains_online(stage: Stage) -> bool:
    """Returns whether a stage trains the policy on its own samples. Evaluations run before, during and after such
    stages."""
    return isinstance(stage, Online) and stage.trains == "policy"


def check_counts(stage: Any, names: Sequence[str]) -> None:
    """Raises ValueError for a count that is out of range."""
    for name in names:
        value, most = getattr(stage, name), MOST_STEPS if name == "steps" else MOST_SEQUENCES
        if not 1 <= value <= most:
            raise ValueError(f"{type(stage).__name__}.{name} must be 1 to {most}; got {value}")


def check_role(stage: Any) -> None:
    """Raises ValueError if a stage trains a role without a valid name, or one that stages create themselves."""
    if not stage.trains.isidentifier() or is_reserved(stage.trains) or stage.trains == CRITIC:
        raise ValueError(
            f"{type(stage).__name__}.trains is {stage.trains!r}; it must name a role such as 'policy' or 'reward', and "
            f"not one of {', '.join((*RESERVED_ROLES, CRITIC))}, which stages create"
        )


def configured_curriculum(stage: Stage, tables: Tables) -> ConfiguredCurriculum | None:
    """Returns the curriculum of a stage; None: it has none."""
    if isinstance(stage, Offline) or stage.curriculum is None:
        return None
    return ConfiguredCurriculum(row_of(tables, "curricula", stage.curriculum), stage.curriculum)


def configured_strategy(stage: Stage, tables: Tables) -> ConfiguredStrategy:
    """Returns the sampling strategy of a stage; PLAIN for one that has none, or samples nothing."""
    if isinstance(stage, Offline) or stage.strategy is None:
        return PLAIN
    return ConfiguredStrategy(row_of(tables, "strategies", stage.strategy), stage.strategy)


def completion_length(stage: Stage, config: Config) -> int:
    """Returns C of a stage: the tokens of its longest completion. Stages may differ, so that windows grow (F7)."""
    stage_length = stage.completion_length if isinstance(stage, Online) else None
    return config.sampler.completion_length if stage_length is None else stage_length


def longest_row(config: Config) -> int:
    """Returns the most tokens of a row of the run: of its longest prompt and completion."""
    return config.data.prompt_length + config.sampler.completion_length


def needs_of(stage: Stage, tables: Tables) -> Needs:
    """Returns what a stage's objective needs."""
    return row_of(tables, "algos", stage.objective).needs(stage.objective)


def stored_attributes(stage: Stage, objective: Objective) -> int | None:
    """Returns how many attributes of each row the data of a stage rate; None: none, or at most one number for each row
    of a pair."""
    needs = objective.needs(stage.objective)
    if not needs.row_values or objective.unit_size != 1:
        return None
    return len(needs.row_value_names) or needs.score_outputs


def attribute_weights_of(stages: Sequence[Stage], role: str, tables: Tables, reached: int) -> tuple[float, ...] | None:
    """Returns the weights that combine the outputs of a role's reward head into one score: those of the last stage that
    reads it with some, else those of the objective that trained it (Needs.score_weights); None: equal ones. The moving
    average has the weights of the role that it averages.

    Args:
      reached: the index of the stage that the head is of. A stage that trains the role anew, and those after it, read
        another head. Weights that do not fit its outputs are of an earlier head.
    """
    before, after = stages[: reached + 1], stages[reached + 1 :]
    averaged = [stage.trains for stage in before if stage.optimizer.average is not None]
    role = averaged[-1] if role == AVERAGE and averaged else role
    trained = [needs for stage in before if stage.trains == role and (needs := needs_of(stage, tables)).score]
    if not trained:
        return None
    same_head = (*before, *itertools.takewhile(lambda stage: stage.trains != role, after))
    readers = [stage for stage in same_head if isinstance(stage, Online) and role in stage.rewards]
    weights = [stage.attribute_weights for stage in readers if stage.attribute_weights is not None]
    fitting = [given for given in weights if len(given) == trained[-1].score_outputs]
    return fitting[-1] if fitting else trained[-1].score_weights


def segments_of(stage: Online, config: Config) -> int:
    """Returns the number of segments that a completion is sampled in, one per step."""
    return num_segments(stage.strategy, completion_length(stage, config))


def continues_optimizer(stage: Stage) -> bool:
    """Whether a stage begins with the optimizer state of the stage before."""
    return isinstance(stage, Online) and stage.optimizer_state == "continued"


def trained_before(role: str, stage: Stage, stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages before `stage` that train a role, the latest first."""
    earlier = itertools.takewhile(lambda candidate: candidate is not stage, stages)
    return [candidate for candidate in earlier if candidate.trains == role][::-1]


def correction_length(stage: Online, config: Config) -> int:
    """Returns the most tokens of a corrector's prompt, which contains a completion: a row of the run must have room for
    the prompt and the corrected completion."""
    return longest_row(config) - completion_length(stage, config)


def written_corrections(stage: Online, stages: Sequence[Stage]) -> Corrections:
    """Returns the rows on which the last earlier stage trained a stage's corrector. Raises ValueError without one."""
    role = stage.corrector.role
    for earlier in trained_before(role, stage, stages):
        if isinstance(earlier, Offline) and isinstance(earlier.source, Corrections):
            return earlier.source
    raise ValueError(f"Corrector.role is {role!r}, which no earlier stage trains on corrections; add one with "
                     f"Offline.source = @Corrections(), SFT and Offline.trains = {role!r}")  # fmt: skip


def question_length(config: Config) -> int:
    """Returns the most tokens of a question to a pair model, which holds two completions: a row of the run."""
    return longest_row(config)


def asked_comparisons(stage: Online, stages: Sequence[Stage]) -> Comparisons:
    """Returns how a stage's pair model is prompted. Raises ValueError if neither it nor an earlier stage says so."""
    pair_model = stage.pair_model
    if pair_model.comparisons is not None:
        return pair_model.comparisons
    for earlier in trained_before(pair_model.role, stage, stages):
        if isinstance(earlier, Offline) and isinstance(earlier.source, Comparisons):
            return earlier.source
    raise ValueError(f"PairModel.role is {pair_model.role!r}, which no earlier stage trains on comparisons; add one "
                     f"with Offline.source = @Comparisons(), SFT and Offline.trains = {pair_model.role!r}, or say how "
                     "it is asked: PairModel.comparisons = @Comparisons()")  # fmt: skip


def optimizers(stage: Stage) -> dict[str, Any]:
    """Returns the optimizer of every role that a stage trains, that of `trains` first (O5).

    A separate critic has its own learning rate, such as 1e-5 where the policy's is 1e-6.
    """
    if isinstance(stage, Offline) or stage.critic is None:
        return {stage.trains: stage.optimizer}
    critic_optimizer = stage.critic_optimizer or dataclasses.replace(stage.optimizer, average=None)
    return {stage.trains: stage.optimizer, CRITIC: critic_optimizer}


def configured_optimizers(stage: Stage, tables: Tables) -> dict[str, ConfiguredOptimizer]:
    """Returns the optimizer of every role that a stage trains, with its row."""
    configured = lambda config: ConfiguredOptimizer(row_of(tables, "optimizers", config), config)
    return {role: configured(config) for role, config in optimizers(stage).items()}


def trained_heads(stage: Stage, needs: Needs) -> dict[str, tuple[str, ...]]:
    """Returns the heads of every role that a stage trains. needs: those of its objective."""
    if CRITIC not in optimizers(stage):
        return {stage.trains: needs.heads}
    return {stage.trains: needs._replace(values=False).heads, CRITIC: (VALUE,)}


def stage_names(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Returns the name of every stage, all different: a second `sft` is `sft_2`, or has the next free number. A name
    that an Offline stage sets stays as it is."""
    fixed_names = [stage.name if isinstance(stage, Offline) else None for stage in stages]
    used, names = {*fixed_names}, []
    for stage, fixed_name in zip(stages, fixed_names):
        base = type(stage.objective).__name__.lower() if stage.name is None else stage.name
        numbered = (base if i == 1 else f"{base}_{i}" for i in itertools.count(1))
        names.append(next(name for name in numbered if name not in used) if fixed_name is None else fixed_name)
        used.add(names[-1])
    return tuple(names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluation on held-out prompts, before every Online stage that trains the policy, after it, and between."""

    prompts: int = 512  # held-out prompts, distinct, disjoint by hash from every training prompt
    samples: int = 1  # completions per prompt
    batch: int = 64  # prompts sampled at once
    every: int | None = None  # steps of an Online stage between evaluations; None: only before and after it
    temperature: float | None = 1.0  # None: greedy

    def __post_init__(self) -> None:
        if min(self.prompts, self.samples, self.batch) < 1 or (self.every is not None and self.every < 1):
            raise ValueError("Eval.prompts, samples, batch and every must be at least 1")
        check_temperature(self.temperature, "Eval.temperature")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a run."""

    task: Any = dataclasses.field(metadata={"table": "envs"})  # where examples come from
    data: Data  # how examples become prompts
    sampler: Sampler  # how completions are drawn
    stages: tuple[Offline | Online, ...]  # what is learned, in this order
    parts: tuple[str, ...] = ()  # Python files that add rows to the tables
    run: Run = dataclasses.field(default_factory=Run)  # the seed
    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)  # devices along each axis
    # Separate devices for sampling, in every process the ones after those of `mesh`: completions are sampled while the
    # policy learns, with weights that are Online.lag (at least 1) versions older. None: sampling and learning alternate
    # on `mesh`.
    sampler_mesh: MeshShape | None = None
    tokenizer: Any = dataclasses.field(
        default_factory=TOKENIZERS["Bytes"].config, metadata={"table": "tokenizers"}
    )  # text to ids
    # A decoder with random weights, a published model, or a model of your own.
    model: Decoder | Published | Any = dataclasses.field(default_factory=Decoder, metadata={"table": "models"})
    # A published model with the policy's tokenizer, in the role `teacher`; None: a stage trains it, or there is none.
    teacher: Published | None = None
    adapter: LoRA | None = None  # trains adapters over frozen weights; None: trains all weights
    scoring: Scoring = dataclasses.field(default_factory=Scoring)  # how completions are judged
    reward: RewardModel | None = None  # a classifier whose scores are added to the verifiers' rewards
    judges: tuple[Judge, ...] = ()  # language models behind an API whose scores are added, too
    eval: Eval | None = None  # evaluation on held-out prompts; None: none
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)  # when the run saves checkpoints
    log: Log = dataclasses.field(default_factory=Log)  # what is written and shown

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("Config.stages is empty; give it at least one stage, such as [@Online()]")
        names = [stage.name for stage in self.stages if stage.name is not None and isinstance(stage, Offline)]
        for stage in self.stages:
            if stage.name == "":
                default = "the name of the objective" if isinstance(stage, Offline) else repr(Online.name)
                raise ValueError(f"{type(stage).__name__}.name is empty; leave it out for {default}")
        if clashing := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages have the name {clashing[0]!r}; names of stages must differ")
        judges = [judge.name for judge in self.judges]
        if clashing := sorted({name for name in judges if judges.count(name) > 1}):
            raise ValueError(f"two judges have the name {clashing[0]!r}; give each its own Judge.name")
        for stage in self.stages:
            if unknown := sorted({*(getattr(stage, "judges", None) or ())} - {*judges}):
                raise ValueError(
                    f"Online.judges names {unknown[0]!r}, which is not in Config.judges. Available: "
                    f"{', '.join(judges) or 'none'}"
                )


# Fields that choose an implementation: same numbers up to rounding, same leaves in a checkpoint. They may change when a
# run is resumed, and the run reports it.
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
# All fields that may change when a run is resumed. ROUNDED and the meshes change numbers by rounding only. Limits at
# which a run stopped may be raised. The others change how long or how loudly it runs, never what it computes.
FREE = (
    "Data.on_bad_prompt",  # a run that stopped at a bad prompt may continue without it
    "Data.max_dropped_share",  # or that stopped at too many of them
    "Config.parts",  # the parts' sources are compared instead of their paths
    "Dataset.path",  # the name and the content of the file are compared instead
    "Jsonl.path",
    "Scoring.workers",
    "Scoring.stop_above",  # a run that stopped at these limits may continue with others
    "Scoring.stop_above_verifier_errors",
    "Judge.address",  # the same model may move to another server
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
    "MeshShape.*",  # the manifest names the mesh, and a resume on another one reports it
    "Config.sampler_mesh",
)

Tables = Mapping[str, Mapping[str, Any]]

TABLES: Tables = {"algos": ALGOS, "optimizers": OPTIMIZERS, "strategies": STRATEGIES, "curricula": CURRICULA,
                  "sources": SOURCES, "envs": ENVS, "verifiers": VERIFIERS, "tokenizers": TOKENIZERS,
                  "models": {}}  # fmt: skip


def config_classes(tables: Tables) -> dict[str, dict[str, type]]:
    """Returns name -> config class for each table, as the gin reader needs them."""
    return {table: {name: row.config for name, row in rows.items()} for table, rows in tables.items()}


def row_of(tables: Tables, table: str, config: Any) -> Any:
    """Returns the row whose config class `config` is an instance of."""
    return tables[table][type(config).__name__]
