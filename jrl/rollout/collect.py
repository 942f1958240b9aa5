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
from jrl.rollout.strategies.contract import FIRST_ATTEMPT, PLAIN, ConfiguredStrategy
from jrl.rollout.token_rewards import span_rewards
from jrl.tasks.data import curricula
from jrl.tasks.data.curricula import ConfiguredCurriculum
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stream import Stream
from jrl.tasks.stopping import Stop, never
from jrl.tasks.verdict import Status
from jrl.tasks.wrong_result import WrongResult
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
    place: Callable[[np.ndarray], Array]  # puts an array by row on the learner's devices
    prompts: int  # per draw
    samples: int  # per prompt
    prompt_length: int
    # Names of the components of the reward that learning may see, whichever verifiers have been loaded so far.
    components: tuple[str, ...] = ()
    curriculum: ConfiguredCurriculum | None = None  # None: prompts come in the stream's order
    strategy: ConfiguredStrategy = PLAIN
    segments: int = 1  # sampling calls per completion, each with its own weights
    next_segment: Callable[..., Rollout] | None = None  # draws a segment after the first; None: there is one
    processes: Processes = ONE  # of the run; each decodes and scores its own rows
    decodes_all: bool = True  # decode the text of other processes' rows too, since the run stores or shows it
    devices: Any = None  # separate ones that `program` draws on, from jrl.run.sampler_devices; None: the learner's


class Draw(NamedTuple):
    """A sampling call in flight: arrays on the device, and where in the data its prompts came from."""

    rollout: Rollout
    visits: list[Visit]  # one for each group; groups after them are padding
    position: dict[str, Any]  # of the data stream before these prompts; with a curriculum, also the examples it chose
    under_way: Callable[[], dict[str, float]] | None = None  # on separate devices: waits, and returns its seconds
    host: Rollout | None = None  # the rollout as numpy arrays, if it was transferred through the host
    gathered: dict[str, Array] | None = None  # the rollout's fields ON_HOST, on their way to every process


class Submitted(NamedTuple):
    """A draw that is being scored."""

    drawn: Draw
    host: dict[str, np.ndarray]  # the rollout's fields ON_HOST
    texts: list[str]  # completion of every sequence but padding, a strategy's prefix included; "" where not decoded
    # For the last attempts of `own_rows`, then for the first ones if there are two; None: nothing scores them.
    ticket: ScoringTicket | None
    others: list[Any]  # tickets of the other sources of rewards
    seconds: Mapping[str, float] = MappingProxyType({})  # with separate sampling devices: seconds waited, by metric


class Collected(NamedTuple):
    """A scored batch, on the device to learn from and on the host to look at."""

    rollout: Rollout
    scores: Scores
    host: dict[str, np.ndarray]  # the rollout's fields ON_HOST
    host_scores: HostScores
    visits: list[Visit]
    texts: list[str]  # as in Submitted, then "" for padding
    metrics: dict[str, float]
    samples: int  # per prompt


def draw(sampler: PromptSampler, weights: PyTree, version: Array) -> Draw:
    """Dispatches one sampling call on the next prompts of the training stream, and returns at once."""
    position, visits = next_visits(sampler)
    strategy, tokenizer, width = sampler.strategy.row, sampler.tokenizer, sampler.prompt_length
    placement = dict(count=sampler.prompts, width=width, pad_id=tokenizer.pad_id, mesh=sampler.mesh)
    if strategy.asked is None:
        prefixed = [visit._replace(prompt=visit.prompt + prefix_of(sampler, visit)) for visit in visits]
        prompts = place_prompts(prefixed, **placement)
    else:
        substitutes = [tokens_of(sampler, "asked", visit, width) for visit in visits]
        prompts = place_asked(substitutes, visits, **placement)
    stream = place_on_mesh(np.uint32(TRAIN_STREAM), replicated(sampler.mesh))
    rollout = sampler.program(weights, prompts, sampler.key, stream, version, sampler.params, sampler.stop_table, None)
    return Draw(rollout, visits, position, None if sampler.devices is None else sampler.devices.watch(rollout))


