"""Shows a data file as the model will see it, for `jrl data inspect`: each row's tokens, which of them are learned
from, and statistics over all rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl import paths
from jrl.config.errors import nearest
from jrl.config.load import load
from jrl.experiment import Config, row_of, stage_names, stored_rows_of
from jrl.run.report.text import counted, printable
from jrl.tasks.data.contamination import EvaluationIndex, described, example_digest
from jrl.tasks.data.prompts import Data, Visit, encode_prompt, is_held_out
from jrl.tasks.data.sources import SOURCES
from jrl.tasks.data.stored import StoredSource
from jrl.tasks.data.survey import texts_of
from jrl.tasks.envs import ENVS, open_source
from jrl.tasks.envs.contract import Environment, Source
from jrl.tasks.envs.dataset import Dataset, readable_as
from jrl.tasks.envs.filtered import FilteredSource
from jrl.tasks.envs.jsonl import Jsonl, open_reader
from jrl.tasks.envs.layouts import LAYOUTS
from jrl.tasks.example import visit_uid
from jrl.tasks.stopping import Stop, never
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.bytes import Bytes

SHOWN_OVERLAPS = 20  # most contaminated rows that are listed
LONGEST = 1 << 20  # most tokens of a prompt, without a configuration
WIDE = 1 << 16  # tokens for which arrays are allocated whatever an example says: templates may add many
LEARNED, PLAIN = "\x1b[32m", "\x1b[0m"


class Inspected(NamedTuple):
    """An open data file."""

    source: Source
    tokenizer: Any
    data: Data
    rows: StoredSource | None  # makes rows of examples; None: an example is its prompt alone
    settings: Any  # the config of `rows`
    width: int  # most tokens of a row
    task: Any = None  # how the file is read; None: a configuration's own task


class TokenRow(NamedTuple):
    """One row of tokens."""

    label: str  # "prompt"; "learned"; in units of several rows "label 1" or "label 0"
    tokens: list[int]
    learned: list[bool]


class Read(NamedTuple):
    """How to read a file, and whose task to read."""

    layout: str | None = None  # one of LAYOUTS; None: the columns of Jsonl
    take: str | None = None  # what the layout makes an example of; None: as configured, else its first choice
    stage: str | None = None  # the stage whose task is read; None: Config.task
    option: str = "--layout"  # that names the layout
    bindings: Sequence[str] = ()  # without a configuration: of the fields of Jsonl, or of Dataset with a layout


BY_COLUMNS = Read()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """The root of `Read.bindings`."""

    task: Any = dataclasses.field(metadata={"table": "envs"})


def bound_task(read: Read) -> Dataset | Jsonl:
    """Returns the settings that `read.bindings` give for a file that is read without a configuration, whose path is
    not among them. Raises: ConfigError for what is no binding of the section; ValueError for one of another."""
    section = "Jsonl" if read.layout is None else "Dataset"
    if others := [binding for binding in read.bindings if not binding.startswith(f"{section}.")]:
        raise ValueError(f"{others[0]}: without --config, only fields of {section} can be bound")
    bindings = [f"_File.task = @{section}()", f"{section}.path = ''", *read.bindings]
    if read.layout is not None:
        bindings.append(f"Dataset.layout = {read.layout!r}")
    elif not any(binding.startswith("Jsonl.needs_answer") for binding in read.bindings):
        bindings.append("Jsonl.needs_answer = False")
    return load(None, bindings, _File, {"envs": {row.config.__name__: row.config for row in ENVS.values()}}).task


def file_config(path: str, read: Read, task: Any = None) -> Dataset | Jsonl:
    """Returns the task that reads a file.

    Args:
      task: a configuration's task, or `bound_task`. Its other settings apply if it is a Dataset or, without a layout, a
        Jsonl.

    Raises: ValueError if there is no such file.
    """
    if not paths.is_remote(path) and not paths.matches(path):  # the task would name a field that nobody set
        raise ValueError(f"{path} does not exist")
    if read.layout is not None:
        named = {} if read.take is None else {"take": read.take}
        if isinstance(task, Dataset):
            return dataclasses.replace(task, path=path, layout=read.layout, **named)
        return Dataset(path=path, layout=read.layout, **named)
    return (
        dataclasses.replace(task, path=path)
        if isinstance(task, Dataset | Jsonl)
        else Jsonl(path=path, needs_answer=False)
    )


def task_of(config: Config, stage: str | None) -> Any:
    """Returns the task of the stage with this name; None: of the run. Raises: ValueError if there is no such stage."""
    if stage is None:
        return config.task
    stages = dict(zip(stage_names(config.stages), config.stages))
    if stage not in stages:
        raise ValueError(f"--stage: the configuration has no stage {stage!r}. Available: {', '.join(stages)}")
    rows = stored_rows_of(stages[stage])
    own = None if rows is None else rows.task
    return config.task if own is None else own


def open_file(
    path: str | None,
    config: Config | None,
    tables: dict[str, Any] | None,
    name: str | None,
    read: Read = BY_COLUMNS,
    stop: Stop = never,
) -> Inspected:
    """Returns the file, read and checked as a run would.

    Args:
      path: None: the configuration's own task.
      config: provides the tokenizer, the prompt length, the settings of the source if a stage has it and, if its task
        reads a file, how to read it. None: bytes, any length, defaults.
      tables: the tables of the configuration's parts.
      name: the source in SOURCES that makes rows of examples; None: prompts only.

    Raises: ValueError if the file is refused, or there is no such source; StopRequested if `stop` returns True.
    """
    sources = SOURCES if tables is None else tables["sources"]
    if name is not None and name not in sources:
        guess = nearest(name, sources)
        hint = f"; did you mean {guess}?" if guess else "."
        raise ValueError(f"--as: unknown source {name!r}{hint} Available: {', '.join(sources)}")
    if path is None and config is None:
        raise ValueError("name a FILE, or a --config whose task is to be inspected")
    if read.take is not None and read.layout is None:
        raise ValueError("--take says what becomes of the rows of a --layout; name one")
    if read.stage is not None and path is not None:
        raise ValueError(f"--stage {read.stage} shows the task of a stage of --config, and {path} is to be shown; "
                         "leave one of them out")  # fmt: skip
    if config is None:
        task = file_config(path, read, bound_task(read) if read.bindings else None)
        source = open_named(task, ENVS, stop, read.option)
        data = Data(prompt_length=LONGEST, held_out_every=None)
        tokenizer, width = TOKENIZERS["Bytes"].build(Bytes(), ()), 2 * LONGEST
    else:
        task = task_of(config, read.stage) if path is None else file_config(path, read, config.task)
        if path is None:
            source = open_source(task, tables["envs"], stop)
        else:
            source = open_named(task, tables["envs"], stop, read.option)
        data = config.data
        texts = texts_of(source, data)
        tokenizer = row_of(tables, "tokenizers", config.tokenizer).build(config.tokenizer, texts)
        width = data.prompt_length + config.sampler.completion_length
    rows = None if name is None else sources[name]
    stored = [] if config is None else map(stored_rows_of, config.stages)
    stage_sources = [rows.source for rows in stored if rows is not None]
    settings = next((source_config for source_config in stage_sources if type(source_config).__name__ == name), None)
    if rows is not None and settings is None:
        settings = rows.config()
    return Inspected(source, tokenizer, data, rows, settings, width, None if path is None else task)


def open_named(
    task: Dataset | Jsonl, table: Mapping[str, Environment], stop: Stop, option: str = BY_COLUMNS.option
) -> Source:
    """Returns the source of a file.

    Raises: ValueError if the file is refused. If no layout was named, the message names those that read its first row.
    """
    try:
        return open_source(task, table, stop)
    except ValueError as error:
        if isinstance(task, Dataset) or not (layouts := layouts_of_first_row(task)):
            raise
        named = ", ".join(f"{option} {name}" for name in layouts)
        raise ValueError(f"{error}. Without {option} rows are read by the columns of Jsonl; these read the first "
                         f"row: {named}") from error  # fmt: skip


def layouts_of_first_row(task: Jsonl) -> list[str]:
    """Returns the layouts that can read the first row of a file; [] if the file cannot be read at all."""
    try:
        _, _, row = next(iter(open_reader(task).each()))
        return readable_as(row(), None)
    except (OSError, ValueError, StopIteration):
        return []


def sequences_of(inspected: Inspected, index: int) -> tuple[str, list[TokenRow], str | None]:
    """Returns an example's id, its rows, and why it has none (None if it has rows)."""
    example = inspected.source[index]
    prompt, cause = encode_prompt(example, inspected.tokenizer, inspected.data)
    if cause is not None:
        return example.id, [], cause
    if inspected.rows is None:
        return example.id, [TokenRow("prompt", list(prompt), [False] * len(prompt))], None
    visit = Visit(example, visit_uid(example.id, 0), prompt, index)
    stored, causes = inspected.rows.rows(inspected.settings, [visit], inspected.tokenizer, _width(inspected, example))
    name = "learned" if inspected.rows.unit_size == 1 else "label {:g}"
    token_rows = [
        TokenRow(name.format(label), tokens[:n].tolist(), mask[:n].tolist())
        for tokens, n, mask, label, weight in zip(
            stored.tokens, stored.length, stored.action_mask, stored.label, stored.weight
        )
        if weight
    ]
    return example.id, token_rows, next(iter(causes), None)


