"""Checks that the options of a configuration go together, before any device is used."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Mapping, Sequence

import jax

from jrl.algos.contract import Facts, Needs, Objective
from jrl.algos.online_vpo import OnlineVPO
from jrl.algos.reward_shaping import below_zero, changes_rewards, components_read, replaces_infeasible
from jrl.algos.score import SCoRe
from jrl.algos.xpo import XPO
from jrl.experiment import (
    Config,
    Offline,
    Online,
    Stage,
    Tables,
    asked_comparisons,
    completion_length,
    configured_curriculum,
    configured_strategy,
    continues_optimizer,
    correction_length,
    is_reserved,
    judges_of,
    needs_of,
    optimizers,
    question_length,
    row_of,
    segments_of,
    stage_names,
    stored_attributes,
    trained_before,
    trained_heads,
    written_corrections,
)
from jrl.learning.average import AVERAGE
from jrl.learning.critic import CRITIC
from jrl.learning.optimizers.schedules import updates_until_zero
from jrl.learning.optimizers.settings import OptimizerSettings
from jrl.models.heads import REWARD
from jrl.models.pretrained.published import Published
from jrl.models.shape import Decoder
from jrl.rollout.corrector import KEPT
from jrl.rollout.pair_model import component_names as compared_names
from jrl.rollout.process_rewards import WORST_STEP
from jrl.rollout.scoring import component_names, rewards_spans
from jrl.rollout.sources import ROLE_ENSEMBLE
from jrl.rollout.strategies.contract import FIRST_ATTEMPT, ConfiguredStrategy, Setting
from jrl.rollout.strategies.opponent import MixtureOpponent
from jrl.rollout.strategies.partial import Partial
from jrl.rollout.strategies.reference_samples import ReferenceSamples
from jrl.rollout.strategies.roll_out import RollOut
from jrl.tasks.data.curricula import SizeMixing
from jrl.tasks.judges import Pairwise
from jrl.tasks.judges.judge import score_names
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.tasks.verifiers.contract import Limits

# rows in a unit -> what they are in jrl's sources; a user's own source may have units of another size
UNITS = {1: "single rows", 2: "pairs", 3: "pairs with a rationale", 6: "pairs after three prompts",
         8: "pairs of one user"}  # fmt: skip


def check(config: Config, tables: Tables) -> None:
    """Raises ValueError for a combination of options that cannot run, before any device is used."""
    roles: dict[str, frozenset[str]] = {"policy": frozenset()}  # role -> its heads, of earlier stages
    curriculum = None
    for stage in config.stages:
        check_stage(stage, config, tables, roles)
        if stage.learner.replays_routes:
            check_routes(stage, tables)
        if (configured := configured_curriculum(stage, tables)) is not None:
            if curriculum is not None and configured.row.pilot(configured.config):
                raise ValueError(
                    f"{type(configured.config).__name__} chooses by its first steps, which are counted from the first "
                    f"stage that has a curriculum, and an earlier stage has {curriculum}; leave that one out"
                )
            curriculum = type(configured.config).__name__
        needs = needs_of(stage, tables)
        for role, heads in trained_heads(stage, needs).items() if stage.steps else ():  # no steps: trains no role
            roles[role] = roles.get(role, frozenset()).union(heads)
    check_model(config)
    check_sampler_mesh(config)
    check_teacher(config, tables, roles.keys())
    if config.eval is not None and config.data.held_out_every is None:
        raise ValueError("Eval needs held-out prompts: set Data.held_out_every, or Config.eval = None")


def notes_of_start(config: Config, tables: Tables) -> list[str]:
    """Returns notes on what is legal and probably not meant, for the log of a run that begins."""
    accuracy = accuracy_note(config, tables)
    return [*([] if accuracy is None else [accuracy]), *schedule_notes(config)]


def accuracy_note(config: Config, tables: Tables) -> str | None:
    """Returns a note if the first verifier, which says what is correct, gives no reward above 0; else None. It is not
    refused: examples may name verifiers of their own."""
    if not config.scoring.verifiers:
        return None
    first = config.scoring.verifiers[0]
    if row_of(tables, "verifiers", first).limits(first).highest > 0:
        return None
    name = type(first).__name__
    return (f"{name}, the first of Scoring.verifiers, says what is correct, and gives no reward above 0: accuracies "
            "may always be 0. Put the verifier of the answer first")  # fmt: skip


def schedule_notes(config: Config) -> list[str]:
    """Returns a note on every stage whose learning rate falls to 0 before its last update. A stage that would begin at
    0 is refused."""
    notes = []
    for stage_name, stage in zip(stage_names(config.stages), config.stages):
        for role, optimizer in optimizers(stage).items():
            begun, updates = 0, stage.steps * stage.learner.updates_per_batch
            if role == stage.trains:
                begun, updates = updates_before(stage, config), updates_of(stage)
            until_zero, name = updates_until_zero(optimizer.schedule), type(optimizer.schedule).__name__
            if until_zero is not None and updates and until_zero < begun + updates:
                limited = role == stage.trains and fewest_updates_of(stage) < updates
                notes.append(
                    f"the learning rate of the role {role} falls to 0 ({name}) after {until_zero - begun:,} of "
                    f"{'up to' if limited else 'the'} {updates:,} updates of stage {stage_name}, and the rest change "
                    f"nothing: let the schedule end with the stage, or set {name}.end above 0"
                )
    return notes


def updates_of(stage: Stage) -> int:
    """Returns the number of updates that a stage makes of the role that it trains; the most, if it has a KL limit."""
    warmup = stage.critic_warmup if isinstance(stage, Online) else 0
    return max(stage.steps - warmup, 0) * stage.learner.updates_per_batch


def fewest_updates_of(stage: Stage) -> int:
    """Returns the fewest updates that a stage makes of the role that it trains, if none is skipped: a KL limit may
    leave only the first of every batch."""
    limited = isinstance(stage, Online) and stage.max_kl is not None
    return updates_of(stage) // stage.learner.updates_per_batch if limited else updates_of(stage)


def updates_before(stage: Stage, config: Config) -> int:
    """Returns the smallest count of updates that the optimizer of a stage begins with: that of the stages it continues,
    if none was skipped."""
    if not continues_optimizer(stage):
        return 0
    before = [s for s in itertools.takewhile(lambda s: s is not stage, config.stages) if s.steps][-1]
    return fewest_updates_of(before) + updates_before(before, config)


def check_stage(stage: Stage, config: Config, tables: Tables, earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError for a stage that cannot run.

    Args:
      earlier: the roles that exist when it begins, and the heads of each.
    """
    objective = row_of(tables, "algos", stage.objective)
    if isinstance(stage, Offline):
        check_offline(stage, objective, config, tables, earlier)
    else:
        check_online(stage, objective, config, tables, earlier)


