"""What scores the completions of a run: verifiers, a published reward model, judges, and roles of the run itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.device.placement import place_on_mesh
from jrl.device.processes import Processes
from jrl.device.sharding import batch_sharding, replicated, rows_over_shards
from jrl.experiment import (
    Config,
    Online,
    asked_comparisons,
    asks,
    correction_length,
    judges_of,
    question_length,
    written_corrections,
)
from jrl.learning.learner import weights_of
from jrl.learning.step import StagePrograms
from jrl.rollout.corrector import corrector_source
from jrl.rollout.pair_model import pair_model_source
from jrl.rollout.process_rewards import process_source
from jrl.rollout.prompts import TRAIN_STREAM, place_prompts
from jrl.rollout.rewards import OpenClassifier, reward_model_source
from jrl.rollout.sampler import untruncated
from jrl.rollout.scoring import Scorer, open_scoring
from jrl.rollout.sources import ROLE_ENSEMBLE, RewardSource, judge_source, roles_source
from jrl.run.agreement import journal_name, other_journals
from jrl.run.checkpoints.run_state import list_steps
from jrl.run.policy import Policy, root_key
from jrl.run.report.display import Display
from jrl.run.reward_model import open_reward_model
from jrl.run.stage_steps import ends
from jrl.tasks.data.comparisons import first_tokens
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.survey import answered_conversations
from jrl.tasks.envs.contract import Source, named_verifiers
from jrl.tasks.judges import OpenJudge, open_judges
from jrl.tasks.stopping import Stop
from jrl.types import Array, PackedBatch, Rollout, TrainState


class Judgement(NamedTuple):
    """What scores the completions of a run, besides the roles that its stages train."""

    scorer: Scorer  # verifiers
    classifier: OpenClassifier | None  # the published reward model
    judges: Sequence[OpenJudge]


@contextlib.contextmanager
def open_judgement(
    policy: Policy,
    source: Source,
    folder: Path,
    display: Display,
    stop: Stop,
    processes: Processes,
    pool: Any,
) -> Iterator[Judgement]:
    """Starts verifiers and judges, and reads the published reward model. Closes them at the end.

    Args:
      source: of Config.task. stop: ends the requests to judges. pool: verifier workers to use; None: new ones.
    """
    config, parts = policy.config, policy.parts
    with contextlib.ExitStack() as stack:
        display.phase("verifiers")
        opened = open_scoring(
            config.scoring,
            parts.tables["verifiers"],
            parts.sources,
            folder / journal_name(processes.index),
            other_journals=other_journals(folder, processes.index),
            private=[folder],
            also=sorted(named_verifiers(source)),  # stored rows of stages are not scored
            pool=pool,
        )
        scorer = stack.enter_context(opened)
        classifier = None
        if config.reward is not None:
            answered = functools.partial(answered_conversations, source, config.data)
            classifier = open_reward_model(
                config.reward, policy.mesh, policy.program_cache, folder, display.phase, answered, processes
            )
        still_asked = judges_still_asked(config, max(list_steps(folder / "checkpoints"), default=0))
        if still_asked:
            display.phase("judges")
        of_process = dict(index=processes.index, count=processes.count)
        judges = open_judges(config.judges, folder, stop, still_asked=still_asked, **of_process)
        for judge in judges:
            stack.callback(judge.close)
        yield Judgement(scorer, classifier, judges)


def judges_still_asked(config: Config, done: int) -> set[str]:
    """Returns the names of the judges of the stages that have steps left after `done` steps."""
    left = [stage for stage, end in zip(config.stages, ends(config)) if end > done]
    return {judge.name for stage in left for judge in judges_of(stage, config)}


def reward_sources(
    stage: Online,
    programs: StagePrograms,
    judgement: Judgement,
    processes: Processes,
) -> tuple[RewardSource, ...]:
    """Returns the published reward model, the judges and the roles that reward a stage."""
    scores_of = lambda role, state, packed: programs.scores(weights_of(state.models, role), packed)

    def from_role(role: str, weight: float) -> RewardSource:
        return roles_source(f"role/{role}", weight, functools.partial(scores_of, role))

    def ensemble_scores(state: TrainState, packed: PackedBatch) -> Array:
        return programs.combine([scores_of(role, state, packed) for role in stage.rewards])

    if stage.ensemble is None:
        from_roles = [from_role(role, weight) for role, weight in stage.rewards.items()]
    else:
        from_roles = [roles_source(ROLE_ENSEMBLE, next(iter(stage.rewards.values())), ensemble_scores)]
    from_judges = [judge_source(judge, processes) for judge in judgement.judges if asks(stage, judge.config)]
    from_model = [] if judgement.classifier is None else [reward_model_source(judgement.classifier)]
    return (*from_model, *from_judges, *from_roles)


def open_process_rewards(stage: Online, programs: StagePrograms, policy: Policy) -> RewardSource:
    """Returns the role that scores the steps of completions, as a source of token rewards."""
    role = stage.process.role
    scores = lambda state, packed: programs.step_scores(weights_of(state.models, role), packed)
    return process_source(stage.process, scores, policy.tokenizer)


def open_corrector(stage: Online, programs: StagePrograms, policy: Policy) -> RewardSource:
    """Returns a stage's corrector as a source of token rewards."""
    config, mesh, tokenizer, role = policy.config, policy.mesh, policy.tokenizer, stage.corrector.role
    key = root_key(policy)
    longest, stream = correction_length(stage, config), place_on_mesh(np.uint32(TRAIN_STREAM), replicated(mesh))

    def draw(state: TrainState, visits: Sequence[Visit]) -> Rollout:
        prompts = place_prompts(visits, stage.prompts * stage.samples, longest, tokenizer.pad_id, mesh)
        weights, version = weights_of(state.models, role).params, state.models[role].version
        return programs.correct(weights, prompts, key, stream, version, untruncated(None, mesh), None, None)

    written = written_corrections(stage, config.stages)
    return corrector_source(stage.corrector, written, draw, tokenizer, longest)


def open_pair_model(stage: Online, programs: StagePrograms, policy: Policy) -> RewardSource:
    """Returns a stage's pair model as a source of rewards, and of preferences between completions."""
    config, mesh, tokenizer, pair_model = policy.config, policy.mesh, policy.tokenizer, stage.pair_model
    comparisons, width = asked_comparisons(stage, config.stages), question_length(config)
    verdicts = place_on_mesh(np.array(first_tokens(comparisons, tokenizer), np.int32), replicated(mesh))
    rows = rows_over_shards(pair_model.batch, mesh)
    place = lambda x: place_on_mesh(x, batch_sharding(mesh, x.ndim))

    def prefer(state: TrainState, questions: Sequence[Sequence[int]]) -> list[Array]:
        weights, answers = weights_of(state.models, pair_model.role), []
        for start in range(0, len(questions), rows):
            tokens, length = np.full((rows, width), tokenizer.pad_id, np.int32), np.ones(rows, np.int32)
            for row, ids in enumerate(questions[start : start + rows]):
                tokens[row, : len(ids)], length[row] = ids, len(ids)
            answers.append(programs.prefer(weights, place(tokens), place(length), verdicts))
        return answers

    return pair_model_source(pair_model, comparisons, prefer, tokenizer, stage.samples, width)
