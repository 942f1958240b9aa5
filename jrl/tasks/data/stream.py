"""An endless, exactly resumable stream over the training examples of a source.

    position 0, 1, 2, ...   --order: reshuffled each epoch-->   (epoch, example)   --split, checks-->   Visit

Every process of a run reads the same prompts in the same order, and a position means the same on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.tasks.data.curricula import ConfiguredCurriculum, Outcomes, none_left, order_of
from jrl.tasks.data.order import open_order, read_in_order
from jrl.tasks.data.prompts import NOT_DROPPED, Data, Visit, dropped_prompts, encode_prompt, is_held_out, refusal
from jrl.tasks.envs.contract import Source
from jrl.tasks.example import Example, visit_uid
from jrl.tasks.shares import is_above
from jrl.tasks.stopping import Stop, StopRequested, check_stop, never

ENOUGH_SEEN = 1000  # randomly ordered prompts, enough to estimate the dropped share to about 2 %


class Stream:
    """A position in the order, which `next` advances. Its state is JSON and is saved in the checkpoint."""

    def __init__(self, source: Source, tokenizer: Any, config: Data, seed: int, stop: Stop) -> None:
        self._source, self._tokenizer, self._config, self._stop = source, tokenizer, config, stop
        self._seed, self._size = seed, len(source)
        self._order = open_order(self._size, seed)
        self._position = 0
        self._ahead: dict[int, Example] = {}  # by index, examples of the next positions
        self._is_training: np.ndarray | None = None
        self.outcomes: Outcomes | None = None  # of the examples, if a stage has a curriculum
        # Both count the first pass only: later passes drop the same examples.
        self.counts: dict[str, int] = {}  # training examples that were dropped, by cause
        self.seen = 0  # training examples

    def next(self, n: int) -> list[Visit]:
        """Returns the next `n` visits.

        Raises: ValueError if a prompt is refused, more than Data.max_dropped_share of them are dropped, or a whole pass
            has no usable prompt. StopRequested if the stream's `stop` returns True; the stream is then unchanged.
        """
        before = self.get_state()
        try:
            return [self._advance(n - i) for i in range(n)]
        except StopRequested:
            self.set_state(before)
            raise

    def select(self, n: int, curriculum: ConfiguredCurriculum) -> list[Visit]:
        """Returns the next `n` visits of a curriculum: distinct examples, cycled if there are fewer than `n`.

        Args:
          curriculum: the curriculum; its table is `outcomes`.

        Raises: ValueError if it leaves no training prompt, or a prompt cannot be used; StopRequested as in `next`.
        """
        order = order_of(
            curriculum, self.outcomes, self._seed, self._position, self.training_examples(curriculum, self._stop)
        )
        chosen: list[int] = []
        for index in order.tolist():
            check_stop(self._stop, "reading prompts")
            if not is_held_out(self._source[index], self._config):
                chosen.append(index)
            if len(chosen) == n:
                break
        if not chosen:
            raise ValueError(none_left(curriculum.config, self.outcomes))
        return self.revisit([chosen[i % len(chosen)] for i in range(n)])

    def draw(self, n: int, chances: np.ndarray) -> list[Visit]:
        """Returns the next `n` visits of examples drawn with replacement, and advances past them. The draw is a
        function of seed and position.

        Args:
          chances: [size] float64 of sum 1, the probability of every example of the source.
        """
        rng = np.random.default_rng((self._seed, self._position))
        return self.revisit(rng.choice(self._size, size=n, p=chances).tolist())

    def every(self, stop: Stop = never) -> Iterator[Visit | None]:
        """Yields the first visit of every example of the source, in the source's order; None for one that is held out
        or dropped. The position does not change. Resets the counts and counts dropped examples, as the first pass does.

        Raises: ValueError if a prompt is refused, or more than Data.max_dropped_share of them are dropped;
            StopRequested if `stop` returns True.
        """
        self.counts, self.seen = {}, 0
        for index in range(self._size):
            check_stop(stop, "reading prompts")
            example = self._source[index]
            visit = None
            if not is_held_out(example, self._config):
                prompt, cause = encode_prompt(example, self._tokenizer, self._config)
                if cause is not None and self._config.on_bad_prompt == "refuse":
                    raise refusal(example, cause, len(prompt), self._config)
                self._count(cause)
                if cause is None:
                    visit = Visit(example, visit_uid(example.id, 0), prompt, index)
            yield visit
        self._check_dropped()

    def training_examples(self, curriculum: ConfiguredCurriculum, stop: Stop = never) -> np.ndarray | None:
        """Returns which examples of the source are in the training split, [size] bool, for a curriculum that compares
        examples; None: all are, or it does not compare. The first call that needs the mask reads every example.

        Raises: StopRequested if `stop` returns True.
        """
        if not curriculum.row.compares or self._config.held_out_every is None:
            return None
        if self._is_training is None:
            is_training = np.zeros(self._size, bool)
            for index in range(self._size):
                check_stop(stop, "reading prompts")
                is_training[index] = not is_held_out(self._source[index], self._config)
            self._is_training = is_training
        return self._is_training

    def revisit(self, chosen: Sequence[int]) -> list[Visit]:
        """Returns visits of the chosen examples, and advances past them. Their visit numbers, which seed their random
        draws, are negative positions, from -1 down; visits made by `next` use the epoch, from 0 up.

        Raises: ValueError if a prompt cannot be used.
        """
        visits = []
        for index in chosen:
            example = self._source[index]
            prompt, cause = encode_prompt(example, self._tokenizer, self._config)
            if cause is not None:
                raise refusal(example, cause, len(prompt), self._config, NOT_DROPPED)
            self._position += 1
            visits.append(Visit(example, visit_uid(example.id, -self._position), prompt, index))
        return visits

    def get_state(self) -> dict[str, Any]:
        """Returns the position and the counts as JSON. They are the same on every process, for any number of them."""
        return {"position": self._position, "seed": self._seed, "size": self._size,
                "counts": dict(sorted(self.counts.items())), "seen": self.seen}  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a saved position. Raises ValueError if it was saved with another seed or size of the source."""
        current = self.get_state()
        for name in ("seed", "size"):
            if state[name] != current[name]:
                raise ValueError(f"data position saved with {name} = {state[name]!r}, this run has {current[name]!r}")
        self._position = int(state["position"])
        self.counts = {cause: int(count) for cause, count in state["counts"].items()}
        self.seen = int(state["seen"])

    def _advance(self, missing: int) -> Visit:
        """Returns the next visit. missing: visits that are needed, this one included."""
        # Any window of 2 * size - 1 positions contains a whole epoch, so finding nothing means an empty split.
        for _ in range(2 * self._size):
            position = self._position
            if position == self._size:
                self._check_dropped()
            index = self._order(position)
            if index not in self._ahead:
                ahead = {self._order(position + i) for i in range(min(missing, self._size))}
                self._ahead = dict(read_in_order(self._source, ahead, self._stop, "reading prompts"))
            example = self._ahead.pop(index)
            self._position += 1
            if is_held_out(example, self._config):
                continue
            prompt, cause = encode_prompt(example, self._tokenizer, self._config)
            if cause is not None and self._config.on_bad_prompt == "refuse":
                raise refusal(example, cause, len(prompt), self._config)
            if position < self._size:
                self._count(cause)
            if cause is None:
                return Visit(example, visit_uid(example.id, position // self._size), prompt, index)
        raise ValueError(
            f"none of the {self._size} examples can be used for training "
            f"(dropped so far: {self.counts or 'none'}; Data.held_out_every = {self._config.held_out_every})"
        )

    def _count(self, cause: str | None) -> None:
        """Counts an example of the first pass, dropped for `cause`; None: not dropped."""
        self.seen += 1
        if cause is not None:
            self.counts[cause] = self.counts.get(cause, 0) + 1
            if self.seen >= ENOUGH_SEEN:
                self._check_dropped()

    def _check_dropped(self) -> None:
        """Raises ValueError if more of the examples seen so far were dropped than Data.max_dropped_share allows."""
        if is_above(sum(self.counts.values()), self.seen, self._config.max_dropped_share):
            raise ValueError(
                f"{dropped_prompts(self.counts, self.seen, self._config)}, more than Data.max_dropped_share="
                f"{self._config.max_dropped_share} of them; raise Data.prompt_length, or Data.max_dropped_share if "
                "this is intended"
            )


def open_stream(source: Source, tokenizer: Any, config: Data, *, seed: int, stop: Stop = never) -> Stream:
    """Returns the stream of the training split of `source`, at its start. Raises ValueError for an empty source."""
    if len(source) < 1:
        raise ValueError("the source has no examples")
    return Stream(source, tokenizer, config, seed, stop)
