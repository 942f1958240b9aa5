"""Converts a row of a published data set to an Example: maps the columns and extracts the answer.

    {"prompt": "12+34=", "answer": "46"}
    {"messages": [{"role": "user", "content": "12+34="}], "answer": "46", "id": "a", "task": "sums", "level": 2}

GSM8K (2110.14168) has `question` and `answer`, a worked solution that ends with the line `#### 42`. MATH (2103.03874)
has `problem` and `solution`, with the answer in the last `\\boxed{...}`:

    Jsonl.columns = {'prompt': 'question'}                            Jsonl.answer_in = 'hash'
    Jsonl.columns = {'prompt': 'problem', 'answer': 'solution'}       Jsonl.answer_in = 'boxed'
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jrl.tasks.example import ROLES, Example, Message

CAUSES = {
    "too_long": "is longer than max_row_bytes",
    "bad_utf8": "is not UTF-8",
    "bom": "begins with a byte order mark",
    "blank": "is blank",
    "bad_json": "is not JSON",
    "not_finite": "has NaN or an infinite number, which JSON does not have",
    "duplicate_key": "has a key twice",
    "too_deep": "is nested deeper than 64 levels",
    "surrogate": "contains half a surrogate pair, which is not text",
    "not_object": "is not an object",
    "missing_field": "lacks a field",
    "two_prompts": "has both a prompt and messages",
    "wrong_type": "has a field of the wrong type",
    "empty_prompt": "has an empty prompt",
    "answered_prompt": "has messages that end with an answer, which the policy would see",
    "missing_answer": "has no answer",
    "duplicate_id": "repeats the id of an earlier row",
}
FIELDS = ("prompt", "messages", "answer", "id", "task", "verifiers", "info")
PROMPT = "{prompt}"
AnswerIn = Literal["whole", "hash", "boxed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl:
    """A file of rows: JSON lines, gzipped if its name ends in .gz; Parquet if it ends in .parquet; ArrayRecord if it
    ends in .array_record. Columns that are not fields of jrl go to `info`, for verifiers and reports only. So does the
    text that the answer was extracted from, as `solution`."""

    path: str  # the file, or with * in its name several, read as one: 'rows-*.jsonl'
    columns: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # jrl's field -> the file's column, where they differ
    answer_in: AnswerIn = "whole"  # whole: the column; hash: after the last ####; boxed: in the last \boxed{}
    prompt_form: str = PROMPT  # template of the prompt: {prompt} is the row's `prompt` (not its `messages`)
    system: str = ""  # a system message before a row's `prompt` (not before its `messages`)
    task: str = ""  # label of rows without one; empty: the file's name up to * or its ending, else the folder's
    verifiers: tuple[str, ...] = ()  # for rows that name none; empty: the run's verifiers
    needs_answer: bool = True  # a row without an answer is bad
    on_bad_row: Literal["refuse", "drop"] = "refuse"  # refuse: stop with an error; drop: skip and count the row
    max_dropped: float = 0.1  # largest share of rows that may be dropped
    max_row_bytes: int = 16 * 2**20  # a longer row is bad

    def __post_init__(self) -> None:
        for field in self.columns:
            if field not in FIELDS:
                raise ValueError(f"Jsonl.columns names {field!r}, which is not one of our fields: {', '.join(FIELDS)}")
        if self.prompt_form.count(PROMPT) != 1:
            raise ValueError(f"Jsonl.prompt_form is {self.prompt_form!r}; it must hold {PROMPT} once")
        if not 0 <= self.max_dropped <= 1:
            raise ValueError(f"Jsonl.max_dropped is {self.max_dropped}; it is a share, from 0 to 1")
        if self.max_row_bytes < 2:
            raise ValueError(f"Jsonl.max_row_bytes is {self.max_row_bytes}: it must be at least 2")


class BadRow(ValueError):
    """A row that cannot be used. The message is the text of one of CAUSES, with details."""

    def __init__(self, cause: str, details: str = "") -> None:
        super().__init__(f"{CAUSES[cause]}{f': {details}' if details else ''}")
        self.cause = cause


def counts_text(counts: Mapping[str, int]) -> str:
    """Returns counts by cause for messages: "2 bad_json, 1 blank"."""
    return ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items()))


def example_of(row: dict[str, Any], number: int, config: Jsonl) -> Example:
    """Returns the example of row `number` of the file, counted from 1. Raises BadRow."""
    column = {field: config.columns.get(field, field) for field in FIELDS}

    def text(field: str, default: str | None) -> str | None:
        value = row.get(column[field])
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise BadRow("wrong_type", f"{column[field]!r} is {kind(value)}, not text")
        return value

    if row.get(column["messages"]) is not None:
        if column["prompt"] != column["messages"] and row.get(column["prompt"]) is not None:
            raise BadRow("two_prompts", f"leave {column['prompt']!r} or {column['messages']!r} out. 'prompt': 'unused' "
                         "in Jsonl.columns reads the messages and 'messages': 'unused' the prompt, if there is no such "
                         "column")  # fmt: skip
        messages = messages_of(row[column["messages"]], column["messages"])
        if messages[-1].role == "assistant":
            raise BadRow(
                "answered_prompt",
                f"{column['messages']!r}. 'messages': 'unused' and 'prompt': NAME in Jsonl.columns read another "
                "column, and a Dataset.layout such as 'messages' reads the answers, too",
            )
    elif row.get(column["prompt"]) is not None:
        prompt = row[column["prompt"]]
        if not isinstance(prompt, str):
            raise BadRow("wrong_type", f"{column['prompt']!r} is {kind(prompt)}, not text")
        if not prompt.strip():
            raise BadRow("empty_prompt")
        messages = (Message("user", prompt.join(config.prompt_form.split(PROMPT))),)
    else:
        raise BadRow(
            "missing_field",
            f"it needs {column['prompt']!r} or {column['messages']!r}; it has "
            f"{_names(row)}. Jsonl.columns = {{'prompt': NAME}} says which column it is",
        )
    if not any(message.content.strip() for message in messages):
        raise BadRow("empty_prompt")
    if config.system and row.get(column["messages"]) is None:
        messages = (Message("system", config.system), *messages)
    written = text("answer", None)
    answer = written if written is None else final_answer(written, config.answer_in)
    if config.needs_answer and not (answer or "").strip():
        raise BadRow("missing_answer", _no_answer(column["answer"], written, config.answer_in))
    verifiers = row.get(column["verifiers"])
    if verifiers is not None and not (isinstance(verifiers, list) and all(isinstance(v, str) for v in verifiers)):
        raise BadRow("wrong_type", f"{column['verifiers']!r} is not a list of names")
    info = row.get(column["info"])
    if info is not None and not isinstance(info, dict):
        raise BadRow("wrong_type", f"{column['info']!r} is {kind(info)}, not an object")
    others = {name: value for name, value in row.items() if name not in column.values()}
    if config.answer_in != "whole" and written is not None:
        others.setdefault("solution", written)  # a column of that name in the file takes precedence
    name, task = names_of(config.path)
    return Example(
        id=text("id", f"{name}/{number}"),
        messages=messages,
        answer=answer,
        verifiers=tuple(verifiers) if verifiers else config.verifiers,
        task=text("task", config.task or task),
        info={**others, **(info or {})},
    )


@functools.lru_cache(maxsize=64)
def names_of(path: str) -> tuple[str, str]:
    """Returns a file's name, and that without its ending: the task of its examples where no other is given. For a name
    with *, the task is what stands before it, else the last folder without one, which is then part of the name."""
    name = Path(path).name
    if "*" not in name:
        return name, Path(name.removesuffix(".gz")).stem
    if task := name.split("*")[0].rstrip("-_."):
        return name, task
    task = next(folder.name for folder in Path(path).parents if "*" not in folder.name).strip(".") or "rows"
    return f"{task}/{name}", task


def final_answer(text: str, answer_in: AnswerIn) -> str | None:
    r"""Returns the final answer of a worked solution, or None if there is none where `answer_in` says.

    Args:
      answer_in: "whole": the text unchanged; "hash": the rest of the line after the last ####; "boxed": the contents of
        the last \boxed{...} or \fbox{...} with balanced braces, or of `\boxed 5` up to the next dollar sign, as in the
        evaluation published with MATH. The last one counts because a solution may also box intermediate steps.
    """
    match answer_in:
        case "hash":
            _, mark, after = text.rpartition("####")
            return after.split("\n")[0].strip() or None if mark else None
        case "boxed":
            return _last_boxed(text)
    return text


def _last_boxed(text: str) -> str | None:
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox")
    if rest.startswith(" ") and not rest.lstrip().startswith("{"):
        return rest.split("$")[0].strip() or None
    rest = rest.lstrip()
    depth, i = 0, 0
    while i < len(rest):
        match rest[i]:
            case "\\":
                i += 1  # an escaped brace does not count
            case "{":
                depth += 1
            case "}":
                depth -= 1
        if depth == 0:
            break
        i += 1
    return rest[1:i].strip() or None if rest.startswith("{") and i < len(rest) else None


def _no_answer(column: str, written: str | None, answer_in: AnswerIn) -> str:
    where = {"hash": "#### with an answer after it", "boxed": r"complete \boxed{} with an answer in it"}
    if answer_in in where and (written or "").strip():
        missing = f"{column!r} has no {where[answer_in]}"
    else:
        missing = f"{column!r} is missing, null or blank"
    return f"{missing}; Jsonl.needs_answer = False allows it"


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    """Returns the messages in a column of a row. Raises BadRow for anything else."""
    if not isinstance(value, list) or not value:
        raise BadRow("wrong_type", f"{column!r} is not a list of messages")
    messages = []
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)
                and isinstance(message.get("content"), str)):  # fmt: skip
            raise BadRow("wrong_type", f'{column!r} has an entry that is not {{"role": text, "content": text}}')
        if message["role"] not in ROLES:
            raise BadRow("wrong_type", f"role {message['role']!r:.40} is not one of {', '.join(ROLES)}")
        messages.append(Message(message["role"], message["content"]))
    return tuple(messages)


def kind(value: Any) -> str:
    """Returns a description of a JSON value's type, for messages."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def _names(row: dict[str, Any]) -> str:
    return ", ".join(repr(name[:40]) for name in list(row)[:8]) or "none"