def _width(inspected: Inspected, example: Any) -> int:
    """Returns the width at which an example's rows are allocated: `inspected.width`, or less if that is far more than
    the rows can take. A row holds a text of the example at most twice, as bytes or fewer tokens."""
    return min(inspected.width, max(WIDE, 2 * len(json.dumps(example.to_json(), default=str))))


def show(inspected: Inspected, count: int, color: bool) -> Iterator[str]:
    """Yields lines on the first `count` examples: every token as text, learned tokens in green or in brackets."""
    for index in range(min(count, len(inspected.source))):
        name, sequences, cause = sequences_of(inspected, index)
        held_out = " (held out)" if is_held_out(inspected.source[index], inspected.data) else ""
        yield f"{printable(name, 80)}{held_out}" + (f": left out, {cause}" if cause else "")
        for sequence in sequences:
            learned = sum(sequence.learned)
            yield f"  {sequence.label}: {len(sequence.tokens)} tokens, {learned} learned from"
            yield "    " + "".join(_token(inspected.tokenizer, *pair, color) for pair in
                                   zip(sequence.tokens, sequence.learned))  # fmt: skip


def _token(tokenizer: Any, token: int, learned: bool, color: bool) -> str:
    text = printable(tokenizer.decode([token]), 200) or f"<{token}>"
    if not learned:
        return f"{text}|"
    return f"{LEARNED}{text}{PLAIN}|" if color else f"[{text}]"