def check_offline(
    stage: Offline, objective: Objective, config: Config, tables: Tables, earlier: Mapping[str, frozenset[str]]
) -> None:
    """Raises ValueError for an Offline stage that cannot run.

    Args:
      earlier: as in `check_stage`.
    """
    check_stored_rows(stage, objective, tables)
    objective.check(stage.objective, facts_of(stage, config, samples=1, lag=0))
    check_needs(stage, objective, config, earlier)


def check_online(
    stage: Online, objective: Objective, config: Config, tables: Tables, earlier: Mapping[str, frozenset[str]]
) -> None:
    """Raises ValueError for an Online stage that cannot run.

    Args:
      earlier: as in `check_stage`.
    """
    name, strategy = type(stage.objective).__name__, configured_strategy(stage, tables)
    if objective.advantages is None and objective.pairs is None:
        raise ValueError(f"{name} learns from stored rows, not from sampled ones; use it in an Offline stage")
    if objective.sequence_loss is not None and objective.pairs is None:
        raise ValueError(f"{name} has a loss over sequences, but no `pairs` to say which samples it compares")
    if objective.pairs is not None and stage.learner.prefix_sharing != "none":
        raise ValueError(f"{name} compares the samples of a prompt, which are packed whole into one row; set "
                         "Learner.prefix_sharing = 'none'")  # fmt: skip
    spans, verifiers = rewards_spans(config.scoring, tables["verifiers"]), config.scoring.verifiers
    facts = facts_of(stage, config, samples=stage.samples, lag=stage.lag)._replace(
        attempts=strategy.row.attempts,
        branches=strategy.row.branches(strategy.config),
        replaces_infeasible=replaces_infeasible(stage.shaping),
        without_spans=not (spans and stage.process is stage.corrector is None),
        pair_model=stage.pair_model is not None,
        rows=stage.prompts * stage.samples,
        held_out_outcome=bool(verifiers) and verifiers[0].weight <= 0,
        not_rewarded=not_rewarded(stage, config, strategy),
        changes_rewards=changes_rewards(stage.shaping),
        negative_rewards=(*negative_components(stage, config, tables, strategy), *below_zero(stage.shaping)),
        potential=stage.shaping is not None and stage.shaping.potential is not None,
    )
    objective.check(stage.objective, facts)
    if facts.held_out_outcome:
        check_held_out(stage)
    check_strategy(strategy, stage, objective, config, earlier)
    if stage.lag > 1 and not objective.corrects_staleness(stage.objective):
        raise ValueError(
            f"Online.lag = {stage.lag}, and {name} as configured has no bound on importance weights: tokens of weights "
            f"{stage.lag} versions older would count as if the newest had drawn them. Set {name}.importance = "
            "@TruncatedImportance() where it has that field, use DecoupledPPO, M2PO or IcePop, or Online.lag = 0 or 1"
        )
    if completion_length(stage, config) > config.sampler.completion_length:
        raise ValueError(
            f"Online.completion_length = {stage.completion_length} exceeds Sampler.completion_length = "
            f"{config.sampler.completion_length}, which is the maximum of all stages; raise that one"
        )
    check_needs(stage, objective, config, earlier)
    check_learner_of_samples(stage, objective, config)
    check_kl_limit(stage, objective)
    if continues_optimizer(stage):
        check_continued_optimizer(stage, config, tables)
    if stage.critic is not None:
        check_critic(stage, objective, earlier)
    check_judges(stage, config)
    if stage.curriculum is not None and config.data.on_bad_prompt == "drop":
        raise ValueError(
            "Online.curriculum does not go with Data.on_bad_prompt = 'drop': prompts are dropped and counted on the "
            "first pass over all of them, which a curriculum does not make; set 'refuse', and remove such prompts from "
            "the data"
        )
    check_reward_sources(stage, objective, config, tables, earlier)
    if stage.pretraining is not None:
        check_pretraining(stage, tables)
    if stage.shaping is not None and stage.shaping.potential is not None:
        check_potential(stage, objective, config, tables)
    if isinstance(stage.strategy, RollOut) and spans:
        raise ValueError("RollOut learns from the tokens before the guide's words, and a verifier that rewards spans "
                         "rewards those words, which are not learned from; use one that rewards the completion, such "
                         "as Calibration for ConfidenceSpan")  # fmt: skip