def draw_further(sampler: PromptSampler, drawn: Draw, weights: PyTree, version: Array) -> Draw:
    """Dispatches the next segment of a draw, and returns at once."""
    uid = np.zeros((*drawn.rollout.length.shape, 2), np.uint32)
    uid[: len(drawn.visits) * sampler.samples] = np.repeat([visit.uid for visit in drawn.visits], sampler.samples, 0)
    uid = place_on_mesh(uid, batch_sharding(sampler.mesh, 2))
    stream = place_on_mesh(np.uint32(TRAIN_STREAM), replicated(sampler.mesh))
    rollout = sampler.next_segment(weights, drawn.rollout, uid, sampler.key, stream, version, sampler.params)
    return drawn._replace(rollout=rollout, gathered=None)


def hand_out(drawn: Draw) -> Draw:
    """Dispatches the transfer of a draw's tokens to every process, and returns at once. Call it before the next draw is
    dispatched: devices run programs in order, so the transfer would wait for that draw too."""
    return drawn._replace(gathered=gathered({name: getattr(drawn.rollout, name) for name in ON_HOST}))


def prefix_of(sampler: PromptSampler, visit: Visit) -> tuple[int, ...]:
    """Returns the tokens that the strategy appends to a prompt and the policy continues; mostly ()."""
    return tokens_of(sampler, "prefix", visit, sampler.prompt_length - len(visit.prompt))


def tokens_of(sampler: PromptSampler, function: str, visit: Visit, room: int) -> tuple[int, ...]:
    """Returns the tokens that a function of the strategy's row gives for a visit. Raises WrongResult if they do not fit
    into `room`, or are no ids of the tokenizer: an id beyond the vocabulary would be read as another one."""
    (row, config), size = sampler.strategy, sampler.tokenizer.vocab_size
    tokens = getattr(row, function)(config, visit, sampler.tokenizer, room)
    is_id = lambda token: isinstance(token, int | np.integer) and 0 <= token < size
    if not isinstance(tokens, tuple) or len(tokens) > room or not all(map(is_id, tokens)):
        name = type(config).__name__
        raise WrongResult(
            f"Online.strategy = @{name}(): `{function}` returns {tokens!r:.100} for example "
            f"{visit.example.id!r}; it must return a tuple of at most {room} ids below {size}",
            getattr(row, function),
        )
    return tokens


def redraw_prompts(sampler: PromptSampler, position: dict[str, Any]) -> list[Visit]:
    """Returns the prompts of a draw that was saved in flight, and moves the stream past them again."""
    sampler.stream.set_state(position)
    if sampler.curriculum is not None:
        return sampler.stream.revisit(position["chosen"])
    return sampler.stream.next(sampler.prompts)


def next_visits(sampler: PromptSampler) -> tuple[dict[str, Any], list[Visit]]:
    """Returns the position of the next prompts in the data, and the prompts. With a curriculum the position also has
    the chosen examples, since its table will have changed."""
    position = sampler.stream.get_state()
    if sampler.curriculum is None:
        return position, sampler.stream.next(sampler.prompts)
    visits = sampler.stream.select(sampler.prompts, sampler.curriculum)
    return {**position, "chosen": [visit.index for visit in visits]}, visits


def record_outcomes(sampler: PromptSampler, rounds: Sequence[Collected]) -> dict[str, float]:
    """Records the outcomes of a step's rounds in the curriculum's table, and returns its metrics; {} without one."""
    if sampler.curriculum is None:
        return {}
    index, outcome, valid = [], [], []
    for round_ in rounds:
        rows = len(round_.visits) * round_.samples
        index += [visit.index for visit in round_.visits]
        outcome.append(round_.host_scores.outcome[:rows].reshape(-1, round_.samples))
        valid.append(round_.host_scores.valid[:rows].reshape(-1, round_.samples))
    stream = sampler.stream
    stream.outcomes = curricula.recorded(
        sampler.curriculum, stream.outcomes, index, np.concatenate(outcome), np.concatenate(valid)
    )
    return curricula.metrics(sampler.curriculum, stream.outcomes, stream.training_examples(sampler.curriculum))


