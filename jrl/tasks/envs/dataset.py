"""Tasks from a file in the layout of a published data set: conversations, pairs, ranked answers, trees. No JAX.

    Config.task = @Dataset()
    Dataset.path = 'ultrafeedback.parquet'
    Dataset.layout = 'ultrafeedback'

The layouts are in jrl.tasks.envs.layouts. The layout must be named; it is never guessed. The error for a row that it
cannot read names file, row and field, and the layouts that could read it. The file is read once when it is opened;
16 bytes per row and at most 16 per example stay in memory.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jrl.config.errors import suggestion
from jrl.tasks.envs.columns import BadRow, counts_text, names_of
from jrl.tasks.envs.contract import REPEATED_PROMPT, digest_of, in_range
from jrl.tasks.envs.jsonl import Reader, open_reader
from jrl.tasks.envs.layouts import LAYOUTS
from jrl.tasks.envs.layouts.contract import Take, Taken, taken
from jrl.tasks.envs.layouts.fields import BadField, Field
from jrl.tasks.example import Example, Message
from jrl.tasks.shares import is_above
from jrl.tasks.stopping import Stop, check_stop, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A file of a published data set: JSON lines (.jsonl, .jsonl.gz), Parquet (.parquet) or ArrayRecord
    (.array_record). docs/data-layouts.md has every layout with an example row."""

    path: str  # the file, or with * in its name several, read as one: 'train-*.parquet'
    layout: str  # the layout of its rows: a name of `jrl list layouts`
    take: Take | None = None  # what becomes an example; None: the layout's first choice
    rank_by: str | None = None  # what answers are ranked by; None: the layout's first choice
    system: str = ""  # a system message for conversations that have none
    task: str = ""  # label of the examples; empty: the file's name up to * or its ending, else the folder's
    verifiers: tuple[str, ...] = ()  # of the examples; empty: the run's verifiers
    on_bad_row: Literal["refuse", "drop"] = "refuse"  # refuse: stop with an error; drop: skip and count the row
    max_dropped: float = 0.1  # largest share of rows that may be dropped
    max_row_bytes: int = 16 * 2**20  # a longer row is bad

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            hint = suggestion(self.layout, LAYOUTS, kind="layouts", max_listed=len(LAYOUTS))
            raise ValueError(f"Dataset.layout: there is no layout {self.layout!r}{hint}")
        layout = LAYOUTS[self.layout]
        if self.take is not None and self.take not in layout.takes:
            raise ValueError(f"Dataset.take: {self.take!r} does not go with the layout {self.layout!r}, which has "
                             f"{', '.join(layout.takes)}")  # fmt: skip
        if self.rank_by is not None and self.rank_by not in layout.rank_by:
            has = f"has {', '.join(layout.rank_by)}" if layout.rank_by else "ranks nothing"
            raise ValueError(f"Dataset.rank_by: {self.rank_by!r} does not go with the layout {self.layout!r}, which "
                             f"{has}")  # fmt: skip
        if not 0 <= self.max_dropped <= 1:
            raise ValueError(f"Dataset.max_dropped is {self.max_dropped}; it is a share, from 0 to 1")
        if self.max_row_bytes < 2:
            raise ValueError(f"Dataset.max_row_bytes is {self.max_row_bytes}: it must be at least 2")


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetSource:
    """Examples by number. Make one with `open_dataset`."""

    config: Dataset
    reader: Reader
    positions: np.ndarray  # [rows] uint64, the row's position for the reader; rows of a group are adjacent
    numbers: np.ndarray  # [rows] uint64, its number in the file, from 1
    starts: np.ndarray  # [groups + 1] int64, the first row of each group of rows that are read together
    group: np.ndarray  # [n] uint32, the group of rows of an example
    which: np.ndarray  # [n] uint32, its index among the examples of the group
    fingerprint: str
    counts: dict[str, int]
    verifiers: frozenset[str]

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, index: int) -> Example:
        """Returns example `index`. Raises ValueError if the file changed since it was opened."""
        index = in_range(index, len(self))
        group, which = int(self.group[index]), int(self.which[index])
        rows = slice(int(self.starts[group]), int(self.starts[group + 1]))
        read = read_rows([self.reader.at(int(position)) for position in self.positions[rows]], self.config, {})
        return _example(read[which], int(self.numbers[rows.start]), which if len(read) > 1 else None, self.config)


def open_dataset(config: Dataset, stop: Stop = never) -> DatasetSource:
    """Returns the source. Every row is checked.

    Raises: ValueError if the file cannot be read, a row is bad and `on_bad_row` is "refuse" (naming file, row and
        field), more than `max_dropped` of the rows are bad, or no example is left; StopRequested if `stop` returns
        True.
    """
    try:
        return _Opening(config, stop).source()
    except OSError as error:
        unread = str(error.filename or config.path)  # of several files, the one
        raise ValueError(f"Dataset.path: {unread!r} cannot be read: {error.strerror or error}") from error