def check_held_out(stage: Online) -> None:
    """Raises ValueError if a stage learns from the first verifier's verdicts by its shaping or its curriculum. The
    first verifier only watches."""
    held_out = ("and the first in Scoring.verifiers has no weight above 0: the policy would learn from a held-out "
                "verdict. Put one with a weight first, or use")  # fmt: skip
    if stage.shaping is not None and stage.shaping.group_length is not None:
        raise ValueError(f"Shaping.group_length rewards what the first verifier calls right, {held_out} "
                         "Shaping.length_penalty, which reads no verdict")  # fmt: skip
    reads_outcomes = stage.curriculum is not None and not isinstance(stage.curriculum, SizeMixing)
    if reads_outcomes and stage.trains == "policy":
        raise ValueError(f"Online.curriculum = @{type(stage.curriculum).__name__}() chooses prompts by what the first "
                         f"verifier calls right, {held_out} @SizeMixing(), which reads no verdict")  # fmt: skip


def facts_of(stage: Stage, config: Config, *, samples: int, lag: int) -> Facts:
    """Returns the facts that an objective's check reads, for an Offline or an Online stage."""
    sampler = config.sampler
    return Facts(
        samples=samples,
        lag=lag,
        updates_per_batch=stage.learner.updates_per_batch,
        truncated_sampling=sampler.top_k is not None or (sampler.top_p or 1) < 1 or (sampler.min_p or 0) > 0,
        greedy=sampler.temperature is None,
        max_completion=completion_length(stage, config),
    )


def not_rewarded(stage: Online, config: Config, strategy: ConfiguredStrategy) -> tuple[str, ...]:
    """Returns the names of a stage's reward components whose weight in the reward is not above 0."""
    return tuple(name for name, weight in component_weights(stage, config, strategy).items() if not weight > 0)


def negative_components(stage: Online, config: Config, tables: Tables, strategy: ConfiguredStrategy) -> tuple[str, ...]:
    """Returns the names of a stage's reward components that can lower its reward below 0: those with a weight below 0,
    and verifiers whose declared range begins below 0. What has no declared range counts as positive."""
    ranges = {}
    for name, verifier in zip(component_names(config.scoring), config.scoring.verifiers):
        limits = row_of(tables, "verifiers", verifier).limits(verifier)
        ranges[name] = (0.0 if limits.lowest == Limits().lowest else limits.lowest, limits.highest)
    weights = component_weights(stage, config, strategy)
    return tuple(name for name, weight in weights.items() if min(weight * x for x in ranges.get(name, (0.0, 1.0))) < 0)


def component_weights(stage: Online, config: Config, strategy: ConfiguredStrategy) -> dict[str, float]:
    """Returns the weight of every reward component of a stage. A gate's labels have names that only its folder knows:
    they are called "the labels of RewardModel.gate". Verifiers that examples name are left out."""
    weights = dict(zip(component_names(config.scoring), (verifier.weight for verifier in config.scoring.verifiers)))
    for judge in judges_of(stage, config):
        score, *parts = score_names(judge)
        weights |= {score: judge.weight, **dict.fromkeys(parts, 0)}
    roles = {f"role/{role}": weight for role, weight in stage.rewards.items()}
    weights |= roles if stage.ensemble is None else {ROLE_ENSEMBLE: min(roles.values(), default=1)}
    if config.reward is not None:
        weights["RewardModel"] = min(config.reward.weights, default=1)
        if config.reward.gate is not None:
            weights["the labels of RewardModel.gate"] = 0
    if stage.pair_model is not None:
        wins, *preferences = compared_names(stage.samples)
        weights |= {wins: stage.pair_model.weight, **dict.fromkeys(preferences, 0)}
    watching = {KEPT: stage.corrector, WORST_STEP: stage.process}
    weights |= dict.fromkeys((name for name, source in watching.items() if source is not None), 0)
    if strategy.row.attempts > 1:
        weights[FIRST_ATTEMPT] = 0
    return weights


