"""Chat templates: render a conversation to text with the template that came with a model. No JAX.

In text that the template writes, the spelling of a control token means that token. In text from data it never does.
`Guard` inserts a mark into text from data wherever it contains a spelling, or could form one together with adjacent
template text. The mark is a character that no text of the conversation contains. It is removed after the template's own
spellings have been found.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jrl.tasks.example import ROLES, Message
from jrl.tasks.tokenizers.child import Child, ChildDied, ChildStuck
from jrl.tasks.tokenizers.contract import utf8
from jrl.tasks.tokenizers.spelling import one_of

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_TEXT_CHARACTERS = 1 << 22  # characters that one renders
CPU_SECONDS = 2
WALL_SECONDS = 60.0  # limit for a reply, generous for a busy machine
MEMORY_MB = 512
KNOWN_ROLES = (*ROLES, "developer", "function", "ipython", "model", "observation")  # a role is not free text
REASONING = ("reasoning_content", "thinking", "reasoning")
FREE_FIELDS = frozenset(("content", "text", "description", *REASONING))
# Names and values that occur in the structure of conversations and schemas.
STRUCTURE = frozenset(
    "array arguments boolean content description enum function id integer items name null number object parameters "
    "properties required role string text tool_call_id tool_calls type".split()
)
_EDGES = re.compile(r"^\W+|\W+$")


class TemplateError(ValueError):
    """The template cannot render this conversation. The message says why."""


class BrokenTemplate(TemplateError):
    """The template cannot be compiled, or does not terminate: it works for no conversation."""


class Renderer:
    """The process that renders templates. Started at the first request and restarted after it was killed. `close` or
    the end of this object kills it."""

    def __init__(self) -> None:
        self._child = Child("render.py", CPU_SECONDS, MEMORY_MB, MAX_TEXT_CHARACTERS)

    def render(self, template: str, contexts: Sequence[Mapping[str, Any]], date: str) -> list[str]:
        """Returns `template` rendered with each context. Raises TemplateError if one cannot be rendered."""
        if importlib.util.find_spec("jinja2") is None:
            raise ValueError("a chat template needs jinja2: pip install 'jrl-jax[hf]'")
        try:
            reply = self._child.ask({"template": template, "contexts": contexts, "date": date}, WALL_SECONDS)
        except ChildStuck as error:
            raise BrokenTemplate(f"the chat template does not end: stopped after {WALL_SECONDS:.0f} seconds") from error
        except ChildDied as error:
            raise BrokenTemplate(
                f"the chat template does not end: killed at {CPU_SECONDS} seconds of processor time or {MEMORY_MB} MB "
                "of memory"
            ) from error
        for answer in reply["answers"]:
            if "failed" in answer:
                kind = BrokenTemplate if answer.get("broken") else TemplateError
                raise kind(f"the chat template does not render: {answer['failed']}")
        return [answer["text"] for answer in reply["answers"]]

    def close(self) -> None:
        self._child.close()


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A chat template and its variables other than the conversation."""

    source: str
    tool_source: str | None  # a separate template for conversations with tools; None: `source`
    variables: Mapping[str, Any]  # bos_token and the like, and options
    date: str  # YYYY-MM-DD, the date for strftime_now
    place: str = ""  # the file it came from, for messages; "": none
    renderer: Renderer = dataclasses.field(default_factory=Renderer)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """Returns the text of a conversation; with `add_generation_prompt`, including the header of the assistant's
        next turn.

        Raises: TemplateError if the template rejects the conversation, fails, or does not terminate in time.
        """
        return self.render_each([(messages, tools)], add_generation_prompt=add_generation_prompt)[0]

    def render_each(
        self,
        conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]],
        *,
        add_generation_prompt: bool,
    ) -> list[str]:
        """Returns the texts of conversations, given as (messages, tools). Either all or none must have tools. Raises
        TemplateError as `render` does."""
        source = self.tool_source if conversations[0][1] and self.tool_source is not None else self.source
        contexts = [
            {
                **self.variables,
                "messages": list(messages),
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            for messages, tools in conversations
        ]
        try:
            return self.renderer.render(source, contexts, self.date)
        except TemplateError as error:
            raise type(error)(f"{self.place}: {error}" if self.place else str(error)) from error


def plain_messages(messages: Iterable[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as JSON for templates. Reasoning under any name of REASONING is also given as
    "reasoning_content" and "thinking".

    Raises: ValueError for a role that is not in KNOWN_ROLES, or content that is not JSON.
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
    """Returns a copy of a JSON value without lone surrogates. Raises ValueError if it is not JSON."""
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
    """Returns a character that occurs in no text of `data`, neither itself nor as a JSON escape. It is rare and
    printable: a template that writes a list or dict with Python's repr leaves it unchanged."""
    used = json.dumps(data, ensure_ascii=False)
    escaped = used.replace("\\\\", "\\")  # a text that contains an escape sequence is escaped once more in `used`
    return next(char for char in map(chr, range(0x20000, 0x2A6D7)) if char not in used and _escape(char) not in escaped)


def without_mark(text: str, mark: str) -> str:
    """Returns rendered text without the mark, which the template may also have written as a JSON escape."""
    return text.replace(mark, "").replace(_escape(mark), "")


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1]


class Guard:
    """Prevents text from producing any of `spellings`, alone or together with the text around it."""

    def __init__(self, spellings: Collection[str]):
        self._spellings = tuple(spellings)
        self._pattern = one_of(self._spellings)
        self._heads = {text[:k] for text in spellings for k in range(1, len(text))}
        self._tails = {text[k:] for text in spellings for k in range(1, len(text))}
        self._words = {_EDGES.sub("", text) for text in spellings} - STRUCTURE
        self._longest = max(map(len, spellings), default=0)

    def text(self, text: str, mark: str, *, free: bool = True) -> str:
        """Returns `text` with `mark` inside every spelling, and at an end where a spelling could span the boundary.

        A text that is not `free` is a name or a field's value, which a template may compare. It stays unchanged if it
        is a part of a spelling ("text" of "<|endoftext|>").
        """
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        core = text.strip()  # templates may strip both ends
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
        """Returns JSON with every text in it guarded, field names included. FREE_FIELDS contain free text."""
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
        """Returns the names and values in JSON that are the word inside a spelling ("think" of "<think>"). A template
        that writes a name between brackets could form the spelling."""
        if isinstance(value, str):
            return {value} & self._words
        if isinstance(value, Mapping):
            inner = [value for key, value in value.items() if key not in FREE_FIELDS or not isinstance(value, str)]
            return set().union(set(value) & self._words, *map(self.words, inner))
        return set().union(*map(self.words, value)) if isinstance(value, list) else set()


def renamed(value: Any, words: Collection[str]) -> Any:
    """Returns JSON with letters and digits of the names and values in `words` replaced by "Q"."""
    if isinstance(value, str):
        return "".join("Q" if char.isalnum() else char for char in value) if value in words else value
    if isinstance(value, Mapping):
        return {renamed(key, words): renamed(inner, words) for key, inner in value.items()}
    return [renamed(inner, words) for inner in value] if isinstance(value, list) else value


def guarded(
    messages: Sequence[Mapping[str, Any]], mark: str, *, by_assistant: Guard, by_others: Guard
) -> list[dict[str, Any]]:
    """Returns the messages guarded: those of the assistant by one guard, all others by the other."""
    rows = []
    for message in messages:
        guard = by_assistant if message["role"] in ASSISTANTS else by_others
        rest = guard.tree({name: value for name, value in message.items() if name != "role"}, mark)
        rows.append({"role": message["role"], **rest})
    return rows


class Neutral:
    """Rewrites text from data such that no template can form a control token from it: every letter and digit becomes
    one letter that no spelling has. Literals that a template searches for, such as "</think>", stay, so the template
    takes the same branches.

    A template that splits and joins text, or changes its case, may form a spelling from text that contains none. The
    control tokens of the original and the neutral rendering then differ, which detects this.
    """

    def __init__(self, spellings: Collection[str], tags: Collection[str], sources: Iterable[str]):
        used = {char for text in spellings for char in text + text.lower() + text.upper()}
        self._letter = next(char for char in _NEUTRAL_LETTERS if char not in used and char.lower() not in used)
        bare = {char for text in spellings if not _WORD.search(text) for char in text.strip()}
        self._replaced = re.compile(f"[^\\W_]|[{re.escape(''.join(sorted(bare)))}]" if bare else r"[^\W_]")
        words = [set(_WORD.findall(text.lower())) for text in spellings]
        literals = {
            literal
            for source in sources
            for literal in _literals(source)
            if _WORD.search(literal)
            and re.search(r"[^\w\s]", literal)
            and not any(literal in spelling for spelling in spellings)
            and not any(of_spelling <= set(_WORD.findall(literal.lower())) for of_spelling in words if of_spelling)
        }
        self._unchanged = {False: one_of(literals), True: one_of({*literals, *tags})}
        self._tags = one_of(tags)
        self._compared = {literal for source in sources for literal in _literals(source)} | STRUCTURE

    def rows(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns guarded messages with neutral text."""
        return self._map(messages, lambda text, by_assistant: self._text(text, by_assistant))

    def broken(self, messages: Sequence[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
        """Returns guarded messages with a mark after every character of free text, except in tags of the assistant:
        however a template cuts and joins it, it forms no spelling. The template no longer finds its own literals in it.
        """
        return self._map(
            messages, lambda text, by_assistant: self._broken_text(text, mark, by_assistant), only_free=True
        )

    def tree(self, value: Any) -> Any:
        """Returns guarded JSON, such as tools, with neutral text."""
        return self._walk(value, self._plain, None, only_free=False)

    def broken_tree(self, value: Any, mark: str) -> Any:
        """Returns guarded JSON with a mark after every character of its free text."""
        return self._walk(value, lambda text: self._broken_text(text, mark, False), None, only_free=True)

    def _plain(self, text: str) -> str:
        return self._text(text, False)

    def _map(
        self, messages: Sequence[Mapping[str, Any]], change: Any, *, only_free: bool = False
    ) -> list[dict[str, Any]]:
        rows = []
        for message in messages:
            by_assistant = message["role"] in ASSISTANTS
            rest = {name: value for name, value in message.items() if name != "role"}
            bound_change = lambda text, by_assistant=by_assistant: change(text, by_assistant)
            changed = self._walk(rest, bound_change, None, only_free=only_free)
            rows.append({"role": message["role"], **changed})
        return rows

    def _walk(self, value: Any, change: Any, field: str | None, *, only_free: bool) -> Any:
        if isinstance(value, str):
            compared = field not in FREE_FIELDS and (only_free or value in self._compared)
            return value if compared else change(value)
        if isinstance(value, Mapping):
            out: dict[str, Any] = {}
            for key, inner in value.items():
                name = key if only_free or key.isidentifier() else change(key)
                while name in out:
                    name += self._letter
                out[name] = self._walk(inner, change, key, only_free=only_free)
            return out
        if isinstance(value, list):
            return [self._walk(inner, change, field, only_free=only_free) for inner in value]
        return value

    def _text(self, text: str, by_assistant: bool) -> str:
        return _between(self._unchanged[by_assistant], text, lambda part: self._replaced.sub(self._letter, part))

    def _broken_text(self, text: str, mark: str, by_assistant: bool) -> str:
        spread = lambda part: re.sub("(?s)(.)", lambda match: match[0] + mark, part)
        return _between(self._tags, text, spread) if by_assistant else spread(text)


ASSISTANTS = ("assistant", "model")
_NEUTRAL_LETTERS = "QXZJKVWYBFGHCDLMNPRSTUAEIO\u0416\u0429\u042e\u05d0\u05e9\u3042"
_WORD = re.compile(r"[^\W_]+")
_QUOTE = re.compile(r"(?<!\\)(\\*+)(['\"])")  # with the backslashes before it
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def _literals(source: str) -> set[str]:
    """Returns the nonempty string literals of a template. A quote that is never closed starts none."""
    quotes = [(match.start(2), match[2], len(match[1]) % 2 == 0) for match in _QUOTE.finditer(source)]
    last = {quote: position for position, quote, closes in quotes if closes}
    texts, opened = set(), None
    for position, quote, closes in quotes:
        if opened is None and position < last.get(quote, 0):
            opened = position
        elif opened is not None and closes and quote == source[opened]:
            texts.add(source[opened + 1 : position])
            opened = None
    return {re.sub(r"(?s)\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text) for text in texts} - {""}


def _between(unchanged: re.Pattern[str], text: str, change: Any) -> str:
    """Returns `text` with `change` applied to the parts between the matches of `unchanged`."""
    out, start = [], 0
    for match in unchanged.finditer(text):
        out += [change(text[start : match.start()]), match[0]]
        start = match.end()
    return "".join([*out, change(text[start:])])
