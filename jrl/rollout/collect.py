"""From prompts to a scored batch: draw on the device, verify on the host, refill where groups carry no signal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.device.sharding import batch_sharding, replicated
from jrl.rollout.rewards import add_rewards, judge_texts
from jrl.rollout.scoring import HostScores
from jrl.run.job import Job
from jrl.run.programs import TRAIN_STREAM, place_prompts
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Message
from jrl.tasks.verdict import Status
from jrl.types import Array, PyTree, Rollout, Scores


class Draw(NamedTuple):
    """A sampling call under way: arrays on the device, and where in the data its prompts came from."""

    rollout: Rollout
    visits: list[Visit]  # one for each group; groups after them are padding
    position: dict[str, Any]  # of the data stream before these prompts


class Collected(NamedTuple):
    """A scored batch, on the device to learn from and on the host to look at."""

    rollout: Rollout
    scores: Scores
    host: dict[str, np.ndarray]  # the rollout's fields
    said: HostScores
    visits: list[Visit]
    texts: list[str]  # completion of every sequence; "" for padding
    metrics: dict[str, float]


def draw(job: Job, params: PyTree, version: Array) -> Draw:
    """Dispatches one sampling call on the next prompts of the training stream, and returns at once."""
    position = job.stream.get_state()
    visits = job.stream.next(job.config.loop.prompts)
    return Draw(sample(job, params, version, visits), visits, position)


def redraw_prompts(job: Job, position: dict[str, Any]) -> list[Visit]:
    """Returns the prompts of a draw that was saved on its way, moving the stream past them again."""
    job.stream.set_state(position)
    return job.stream.next(job.config.loop.prompts)


def sample(job: Job, params: PyTree, version: Array, visits: list[Visit]) -> Rollout:
    data, loop = job.config.data, job.config.loop
    prompts = place_prompts(visits, loop.prompts, data.prompt_length, job.tokenizer.pad_id, job.mesh)
    stream = jax.device_put(np.uint32(TRAIN_STREAM), replicated(job.mesh))
    return job.programs.sample(params, prompts, job.key, stream, version, job.sampling_params, job.stop_table, None)


def collect(job: Job, first: Draw, refill_with: Callable[[], tuple[PyTree, Array]], meanwhile: Callable[..., Any]):
    """Returns (Collected, what `meanwhile` returned for its rollout).

    Args:
      first: the draw of this step.
      refill_with: gives the parameters and version that refills of this step are drawn with.
      meanwhile: (rollout, its fields on the host) -> anything. Called while the host scores, to keep the device busy;
        called again where refills changed the batch.
    """
    most = job.algorithm.refill(job.config.algo)
    host, ticket, texts = begin_scoring(job, first)
    busy = meanwhile(first.rollout, host)
    rounds = [scored(job, first, host, judged(job, first, job.scorer.collect(ticket), texts), texts)]
    if most is None:
        return rounds[0], busy
    kept = [kept_groups(job, rounds[0])]
    # Every process sees the same rewards, so every process takes the same number of rounds.
    while sum(map(len, kept)) < len(first.visits) and len(rounds) <= most:
        params, version = refill_with()
        again = draw(job, params, version)
        host, ticket, texts = begin_scoring(job, again)
        rounds.append(scored(job, again, host, judged(job, again, job.scorer.collect(ticket), texts), texts))
        kept.append(kept_groups(job, rounds[-1]))
    counters = {
        "refill/rounds": float(len(rounds) - 1),
        "refill/groups_drawn": float(sum(len(r.visits) for r in rounds)),
        "refill/groups_with_signal": float(sum(map(len, kept))),
    }
    if len(rounds) == 1:
        return rounds[0]._replace(metrics={**rounds[0].metrics, **counters}), busy
    merged = merge(job, rounds, kept)
    return merged._replace(metrics={**merged.metrics, **counters}), meanwhile(merged.rollout, merged.host)


def begin_scoring(job: Job, drawn: Draw) -> tuple[dict[str, np.ndarray], Any, list[str]]:
    """Waits for the draw, and hands its completions to the verifiers. Returns (fields on the host, ticket, texts)."""
    host = jax.device_get(fields(drawn.rollout))
    samples = job.config.loop.samples
    texts, keys, examples = [], [], []
    for row in range(len(drawn.visits) * samples):
        visit = drawn.visits[row // samples]
        texts.append(completion_text(job.tokenizer, host, row))
        keys.append((visit.uid, int(host["sample"][row])))
        examples.append(visit.example)
    return host, job.scorer.submit(texts, examples, keys), texts


def completion_text(tokenizer: Any, host: dict[str, np.ndarray], row: int) -> str:
    """Returns what the policy said in a row, control tokens left out."""
    return tokenizer.decode(host["tokens"][row][host["action_mask"][row]].tolist())


def judged(job: Job, drawn: Draw, said: HostScores, texts: list[str]) -> HostScores:
    """Returns the scores with the reward model's word added, where the run has one."""
    if job.judge is None:
        return said
    samples = job.config.loop.samples
    spoken = [
        [*drawn.visits[row // samples].example.messages, Message("assistant", text)] for row, text in enumerate(texts)
    ]
    return add_rewards(said, job.judge, *judge_texts(job.judge, spoken))


def scored(job: Job, drawn: Draw, host: dict[str, np.ndarray], said: HostScores, texts: list[str]) -> Collected:
    """Returns a round with its scores on the device. Padding rows are masked."""
    rows = host["length"].shape[0]
    missing = rows - len(texts)
    said = padded(said, missing)
    scores = on_device(said, job)
    return Collected(
        drawn.rollout,
        scores,
        host,
        said,
        drawn.visits,
        texts + [""] * missing,
        verdict_metrics(said, drawn.visits, job),
    )


def on_device(said: HostScores, job: Job) -> Scores:
    """Returns what learning needs of the scores, cut over the batch axes."""
    place = lambda x: jax.device_put(x, batch_sharding(job.mesh, x.ndim))
    return Scores(
        reward=place(said.reward), valid=place(said.valid), verdict=place(said.verdict), outcome=place(said.outcome)
    )


def verdict_metrics(said: HostScores, visits: list[Visit], job: Job) -> dict[str, float]:
    """Returns counts of verdicts and means of reward parts and tasks, over rows that are not padding."""
    rows = len(visits) * job.config.loop.samples
    valid = said.valid[:rows]
    out = {f"verdict/{status.name.lower()}": float((said.verdict[:rows] == status).sum()) for status in Status}
    del out["verdict/padding"]
    for name, part in said.parts.items():
        judged = np.isfinite(part[:rows])
        if judged.any():
            out[f"reward_part/{name}"] = float(part[:rows][judged].mean())
    tasks = np.array([visit.example.task for visit in visits for _ in range(job.config.loop.samples)])
    for task in sorted(set(tasks)) if len(set(tasks)) > 1 else []:
        chosen = (tasks == task) & valid
        if chosen.any():
            out[f"reward_task/{task}"] = float(said.reward[:rows][chosen].mean())
    return out


def kept_groups(job: Job, round_: Collected) -> list[int]:
    """Returns the groups of a round that the algorithm would learn from."""
    rows = jax.device_get(job.programs.keep(round_.rollout, round_.scores, job.algo))
    groups = rows.reshape(-1, job.config.loop.samples).any(axis=1)
    return [g for g in np.flatnonzero(groups).tolist() if g < len(round_.visits)]


def merge(job: Job, rounds: list[Collected], kept: list[list[int]]) -> Collected:
    """Returns one batch: groups with signal in the order drawn, then groups without, which the algorithm masks."""
    samples, wanted = job.config.loop.samples, len(rounds[0].visits)
    good = [(r, g) for r, groups in enumerate(kept) for g in groups]
    rest = [(r, g) for r, round_ in enumerate(rounds) for g in range(len(round_.visits)) if g not in set(kept[r])]
    chosen = (good + rest)[:wanted]
    rows = [(r, g * samples + k) for r, g in chosen for k in range(samples)]
    pad = rounds[0].host["length"].shape[0] - len(rows)
    rows += [(0, wanted * samples + k) for k in range(pad)]

    def pick(name: str) -> np.ndarray:
        return np.stack([rounds[r].host[name][i] for r, i in rows])

    host = {name: pick(name) for name in rounds[0].host}
    host["group"] = (np.arange(len(rows)) // samples).astype(host["group"].dtype)
    said = chosen_scores([round_.said for round_ in rounds], rows)
    place = lambda x: jax.device_put(x, batch_sharding(job.mesh, x.ndim))
    rollout = rounds[0].rollout.replace(**{name: place(value) for name, value in host.items()})
    scores = on_device(said, job)
    visits = [rounds[r].visits[g] for r, g in chosen]
    texts = [rounds[r].texts[i] for r, i in rows]
    return Collected(rollout, scores, host, said, visits, texts, verdict_metrics(said, visits, job))


def padded(said: HostScores, missing: int) -> HostScores:
    """Returns the scores with `missing` rows of padding behind them."""
    if not missing:
        return said
    longer = lambda x, fill: np.concatenate([x, np.full(missing, fill, x.dtype)])
    return dataclasses.replace(
        said,
        reward=longer(said.reward, 0),
        valid=longer(said.valid, False),
        verdict=longer(said.verdict, Status.PADDING),
        outcome=longer(said.outcome, 0),
        parts={name: longer(part, np.nan) for name, part in said.parts.items()},
        details=[*said.details, *[""] * missing],
    )


def chosen_scores(rounds: list[HostScores], rows: list[tuple[int, int]]) -> HostScores:
    """Returns the scores of (round, row) pairs, in their order."""
    pick = lambda name: np.stack([getattr(rounds[r], name)[i] for r, i in rows])
    names = sorted({name for said in rounds for name in said.parts})
    nan = np.float32(np.nan)
    verdict = pick("verdict")
    return HostScores(
        reward=pick("reward"),
        valid=pick("valid"),
        verdict=verdict,
        outcome=pick("outcome"),
        parts={
            name: np.stack([rounds[r].parts[name][i] if name in rounds[r].parts else nan for r, i in rows])
            for name in names
        },
        details=[rounds[r].details[i] for r, i in rows],
        counts={status.name: int((verdict == status).sum()) for status in Status},
        replayed=sum(said.replayed for said in rounds),
    )


def fields(rollout: Rollout) -> dict[str, Array]:
    """Returns the per-sequence fields that are there, by name."""
    return {
        name: value
        for name, value in vars(rollout).items()
        if value is not None and isinstance(value, jax.Array) and jnp.ndim(value) > 0
    }