def submit(
    drawn: Draw,
    sampler: PromptSampler,
    scorer: Scorer,
    sources: Sequence[RewardSource],
    completions: Callable[[Draw, dict[str, np.ndarray], list[str]], Completions],
) -> Submitted:
    """Waits for a draw, and submits its completions to the verifiers and the other sources of rewards.

    Args:
      completions: (draw, its fields on the host, texts) -> the input of the other sources.
    """
    samples = sampler.samples
    drawn, seconds = (drawn, {}) if sampler.devices is None else sampler.devices.collect(drawn)
    source = drawn.rollout if drawn.host is None else drawn.host
    host = fetch(drawn.gathered or {name: getattr(source, name) for name in ON_HOST})
    drawn = drawn._replace(gathered=None)  # takes memory on every device, and is not read again
    rows = range(len(drawn.visits) * samples)
    scored_here = own_rows(sampler, drawn.visits)
    decoded = set(rows if sources or sampler.decodes_all else scored_here)
    visits = [drawn.visits[row // samples] for row in rows]
    decode = lambda row, columns: sampler.tokenizer.decode(host["tokens"][row][columns].tolist())
    texts = [
        decode(row, slice(len(visit.prompt), host["length"][row])) if row in decoded else ""
        for row, visit in zip(rows, visits)
    ]
    attempts = sampler.strategy.row.attempts
    columns = [scored_columns(host, row, len(visit.prompt), attempts) for row, visit in zip(rows, visits)]

    def attempt_text(row: int, attempt: int) -> str:
        return texts[row] if attempts == 1 else decode(row, columns[row][attempt])  # a single one is the completion

    last_first = [*reversed(range(attempts))]
    texts_by_attempt = [[attempt_text(row, k) for row in scored_here] for k in last_first]
    # Each attempt has its own key: both may have the same text, and only one of them may have been scored.
    keys = [(visits[row].uid, row % samples + k * samples) for k in last_first for row in scored_here]
    examples = [visits[row].example for row in scored_here]
    ticket = scorer.submit([*itertools.chain(*texts_by_attempt)], examples * attempts, keys)
    tickets = []
    if sources:
        scores_all = len(scored_here) == len(rows)
        last_texts = texts_by_attempt[0] if scores_all else [attempt_text(row, -1) for row in rows]
        batch = completions(drawn, host, last_texts)
        tickets = [source.submit(batch) for source in sources]
    return Submitted(drawn, host, texts, ticket, others=tickets, seconds=seconds)


def own_rows(sampler: PromptSampler, visits: Sequence[Visit]) -> range:
    """Returns the rows of a draw that this process scores: those of its share of the prompts."""
    share = sampler.processes.share(len(visits))
    return range(share.start * sampler.samples, share.stop * sampler.samples)


def scored_columns(host: dict[str, np.ndarray], row: int, start: int, attempts: int) -> list[np.ndarray]:
    """Returns the columns of each attempt of a row, [k] int each, the first attempt first. A single attempt is all that
    follows the prompt, including tokens that the policy did not sample; each of two has its sampled tokens, and the
    second may have none.

    Args:
      start: tokens of the prompt.
    """
    if attempts == 1:
        return [np.arange(start, max(start, host["length"][row]))]
    actions = np.flatnonzero(host["action_mask"][row])
    runs = np.split(actions, np.flatnonzero(np.diff(actions) > 1) + 1)
    return [*runs, *[np.arange(0)] * (attempts - len(runs))]


def collect(
    submitted: Submitted,
    scorer: Scorer,
    sources: Sequence[RewardSource],
    sampler: PromptSampler,
    stop: Stop = never,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Waits for the scores of a draw, and returns it with them on the device. Padding rows are masked.

    Args:
      stop: polled while the verifiers work. progress: called with (scored, all) completions.

    Raises: StopRequested where `stop` says so; RewardOverflow where a token's reward, or the sum of the batch's
      rewards, is beyond float32.
    """
    samples = sampler.samples
    scores = scorer.collect(submitted.ticket, stop, progress, sampler.processes)
    drawn, texts, host = submitted.drawn, submitted.texts, submitted.host
    attempts = sampler.strategy.row.attempts
    if attempts > 1:
        scores = last_of_two(scores, len(own_rows(sampler, drawn.visits)))
    scores = scores_of_all(scores, sampler.processes)
    if scores.spans is not None:
        written = np.zeros(host["tokens"].shape, bool)
        for row in range(len(texts)):
            written[row, scored_columns(host, row, len(drawn.visits[row // samples].prompt), attempts)[-1]] = True
        with np.errstate(over="ignore"):
            token_reward = span_rewards(scores.spans, host["tokens"], written, sampler.tokenizer)
        # Only tokens that the policy sampled are rewarded.
        token_reward = np.where(host["action_mask"], token_reward, 0)[: len(texts)]
        scores = check_range(dataclasses.replace(scores, token_reward=token_reward))
    weights = scorer.component_weights
    for source, ticket in zip(sources, submitted.others):
        learned = source.collect(ticket)
        weights |= dict(zip(learned.names, learned.weights))
        scores = add_scores(scores, learned)
    scores = check_sums(scores, weights)
    num_padding = host["length"].shape[0] - len(texts)
    scores = padded(scores, num_padding)
    return Collected(
        rollout=drawn.rollout,
        scores=scores_to_learn_from(scores, drawn.visits, sampler),
        host=host,
        host_scores=scores,
        visits=drawn.visits,
        texts=texts + [""] * num_padding,
        metrics=verdict_metrics(scores, drawn.visits, samples)
        | prefix_metrics(sampler, drawn.visits, host["action_mask"]),
        samples=samples,
    )


def unsubmitted(drawn: Draw) -> Submitted:
    """Returns a draw that nothing scores."""
    host = {name: getattr(drawn.rollout, name) for name in ON_HOST}
    return Submitted(drawn, host, texts=[""] * len(host["length"]), ticket=None, others=[])


def unscored(submitted: Submitted, sampler: PromptSampler, *, rewards_tokens: bool) -> Collected:
    """Returns a draw with no valid row, so that nothing is learned from it.

    Args:
      rewards_tokens: whether the stage's scores include rewards of tokens.
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
        token_reward=np.zeros(shape, np.float32) if rewards_tokens else None,
    )
    visits = submitted.drawn.visits
    return Collected(
        rollout=submitted.drawn.rollout,
        scores=scores_to_learn_from(scores, visits, sampler),
        host=submitted.host,
        host_scores=scores,
        visits=visits,
        texts=submitted.texts,
        metrics={},
        samples=sampler.samples,
    )


def prefix_metrics(sampler: PromptSampler, visits: Sequence[Visit], action_mask: np.ndarray) -> dict[str, float]:
    """Returns the mean number of tokens between the prompt and the first sampled token, over rows with a sampled token;
    {} without a strategy."""
    actions = action_mask[: len(visits) * sampler.samples]
    if sampler.strategy.config is None or not actions.any():
        return {}
    prompt_lengths = np.repeat([len(visit.prompt) for visit in visits], sampler.samples)
    prefix_lengths = actions.argmax(axis=1) - prompt_lengths
    return {"rollout/prefix_length": float(prefix_lengths[actions.any(axis=1)].mean())}


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


def refilled(
    first: Collected,
    most: int,
    another: Callable[[], Collected],
    keep: Callable[[Collected], Array],
    sampler: PromptSampler,
) -> Collected:
    """Returns one batch, filled with groups that carry a signal from at most `most` further rounds.

    Args:
      another: draws and scores one more round.
      keep: (round) -> [N] bool on the device, the rows that the objective learns from.
    """
    rounds, kept = [first], [groups_with_signal(first, keep(first))]
    # Every process sees the same rewards, so every process draws the same number of rounds.
    while needs_another(rounds, kept, most):
        rounds.append(another())
        kept.append(groups_with_signal(rounds[-1], keep(rounds[-1])))
    return filled(rounds, kept, sampler)


def needs_another(rounds: list[Collected], kept: list[list[int]], most: int) -> bool:
    """Whether the batch still lacks groups with a signal and another round is allowed.

    Args:
      kept: the groups of each round that have a signal.
    """
    return sum(map(len, kept)) < len(rounds[0].visits) and len(rounds) <= most


def filled(rounds: list[Collected], kept: list[list[int]], sampler: PromptSampler) -> Collected:
    """Returns the batch made from all rounds of a step, with their counts as metrics. kept: as in `needs_another`."""
    first = rounds[0]
    counters = {
        "refill/rounds": float(len(rounds) - 1),
        "refill/groups_drawn": float(sum(len(r.visits) for r in rounds)),
        "refill/groups_with_signal": float(sum(map(len, kept))),
    }
    merged = first if len(rounds) == 1 else merge(rounds, kept, sampler)
    return merged._replace(metrics={**merged.metrics, **counters})


def groups_with_signal(round_: Collected, keep: Array) -> list[int]:
    """Returns the groups of a round that the objective would learn from. keep: [N] bool, its rows."""
    groups = fetch(keep).reshape(-1, round_.samples).any(axis=1)
    return [g for g in np.flatnonzero(groups).tolist() if g < len(round_.visits)]


def merge(rounds: list[Collected], kept: list[list[int]], sampler: PromptSampler) -> Collected:
    """Returns one batch: groups with signal in the order drawn, then groups without, which the objective masks."""
    samples, num_groups = sampler.samples, len(rounds[0].visits)
    with_signal = [(r, g) for r, groups in enumerate(kept) for g in groups]
    drawn = [(r, g) for r, round_ in enumerate(rounds) for g in range(len(round_.visits))]
    chosen = [*dict.fromkeys(with_signal + drawn)][:num_groups]
    rows = [(r, g * samples + k) for r, g in chosen for k in range(samples)]
    num_padding = rounds[0].host["length"].shape[0] - len(rows)
    rows += [(0, num_groups * samples + k) for k in range(num_padding)]
    fetched = [fetch(fields(round_.rollout)) for round_ in rounds]
    merged = {name: np.stack([fetched[r][name][i] for r, i in rows]) for name in fetched[0]}
    merged["group"] = (np.arange(len(rows)) // samples).astype(merged["group"].dtype)
    scores = chosen_scores([round_.host_scores for round_ in rounds], rows)
    visits = [rounds[r].visits[g] for r, g in chosen]
    return Collected(
        rollout=rounds[0].rollout.replace(**{name: sampler.place(value) for name, value in merged.items()}),
        scores=scores_to_learn_from(scores, visits, sampler),
        host={name: merged[name] for name in ON_HOST},
        host_scores=scores,
        visits=visits,
        texts=[rounds[r].texts[i] for r, i in rows],
        metrics=verdict_metrics(scores, visits, samples) | prefix_metrics(sampler, visits, merged["action_mask"]),
        samples=samples,
    )


def scores_to_learn_from(scores: HostScores, visits: Sequence[Visit], sampler: PromptSampler) -> Scores:
    """Returns the part of the scores that learning reads, on the device. Rows after those of the visits are padding."""
    place = sampler.place
    absent = np.full(scores.reward.shape, np.nan, np.float32)
    return Scores(
        reward=place(scores.reward),
        valid=place(scores.valid),
        verdict=place(scores.verdict),
        outcome=place(scores.outcome),
        # The tokens of a masked row have no reward either.
        token_reward=None
        if scores.token_reward is None
        else place(np.where(scores.valid[:, None], scores.token_reward, 0).astype(np.float32)),
        components={name: place(scores.components.get(name, absent)) for name in sampler.components},
        task=place(task_hashes(visits, sampler.samples, len(scores.reward))),
        example=place(example_indices(visits, sampler.samples, len(scores.reward))),
    )


def task_hashes(visits: Sequence[Visit], samples: int, rows: int) -> np.ndarray:
    """Returns a hash of the task of every row, [rows] uint32: CRC-32 of its name, 0 on padding."""
    hashes = np.array([zlib.crc32(visit.example.task.encode()) for visit in visits], np.uint32)
    return np.pad(np.repeat(hashes, samples), (0, rows - len(visits) * samples))


def example_indices(visits: Sequence[Visit], samples: int, rows: int) -> np.ndarray:
    """Returns the index of every row's example in the run's source, [rows] int32; -1 on padding, and for an example
    that is not from there. An index beyond int32 is the largest: no objective has as many entries (Needs.examples)."""
    indices = np.array([-1 if visit.index is None else visit.index for visit in visits], np.int64)
    indices = indices.clip(max=np.iinfo(np.int32).max).astype(np.int32)
    return np.pad(np.repeat(indices, samples), (0, rows - len(visits) * samples), constant_values=-1)


def verdict_metrics(scores: HostScores, visits: list[Visit], samples: int) -> dict[str, float]:
    """Returns counts of verdicts and means of reward components and tasks, over rows that are not padding."""
    rows = len(visits) * samples
    valid = scores.valid[:rows]
    metrics = {f"verdict/{status.name.lower()}": float((scores.verdict[:rows] == status).sum()) for status in Status}
    del metrics["verdict/padding"]
    for name, component in scores.components.items():
        judged = np.isfinite(component[:rows])
        if judged.any():
            metrics[f"reward_component/{name}"] = float(component[:rows][judged].mean())
    tasks = np.array([visit.example.task for visit in visits for _ in range(samples)])
    for task in sorted(set(tasks)) if len(set(tasks)) > 1 else []:
        of_task = (tasks == task) & valid
        if of_task.any():
            metrics[f"reward_task/{task}"] = float(scores.reward[:rows][of_task].mean())
    return {**metrics, **scores.source_metrics}


def padded(scores: HostScores, missing: int) -> HostScores:
    """Returns the scores followed by `missing` rows of padding."""
    if not missing:
        return scores
    pad = lambda x, fill: np.concatenate([x, np.full((missing, *x.shape[1:]), fill, x.dtype)])
    return dataclasses.replace(
        scores,
        reward=pad(scores.reward, 0),
        valid=pad(scores.valid, False),
        verdict=pad(scores.verdict, Status.PADDING),
        outcome=pad(scores.outcome, 0),
        components={name: pad(component, np.nan) for name, component in scores.components.items()},
        details=[*scores.details, *[""] * missing],
        token_reward=None if scores.token_reward is None else pad(scores.token_reward, 0),
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
        token_reward=None if rounds[0].token_reward is None else pick("token_reward"),
        source_metrics={
            name: sum(scores.source_metrics.get(name, 0.0) for scores in rounds)
            for name in sorted({name for scores in rounds for name in scores.source_metrics})
        },
    )


def fields(rollout: Rollout) -> dict[str, Array]:
    """Returns the per-sequence fields that are not None, by name."""
    return {
        name: value
        for name, value in vars(rollout).items()
        if isinstance(value, jax.Array | np.ndarray) and jnp.ndim(value) > 0
    }