def check_reward_sources(
    stage: Online, objective: Objective, config: Config, tables: Tables, earlier: Mapping[str, frozenset[str]]
) -> None:
    """Raises ValueError if a source of rewards other than verifiers and judges cannot reward a stage's samples, or
    nothing would be learned from it.

    Args:
      earlier: as in `check_stage`.
    """
    check_reward_roles("Online.rewards", sorted(stage.rewards), earlier)
    check_attribute_weights(stage, config, tables)
    check_one_attempt(stage, config, tables)
    if stage.corrector is not None:
        check_corrector(stage, objective, config)
    if stage.process is not None:
        check_process_rewards(stage, objective, config, tables, earlier)
    if stage.pair_model is not None:
        check_pair_model(stage, objective, config, earlier)


def check_stored_rows(stage: Offline, objective: Objective, tables: Tables) -> None:
    """Raises ValueError if an objective cannot learn from the rows of a stored source."""
    name = type(stage.objective).__name__
    if objective.advantages is not None or objective.pairs is not None:
        raise ValueError(f"{name} learns from sampled rows; use it in an Online stage")
    source = row_of(tables, "sources", stage.source)
    if source.unit_size != objective.unit_size:
        takes, gives = (UNITS.get(size, f"units of {size} rows") for size in (objective.unit_size, source.unit_size))
        raise ValueError(f"{name} takes {takes}, and {type(stage.source).__name__} gives {gives}; see `jrl list "
                         "sources`")  # fmt: skip
    if source.mismatched != (objective.sequence_baseline is not None):
        raise ValueError(f"{name} learns from {'single answers' if objective.sequence_baseline else 'pairs'}, and "
                         f"{type(stage.source).__name__} gives {'single answers' if source.mismatched else 'pairs'}"
                         "; Labeled gives single answers, Preferences pairs")  # fmt: skip
    if getattr(stage.source, "strength", None) is not None and not objective.strengths:
        raise ValueError(f"{name} treats every preference as certain, and {type(stage.source).__name__}.strength "
                         "says how strong each is; use ConservativeDPO, or set it to None")  # fmt: skip
    check_row_values(name, stage, objective)


