"""HuggingFace: the tokenizer of a published model, from its folder, with its chat template. No JAX.

This module reads `tokenizer.json` (with the `tokenizers` library) or a sentencepiece `tokenizer.model`, the chat
template, and the special tokens in `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
`generation_config.json` and `config.json`. Ids are those of the published files, except for what text can produce:

* a *control* is a token that is special, or ends, begins or pads a text. No prompt or completion text produces one;
* a *tag* is another added token that the chat template writes ("<think>", "<tool_response>"). Assistant text may
  contain tags, since the assistant generates them. In system, user and tool text they are encoded as ordinary text;
* any other added token is vocabulary, and is recognized in every text.

In text that the template itself writes, all of them are recognized.

Gemma 3's text models declare a special token for images past the last row of their embedding. Such tokens are left out:
no text produces them, and no file or template names them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl import paths
from jrl.tasks.example import Message
from jrl.tasks.tokenizers.chat_template import (
    MAX_TEMPLATE_CHARACTERS,
    BrokenTemplate,
    ChatTemplate,
    Guard,
    Neutral,
    TemplateError,
    free_mark,
    guarded,
    plain_messages,
    renamed,
    without_mark,
)
from jrl.tasks.tokenizers.contract import SAVED_AS, layout_bytes, padded_size, utf8, without_lead
from jrl.tasks.tokenizers.spelling import Added, Speller, Vocabulary, one_of, open_json, open_model, speller

SAVED_IN = "published"  # folder of the original files
VOCABULARIES = ("tokenizer.json", "tokenizer.model")  # the first one that exists is read
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # used beside TEMPLATE for conversations with tools
FILES = (*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
         "generation_config.json", "config.json", TEMPLATE, TOOL_TEMPLATE, "chat_template.json")  # fmt: skip
MAX_FILE_BYTES = 1 << 28  # of one file
CONTENT = "jrl said this"  # the assistant's message in a test of a template


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The tokenizer and chat template of a published model."""

    path: str  # the model's folder, or the tokenizer.json or .model file in it
    chat_template: str | None = None  # a file to use instead of the folder's template
    template_options: tuple[str, ...] = ()  # variables of the template: "enable_thinking=false", values are JSON
    date: str | None = None  # YYYY-MM-DD, today's date for the template; None: the day the run starts


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedTokenizer:
    """See jrl.tasks.tokenizers.contract for the members. Construct it with `from_files`."""

    files: Mapping[str, bytes]  # the original files, by name
    options: tuple[str, ...]
    speller: Speller
    pieces: tuple[bytes, ...]  # [filled], b"" for controls and unused ids
    names: Mapping[int, str]  # the published spellings of added tokens
    controls: frozenset[int]
    tags: frozenset[str]
    pad_id: int
    bos_id: int
    end_ids: tuple[int, ...]
    start_ids: tuple[int, ...]
    leads: bool
    vocab_size: int
    chat: ChatTemplate | None

    @property
    def filled(self) -> int:
        return len(self.pieces)

    @property
    def end_id(self) -> int:
        return self.end_ids[0]

    @property
    def role_ids(self) -> dict[str, int]:
        return {}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(layout_bytes(self._layout())).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._ids(self.speller.spell(self._clean(text), self._patterns[1]), forbidden=self.controls)

    def decode(self, ids: Iterable[int]) -> str:
        data = b"".join(self.pieces[i] for i in ids if 0 <= i < len(self.pieces))
        return without_lead(data.decode("utf-8", "replace"), self.leads)

    def spelled(self, ids: Iterable[int]) -> str:
        """Returns the text of ids with control tokens spelled out, for display."""
        spellings = (
            utf8(self.names[i]) if i in self.names else self.pieces[i] for i in ids if 0 <= i < len(self.pieces)
        )
        return b"".join(spellings).decode("utf-8", "replace")

    def token_bytes(self) -> list[bytes]:
        return [*self.pieces, *[b""] * (self.vocab_size - len(self.pieces))]

    def encode_prompt(
        self, messages: Iterable[Message | Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Returns the ids of the conversation and the header of the assistant's next turn, by the chat template.

        Without a template: `start_ids`, then the messages separated by blank lines.

        Raises: ValueError if the template rejects the conversation; without a template, for tools and for roles other
            than system and user, whose messages plain text does not tell from a user's.
        """
        if self.chat is not None:
            return self.encode_conversation(messages, tools, add_generation_prompt=True)
        rows = plain_messages(messages)
        if tools or any(row["role"] not in ("system", "user") for row in rows):
            raise ValueError("this model has no chat template, which dialogues with assistant turns or tools need; "
                             "HuggingFace.chat_template = FILE gives it one")  # fmt: skip
        return [*self.start_ids, *self.encode("\n\n".join(row["content"] for row in rows))]

    def encode_conversation(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Returns the ids of a conversation rendered by the chat template. No text from data produces a control token.
        Messages may be JSON, with "tool_calls", "reasoning_content" and the like.

        Raises: ValueError if there is no template, or it rejects the conversation.
        """
        if self.chat is None:
            raise ValueError("this model has no chat template; HuggingFace.chat_template = FILE gives it one")
        rows, tools = plain_messages(messages), list(tools)
        mark = free_mark([rows, tools])
        by_assistant, by_others = self._guards
        every, _ = self._patterns
        rows, tools = guarded(rows, mark, by_assistant=by_assistant, by_others=by_others), by_others.tree(tools, mark)
        neutral = self._neutral

        def rendered(rows: Any, tools: Any, *others: Any) -> list[str]:
            twin = neutral.rows(rows), neutral.tree(tools)
            conversations = [(rows, tools), twin, *others]
            return self.chat.render_each(conversations, add_generation_prompt=add_generation_prompt)

        words = by_others.words([[{**row, "role": ""} for row in rows], tools])
        others = [{**renamed(row, words), "role": row["role"]} for row in rows]
        text, of_twin, *of_renamed = rendered(rows, tools, *([(others, renamed(tools, words))] if words else []))
        if any(len(every.findall(text)) > len(every.findall(other)) for other in of_renamed):
            raise TemplateError(f"the chat template makes control tokens of names in the data: {sorted(words)}")
        if every.findall(text) != every.findall(of_twin):
            # Some were formed from text of the messages. Render again with that text marked, so that it stays text.
            text, of_twin = rendered(neutral.broken(rows, mark), neutral.broken_tree(tools, mark))
            if every.findall(text) != every.findall(of_twin):
                raise TemplateError("the chat template makes control tokens of what a message says")
        return self._ids(without_mark(self.speller.spell(self._clean(text), every), mark))

    def render(
        self, messages: Iterable[Message | Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        """Returns the rendered text of a conversation, for display. Raises ValueError as `encode_conversation` does."""
        if self.chat is None:
            raise ValueError("this model has no chat template; HuggingFace.chat_template = FILE gives it one")
        return self.chat.render(plain_messages(messages), tools, add_generation_prompt=add_generation_prompt)

    def save(self, folder: Path | str) -> None:
        paths.write_files(paths.make_dir(paths.local(folder) / SAVED_IN), self.files)
        paths.write_bytes_atomic(paths.local(folder) / SAVED_AS, layout_bytes(self._layout()))

    @functools.cached_property
    def _patterns(self) -> tuple[Any, Any]:
        """Returns the patterns that match controls and tags, and only tags."""
        return one_of(self.speller.spelling), one_of(self.tags)

    @functools.cached_property
    def _guards(self) -> tuple[Guard, Guard]:
        """Returns the guards for text of the assistant and for all other text."""
        return Guard(self.speller.spelling.keys() - self.tags), Guard(self.speller.spelling)

    @functools.cached_property
    def _neutral(self) -> Neutral:
        sources = [source for source in (self.chat.source, self.chat.tool_source) if source is not None]
        return Neutral(self.speller.spelling, self.tags, sources)

    def _clean(self, text: str) -> str:
        if self.speller.nonce in text:
            raise ValueError("a text holds this process's own spelling of control tokens")
        return utf8(text).decode()

    def _ids(self, text: str, forbidden: frozenset[int] = frozenset()) -> list[int]:
        ids = self.speller.encode(text)
        if not forbidden.isdisjoint(ids):
            raise ValueError(
                f"the text {text[:80]!r} makes a control id; the tokenizer's files do not fit this version"
            )
        return ids

    def _layout(self) -> dict:
        layout = {
            "kind": "HuggingFace",
            "vocab_size": self.vocab_size,
            "options": list(self.options),
            "pad_id": self.pad_id,
            "bos_id": self.bos_id,
            "end_ids": list(self.end_ids),
            "start_ids": list(self.start_ids),
            "tags": sorted(self.tags),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(self.files.items())},
        }
        if self.chat is not None and "strftime_now" in self.chat.source + (self.chat.tool_source or ""):
            layout["date"] = self.chat.date
        return layout


def build(config: HuggingFace, texts: Iterable[str]) -> PublishedTokenizer:
    """Returns the tokenizer of `config.path`. `texts` are not read.

    Raises: ValueError naming the file that is missing or invalid.
    """
    del texts
    files = read_files(config.path)
    if config.chat_template is not None:
        files[TEMPLATE] = _read(Path(config.chat_template), "HuggingFace.chat_template")
        files.pop(TOOL_TEMPLATE, None)
    date = config.date or datetime.date.today().isoformat()
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise ValueError(f"HuggingFace.date is {date!r}: it must be YYYY-MM-DD") from error
    options = config.template_options
    return from_files(files, str(config.path), options=options, date=date, template=config.chat_template)


def read_files(path: str | Path) -> dict[str, bytes]:
    """Returns those of FILES that exist in a published folder. `path` is the folder, or the vocabulary file in it."""
    local = paths.readable_without_weights(path)
    folder, chosen = (local, None) if local.is_dir() else (local.parent, local.name)
    if chosen is not None and not local.exists():
        raise ValueError(f"HuggingFace.path: {str(path)!r} does not exist")
    files = {name: _read(folder / name, "HuggingFace.path", folder) for name in FILES if (folder / name).exists()}
    if chosen is not None:
        for name in VOCABULARIES:
            files.pop(name, None)
        files[VOCABULARIES[0] if chosen.endswith(".json") else VOCABULARIES[1]] = _read(local, "HuggingFace.path")
    if not set(files) & set(VOCABULARIES):
        raise ValueError(
            f"HuggingFace.path: {str(path)!r} holds neither {' nor '.join(VOCABULARIES)}{how_to_convert(folder)}"
        )
    return files


def how_to_convert(folder: Path) -> str:
    """Returns the end of an error: the vocabulary files that jrl does not read, and how transformers makes
    tokenizer.json of them; "" where there are none."""
    if paths.exists(folder / "tekken.json"):
        return (
            ", and jrl does not read tekken.json: convert_tekken_tokenizer('FOLDER/tekken.json').save_pretrained("
            "'FOLDER') of transformers.integrations.mistral writes tokenizer.json, and the chat template too if "
            "mistral-common is installed"
        )
    if not (parts := [name for name in ("vocab.json", "merges.txt") if paths.exists(folder / name)]):
        return ""
    return (
        f", and jrl does not read {' and '.join(parts)}: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes tokenizer.json"
    )


def load(folder: Path, layout: dict) -> PublishedTokenizer:
    """Returns the tokenizer saved in `folder`. Raises ValueError if its files do not match."""
    files = {
        name: _read(folder / SAVED_IN / name, SAVED_IN, folder) for name in layout.get("files", ()) if name in FILES
    }
    date, options = layout.get("date", "2000-01-01"), tuple(layout.get("options", ()))
    tokenizer = from_files(files, str(folder / SAVED_IN), options=options, date=date)
    tokenizer = fit_to_embedding(tokenizer, layout.get("vocab_size", 0))
    if layout != tokenizer._layout():
        raise ValueError(f"{folder / SAVED_AS}: laid out as {layout}, its files give {tokenizer._layout()}")
    return tokenizer


def fit_to_embedding(tokenizer: PublishedTokenizer, rows: int) -> PublishedTokenizer:
    """Returns the tokenizer with `vocab_size` = `rows`, the rows of a model's embedding.

    Raises: ValueError if it has more ids than the embedding has rows: JAX would silently read another row.
    """
    if tokenizer.filled > rows:
        last = tokenizer.filled - 1
        raise ValueError(
            f"the tokenizer's largest id is {last} ({tokenizer.spelled([last])!r}), and the embedding has {rows} rows, "
            f"for ids up to {rows - 1}: they do not belong together, or the embedding was not grown for added tokens"
        )
    return dataclasses.replace(tokenizer, vocab_size=rows)


def from_files(
    files: Mapping[str, bytes], name: str, *, options: Sequence[str], date: str, template: str | None = None
) -> PublishedTokenizer:
    """Returns the tokenizer of a published folder's files. `name` is their origin for errors, and `template` that of
    the chat template if it is not from the folder.

    Raises: ValueError naming the invalid file and the problem.
    """
    try:
        return _from_files(files, name, options=options, date=date, template=template)
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}: a value in its files has the wrong type: {error!r:.300}") from error


def _from_files(
    files: Mapping[str, bytes], name: str, *, options: Sequence[str], date: str, template: str | None
) -> PublishedTokenizer:
    settings = {file: _json(files, file, name) for file in FILES if file.endswith(".json") and file != VOCABULARIES[0]}
    config = settings["tokenizer_config.json"]
    more = _declared(config, settings["added_tokens.json"], name)
    place = next((file for file in VOCABULARIES if file in files), None)
    if place is None:
        raise ValueError(f"{name} holds neither {' nor '.join(VOCABULARIES)}")
    with _values_of(f"{name}/{place}"):
        if place == "tokenizer.json":
            vocabulary = open_json(files[place], f"{name}/{place}", more)
        else:
            legacy = bool(config.get("legacy", True))
            vocabulary = open_model(files[place], f"{name}/{place}", more, legacy=legacy)
    named = _named(config, settings["special_tokens_map.json"])
    file, sources = _templates(files, settings, name)
    written = "".join(sources.values())
    numbers = [settings["generation_config.json"], settings["config.json"], vocabulary.says]
    vocabulary, without_row = _drop_tokens_past_embedding(
        vocabulary, settings["config.json"], {*named.values()}, numbers, written
    )
    ids = {added.text: added.id for added in vocabulary.added}
    if unknown := sorted(text for text in named.values() if text not in ids):
        raise ValueError(f"{name}: the special tokens {unknown} are not added tokens of {place}")
    size = len(vocabulary.pieces)
    begins = _ids_of("bos", named, ids, numbers, size)
    ends = _ids_of("eos", named, ids, _with_text_model(numbers), size)
    pads = _ids_of("pad", named, ids, numbers, size)
    chat = None
    if sources:
        variables, first = {**named, **_options(options)}, next(iter(sources.values()))
        origin = template or f"{name}/{file}"
        chat = ChatTemplate(sources.get("default", first), sources.get("tool_use"), variables, date, origin)
    elif options:
        raise ValueError(f"{name}: HuggingFace.template_options is set, but there is no chat template")
    special = {added.id for added in vocabulary.added if added.special}
    turn_end = _turn_end(
        chat, {added.text: added.id for added in vocabulary.added if added.text.strip()}, special | set(ends)
    )
    if turn_end is not None:
        ends = [turn_end, *(i for i in ends if i != turn_end)]
    if not ends:
        raise ValueError(f"{name}: no file defines the token that ends a text: eos_token of tokenizer_config.json, or "
                         "eos_token_id of generation_config.json or config.json")  # fmt: skip
    controls = frozenset(special | {*begins, *ends, *pads})
    if short := [added.text for added in vocabulary.added if added.id in controls and len(added.text) < 2]:
        raise ValueError(f"{name}: the tokens {short} begin, end or pad a text and are single characters, which any "
                         "text may hold")  # fmt: skip
    tags = frozenset(
        added.text for added in vocabulary.added
        if added.id not in controls and added.text.strip() and len(added.text) > 1 and added.text in written
    )  # fmt: skip
    pieces = tuple(b"" if i in controls else piece for i, piece in enumerate(vocabulary.pieces))
    lost = {piece for piece in vocabulary.pieces if len(piece) == 1} - {*pieces}
    if ordinary := [i for i in sorted(controls) if vocabulary.pieces[i] in lost]:
        raise ValueError(f"{name}: the token {ordinary[0]} ({vocabulary.pieces[ordinary[0]]!r}) begins, ends or pads a "
                         "text and is ordinary text: no other has this byte")  # fmt: skip
    return PublishedTokenizer(
        files=dict(files),
        options=tuple(options),
        speller=speller(vocabulary, controls | {ids[text] for text in tags}, without_row),
        pieces=pieces,
        names={added.id: added.text for added in vocabulary.added},
        controls=controls,
        tags=tags,
        pad_id=(pads or ends)[0],
        bos_id=(begins or ends)[0],
        end_ids=tuple(ends),
        start_ids=_start(config, vocabulary, begins),
        leads=vocabulary.leads,
        vocab_size=padded_size(size),
        chat=chat,
    )


def _drop_tokens_past_embedding(
    vocabulary: Vocabulary,
    config: Mapping[str, Any],
    named: Collection[str],
    numbers: Sequence[Mapping[str, Any]],
    written: str,
) -> tuple[Vocabulary, frozenset[int]]:
    """Returns the vocabulary without its ids past the embedding of `config`, and these ids. All of them must be special
    tokens that no file (`named`, `numbers`) and no chat template (`written`) uses; else they stay, and the model is
    refused with them."""
    texts = config.get("text_config")
    rows = (texts if isinstance(texts, dict) else config).get("vocab_size")
    if not isinstance(rows, int) or not 0 < rows < len(vocabulary.pieces):
        return vocabulary, frozenset()
    remaining = tuple(added for added in vocabulary.added if added.id < rows)
    past = {added.id: added for added in vocabulary.added if added.id >= rows}
    values = [setting.get(f"{name}_token_id") for setting in numbers for name in ("bos", "eos", "pad")]
    used = [i for value in values for i in _listed(value)]
    words = any(vocabulary.pieces[i] for i in range(rows, len(vocabulary.pieces)) if i not in past)
    if words or any(
        not added.special or i in used or added.text in named or added.text in written for i, added in past.items()
    ):
        return vocabulary, frozenset()
    return dataclasses.replace(vocabulary, added=remaining, pieces=vocabulary.pieces[:rows]), frozenset(past)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def rewritten(tokenizer: PublishedTokenizer, messages: Sequence[Message | Mapping[str, Any]]) -> str | None:
    """Returns a sentence that names the first turn with tokens that change when a later turn is added, or None.

    Such a template does not extend a conversation but rewrites it: the tokens sampled in turn k differ from those of
    turn k in the prompt of turn k + 1, and a policy must not be trained as if they were the same.
    """
    held: list[int] = []  # the ids so far, up to the end of the assistant's last message
    edges: list[tuple[int, int]] = []  # (tokens, turns): the first `tokens` ids contain `turns` turns
    for k in range(len(messages) + 1):
        last = k == len(messages)
        if (last and _role(messages[-1]) == "assistant") or (not last and _role(messages[k]) != "assistant"):
            continue
        shown = tokenizer.encode_conversation(messages[:k], add_generation_prompt=True)
        if shown[: len(held)] != held:
            return _named_change(tokenizer, messages, held, shown, edges, k)
        if last:
            break
        edges.append((len(shown), k))
        full = tokenizer.encode_conversation(messages[: k + 1], add_generation_prompt=False)
        if full[: len(shown)] != shown:
            return _named_change(tokenizer, messages, shown, full, edges, k + 1)
        end = next((i for i in range(len(shown), len(full)) if full[i] in tokenizer.end_ids), len(full) - 1) + 1
        held = full[:end]
        edges.append((end, k + 1))
    return None


def _named_change(
    tokenizer: PublishedTokenizer, messages: Sequence[Any], old: list[int], new: list[int], edges: Any, turns: int
) -> str:
    first = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    turn = next(turns for length, turns in edges if first < length)
    was, now = (tokenizer.spelled(ids[max(first - 4, 0) : first + 24]) for ids in (old, new))
    return (
        f"the chat template rewrites turn {turn} ({_role(messages[turn - 1])}) when turn {turns} "
        f"({_role(messages[turns - 1])}) is added: {was!r} becomes {now!r}"
    )


TRIAL = (
    Message("user", "first question"),
    Message("assistant", "<think>\nfirst thought\n</think>\n\nfirst answer"),
    Message("user", "second question"),
    Message("assistant", "<think>\nsecond thought\n</think>\n\nsecond answer"),
    Message("user", "third question"),
)


def rewrites(tokenizer: PublishedTokenizer) -> str | None:
    """Returns the result of `rewritten` for a test conversation with thinking; None without a template."""
    return rewritten(tokenizer, TRIAL) if tokenizer.chat is not None else None


def _role(message: Message | Mapping[str, Any]) -> str:
    return message.role if isinstance(message, Message) else message["role"]


def _read(path: Path, field: str, within: Path | None = None) -> bytes:
    try:
        return paths.read_foreign(path, MAX_FILE_BYTES, within)
    except OSError as error:
        raise ValueError(f"{field}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _json(files: Mapping[str, bytes], file: str, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if there is no such file."""
    return paths.parse_object(files.get(file, b"{}"), f"{name}/{file}")


@contextlib.contextmanager
def _values_of(file: str) -> Iterator[None]:
    """Converts errors caused by a value of the wrong type inside the block to a ValueError that names the file."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file}: a value in it has the wrong type: {type(error).__name__}: {error!s:.300}") from error


_KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}


def _wrong_type(file: str, key: str, value: Any, expected: str) -> ValueError:
    """Returns the error for a value of the wrong type: file, key, value and what is expected."""
    shown = json.dumps(value)
    actual = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return ValueError(f"{file}: {key} is {actual}, {_KINDS.get(type(value), 'null')}; expected {expected}")


def _declared(config: Mapping[str, Any], more: Mapping[str, Any], name: str) -> list[Added]:
    """Returns the added tokens that tokenizer_config.json (`config`) and added_tokens.json (`more`) declare. Raises
    ValueError for an invalid entry."""
    by_id: dict[int, Added] = {}
    for text, i in more.items():
        if not isinstance(i, int):
            raise _wrong_type(f"{name}/added_tokens.json", repr(text), i, "the id of that token")
        by_id[i] = Added(i, text, False)
    file, key = f"{name}/tokenizer_config.json", "added_tokens_decoder"
    rows = config.get(key) or {}
    if not isinstance(rows, dict):
        raise _wrong_type(file, key, rows, "an object that maps a token's id to its properties")
    for i, row in rows.items():
        if not i.isdecimal():
            raise ValueError(f"{file}: {key} has the key {i!r:.80}; expected the id of a token")
        if not isinstance(row, dict):
            raise _wrong_type(file, f"{key}[{i!r}]", row, "an object with the token's text as 'content'")
        if not isinstance(row.get("content"), str):
            raise _wrong_type(file, f"{key}[{i!r}].content", row.get("content"), "the text of the token")
        strips = (bool(row.get("lstrip")), bool(row.get("rstrip")))
        by_id[int(i)] = Added(int(i), row["content"], bool(row.get("special")), strips, bool(row.get("normalized")))
    return list(by_id.values())


def _named(*settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens: "bos_token" -> "<s>". The first file that names one takes precedence."""
    names: dict[str, str] = {}
    for setting in settings:
        for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
            value = setting.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str) and text and name not in names:
                names[name] = text
    return names


def _ids_of(
    name: str, named: Mapping[str, str], ids: Mapping[str, int], numbers: Sequence[Mapping[str, Any]], size: int
) -> list[int]:
    """Returns the ids of the special token `name`, each once: first by its text, then by the ids in other files; all of
    them for eos, else only the first. Skips -1, which means none, and ids above the vocabulary, which some
    configurations have for pad. For pad and bos it skips ordinary tokens too: many configurations have 0 or 1, defaults
    of their class, and these may be "!" and a quote."""
    token_ids = [ids[named[f"{name}_token"]]] if f"{name}_token" in named else []
    allowed = range(size) if name == "eos" else {*ids.values()}
    for setting in numbers:
        for i in _listed(setting.get(f"{name}_token_id")):
            if isinstance(i, int) and i in allowed and i not in token_ids:
                token_ids.append(i)
    return token_ids if name == "eos" else token_ids[:1]


def _with_text_model(numbers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns `numbers` (generation_config.json, config.json, the vocabulary's), with the text_config of a larger model
    if neither file has an eos_token_id outside it: transformers ends a text by it then."""
    texts = numbers[1].get("text_config")
    named = any(setting.get("eos_token_id") is not None for setting in numbers[:2])
    return [*numbers] if named or not isinstance(texts, dict) else [*numbers, texts]


def _templates(files: Mapping[str, bytes], settings: Mapping[str, Any], name: str) -> tuple[str, dict[str, str]]:
    """Returns the file with the chat templates, and the templates by name. Separate template files take precedence over
    tokenizer_config.json."""
    if TEMPLATE in files:
        file, templates = TEMPLATE, _text(files, TEMPLATE, name)
        if TOOL_TEMPLATE in files:
            named = {"default": templates, "tool_use": _text(files, TOOL_TEMPLATE, name)}
            templates = [{"name": key, "template": source} for key, source in named.items()]
    else:
        places = ("chat_template.json", "tokenizer_config.json")
        file = next((place for place in places if settings[place].get("chat_template")), places[-1])
        templates = settings[file].get("chat_template")
    if not templates:
        return file, {}
    sources = {"default": templates} if isinstance(templates, str) else _listed_templates(templates, f"{name}/{file}")
    if long := [key for key, source in sources.items() if len(source) > MAX_TEMPLATE_CHARACTERS]:
        raise ValueError(
            f"{name}/{file}: the chat template {long[0]!r} is longer than {MAX_TEMPLATE_CHARACTERS} characters"
        )
    return file, sources


def _text(files: Mapping[str, bytes], file: str, name: str) -> str:
    try:
        return files[file].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}/{file} is not UTF-8: {error}") from error


def _listed_templates(rows: Any, file: str) -> dict[str, str]:
    """Returns the templates of a list by name. Raises ValueError for an invalid entry."""
    kind = "an object with a text as 'name' and a text as 'template'"
    if not isinstance(rows, list):
        raise _wrong_type(file, "chat_template", rows, f"a text, or a list of which each is {kind}")
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise _wrong_type(file, f"chat_template[{i}]", row, kind)
        for key in ("name", "template"):
            if not isinstance(row.get(key), str):
                raise _wrong_type(file, f"chat_template[{i}].{key}", row.get(key), "a text")
    return {row["name"]: row["template"] for row in rows}


def _options(options: Sequence[str]) -> dict[str, Any]:
    special = {}
    for option in options:
        key, equals, value = option.partition("=")
        try:
            if not equals or not key.isidentifier():
                raise ValueError("it has no name")
            special[key] = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"HuggingFace.template_options: {option!r} is not NAME=JSON, as in 'enable_thinking=false' ({error})"
            ) from error
    return special


def _turn_end(chat: ChatTemplate | None, ids: Mapping[str, int], ends: Iterable[int]) -> int | None:
    """Returns the token that the template writes after the content of an assistant message, with at most whitespace
    between, if it is in `ends`; else None."""
    if chat is None:
        return None
    trial = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": CONTENT}]
    try:
        text = chat.render(trial, (), add_generation_prompt=False)
    except BrokenTemplate:
        raise
    except TemplateError:
        return None  # the template expects other roles first; a file names the token that ends a text
    after = text.rpartition(CONTENT)[2].lstrip()
    match = one_of(ids).match(after)
    return ids[match[0]] if match and CONTENT in text and ids[match[0]] in set(ends) else None


def _start(config: Mapping[str, Any], vocabulary: Vocabulary, begins: Sequence[int]) -> tuple[int, ...]:
    """Returns the first ids of a text: by tokenizer_config.json, as transformers 4 has it (5 drops its add_bos_token),
    else by the vocabulary's file."""
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:
        return vocabulary.start
    return tuple(begins[:1]) if adds_bos else ()
