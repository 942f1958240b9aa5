"""Chat templates: a conversation to text, by a program that came with a model. No JAX.

Two things are held apart: what the template itself writes, in which the spelling of a control token means that token,
and what comes from data, in which it never does. `guard` puts a mark into every place of a text from data where a
spelling stands, or where one could come to be with what the template writes beside it; the mark is a character that
no text of the conversation has, and is taken out again once the template's own spellings have been read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.tasks.example import ROLES, Message
from jrl.tasks.tokenizers.contract import utf8
from jrl.tasks.tokenizers.spelling import one_of

MAX_TEMPLATE_CHARACTERS = 1 << 20  # characters of a template
MAX_TEXT_CHARACTERS = 1 << 22  # characters that one renders
CPU_SECONDS = 2
WALL_SECONDS = 60.0  # of an answer, on a machine however busy
MEMORY_MB = 512
KNOWN_ROLES = (*ROLES, "developer", "function", "ipython", "model", "observation")  # a role is not free text
REASONING = ("reasoning_content", "thinking", "reasoning")
FREE_FIELDS = frozenset(("content", "text", "description", *REASONING))
# Names and values that conversations and schemas are made of, whatever they speak about.
STRUCTURE = frozenset(
    "array arguments boolean content description enum function id integer items name null number object parameters "
    "properties required role string text tool_call_id tool_calls type".split()
)
_EDGES = re.compile(r"^\W+|\W+$")


class TemplateError(ValueError):
    """The template does not render this conversation. The message says why."""


class BrokenTemplate(TemplateError):
    """The template cannot be compiled, or does not end: it is of no use for any conversation."""


class Renderer:
    """The process that renders, started when first asked and again after it was killed. Closed with its owner."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def render(self, template: str, context: Mapping[str, Any], date: str) -> str:
        """Returns what `template` makes of `context`. Raises TemplateError."""
        request = json.dumps({"template": template, "context": context, "date": date}).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                reply = json.loads(self._exchange(request))
            except BaseException:
                self.close()
                raise
        if "failed" in reply:
            raise (BrokenTemplate if reply.get("broken") else TemplateError)(
                f"the chat template does not render: {reply['failed']}"
            )
        return reply["text"]

    def close(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise ValueError("a chat template needs jinja2: pip install 'jrl-jax[hf]'")
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        entries = os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("render.py")),
             str(CPU_SECONDS), str(MEMORY_MB), str(MAX_TEXT_CHARACTERS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={**inherited, "PYTHONPATH": entries, "PYTHONUTF8": "1"}, start_new_session=True,
        )  # fmt: skip
        weakref.finalize(self, _end, self._process)

    def _exchange(self, request: bytes) -> bytes:
        """Sends a line and returns the line that answers it."""
        deadline = time.monotonic() + WALL_SECONDS
        with contextlib.suppress(BrokenPipeError):  # it died; reading says so
            rest = memoryview(request)
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
        out, answer = self._process.stdout.fileno(), bytearray()
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([out], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise BrokenTemplate(f"the chat template does not end: stopped after {WALL_SECONDS:.0f} seconds")
            part = os.read(out, 1 << 16)
            if not part:
                raise BrokenTemplate(
                    f"the chat template does not end: killed at {CPU_SECONDS} seconds of processor time or "
                    f"{MEMORY_MB} MB of memory"
                )
            answer += part
        return bytes(answer)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template and what it sees beside the conversation."""

    source: str
    tool_source: str | None  # another template for conversations that have tools
    variables: Mapping[str, Any]  # bos_token and the like, options
    date: str  # YYYY-MM-DD, what strftime_now shows
    renderer: Renderer = dataclasses.field(default_factory=Renderer)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """Returns the text of a conversation; `add_generation_prompt`: up to where the assistant begins to speak.

        Raises: TemplateError where the template refuses the conversation, fails, or does not end in time.
        """
        source = self.tool_source if tools and self.tool_source is not None else self.source
        context = {
            **self.variables,
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self.renderer.render(source, context, self.date)


def plain_messages(messages: Iterable[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as JSON that templates read: an assistant's reasoning stands under every name they know it by.

    Raises: ValueError for a role that is none of KNOWN_ROLES, or content that is no JSON.
    """
    out = []
    for message in messages:
        row = {"role": message.role, "content": message.content} if isinstance(message, Message) else dict(message)
        if row.get("role") not in KNOWN_ROLES:
            raise ValueError(f"role {row.get('role')!r} is not one of {', '.join(KNOWN_ROLES)}")
        reasoning = next((row[name] for name in REASONING if row.get(name) is not None), None)
        if reasoning is not None:
            row = {"thinking": reasoning, **row, "reasoning_content": reasoning}
        out.append(_clean(row))
    return out


def _clean(value: Any) -> Any:
    """A copy of JSON whose texts have no lone surrogates."""
    if isinstance(value, str):
        return utf8(value).decode()
    if isinstance(value, Mapping):
        return {_clean(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"a message contains {type(value).__name__}, which is not JSON")


def free_mark(data: Any) -> str:
    """Returns a character that no text in `data` has, nor its escape in JSON: a rare one, and one that prints, so that
    a template which writes a list or a dictionary as Python does leaves it as it is."""
    used = json.dumps(data, ensure_ascii=False)
    escaped = used.replace("\\\\", "\\")  # a text that spells an escape is escaped itself here
    return next(char for char in map(chr, range(0x20000, 0x2A6D7)) if char not in used and _escape(char) not in escaped)


def without_mark(text: str, mark: str) -> str:
    """Returns what a template rendered without the mark, which it may have written as JSON escapes it."""
    return text.replace(mark, "").replace(_escape(mark), "")


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1]


class Guard:
    """Keeps texts from producing any of `spellings`, alone or with the text around them."""

    def __init__(self, spellings: Collection[str]):
        self._spellings = tuple(spellings)
        self._pattern = one_of(self._spellings)
        self._heads = {text[:k] for text in spellings for k in range(1, len(text))}
        self._tails = {text[k:] for text in spellings for k in range(1, len(text))}
        self._words = {_EDGES.sub("", text) for text in spellings} - STRUCTURE
        self._longest = max(map(len, spellings), default=0)

    def text(self, text: str, mark: str, *, free: bool = True) -> str:
        """Returns `text` with `mark` inside every spelling, and at an end that a spelling could run over.

        A text that is not `free` is a name or the value of a field, which a template may compare: it is left alone
        where it is a part of a spelling ("text" of "<|endoftext|>").
        """
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        core = text.strip()  # templates take blanks away from both ends
        if not core:
            return text
        lengths = range(1, min(self._longest, len(core)) + 1)
        inside = len(core) < self._longest and any(core in spelling for spelling in self._spellings)
        if inside and not free:
            return text
        before = mark if inside or any(core[:k] in self._tails for k in lengths) else ""
        after = mark if inside or any(core[-k:] in self._heads for k in lengths) else ""
        if not before and not after:
            return text
        start = text.index(core)
        return text[:start] + before + core + after + text[start + len(core) :]

    def tree(self, value: Any, mark: str) -> Any:
        """Returns JSON with every text in it guarded, the names of fields too; FREE_FIELDS hold free text."""
        if isinstance(value, str):
            return self.text(value, mark, free=False)
        if isinstance(value, Mapping):
            return {
                self.text(key, mark, free=False): self.text(inner, mark)
                if key in FREE_FIELDS and isinstance(inner, str)
                else self.tree(inner, mark)
                for key, inner in value.items()
            }
        return [self.tree(inner, mark) for inner in value] if isinstance(value, list) else value

    def words(self, value: Any) -> set[str]:
        """Returns the names and values of JSON that are the word of a spelling ("think" of "<think>"): a template that
        writes a name between signs could make the spelling of them."""
        if isinstance(value, str):
            return {value} & self._words
        if isinstance(value, Mapping):
            inner = [value for key, value in value.items() if key not in FREE_FIELDS or not isinstance(value, str)]
            return set().union(set(value) & self._words, *map(self.words, inner))
        return set().union(*map(self.words, value)) if isinstance(value, list) else set()


def renamed(value: Any, words: Collection[str]) -> Any:
    """Returns JSON in which the names and values `words` are written with other letters, as many."""
    if isinstance(value, str):
        return "".join("Q" if char.isalnum() else char for char in value) if value in words else value
    if isinstance(value, Mapping):
        return {renamed(key, words): renamed(inner, words) for key, inner in value.items()}
    return [renamed(inner, words) for inner in value] if isinstance(value, list) else value


def guarded(
    messages: Sequence[Mapping[str, Any]], mark: str, *, by_assistant: Guard, by_others: Guard
) -> list[dict[str, Any]]:
    """Returns the messages guarded: messages of the assistant by one guard, all others by the other."""
    rows = []
    for message in messages:
        guard = by_assistant if message["role"] in ("assistant", "model") else by_others
        rest = guard.tree({name: value for name, value in message.items() if name != "role"}, mark)
        rows.append({"role": message["role"], **rest})
    return rows
