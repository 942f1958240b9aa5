"""Tasks from a file of JSON lines, read at random by byte offset. No JAX.

    {"prompt": "12+34=", "answer": "46"}
    {"messages": [{"role": "user", "content": "12+34="}], "answer": "46", "id": "a", "task": "sums", "level": 2}

Opening reads the file once, line by line, and keeps 16 bytes a row; memory does not grow with the file's text.
Whatever is wrong with a row is one of CAUSES: refused with file and line, or dropped and counted, as the config says.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jrl import paths
from jrl.envs.contract import digest_of, in_range
from jrl.example import ROLES, Example, Message

CAUSES = {
    "too_long": "is longer than max_row_bytes",
    "bad_utf8": "is not UTF-8",
    "bom": "begins with a byte order mark",
    "blank": "is blank",
    "bad_json": "is not JSON",
    "not_finite": "holds NaN or an infinite number, which JSON does not have",
    "duplicate_key": "holds a key twice",
    "too_deep": "is nested deeper than 64 levels",
    "surrogate": "holds half a surrogate pair, which is no text",
    "not_object": "is not an object",
    "missing_field": "lacks a field",
    "wrong_type": "holds a field of the wrong type",
    "empty_prompt": "has an empty prompt",
    "missing_answer": "has no answer",
    "duplicate_id": "repeats the id of an earlier row",
}
FIELDS = ("prompt", "messages", "answer", "id", "task", "verifiers", "info")
_DEEPEST = 64
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl:
    """A file of JSON lines. A column that is no field of ours is kept in `info`, for verifiers and reports only."""

    path: str
    columns: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # our field -> the file's column, where they differ
    system: str = ""  # a system message before a row's `prompt` (not before its `messages`)
    task: str = ""  # label of rows without one; empty: the file's name without its ending
    verifiers: tuple[str, ...] = ()  # of rows that name none; empty: the run's
    needs_answer: bool = True  # a row without an answer is bad
    on_bad_row: Literal["refuse", "drop"] = "refuse"
    max_dropped: float = 0.1  # largest share of rows that dropping may lose
    max_row_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        for field in self.columns:
            if field not in FIELDS:
                raise ValueError(f"Jsonl.columns names {field!r}, which is not one of our fields: {', '.join(FIELDS)}")
        if self.max_row_bytes < 2:
            raise ValueError(f"Jsonl.max_row_bytes is {self.max_row_bytes}: it must be at least 2")


class BadRow(ValueError):
    """Says which of CAUSES a row is, and the particulars."""

    def __init__(self, cause: str, particulars: str = "") -> None:
        super().__init__(f"{CAUSES[cause]}{f': {particulars}' if particulars else ''}")
        self.cause = cause


@dataclasses.dataclass(frozen=True, eq=False)
class JsonlSource:
    """Rows of the file by number. Make one with `open_jsonl`."""

    config: Jsonl
    offsets: np.ndarray  # [n] uint64, where a row's line begins
    lines: np.ndarray  # [n] uint64, its number in the file, from 1
    length: int  # bytes of the file when it was opened
    changed: int  # nanoseconds, when the file had last been written
    fingerprint: str
    counts: dict[str, int]
    verifiers: frozenset[str]  # that a row names

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Example:
        """Returns row `index`. Raises ValueError where the file is not the one that was opened."""
        index = in_range(index, len(self))
        with open(paths.local(self.config.path), "rb") as file:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (self.length, self.changed):
                raise ValueError(f"{self.config.path} changed while it was being read")
            file.seek(int(self.offsets[index]))
            line = file.readline(self.config.max_row_bytes + 1)
        return read_row(line, int(self.lines[index]), self.config)


def open_jsonl(config: Jsonl) -> JsonlSource:
    """Returns the source, every row of it checked.

    Raises: ValueError where the file cannot be read, a row is bad and `on_bad_row` is "refuse" (naming file and line),
        more than `max_dropped` of the rows are bad, or no row is left.
    """
    offsets, lines, ids, prompts = (array.array("Q") for _ in range(4))
    counts: dict[str, int] = {}
    verifiers: set[str] = set()
    digest = hashlib.sha256()
    first_bad = ""
    try:
        with open(paths.local(config.path), "rb") as file:
            described = os.fstat(file.fileno())
            for number, offset, line in _lines(file, config.max_row_bytes, digest):
                try:
                    example = read_row(line, number, config)
                except BadRow as bad:
                    said = f"{config.path}, line {number}: the row {bad}"
                    if config.on_bad_row == "refuse":
                        raise ValueError(f"{said}. Jsonl.on_bad_row = 'drop' drops and counts such rows") from bad
                    counts[bad.cause] = counts.get(bad.cause, 0) + 1
                    first_bad = first_bad or said
                    continue
                offsets.append(offset)
                lines.append(number)
                ids.append(_short(example.id.encode()))
                prompts.append(_short(example.prompt_digest()))
                verifiers.update(example.verifiers)
    except OSError as error:
        raise ValueError(f"Jsonl.path: {config.path!r} cannot be read: {error.strerror}") from error
    kept, where = _first_of_each(ids)
    repeated = np.setdiff1d(np.arange(len(ids)), kept)
    if len(repeated):
        said = f"{config.path}, line {lines[int(repeated[0])]}: the row {CAUSES['duplicate_id']}"
        if config.on_bad_row == "refuse":
            raise ValueError(f"{said} (line {lines[int(where[repeated[0]])]})")
        counts["duplicate_id"] = len(repeated)
        first_bad = first_bad or said
    dropped, total = sum(counts.values()), len(ids) + sum(counts.values()) - len(repeated)
    if dropped > config.max_dropped * total:
        raise ValueError(
            f"{config.path}: {dropped} of {total} rows are bad, more than Jsonl.max_dropped = {config.max_dropped} of "
            f"them: {dict(sorted(counts.items()))}. The first: {first_bad}"
        )
    if not len(kept):
        raise ValueError(f"{config.path} holds no rows")
    twice = len(kept) - len(np.unique(np.asarray(prompts, np.uint64)[kept]))
    if twice:
        counts["duplicate_prompt"] = twice  # kept: noticed, not dropped
    return JsonlSource(
        config=config,
        offsets=np.asarray(offsets, np.uint64)[kept],
        lines=np.asarray(lines, np.uint64)[kept],
        length=described.st_size,
        changed=described.st_mtime_ns,
        fingerprint=digest_of("jsonl", dataclasses.replace(config, path=Path(config.path).name), digest.hexdigest()),
        counts=counts,
        verifiers=frozenset(verifiers),
    )


def read_row(line: bytes, number: int, config: Jsonl) -> Example:
    """Returns the example of one line, with its line end. Raises BadRow."""
    row = _parse(line, number, config.max_row_bytes)
    column = {field: config.columns.get(field, field) for field in FIELDS}

    def text(field: str, otherwise: str | None) -> str | None:
        value = row.get(column[field])
        if value is None:
            return otherwise
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise BadRow("wrong_type", f"{column[field]!r} is {_kind(value)}, not text")
        return value

    if row.get(column["messages"]) is not None:
        messages = _messages(row[column["messages"]], column["messages"])
    elif row.get(column["prompt"]) is not None:
        prompt = row[column["prompt"]]
        if not isinstance(prompt, str):
            raise BadRow("wrong_type", f"{column['prompt']!r} is {_kind(prompt)}, not text")
        messages = (Message("user", prompt),)
    else:
        raise BadRow("missing_field", f"it needs {column['prompt']!r} or {column['messages']!r}; it has {_names(row)}")
    if not any(message.content.strip() for message in messages):
        raise BadRow("empty_prompt")
    if config.system and row.get(column["messages"]) is None:
        messages = (Message("system", config.system), *messages)
    answer = text("answer", None)
    if config.needs_answer and not (answer or "").strip():
        raise BadRow(
            "missing_answer", f"{column['answer']!r} is missing, null or blank; Jsonl.needs_answer = False allows it"
        )
    verifiers = row.get(column["verifiers"])
    if verifiers is not None and not (isinstance(verifiers, list) and all(isinstance(v, str) for v in verifiers)):
        raise BadRow("wrong_type", f"{column['verifiers']!r} is not a list of names")
    info = row.get(column["info"])
    if info is not None and not isinstance(info, dict):
        raise BadRow("wrong_type", f"{column['info']!r} is {_kind(info)}, not an object")
    others = {name: value for name, value in row.items() if name not in column.values()}
    name = Path(config.path).name
    return Example(
        id=text("id", f"{name}/{number}"),
        messages=messages,
        answer=answer,
        verifiers=tuple(verifiers) if verifiers else config.verifiers,
        task=text("task", config.task or Path(name).stem),
        info={**others, **(info or {})},
    )


def _parse(line: bytes, number: int, max_row_bytes: int) -> dict[str, Any]:
    line = line.rstrip(b"\r\n")
    if len(line) > max_row_bytes:
        raise BadRow("too_long", f"max_row_bytes is {max_row_bytes}")
    if line.startswith(b"\xef\xbb\xbf"):
        raise BadRow("bom", "save the file as UTF-8 without one")
    if not line.strip():
        raise BadRow("blank")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BadRow("bad_utf8", f"byte {error.start} of the line") from error
    # Depth is measured before parsing, since the parser recurses. Only what could be too deep is looked at closely.
    if line.count(b"[") + line.count(b"{") > _DEEPEST and _depth(line) > _DEEPEST:
        raise BadRow("too_deep")
    try:
        row = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite)
    except BadRow:
        raise
    except ValueError as error:
        raise BadRow("bad_json", str(error)) from error
    if not isinstance(row, dict):
        raise BadRow("not_object", f"it is {_kind(row)}")
    if "\\u" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BadRow("surrogate") from error
    return row


def _lines(file: Any, limit: int, digest: Any) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line; of one that is longer than `limit` only the first limit + 3 bytes."""
    number, offset = 0, 0
    while line := file.readline(limit + 3):
        number += 1
        digest.update(line)
        length, end = len(line), line.endswith(b"\n")
        while not end and (more := file.readline(1 << 16)):
            digest.update(more)
            length, end = length + len(more), more.endswith(b"\n")
        yield number, offset, line
        offset += length


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRow("wrong_type", f"{column!r} is not a list of messages")
    messages = []
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)
                and isinstance(message.get("content"), str)):  # fmt: skip
            raise BadRow("wrong_type", f'{column!r} holds something else than {{"role": text, "content": text}}')
        if message["role"] not in ROLES:
            raise BadRow("wrong_type", f"role {message['role']!r} is not one of {', '.join(ROLES)}")
        messages.append(Message(message["role"], message["content"]))
    return tuple(messages)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow("duplicate_key", repr(next(key for key in keys if keys.count(key) > 1)))
    return row


def _refuse(constant: str) -> float:
    raise BadRow("not_finite", constant)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRow("not_finite", digits[:40])
    return value


def _depth(line: bytes) -> int:
    deepest = depth = 0
    for byte in _STRINGS.sub(b"", line):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _first_of_each(digests: array.array) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the first of each value, ascending, and for every index that of its first."""
    _, first, inverse = np.unique(np.asarray(digests, np.uint64), return_index=True, return_inverse=True)
    return np.sort(first), first[inverse]


def _short(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def _names(row: dict[str, Any]) -> str:
    return ", ".join(repr(name[:40]) for name in list(row)[:8]) or "none"
