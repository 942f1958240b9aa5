"""From prompts to a scored batch: draw on the device, score on the host, refill where groups carry no signal."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.device.placement import fetch, gathered, place_on_mesh
from jrl.device.processes import ONE, Processes
from jrl.device.sharding import batch_sharding, replicated
from jrl.rollout.prompts import TRAIN_STREAM, place_asked, place_prompts
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.scoring import HostScores, Scorer, ScoringTicket, check_range, check_sums, scores_of_all
from jrl.rollout.sources import Completions, RewardSource, add_scores
from jrl.rollout.stop_strings import StopTable
from jrl.rollout.strategies import strategy_of
from jrl.rollout.strategies.contract import FIRST_ATTEMPT
from jrl.rollout.token_rewards import span_rewards
from jrl.tasks.data import curricula
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stream import Stream
from jrl.tasks.stopping import Stop, never
from jrl.tasks.verdict import Status
from jrl.types import Array, PyTree, Rollout, Scores

ON_HOST = ("tokens", "length", "action_mask")  # of a rollout, what the host reads at every step


@dataclasses.dataclass(frozen=True)
class PromptSampler:
    """Draws completions of the next training prompts. A draw is dispatched and returned at once."""

    program: Callable[..., Rollout]
    stream: Stream
    tokenizer: Any
    mesh: Mesh
    key: Array  # root of every draw
    params: SamplingParams
    stop_table: StopTable | None
    place: Callable[[np.ndarray], Array]  # puts what is known of a draw's rows where learning takes it from
    prompts: int  # a draw
    samples: int  # of each prompt
    prompt_length: int
    components: tuple[str, ...] = ()  # names of the components of the reward that learning may see
    curriculum: Any = None  # its configuration; None: prompts are walked in order
    strategy: Any = None  # its configuration; None: each completion is drawn by itself
    segments: int = 1  # in how many calls a completion is drawn, each by its own weights
    next_segment: Callable[..., Rollout] | None = None  # draws one of them after the first; None: there is one
    processes: Processes = ONE  # of the run; each decodes and scores its own rows
    decodes_all: bool = True  # this process decodes the rows of the others too, which the run stores or shows
    devices: Any = None  # of their own, of jrl.run.sampler_devices, where `program` draws; None: the learner's


class Draw(NamedTuple):
    """A sampling call under way: arrays on the device, and where in the data its prompts came from."""

    rollout: Rollout
    visits: list[Visit]  # one for each group; groups after them are padding
    position: dict[str, Any]  # of the data stream before these prompts; of a curriculum, also those that it chose
    under_way: Callable[[], dict[str, float]] | None = None  # on devices of their own: waits, and returns its seconds
    host: Rollout | None = None  # the same on the host, where it came through that; numpy arrays
    gathered: dict[str, Array] | None = None  # the rollout's fields ON_HOST, on their way to every process


class Submitted(NamedTuple):
    """A draw that is being scored."""

    drawn: Draw
    host: dict[str, np.ndarray]  # the rollout's fields ON_HOST
    texts: list[str]  # completion of every sequence that is not padding, what began it included; "" where not decoded
    # Of the last attempts of `own_rows`, then of the first ones where there are two; None: nothing scores them.
    ticket: ScoringTicket | None
    others: list[Any]  # tickets of the other sources of rewards
    seconds: Mapping[str, float] = MappingProxyType({})  # on devices of their own: what was waited, and for what


class Collected(NamedTuple):
    """A scored batch, on the device to learn from and on the host to look at."""

    rollout: Rollout
    scores: Scores
    host: dict[str, np.ndarray]  # the rollout's fields ON_HOST
    host_scores: HostScores
    visits: list[Visit]
    texts: list[str]  # completion of every sequence; "" for padding
    metrics: dict[str, float]
    samples: int  # of each prompt


def draw(sampler: PromptSampler, weights: PyTree, version: Array) -> Draw:
    """Dispatches one sampling call on the next prompts of the training stream, and returns at once."""
    position, visits = next_visits(sampler)
    asked, room = strategy_of(sampler.strategy).asked, sampler.prompt_length
    placed = (sampler.prompts, room, sampler.tokenizer.pad_id, sampler.mesh)
    if asked is None:
        begun = [visit._replace(prompt=visit.prompt + prefix_of(sampler, visit)) for visit in visits]
        prompts = place_prompts(begun, *placed)
    else:
        others = [asked(sampler.strategy, visit, sampler.tokenizer, room) for visit in visits]
        prompts = place_asked(others, visits, *placed)
    stream = place_on_mesh(np.uint32(TRAIN_STREAM), replicated(sampler.mesh))
    rollout = sampler.program(weights, prompts, sampler.key, stream, version, sampler.params, sampler.stop_table, None)
    return Draw(rollout, visits, position, None if sampler.devices is None else sampler.devices.watch(rollout))


def draw_further(sampler: PromptSampler, drawn: Draw, weights: PyTree, version: Array) -> Draw:
    """Dispatches the next segment of a draw that was begun, and returns at once."""
    uid = np.zeros((*drawn.rollout.length.shape, 2), np.uint32)
    uid[: len(drawn.visits) * sampler.samples] = np.repeat([visit.uid for visit in drawn.visits], sampler.samples, 0)
    uid = place_on_mesh(uid, batch_sharding(sampler.mesh, 2))
    stream = place_on_mesh(np.uint32(TRAIN_STREAM), replicated(sampler.mesh))
    rollout = sampler.next_segment(weights, drawn.rollout, uid, sampler.key, stream, version, sampler.params)
    return drawn._replace(rollout=rollout, gathered=None)


def hand_out(drawn: Draw) -> Draw:
    """Dispatches what hands a draw's tokens to every process, and returns at once: devices run programs in order, so
    that behind the next draw it would wait for that one too."""
    return drawn._replace(gathered=gathered({name: getattr(drawn.rollout, name) for name in ON_HOST}))


def prefix_of(sampler: PromptSampler, visit: Visit) -> tuple[int, ...]:
    """Returns the tokens after a prompt that the policy goes on from; mostly ()."""
    room = sampler.prompt_length - len(visit.prompt)
    return strategy_of(sampler.strategy).prefix(sampler.strategy, visit, sampler.tokenizer, room)


def redraw_prompts(sampler: PromptSampler, position: dict[str, Any]) -> list[Visit]:
    """Returns the prompts of a draw that was saved on its way, moving the stream past them again."""
    sampler.stream.set_state(position)
    if sampler.curriculum is not None:
        return sampler.stream.revisit(position["chosen"])
    return sampler.stream.next(sampler.prompts)


def next_visits(sampler: PromptSampler) -> tuple[dict[str, Any], list[Visit]]:
    """Returns where in the data the next prompts are, and them. Of a curriculum also which: its table moves on."""
    position = sampler.stream.get_state()
    if sampler.curriculum is None:
        return position, sampler.stream.next(sampler.prompts)
    visits = sampler.stream.select(sampler.prompts, sampler.curriculum)
    return {**position, "chosen": [visit.index for visit in visits]}, visits


def record_outcomes(sampler: PromptSampler, rounds: Sequence[Collected]) -> dict[str, float]:
    """Moves the curriculum's table on by a step's rounds of completions, and returns what it says; {} without one."""
    if sampler.curriculum is None:
        return {}
    index, outcome, valid = [], [], []
    for found in rounds:
        rows = len(found.visits) * found.samples
        index += [visit.index for visit in found.visits]
        outcome.append(found.host_scores.outcome[:rows].reshape(-1, found.samples))
        valid.append(found.host_scores.valid[:rows].reshape(-1, found.samples))
    stream = sampler.stream
    stream.outcomes = curricula.recorded(
        sampler.curriculum, stream.outcomes, index, np.concatenate(outcome), np.concatenate(valid)
    )
    return curricula.metrics(sampler.curriculum, stream.outcomes, stream.training_examples(sampler.curriculum))


def submit(
    drawn: Draw,
    samples: int,
    sampler: PromptSampler,
    scorer: Scorer,
    sources: Sequence[RewardSource],
    completions: Callable[[Draw, dict[str, np.ndarray], list[str]], Completions],
) -> Submitted:
    """Waits for a draw, and hands its completions to every source of rewards.

    Args:
      completions: (draw, its fields on the host, texts) -> what sources beside the verifiers are given.
    """
    drawn, seconds = (drawn, {}) if sampler.devices is None else sampler.devices.collect(drawn)
    source = drawn.rollout if drawn.host is None else drawn.host
    host = fetch(drawn.gathered or {name: getattr(source, name) for name in ON_HOST})
    drawn = drawn._replace(gathered=None)  # on every device; nobody reads it again
    rows = range(len(drawn.visits) * samples)
    scored_here = own_rows(sampler, drawn.visits, samples)
    decoded = set(rows if sources or sampler.decodes_all else scored_here)
    visits = [drawn.visits[row // samples] for row in rows]
    text_of = lambda row, columns: sampler.tokenizer.decode(host["tokens"][row][columns].tolist())
    attempts = strategy_of(sampler.strategy).attempts
    scored = [scored_columns(host, row, len(visit.prompt), attempts) for row, visit in zip(rows, visits)]
    texts = [
        text_of(row, slice(len(visit.prompt), host["length"][row])) if row in decoded else ""
        for row, visit in zip(rows, visits)
    ]
    # The last attempts first. A single one is all of the completion.
    of_attempt = lambda row, k: texts[row] if attempts == 1 else text_of(row, scored[row][k])
    in_turn = [[of_attempt(row, k) for row in scored_here] for k in reversed(range(attempts))]
    keys = [(visits[row].uid, row % samples) for row in scored_here]
    examples = [visits[row].example for row in scored_here]
    ticket = scorer.submit([*itertools.chain(*in_turn)], examples * attempts, keys * attempts)
    alone = len(scored_here) == len(rows)
    last = lambda: in_turn[0] if alone else [of_attempt(row, -1) for row in rows]
    batch = completions(drawn, host, last()) if sources else None
    return Submitted(drawn, host, texts, ticket, [source.submit(batch) for source in sources], seconds)


def own_rows(sampler: PromptSampler, visits: Sequence[Visit], samples: int) -> range:
    """Returns the rows of a draw that this process scores: those of its share of the prompts."""
    share = sampler.processes.share(len(visits))
    return range(share.start * samples, share.stop * samples)


def scored_columns(host: dict[str, np.ndarray], row: int, start: int, attempts: int) -> list[np.ndarray]:
    """Returns the columns of the text of each attempt of a row, [k] int each, the first one first. Of a single attempt
    that is all that follows the prompt, also what the policy did not write itself; of two, what it wrote in each, none
    where the second is missing.

    Args:
      start: tokens of the prompt.
    """
    if attempts == 1:
        return [np.arange(start, max(start, host["length"][row]))]
    actions = np.flatnonzero(host["action_mask"][row])
    parts = np.split(actions, np.flatnonzero(np.diff(actions) > 1) + 1)
    return [*parts, *[np.arange(0)] * (attempts - len(parts))]


def collect(
    submitted: Submitted,
    samples: int,
    scorer: Scorer,
    sources: Sequence[RewardSource],
    sampler: PromptSampler,
    stop: Stop = never,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Waits for the scores of a draw, and returns it with them on the device. Padding rows are masked.

    Args:
      stop: asked while the verifiers work. progress: called with (scored, all) completions.

    Raises: StopRequested where `stop` says so; RewardOverflow where a reward of a token, or what the batch's
      rewards add up to, is beyond float32.
    """
    scores = scorer.collect(submitted.ticket, stop, progress, sampler.processes)
    drawn, texts, host = submitted.drawn, submitted.texts, submitted.host
    attempts = strategy_of(sampler.strategy).attempts
    if attempts > 1:
        scores = last_of_two(scores, len(own_rows(sampler, drawn.visits, samples)))
    scores = scores_of_all(scores, sampler.processes)
    if scores.spans is not None:
        written = np.zeros(host["tokens"].shape, bool)
        for row in range(len(texts)):
            written[row, scored_columns(host, row, len(drawn.visits[row // samples].prompt), attempts)[-1]] = True
        with np.errstate(over="ignore"):
            found = span_rewards(scores.spans, host["tokens"], written, sampler.tokenizer)
        # Of what the policy did not write itself no token is rewarded.
        found = np.where(host["action_mask"], found, 0)[: len(texts)]
        scores = check_range(dataclasses.replace(scores, token_reward=found))
    weights = scorer.component_weights
    for source, ticket in zip(sources, submitted.others):
        learned = source.collect(ticket)
        weights |= dict(zip(learned.names, learned.weights))
        scores = add_scores(scores, learned)
    scores = check_sums(scores, weights)
    missing = host["length"].shape[0] - len(texts)
    scores = padded(scores, missing)
    return Collected(
        drawn.rollout,
        scores_to_learn_from(scores, drawn.visits, samples, sampler.components, sampler.place),
        submitted.host,
        scores,
        drawn.visits,
        texts + [""] * missing,
        verdict_metrics(scores, drawn.visits, samples)
        | prefix_metrics(sampler, drawn.visits, host["action_mask"], samples),
        samples,
    )


def unsubmitted(drawn: Draw) -> Submitted:
    """Returns a draw that nothing scores."""
    host = {name: getattr(drawn.rollout, name) for name in ON_HOST}
    return Submitted(drawn, host, [""] * len(host["length"]), None, [])


def unscored(submitted: Submitted, samples: int, sampler: PromptSampler, *, rewards_tokens: bool) -> Collected:
    """Returns a draw of which no row counts, so that nothing is learned from it.

    Args:
      rewards_tokens: scores of the stage have rewards of tokens.
    """
    shape = submitted.host["tokens"].shape
    zeros = np.zeros(shape[0], np.float32)
    scores = HostScores(
        reward=zeros,
        valid=np.zeros(shape[0], bool),
        verdict=np.full(shape[0], Status.VERIFIER_ERROR, np.int8),
        outcome=zeros,
        components={},
        details=[""] * shape[0],
        replayed=0,
        token_reward=np.zeros(shape, np.float32) if rewards_tokens else None,
    )
    return Collected(
        submitted.drawn.rollout,
        scores_to_learn_from(scores, submitted.drawn.visits, samples, sampler.components, sampler.place),
        submitted.host,
        scores,
        submitted.drawn.visits,
        submitted.texts,
        {},
        samples,
    )


def prefix_metrics(
    sampler: PromptSampler, visits: Sequence[Visit], action_mask: np.ndarray, samples: int
) -> dict[str, float]:
    """Returns how many tokens a strategy has put between prompts and the policy's own, a mean over the rows that have
    some of theirs; {} without a strategy."""
    acts = action_mask[: len(visits) * samples]
    if sampler.strategy is None or not acts.any():
        return {}
    prompts = np.repeat([len(visit.prompt) for visit in visits], samples)
    return {"rollout/prefix_length": float((acts.argmax(axis=1) - prompts)[acts.any(axis=1)].mean())}


def last_of_two(scores: HostScores, rows: int) -> HostScores:
    """Returns the scores of the last attempts, with the rewards of the first ones as a component. A row counts where
    both could be scored.

    Args:
      scores: of `rows` last attempts, then of the first ones in the same order.
    """
    last, first = ({name: getattr(scores, name)[part] for name in ("reward", "valid", "verdict", "outcome")}
                   for part in (slice(rows), slice(rows, None)))  # fmt: skip
    valid = last["valid"] & first["valid"]
    verdict = np.where(last["valid"], np.where(first["valid"], last["verdict"], first["verdict"]), last["verdict"])
    components = {name: component[:rows] for name, component in scores.components.items()}
    return dataclasses.replace(
        scores,
        reward=np.where(valid, last["reward"], 0).astype(np.float32),
        valid=valid,
        verdict=verdict.astype(np.int8),
        outcome=np.where(valid, last["outcome"], 0).astype(np.float32),
        components={**components, FIRST_ATTEMPT: np.where(valid, first["reward"], np.nan).astype(np.float32)},
        details=[a or b for a, b in zip(scores.details[:rows], scores.details[rows:])],
        spans=None if scores.spans is None else scores.spans[:rows],
    )


def completion_text(tokenizer: Any, host: dict[str, np.ndarray], row: int) -> str:
    """Returns what the policy said in a row, control tokens left out."""
    return tokenizer.decode(host["tokens"][row][host["action_mask"][row]].tolist())


def refilled(
    first: Collected,
    samples: int,
    most: int,
    another: Callable[[], Collected],
    keep: Callable[[Collected], Array],
    sampler: PromptSampler,
) -> Collected:
    """Returns one batch whose groups carry a signal as far as `most` more rounds give them.

    Args:
      another: draws and scores one more round. keep: (round) -> [N] bool on the device, rows that the objective takes.
    """
    rounds, kept = [first], [groups_with_signal(first, keep(first), samples)]
    # Every process sees the same rewards, so every process takes the same number of rounds.
    while needs_another(rounds, kept, most):
        rounds.append(another())
        kept.append(groups_with_signal(rounds[-1], keep(rounds[-1]), samples))
    return filled(rounds, kept, samples, sampler)


def needs_another(rounds: list[Collected], kept: list[list[int]], most: int) -> bool:
    """Whether groups without signal are left, and rounds. kept: the groups of each round that have one."""
    return sum(map(len, kept)) < len(rounds[0].visits) and len(rounds) <= most


def filled(rounds: list[Collected], kept: list[list[int]], samples: int, sampler: PromptSampler) -> Collected:
    """Returns the batch that all rounds of a step make, and counts them. kept: as in `needs_another`."""
    first = rounds[0]
    counters = {
        "refill/rounds": float(len(rounds) - 1),
        "refill/groups_drawn": float(sum(len(r.visits) for r in rounds)),
        "refill/groups_with_signal": float(sum(map(len, kept))),
    }
    merged = first if len(rounds) == 1 else merge(rounds, kept, samples, sampler)
    return merged._replace(metrics={**merged.metrics, **counters})


def groups_with_signal(round_: Collected, keep: Array, samples: int) -> list[int]:
    """Returns the groups of a round that the objective would learn from. keep: [N] bool."""
    groups = fetch(keep).reshape(-1, samples).any(axis=1)
    return [g for g in np.flatnonzero(groups).tolist() if g < len(round_.visits)]


def merge(rounds: list[Collected], kept: list[list[int]], samples: int, sampler: PromptSampler) -> Collected:
    """Returns one batch: groups with signal in the order drawn, then groups without, which the objective masks."""
    num_groups = len(rounds[0].visits)
    good = [(r, g) for r, groups in enumerate(kept) for g in groups]
    rest = [(r, g) for r, round_ in enumerate(rounds) for g in range(len(round_.visits)) if g not in set(kept[r])]
    chosen = (good + rest)[:num_groups]
    rows = [(r, g * samples + k) for r, g in chosen for k in range(samples)]
    pad = rounds[0].host["length"].shape[0] - len(rows)
    rows += [(0, num_groups * samples + k) for k in range(pad)]
    fetched = [fetch(fields(round_.rollout)) for round_ in rounds]
    taken = {name: np.stack([fetched[r][name][i] for r, i in rows]) for name in fetched[0]}
    taken["group"] = (np.arange(len(rows)) // samples).astype(taken["group"].dtype)
    scores = chosen_scores([round_.host_scores for round_ in rounds], rows)
    visits = [rounds[r].visits[g] for r, g in chosen]
    return Collected(
        rollout=rounds[0].rollout.replace(**{name: sampler.place(value) for name, value in taken.items()}),
        scores=scores_to_learn_from(scores, visits, samples, sampler.components, sampler.place),
        host={name: taken[name] for name in ON_HOST},
        host_scores=scores,
        visits=visits,
        texts=[rounds[r].texts[i] for r, i in rows],
        metrics=verdict_metrics(scores, visits, samples)
        | prefix_metrics(sampler, visits, taken["action_mask"], samples),
        samples=samples,
    )


def scores_to_learn_from(
    scores: HostScores,
    visits: Sequence[Visit],
    samples: int,
    components: Sequence[str],
    place: Callable[[np.ndarray], Array],
) -> Scores:
    """Returns what learning needs of the scores.

    Args:
      visits, samples: the prompts that the rows are of, and how many rows are of each; the rest is padding.
      components: the names of those that learning may see, whatever verifiers have been met since the run began.
      place: puts an array, by row, where learning takes it from.
    """
    nothing = np.full(scores.reward.shape, np.nan, np.float32)
    return Scores(
        reward=place(scores.reward),
        valid=place(scores.valid),
        verdict=place(scores.verdict),
        outcome=place(scores.outcome),
        # Of a row that is masked the tokens are worth nothing either.
        token_reward=None
        if scores.token_reward is None
        else place(np.where(scores.valid[:, None], scores.token_reward, 0).astype(np.float32)),
        components={name: place(scores.components.get(name, nothing)) for name in components},
        task=place(task_hashes(visits, samples, len(scores.reward))),
    )


def task_hashes(visits: Sequence[Visit], samples: int, rows: int) -> np.ndarray:
    """Returns a number for the task of every row, [rows] uint32: CRC-32 of its name, 0 on padding."""
    of_prompts = np.array([zlib.crc32(visit.example.task.encode()) for visit in visits], np.uint32)
    return np.pad(np.repeat(of_prompts, samples), (0, rows - len(visits) * samples))


def verdict_metrics(scores: HostScores, visits: list[Visit], samples: int) -> dict[str, float]:
    """Returns counts of verdicts and means of reward components and tasks, over rows that are not padding."""
    rows = len(visits) * samples
    valid = scores.valid[:rows]
    out = {f"verdict/{status.name.lower()}": float((scores.verdict[:rows] == status).sum()) for status in Status}
    del out["verdict/padding"]
    for name, component in scores.components.items():
        judged = np.isfinite(component[:rows])
        if judged.any():
            out[f"reward_component/{name}"] = float(component[:rows][judged].mean())
    tasks = np.array([visit.example.task for visit in visits for _ in range(samples)])
    for task in sorted(set(tasks)) if len(set(tasks)) > 1 else []:
        chosen = (tasks == task) & valid
        if chosen.any():
            out[f"reward_task/{task}"] = float(scores.reward[:rows][chosen].mean())
    return {**out, **scores.source_metrics}


def padded(scores: HostScores, missing: int) -> HostScores:
    """Returns the scores with `missing` rows of padding behind them."""
    if not missing:
        return scores
    longer = lambda x, fill: np.concatenate([x, np.full((missing, *x.shape[1:]), fill, x.dtype)])
    return dataclasses.replace(
        scores,
        reward=longer(scores.reward, 0),
        valid=longer(scores.valid, False),
        verdict=longer(scores.verdict, Status.PADDING),
        outcome=longer(scores.outcome, 0),
        components={name: longer(component, np.nan) for name, component in scores.components.items()},
        details=[*scores.details, *[""] * missing],
        token_reward=None if scores.token_reward is None else longer(scores.token_reward, 0),
    )


def chosen_scores(rounds: list[HostScores], rows: list[tuple[int, int]]) -> HostScores:
    """Returns the scores of (round, row) pairs, in their order."""
    pick = lambda name: np.stack([getattr(rounds[r], name)[i] for r, i in rows])
    names = sorted({name for scores in rounds for name in scores.components})
    nan = np.float32(np.nan)
    verdict = pick("verdict")
    return HostScores(
        reward=pick("reward"),
        valid=pick("valid"),
        verdict=verdict,
        outcome=pick("outcome"),
        components={
            name: np.stack([rounds[r].components[name][i] if name in rounds[r].components else nan for r, i in rows])
            for name in names
        },
        details=[rounds[r].details[i] for r, i in rows],
        replayed=sum(scores.replayed for scores in rounds),
        token_reward=None if rounds[0].token_reward is None else pick("token_reward"),
        source_metrics={
            name: sum(scores.source_metrics.get(name, 0.0) for scores in rounds)
            for name in sorted({name for scores in rounds for name in scores.source_metrics})
        },
    )


def fields(rollout: Rollout) -> dict[str, Array]:
    """Returns the per-sequence fields that are there, by name."""
    return {
        name: value
        for name, value in vars(rollout).items()
        if isinstance(value, jax.Array | np.ndarray) and jnp.ndim(value) > 0
    }