def statistics(inspected: Inspected, most: int) -> Iterator[str]:
    """Yields lines on the first `most` examples: lengths in tokens, what is left out, duplicates."""
    num_rows = min(most, len(inspected.source))
    lengths: dict[str, list[int]] = {"prompt": [], "learned": []}
    causes: dict[str, int] = {}
    seen: set[bytes] = set()
    examples: set[bytes] = set()
    tasks: dict[str, int] = {}
    duplicates = 0
    for index in range(num_rows):
        _, sequences, cause = sequences_of(inspected, index)
        if cause is not None:
            causes[cause] = causes.get(cause, 0) + 1
        for sequence in sequences:
            lengths["prompt"].append(len(sequence.tokens) - sum(sequence.learned))
            lengths["learned"].append(sum(sequence.learned))
        example = inspected.source[index]
        digest = example.prompt_digest()
        duplicates += digest in seen
        seen.add(digest)
        examples.add(example_digest(example))
        tasks[example.task] = tasks.get(example.task, 0) + 1
    yield f"{num_rows} of {len(inspected.source)} rows, {duplicates} of them with a repeated prompt"
    if len(examples) < num_rows:
        yield f"duplicates, with the answer too: {num_rows - len(examples)}"
    for task, count in sorted(tasks.items()) if len(tasks) > 1 else ():
        yield f"task {printable(task, 80)}: {counted(count, 'row')}, {count / num_rows:.1%}"
    for name, values in lengths.items():
        if any(values):
            low, middle, high, top = np.percentile(values, [0, 50, 95, 100])
            yield f"{name} tokens: {low:.0f} to {top:.0f}, half up to {middle:.0f}, 95 % up to {high:.0f}"
    for cause, count in sorted(causes.items()):
        yield f"left out, {cause}: {count}"
    for cause, count in sorted(inspected.source.counts.items()):
        yield f"noticed in the file, {cause}: {count}"
    if inspected.rows is not None and num_rows and sum(causes.values()) == num_rows:
        yield from other_ways_to_read(inspected)


def other_ways_to_read(inspected: Inspected) -> Iterator[str]:
    """Yields a line on how else a file could be read, none of whose examples becomes a row; nothing if it cannot."""
    task, option, names = inspected.task, "", []
    if isinstance(task, Dataset):
        takes = LAYOUTS[task.layout].takes
        option, names = "--take", [take for take in takes if take != (task.take or takes[0])]
    elif isinstance(task, Jsonl):
        option, names = "--layout", layouts_of_first_row(task)
    if names:
        yield f"no example gives a row to {type(inspected.settings).__name__}; try {option} {' or '.join(names)}"


def contamination(inspected: Inspected, evaluation: Sequence[Source], ngram: int, overlap: float) -> Iterator[str]:
    """Yields a line of counts, then lines on the examples whose prompts share more than `overlap` of the words of a
    prompt in the evaluation sets: in n-grams of `ngram` words, or all of them if the prompts are equal."""
    index = EvaluationIndex((source[i] for source in evaluation for i in range(len(source))), ngram)
    results = [index.overlap(inspected.source[i]) for i in range(len(inspected.source))]
    overlaps = [row for row in results if row is not None and row.share > overlap]
    yield (
        f"{len(overlaps)} of {len(results)} rows hold one of {counted(len(index), 'evaluation prompt')}, "
        f"{sum(row.kind == 'exact' for row in overlaps)} of them exactly, else by {ngram}-grams above {overlap:.0%}"
    )
    for line in described(overlaps, SHOWN_OVERLAPS):
        yield f"  {printable(line, 200)}"


def lines(inspected: Inspected, count: int, most: int, color: bool) -> Sequence[str]:
    """Returns the output of the command, without the lines of `contamination`."""
    return [*show(inspected, count, color), "", *statistics(inspected, most), *overlaps_of(inspected.source)]


def overlaps_of(source: Source) -> Iterator[str]:
    """Yields lines on the overlaps that a Filtered task found with its evaluation sets."""
    if isinstance(source, FilteredSource):
        for line in described(source.overlaps, SHOWN_OVERLAPS):
            yield f"contaminated: {printable(line, 200)}"