class _Opening:
    """One pass over a file, with the counts of bad and skipped rows."""

    def __init__(self, config: Dataset, stop: Stop) -> None:
        self.config, self.layout, self.stop = config, LAYOUTS[config.layout], stop
        self.reader = open_reader(config, stop)
        self.counts: dict[str, int] = {}
        self.skipped: dict[str, int] = {}
        self.first_bad = ""
        self.total = 0  # rows of the file

    def source(self) -> DatasetSource:
        positions, numbers, starts = array.array("Q"), array.array("Q"), array.array("q", [0])
        group, which = array.array("L"), array.array("L")
        prompts = array.array("Q")
        for row_positions, row_numbers, read in self._groups():
            for i, taken_row in enumerate(read):
                group.append(len(starts) - 1)
                which.append(i)
                digest = _example(taken_row, row_numbers[0], i, self.config).prompt_digest()
                prompts.append(int.from_bytes(digest[:8], "little"))
            positions.extend(row_positions)
            numbers.extend(row_numbers)
            starts.append(len(positions))
        dropped = sum(self.counts.values())
        if is_above(dropped, self.total, self.config.max_dropped):
            raise ValueError(
                f"{self.config.path}: {dropped} of {self.total} rows are bad, more than Dataset.max_dropped = "
                f"{self.config.max_dropped} of them: {counts_text(self.counts)}. The first: {self.first_bad}"
            )
        if not len(group):
            causes = {**self.counts, **self.skipped}
            why = f": {counts_text(causes)}" if causes else ""
            first = f". The first bad row: {self.first_bad}" if self.first_bad else ""
            raise ValueError(f"{self.config.path} holds no examples{why}{first}")
        duplicates = len(prompts) - len(np.unique(np.asarray(prompts, np.uint64)))
        for cause, count in (*self.skipped.items(), (REPEATED_PROMPT, duplicates), *self.reader.counts().items()):
            if count:
                self.counts[cause] = count
        c = self.config
        name, verifiers = names_of(c.path)[0], "/".join(c.verifiers)
        decides = (name, c.layout, c.take, c.rank_by, c.system, c.task, verifiers, c.max_row_bytes)
        return DatasetSource(
            config=c,
            reader=self.reader,
            positions=np.asarray(positions, np.uint64),
            numbers=np.asarray(numbers, np.uint64),
            starts=np.asarray(starts, np.int64),
            group=np.asarray(group, np.uint32),
            which=np.asarray(which, np.uint32),
            fingerprint=digest_of("dataset", *decides, self.reader.digest()),
            counts=self.counts,
            verifiers=frozenset(c.verifiers),
        )

    def _groups(self):
        """Yields (positions, numbers, the Taken of the rows) of every row, or of every group of rows read together."""
        grouped: dict[str, tuple[array.array, array.array]] = {}
        for number, position, row in self.reader.each():
            check_stop(self.stop, f"reading {self.config.path}")
            self.total += 1
            value: dict[str, Any] | None = None
            try:
                value = row()
                if self.layout.group is not None:
                    key = self.layout.group(Field(value))
                    positions, numbers = grouped.setdefault(key, (array.array("Q"), array.array("Q")))
                    positions.append(position)
                    numbers.append(number)
                    continue
                read = read_rows([value], self.config, self.skipped)
            except BadRow as bad:
                self._bad(bad, [number], value)
                continue
            if read:
                yield [position], [number], read
        for positions, numbers in grouped.values():
            check_stop(self.stop, f"reading {self.config.path}")
            try:
                read = read_rows([self.reader.at(position) for position in positions], self.config, self.skipped)
            except BadRow as bad:
                self._bad(bad, numbers, None)
                continue
            if read:
                yield positions, numbers, read

    def _bad(self, bad: BadRow, numbers: Sequence[int], row: dict[str, Any] | None) -> None:
        """Counts a group of bad rows. Raises: ValueError if bad rows are refused."""
        number = numbers[bad.row if isinstance(bad, BadField) else 0]
        what = str(bad) if isinstance(bad, BadField) else f"the row {bad}"
        problem = f"{self.reader.place(number)}: {what}"
        if self.config.on_bad_row == "refuse":
            others = [] if row is None else readable_as(row, self.config.layout)
            could = (
                f". Dataset.layout is {self.config.layout!r}; these read the row: {', '.join(others)}" if others else ""
            )
            raise ValueError(f"{problem}{could}. Dataset.on_bad_row = 'drop' drops and counts such rows") from bad
        self.counts[bad.cause] = self.counts.get(bad.cause, 0) + len(numbers)
        self.first_bad = self.first_bad or problem


def read_rows(rows: Sequence[dict[str, Any]], config: Dataset, skipped: dict[str, int]) -> list[Taken]:
    """Returns what becomes of a group of rows that are read together. Raises: BadField.

    Args:
      skipped: counts by cause; prompts without an example are added to them, as in `taken`.
    """
    layout = LAYOUTS[config.layout]
    fields = [Field(row, row=i) for i, row in enumerate(rows)]
    rank_by = config.rank_by or next(iter(layout.rank_by), None)
    read = layout.read(fields if layout.group is not None else fields[0], rank_by)
    return taken(read, config.take or layout.takes[0], skipped)


def readable_as(row: dict[str, Any], asked: str | None) -> list[str]:
    """Returns the names of the layouts that can read a row, without `asked`; None: all of them."""
    names = []
    for name, layout in LAYOUTS.items():
        try:
            field = Field(row)
            if layout.group is not None:
                layout.group(field)
            layout.read([field] if layout.group is not None else field, next(iter(layout.rank_by), None))
        except BadRow:
            continue
        names.append(name)
    return [name for name in names if name != asked]


def _example(row: Taken, number: int, which: int | None, config: Dataset) -> Example:
    name, task = names_of(config.path)
    prompt = row.prompt
    if config.system and prompt[0].role != "system":
        prompt = (Message("system", config.system), *prompt)
    return Example(
        id=f"{name}/{number}" + ("" if which is None else f".{which}"),
        messages=prompt,
        answer=row.answer,
        verifiers=config.verifiers,
        task=config.task or task,
        info=row.info,
    )