def check_row_values(name: str, stage: Offline, objective: Objective) -> None:
    """Raises ValueError if the source of a stage does not rate rows as the objective requires."""
    source, needs = type(stage.source).__name__, objective.needs(stage.objective)
    values, read = getattr(stage.source, "values", None), " and ".join(needs.row_value_names)
    if values is not None and not needs.row_values:
        raise ValueError(
            f"{name} does not read values of answers in the data; set {source}.values to None, or use another source"
        )
    if values is None and needs.row_values:
        raise ValueError(
            f"{name} reads {read}, which {source} does not give; see `jrl list sources`"
            if read
            else f"{name} reads values of answers in the data, and {source}.values does not name the entries that hold "
            "them; set it to two, such as ('value', 'rejected_value')"
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


def check_strategy(
    strategy: ConfiguredStrategy,
    stage: Online,
    objective: Objective,
    config: Config,
    earlier: Mapping[str, frozenset[str]],
) -> None:
    """Raises ValueError if a stage cannot use its sampling strategy, or its objective cannot learn from such rows.

    Args:
      earlier: as in `check_stage`.
    """
    name = type(stage.objective).__name__
    longest = completion_length(stage, config)
    has_average = stage.optimizer.average is not None and stage.trains == "policy"
    roles = {*earlier, *(AVERAGE,) * has_average}
    roles |= {"reference"} if objective.needs(stage.objective).reference else set()
    setting = Setting(stage.samples, longest, config.sampler.stop_strings, frozenset(roles))
    strategy.row.check(strategy.config, setting)
    if strategy.row.asked is not None and not objective.corrects_staleness(stage.objective):
        raise ValueError(
            f"@{type(stage.strategy).__name__}() samples from other prompts than its rows train on, and {name} as "
            f"configured has no bound on importance weights. Use RAFT or ExpertIteration, which imitate, or set {name}"
            ".importance = @TruncatedImportance() where it has that field"
        )
    if stage.learner.prefix_sharing != "none" and not strategy.row.shares_prompt:
        raise ValueError(f"{type(stage.strategy).__name__} draws rows of a prompt that begin differently, which cannot "
                         "share a prefix; set Learner.prefix_sharing = 'none'")  # fmt: skip
    if isinstance(stage.strategy, ReferenceSamples) != isinstance(stage.objective, XPO | OnlineVPO):
        given = "None" if stage.strategy is None else f"@{type(stage.strategy).__name__}()"
        raise ValueError(f"{name} with Online.strategy = {given}: XPO and OnlineVPO compare the policy's samples "
                         "with the reference's, which @ReferenceSamples() draws, and no other objective reads those; "
                         "use the two together")  # fmt: skip
    has_branches = strategy.row.branches(strategy.config) is not None
    if objective.pairs is not None and objective.needs(stage.objective).logprobs and has_branches:
        raise ValueError(
            f"{name} compares the log-probs of a prompt's completions, and {type(stage.strategy).__name__} draws some "
            "that begin with tokens of another, which have none: a pair would compare unlike parts of two texts. Leave "
            "Online.strategy out, or use an objective that gives tokens an advantage, such as GRPO"
        )
    if stage.shaping is not None and strategy.row.attempts > 1:
        raise ValueError("Online.shaping changes the reward of a row; with two attempts in it (SelfCorrection) the "
                         "first one would be compared unshaped; set Online.shaping = None")  # fmt: skip
    if stage.shaping is not None and isinstance(stage.strategy, MixtureOpponent):
        raise ValueError("Online.shaping reads how long the policy's own completions are, and an opponent's tokens "
                         "(MixtureOpponent) are not: wins would depend on it; set Online.shaping = None")  # fmt: skip
    if isinstance(stage.strategy, Partial):
        check_partial(stage, objective, config)


def check_partial(stage: Online, objective: Objective, config: Config) -> None:
    """Raises ValueError if the rest of a stage does not support completions that are sampled over several steps."""
    name, partial = type(stage.objective).__name__, stage.strategy
    if stage.lag:
        raise ValueError(f"Online.lag = {stage.lag} does not go with Online.strategy = @Partial(), which declares the "
                         "version of every segment; leave it out")  # fmt: skip
    if objective.refill(stage.objective) is not None:
        raise ValueError(f"{name} as configured draws more prompts within a step, which @Partial() cannot: it draws "
                         f"completions over several. Set {name}.max_refills = None")  # fmt: skip
    oldest, half = segments_of(stage, config) - 1, -(-completion_length(stage, config) // 2)
    if oldest > 1 and not partial.newest_only and not objective.corrects_staleness(stage.objective):
        raise ValueError(
            f"Partial.tokens = {partial.tokens}: the first tokens of completions are {oldest} versions old, and {name} "
            f"as configured has no bound on importance weights; set {name}.importance = @TruncatedImportance() where it"
            f" has that field, Partial.newest_only = True, or Partial.tokens = {half}"
        )


def check_needs(stage: Stage, objective: Objective, config: Config, earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError if the model or earlier stages do not have what an objective needs.

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
        raise ValueError(f"{name} reads values of answers in the data (Needs.row_values), which samples do not "
                         "have; use it in an Offline stage")  # fmt: skip
    of_samples = {"staleness": needs.staleness, "task": needs.task, "examples": needs.examples is not None}
    if (read := [field for field, needed in of_samples.items() if needed]) and not isinstance(stage, Online):
        raise ValueError(f"{name} reads what only samples have (Needs.{', Needs.'.join(read)}), and its rows are "
                         "stored; use it in an Online stage")  # fmt: skip
    if needs.input_mix is not None and not isinstance(config.model, Decoder | Published):
        raise ValueError(f"{name} mixes the embeddings of tokens, which a Decoder reads and {model} does not; use "
                         f"{name}.share = None, or SFT")  # fmt: skip
    if isinstance(stage, Online) and stage.reset_reference_every is not None and not needs.reference:
        weights = [field for field in ("kl", "kl_in_reward") if hasattr(stage.objective, field)]
        raise ValueError(
            f"Online.reset_reference_every = {stage.reset_reference_every}, and {name} as configured uses no "
            f"reference; {''.join(f'set {name}.{field} = 0.01, or ' for field in weights)}leave it out"
        )
    if needs.has_teacher and config.teacher is None and "teacher" not in earlier:
        raise ValueError(
            f"{name} learns from the role 'teacher', which no earlier stage trains; set Config.teacher = @Published() "
            "with its folder, or train one with Offline.trains = 'teacher'"
        )
    check_reward_roles(f"{name}.models", needs.scored_by, earlier)


def check_learner_of_samples(stage: Online, objective: Objective, config: Config) -> None:
    """Raises ValueError if a role other than the policy would learn from the policy's samples as if they were its own,
    or the policy would learn as a reward model."""
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
    changes_reward = stage.rewards or stage.shaping is not None or judges_of(stage, config)
    if getattr(stage.objective, "ranks_by", None) == "outcome" and changes_reward:
        raise ValueError(f"{name}.ranks_by = 'outcome' takes pairs by the first verifier alone, and Online.rewards, "
                         "Online.shaping and judges change the reward; leave them out (Online.judges = ()), or set it "
                         "to 'reward'")  # fmt: skip


def check_kl_limit(stage: Online, objective: Objective) -> None:
    """Raises ValueError if nothing measures how far the updates of a batch move the policy."""
    compares_tokens = objective.token_loss is not None and objective.needs(stage.objective).old_logprobs
    if stage.max_kl is not None and not compares_tokens:
        raise ValueError(
            "Online.max_kl reads the KL from the weights before a batch, and "
            f"{type(stage.objective).__name__} compares no tokens with them; leave it out"
        )


def check_continued_optimizer(stage: Online, config: Config, tables: Tables) -> None:
    """Raises ValueError if a stage cannot continue the optimizer of the stage before: that one must have trained the
    same arrays, by an optimizer whose state has the same arrays."""
    steps_before = [s for s in itertools.takewhile(lambda s: s is not stage, config.stages) if s.steps]
    before = steps_before[-1] if steps_before else None
    continues = "Online.optimizer_state = 'continued' continues the optimizer of the stage before"
    if before is None or before.trains != stage.trains:
        trained = "there is none" if before is None else f"that one trains {before.trains!r}"
        raise ValueError(f"{continues}, which must train {stage.trains!r} too; {trained}. Set 'new'")
    if (difference := _state_difference(before.optimizer, stage.optimizer)) is not None:
        raise ValueError(
            f"{continues}: both must be of one kind, with the same options but for floats, schedule and average; got "
            f"{difference}. Set 'new', or the same options in both"
        )
    until_zero, begun = updates_until_zero(stage.optimizer.schedule), updates_before(stage, config)
    if until_zero is not None and begun >= until_zero and updates_of(stage):
        raise ValueError(
            f"{continues}: after its {begun:,} updates {type(stage.optimizer.schedule).__name__} is at a rate of 0, "
            f"which it reaches after {until_zero:,}, and nothing would be learned. Let the schedule end with this "
            "stage, or set 'new'"
        )
    heads_of = lambda s: trained_heads(s, needs_of(s, tables))[stage.trains]
    outputs = lambda s: {head: needs_of(s, tables).head_outputs[head] for head in heads_of(s)}
    known = {head: count for s in reversed(trained_before(stage.trains, stage, config.stages)) if s.steps
             for head, count in outputs(s).items()}  # fmt: skip
    if new := [head for head, count in outputs(stage).items() if known.get(head) != count]:
        raise ValueError(f"{continues}, and {type(stage.objective).__name__} trains a {new[0]} head that it did not "
                         "have: the head has no moments. Set 'new'")  # fmt: skip


def _state_difference(before: OptimizerSettings, after: OptimizerSettings) -> str | None:
    """Returns what of two optimizers may give their states other arrays: another kind, or the first option that differs
    and is no float, schedule or average; None: nothing."""
    name = type(after).__name__
    if type(before) is not type(after):
        return f"{type(before).__name__} and then {name}"
    for field in dataclasses.fields(after):
        values = [getattr(optimizer, field.name) for optimizer in (before, after)]
        changed = dataclasses.replace(before, **{field.name: values[1]})
        if field.name not in ("schedule", "average") and jax.tree.structure(changed) != jax.tree.structure(before):
            return f"{name}.{field.name} = {values[0]!r} and then {values[1]!r}"
    return None


def check_critic(stage: Online, objective: Objective, earlier: Collection[str]) -> None:
    """Raises ValueError if a separate critic has nothing to learn, or no role to be initialized from."""
    name = type(stage.objective).__name__
    if not objective.needs(stage.objective).values:
        raise ValueError(f"Online.critic = {stage.critic!r}, and {name} reads no values; leave it out, or use PPO")
    if objective.value_loss is None:
        raise ValueError(f"Online.critic = {stage.critic!r}, and {name} has no value_loss next to its token_loss: the "
                         "value head must be on the policy; leave Online.critic out")  # fmt: skip
    if stage.critic not in earlier:
        raise ValueError(f"Online.critic names the role {stage.critic!r}, which no earlier stage trains. Available: "
                         f"{', '.join(sorted(earlier))}")  # fmt: skip


def check_reward_roles(field: str, names: Sequence[str], earlier: Mapping[str, frozenset[str]]) -> None:
    """Raises ValueError if a field names a role that is not a reward model when the stage begins."""
    models = [role for role, heads in earlier.items() if REWARD in heads]
    for name in names:
        if name not in models:
            what = "has no reward head" if name in earlier else "no earlier stage trains"
            trains = "reward" if name in ("policy", CRITIC) or is_reserved(name) else name
            raise ValueError(
                f"{field} names the role {name!r}, which {what}; train a reward model, such as BradleyTerry with "
                f"Offline.trains = {trains!r}. Reward models by then: {', '.join(models) or 'none'}"
            )


def check_attribute_weights(stage: Online, config: Config, tables: Tables) -> None:
    """Raises ValueError unless there is one weight for each output of the reward heads that a stage reads, and for
    heads whose outputs are not all scores."""
    if stage.attribute_weights is None:
        for role in stage.rewards:
            if (weights := head_needs(role, stage, config, tables).score_weights) is not None:
                raise ValueError(f"Online.rewards names {role!r}, and the outputs of its reward head are not all "
                                 f"scores; set Online.attribute_weights, such as {weights}")  # fmt: skip
        return
    count = len(stage.attribute_weights)
    if not stage.rewards:
        raise ValueError("Online.attribute_weights is for the reward models in Online.rewards, which names none; name "
                         "one, or leave it out")  # fmt: skip
    if not all(abs(weight) <= LARGEST_REWARD for weight in stage.attribute_weights):
        raise ValueError(f"Online.attribute_weights = {stage.attribute_weights} must be finite, in float32 too")
    for role in stage.rewards:
        needs = head_needs(role, stage, config, tables)
        if needs.score_outputs != count:
            such_as = ", or None" if needs.score_weights is None else f", such as {needs.score_weights}"
            raise ValueError(f"Online.attribute_weights has {count} weights, and the reward head of {role!r} has "
                             f"{needs.score_outputs} outputs; give one weight for each{such_as}")  # fmt: skip


def head_needs(role: str, stage: Online, config: Config, tables: Tables) -> Needs:
    """Returns the needs of the last objective that trains the reward head of a role before a stage."""
    before = (needs_of(earlier, tables) for earlier in trained_before(role, stage, config.stages))
    return next(needs for needs in before if needs.score)


def check_judges(stage: Online, config: Config) -> None:
    """Raises ValueError if a judge that compares the completions of a prompt would get only one."""
    if stage.samples > 1:
        return
    for judge in judges_of(stage, config):
        if isinstance(judge.grading, Pairwise) and judge.grading.against == "group":
            raise ValueError(
                f"the judge {judge.name!r} compares the completions of a prompt, and Online.samples = 1 gives it "
                f"one; use at least 2, usually 8, or {type(judge.grading).__name__}.against = 'answer'"
            )


def check_token_rewards(what: str, stage: Online, objective: Objective) -> None:
    """Raises ValueError if an objective does not read token rewards. what: the option that produces them."""
    if not objective.needs(stage.objective).token_rewards:
        raise ValueError(f"{what}, and {type(stage.objective).__name__} reads only the reward of a completion; use "
                         "PPO, Reinforce or ReinforcePlusPlus")  # fmt: skip


def check_one_attempt(stage: Online, config: Config, tables: Tables) -> None:
    """Raises ValueError if a row has two attempts, and a source of rewards reads one, or an objective compares rewards
    of the two of which such a source is in the second's alone."""
    read = {"corrector": "rewrites one answer", "process": "judges the steps of one answer",
            "pair_model": "compares single answers"}  # fmt: skip
    reads = [f"Online.{field} {what}" for field, what in read.items() if getattr(stage, field) is not None]
    if reads and configured_strategy(stage, tables).row.attempts > 1:
        raise ValueError(f"{reads[0]}, and @{type(stage.strategy).__name__}() draws two in a row; leave one of them "
                         "out")  # fmt: skip
    judged = any(judge.weight for judge in judges_of(stage, config))
    beside = {"Online.rewards = {}": any(stage.rewards.values()), "Online.judges = ()": judged,
              "Config.reward = None": config.reward is not None and any(config.reward.weights)}  # fmt: skip
    if isinstance(stage.objective, SCoRe) and (left_out := [option for option, adds in beside.items() if adds]):
        raise ValueError("SCoRe compares the rewards of two attempts, and only verifiers score the first one: what a "
                         f"model adds to the second would count as progress. Set {left_out[0]}")  # fmt: skip


def check_corrector(stage: Online, objective: Objective, config: Config) -> None:
    """Raises ValueError if a corrector could not rewrite completions, or nothing would be learned from it."""
    length = completion_length(stage, config)
    written_corrections(stage, config.stages)
    check_token_rewards("Online.corrector rewards tokens", stage, objective)
    if correction_length(stage, config) <= config.data.prompt_length:
        raise ValueError(
            f"Online.corrector reads a prompt and its answer and writes another answer, and there is room for one of "
            f"{length} tokens: set Online.completion_length = {length}, and Sampler.completion_length, the longest of "
            f"all stages, to at least {2 * length} plus the tokens of Corrections.ask"
        )


def check_process_rewards(
    stage: Online, objective: Objective, config: Config, tables: Tables, earlier: Mapping[str, frozenset[str]]
) -> None:
    """Raises ValueError if no role can score the steps of completions, or nothing would be learned from it."""
    role = stage.process.role
    check_reward_roles("ProcessRewards.role", [role], earlier)
    if head_needs(role, stage, config, tables).score_weights is not None:
        raise ValueError(f"ProcessRewards.role names {role!r}, and the outputs of its reward head are not all scores; "
                         "name another role")  # fmt: skip
    check_token_rewards("Online.process rewards tokens", stage, objective)
    if stage.trains == stage.process.role:
        raise ValueError(f"Online.trains = {stage.trains!r} is the role that Online.process judges steps by; train "
                         "another one")  # fmt: skip


def check_pair_model(
    stage: Online, objective: Objective, config: Config, earlier: Mapping[str, frozenset[str]]
) -> None:
    """Raises ValueError if a pair model has no such role or nothing to compare, or nothing would be learned from it."""
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
    if stage.trains == pair_model.role and stage.trains != "policy":
        raise ValueError(f"Online.trains = {stage.trains!r} would let it label the pairs that it learns from; train "
                         "another role")  # fmt: skip
    longest = completion_length(stage, config)
    if 2 * longest >= question_length(config):
        raise ValueError(
            f"Online.pair_model reads a prompt and two answers, and there is no room for two of {longest} tokens: set "
            f"Online.completion_length = {longest}, and Sampler.completion_length, the longest of all stages, to at "
            f"least {2 * longest} plus the tokens of Comparisons.ask"
        )


def check_pretraining(stage: Online, tables: Tables) -> None:
    """Raises ValueError if the stage does not train the policy, or the source gives rows to compare or rate."""
    source, name = stage.pretraining.source, type(stage.pretraining.source).__name__
    if stage.trains != "policy":
        raise ValueError(f"Online.pretraining is for the policy to imitate, and this stage trains {stage.trains!r}; "
                         "leave it out")  # fmt: skip
    row = row_of(tables, "sources", source)
    if row.unit_size != 1 or row.mismatched or getattr(source, "values", None) is not None:
        raise ValueError(f"PretrainingMix.source = @{name}() gives rows that are compared or rated; use "
                         "single ones that are to be imitated, such as @Demonstrations()")  # fmt: skip


def check_potential(stage: Online, objective: Objective, config: Config, tables: Tables) -> None:
    """Raises ValueError if there are no token rewards to use as potentials, or the objective does not read them."""
    spans = rewards_spans(config.scoring, tables["verifiers"])
    if not (spans or stage.process is not None or stage.corrector is not None):
        raise ValueError("Shaping.potential uses token rewards, and nothing gives any; set Online.process or "
                         "Online.corrector, use a verifier that rewards spans, or leave it out")  # fmt: skip
    check_token_rewards("Shaping.potential uses token rewards", stage, objective)


def check_components(stage: Online, components: Sequence[str]) -> None:
    """Raises ValueError if shaping reads a reward component that no source has."""
    for name in components_read(stage.shaping):
        if name not in components:
            near = difflib.get_close_matches(name, components, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Online.shaping reads the component {name!r}, which no source of rewards has.{hint} "
                             f"Available: {', '.join(components)}")  # fmt: skip


def check_routes(stage: Stage, tables: Tables) -> None:
    """Raises ValueError if the rows of a stage have no routes of the policy to replay."""
    if isinstance(stage, Offline):
        raise ValueError("Learner.routes = 'replayed' takes what the sampler recorded, and an Offline stage learns "
                         "from stored rows; set it only for the stage that samples, such as rl/Learner.routes where "
                         "that stage has Online.learner = @rl/Learner()")  # fmt: skip
    strategy = configured_strategy(stage, tables).row
    if strategy.drawing is not None and not strategy.keeps_routes:
        raise ValueError(
            f"Learner.routes = 'replayed' does not go with Online.strategy = @{type(stage.strategy).__name__}(): "
            "it draws rows with other weights than the policy's, or after another prompt, where routers choose "
            "differently (Strategy.keeps_routes = False); leave it out"
        )


def check_sampler_mesh(config: Config) -> None:
    """Raises ValueError if separate sampling devices would never sample while the others learn."""
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
    """Raises ValueError if nothing reads Config.teacher, or a stage trains that role too."""
    if config.teacher is None:
        return
    if "teacher" in trained:
        raise ValueError(
            "Config.teacher puts a published model in the role 'teacher', which a stage trains; leave one out"
        )
    needs = [needs_of(stage, tables) for stage in config.stages]
    pair_models = [getattr(stage, "pair_model", None) for stage in config.stages]
    compares = any(pair_model is not None and pair_model.role == "teacher" for pair_model in pair_models)
    if not any(stage_needs.has_teacher for stage_needs in needs) and not compares:
        raise ValueError("No objective of the run reads Config.teacher; use OnPolicyDistillation, GKD or "
                         "Distillation, set PairModel.role = 'teacher', or leave it out")  # fmt: skip


def check_model(config: Config) -> None:
    """Raises ValueError for adapters that the model does not support, quantized matrices without remat, and bfloat16
    master weights."""
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
    """Raises ValueError if trained weights would be in bfloat16 (O4): master weights are float32 or wider.

    Just above 1, bfloat16 numbers are 2^-7 apart, and an update of less than half of that changes nothing; Adam's
    updates at a learning rate of 1e-6 are far smaller. Frozen weights under adapters may be in bfloat16.

    Source: mixed precision training, 1710.03740 section 3.1.
    """
    name = type(config.model).__name__
    if config.model.param_dtype == "bfloat16" and config.adapter is None:
        raise ValueError(
            f"{name}.param_dtype='bfloat16' cannot be trained: bfloat16 rounds small updates away. "
            f"Use {name}.dtype='bfloat16' for the computation and keep float32 parameters, or train adapters: "
            "Config.adapter = @LoRA()"
        )
