"""The vocabularies of published tokenizers, with every control token respelled so that no text can produce it. No JAX.

A published tokenizer matches the spelling of a control token ("<|im_end|>") in any text. This module gives such a token
another spelling, made of random digits, before the file is opened. "<|im_end|>" is then ordinary text for the
normalizer, the pre-tokenizer and the merges, and text that means the token (from a chat template) uses the new
spelling. The library does everything else, so ids are those of the published file.

`open_json` reads `tokenizer.json` with the `tokenizers` library, `open_model` a sentencepiece `.model` file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import sentencepiece

from jrl.tasks.tokenizers.child import Child, ChildDied, ChildStuck
from jrl.tasks.tokenizers.contract import utf8

MAX_IDS = 1 << 24  # of a vocabulary, as of a Decoder
MAX_EXPANSION = 256  # most characters that a normalizer may produce from one
BLANK = "\u2581"  # the symbol for a space in sentencepiece and in files converted from it
NEEDED = frozenset((*b"\t\n", *range(0x20, 0x7F)))  # bytes that every vocabulary has
NO_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))  # bytes that no text has
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANKS = re.compile(r"\s*")


@dataclasses.dataclass(frozen=True)
class Added:
    """A token that is matched in a text before merges are applied."""

    id: int
    text: str
    special: bool  # structure: never part of a text
    strips: tuple[bool, bool] = (False, False)  # whether it strips whitespace before, and after it
    normalized: bool = False  # matched in normalized text


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A published vocabulary, before it is opened for a choice of controls."""

    added: tuple[Added, ...]  # by id
    pieces: tuple[bytes, ...]  # by id, the bytes of a token; for an added token, of its spelling
    start: tuple[int, ...]  # ids that the file puts before a text
    leads: bool  # a space is added before a text, and removed in decoding
    says: Mapping[str, int]  # the file's "bos_token_id", "eos_token_id", "pad_token_id", if any; -1 for none
    open: Callable[[Mapping[int, str]], Callable[[str], list[int]]]  # id -> new spelling; returns encode(text)


@dataclasses.dataclass(frozen=True)
class Speller:
    """Writes control tokens in the spelling that `encode` reads. Every Speller draws new digits; ids do not depend on
    them."""

    nonce: str
    spelling: Mapping[str, str]  # published spelling -> new one
    encode: Callable[[str], list[int]]  # text with new spellings in it -> ids

    def spell(self, text: str, spellings: re.Pattern[str]) -> str:
        """Returns `text` with the published spellings that the pattern matches replaced by the new ones."""
        return spellings.sub(lambda match: self.spelling[match[0]], text)


def speller(vocabulary: Vocabulary, controls: Collection[int], left_out: Collection[int] = ()) -> Speller:
    """Returns the vocabulary opened such that text cannot produce the tokens `controls`, and nothing those in
    `left_out`. It changes no other token."""
    nonce = secrets.token_hex(16)
    new = {i: f"jrl{nonce}x{i}x" for i in (*controls, *left_out)}
    texts = {added.id: added.text for added in vocabulary.added}
    return Speller(nonce, {texts[i]: new[i] for i in controls if i in texts}, vocabulary.open(new))


def one_of(texts: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, longest first. Without texts it matches nothing."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def open_json(data: bytes, name: str, more: Collection[Added]) -> Vocabulary:
    """Returns the contents of a `tokenizer.json`. `more` are added tokens that its folder declares elsewhere.

    Raises: ValueError if the file is invalid, or of a kind that would lose text: only rare bytes may be `unspelled`.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(f"{name} needs the tokenizers library: pip install 'jrl-jax[hf]'") from error
    try:
        layout = json.loads(data)
        model, kind = layout["model"], layout["model"].get("type", "BPE")
        listed = [_added(row) for row in layout.get("added_tokens") or ()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} is not a valid tokenizer.json: {error!r}") from error
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"{name}: a {kind} vocabulary loses text that it has no word for; jrl reads BPE and Unigram")
    words = _words(model, kind, name)
    check_ids([*(i for _, i in words), *(token.id for token in listed), *(token.id for token in more)], name)
    if (growth := expansion(layout.get("normalizer"))) > MAX_EXPANSION:
        raise ValueError(f"{name}: its normalizer may make {growth} characters of one; at most {MAX_EXPANSION} are "
                         "allowed")  # fmt: skip
    by_id = {added.id: added for added in listed}
    for added in more:
        known = by_id.get(added.id)
        by_id[added.id] = added if known is None else dataclasses.replace(known, special=known.special or added.special)
    added = tuple(by_id[i] for i in sorted(by_id))
    if short := [token.text for token in added if len(token.text) < 2 and token.special]:
        raise ValueError(f"{name}: the special tokens {short} are single characters, which any text may hold")
    model["dropout"] = None  # BPE dropout would make ids random
    layout |= {"truncation": None, "padding": None, "added_tokens": [_row(token) for token in added]}
    check_opens("json", json.dumps(layout).encode(), name)
    try:
        with_added = tokenizers.Tokenizer.from_str(json.dumps(layout))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{name} cannot be opened: {error}") from error
    if moved := [token.text for token in added if with_added.token_to_id(token.text) != token.id]:
        raise ValueError(f"{name}: the added tokens {moved[:5]} do not get the ids that the file gives them")
    style = _style(layout.get("decoder"), name)
    pieces = [b""] * (1 + max(i for i in (*(i for _, i in words), *by_id)))
    for word, i in words:
        pieces[i] = style.to_bytes(word)
    for token in added:
        pieces[token.id] = utf8(token.text.replace(BLANK, " ") if style.blanks else token.text)
    if lost := unspelled(pieces):
        if style.blanks or kind != "BPE" or not lost.isdisjoint(NEEDED):
            raise ValueError(f"{name} has no token for {len(lost)} of the 256 bytes: text that needs one would be lost")
        model["unk_token"] = None  # such a byte makes no token: were it a control, a text could forge one
    if style.blanks and not model.get("byte_fallback"):
        raise ValueError(f"{name}: its byte_fallback is off: text that its words cannot spell would be lost")
    with_start = with_added.encode("x").ids
    bare = with_added.encode("x", add_special_tokens=False).ids
    start = tuple(with_start[: max(_find(with_start, bare), 0)])

    def opened(new: Mapping[int, str]) -> Callable[[str], list[int]]:
        respelled = _respelled(layout, {token.text: new[token.id] for token in added if token.id in new}, new)
        try:
            encoder = tokenizers.Tokenizer.from_str(json.dumps(respelled))
        except Exception as error:  # a control token from which longer tokens are merged
            raise ValueError(f"{name}: a token that begins, ends or pads a text is ordinary text: {error}") from error
        return lambda text: encoder.encode(text, add_special_tokens=False).ids

    return Vocabulary(added, tuple(pieces), start, style.leads, {}, opened)


def open_model(data: bytes, name: str, more: Collection[Added] = (), *, legacy: bool = True) -> Vocabulary:
    """Returns the contents of a sentencepiece `.model` file, as `open_json` would for the converted vocabulary.

    Args:
      more: added tokens that its folder declares; their ids may be above those of the file.
      legacy: the leading space is also added to the text after every added token.
    Raises: ValueError if the file is invalid, or would lose text because it has no byte fallback.
    """
    check_opens("model", data, name)
    check_ids([added.id for added in more], name)
    try:
        # Only this module of the library needs protobuf, which is a dependency of orbax.
        from sentencepiece import sentencepiece_model_pb2 as pb2

        proto = pb2.ModelProto.FromString(data)
        sentencepiece.SentencePieceProcessor(model_proto=data)
    except Exception as error:  # protobuf's DecodeError has no more specific base
        raise ValueError(f"{name} is not a sentencepiece model: {error}") from error
    kinds = pb2.ModelProto.SentencePiece
    by_id: dict[int, Added] = {}
    pieces: list[bytes] = []
    for i, piece in enumerate(proto.pieces):
        if piece.type in (kinds.CONTROL, kinds.UNKNOWN, kinds.USER_DEFINED):
            by_id[i] = Added(i, piece.piece, piece.type != kinds.USER_DEFINED)
        pieces.append(b"" if piece.type == kinds.UNUSED else _with_blanks(piece.piece))
    for added in more:
        known = by_id.get(added.id)
        if added.id < len(proto.pieces) and proto.pieces[added.id].piece != added.text:
            raise ValueError(
                f"{name}: id {added.id} is {proto.pieces[added.id].piece!r} here and {added.text!r} in the other file"
            )
        special = added.special or (known is not None and known.special)
        by_id[added.id] = dataclasses.replace(added, special=special)
    pieces += [b""] * (max(by_id, default=-1) + 1 - len(pieces))
    for added in by_id.values():
        pieces[added.id] = utf8(added.text.replace(BLANK, " "))
    if lost := 256 - len({piece for piece in pieces if len(piece) == 1}):
        raise ValueError(
            f"{name} has no piece for {lost} of the 256 bytes (byte_fallback): text that needs one would be lost"
        )
    leads = bool(proto.normalizer_spec.add_dummy_prefix)

    def opened(new: Mapping[int, str]) -> Callable[[str], list[int]]:
        respelled = pb2.ModelProto.FromString(data)
        for i, text in new.items():
            if i < len(respelled.pieces):
                respelled.pieces[i].piece = text
                if respelled.pieces[i].type != kinds.UNKNOWN:
                    respelled.pieces[i].type = kinds.CONTROL  # never matched in text
        respelled.normalizer_spec.add_dummy_prefix = False
        processor = sentencepiece.SentencePieceProcessor(model_proto=respelled.SerializeToString())
        unsplit = {new.get(i, added.text): added for i, added in by_id.items() if i in new or i >= len(proto.pieces)}
        unsplit.pop("", None)
        cut = one_of(unsplit)

        def encode_part(text: str, start: int) -> list[int]:
            # sentencepiece itself adds a space before a space too; conversions of its files do not.
            leading = leads and (start == 0 or legacy) and not text.startswith((" ", BLANK))
            return processor.encode(" " + text if leading and text else text)

        def encode(text: str) -> list[int]:
            out, start = [], 0
            while match := cut.search(text, start):
                token, part = unsplit[match[0]], text[start : match.start()]
                out += [*encode_part(part.rstrip() if token.strips[0] else part, start), token.id]
                start = _BLANKS.match(text, match.end()).end() if token.strips[1] else match.end()
            return out + encode_part(text[start:], start)

        return encode

    trainer = proto.trainer_spec
    says = {"bos_token_id": trainer.bos_id, "eos_token_id": trainer.eos_id, "pad_token_id": trainer.pad_id}
    added = tuple(by_id[i] for i in sorted(by_id))
    return Vocabulary(added, tuple(pieces), (trainer.bos_id,) if trainer.bos_id >= 0 else (), leads, says, opened)


def check_opens(form: str, data: bytes, name: str) -> None:
    """Raises ValueError if a vocabulary crashes its library, or does not terminate on a few texts. It is opened in
    another process, which can be killed.

    Args:
      form: "json" or "model".
    """
    digest = form, hashlib.sha256(data).digest()
    if digest in _SOUND:
        return
    try:
        reply = _TRIALS.ask({"form": form, "bytes": len(data)}, TRIAL_SECONDS + WALL_SECONDS, data)
    except ChildStuck as error:
        raise ValueError(f"{name} cannot be opened: {error}") from error
    except ChildDied as error:
        raise ValueError(f"{name} cannot be opened: the process that tried it ended") from error
    if reply["problem"]:
        raise ValueError(f"{name} cannot be opened: {reply['problem']}")
    _SOUND.add(digest)


TRIAL_SECONDS, TRIAL_MB, WALL_SECONDS = 60, 4096, 120.0
_TRIALS = Child("trial.py", TRIAL_SECONDS, TRIAL_MB)
_SOUND: set[tuple[str, bytes]] = set()  # the (form, digest) of vocabularies that passed in this process


def check_ids(ids: Iterable[Any], name: str) -> None:
    """Raises ValueError for an id that is not an integer from 0 to MAX_IDS - 1. The limit matters because memory is
    allocated for every id up to the largest."""
    for i in ids:
        if type(i) is not int or not 0 <= i < MAX_IDS:
            raise ValueError(f"{name}: the id {i!r:.80} is not one of 0 to {MAX_IDS - 1}")


def unspelled(pieces: Iterable[bytes]) -> set[int]:
    """Returns the bytes that no token spells alone. Text is encoded without them, as the library does."""
    return {*range(256)} - {piece[0] for piece in pieces if len(piece) == 1}


def expansion(normalizer: Any) -> int:
    """Returns how many characters a normalizer of a tokenizer.json may produce from one. An unknown or invalid step
    counts as 1, since the library rejects it."""
    if not isinstance(normalizer, Mapping):
        return 1
    steps = normalizer.get("normalizers")
    if normalizer.get("type") == "Sequence" and isinstance(steps, list):
        return math.prod(expansion(step) for step in steps)
    if normalizer.get("type") == "Replace":
        pattern, content = normalizer.get("pattern"), normalizer.get("content")
        literal = pattern.get("String") if isinstance(pattern, Mapping) else None
        if not isinstance(content, str):
            return 1
        if isinstance(literal, str) and literal:
            return max(1, -(-len(content) // len(literal)))
        return 1 + len(content)  # a regular expression may match between any two characters
    # The longest compatibility decomposition has 18 characters; ByteLevel writes each of at most 4 bytes as a letter.
    return {"NFD": 4, "NFKD": 18, "NFKC": 18, "NFC": 3, "Lowercase": 3, "BertNormalizer": 12, "Precompiled": 18,
            "Nmt": 1, "ByteLevel": 4}.get(normalizer.get("type"), 1)  # fmt: skip


def _words(model: Mapping[str, Any], kind: str, name: str) -> list[tuple[str, int]]:
    """Returns the words of a vocabulary with their ids. Raises ValueError if its format does not fit its kind."""
    vocab = model.get("vocab")
    if kind == "BPE" and isinstance(vocab, Mapping):
        return list(vocab.items())
    if kind == "Unigram" and isinstance(vocab, list):
        if all(isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in vocab):
            return [(word, i) for i, (word, _) in enumerate(vocab)]
    raise ValueError(f"{name}: the vocabulary of a {kind} model has the wrong format")


def _find(long: list[int], short: list[int]) -> int:
    return next((k for k in range(len(long) - len(short) + 1) if long[k : k + len(short)] == short), -1)


def _added(row: Mapping[str, Any]) -> Added:
    strips = (bool(row.get("lstrip")), bool(row.get("rstrip")))
    if row.get("single_word"):
        raise ValueError(f"added token {row['content']!r} has single_word, which jrl does not read")
    return Added(int(row["id"]), str(row["content"]), bool(row.get("special")), strips, bool(row.get("normalized")))


def _row(one: Added) -> dict[str, Any]:
    return {"id": one.id, "content": one.text, "single_word": False, "lstrip": one.strips[0], "rstrip": one.strips[1],
            "normalized": one.normalized, "special": one.special}  # fmt: skip


def _respelled(layout: Mapping[str, Any], new: Mapping[str, str], by_id: Mapping[int, str]) -> dict[str, Any]:
    """Returns the file with new spellings for some tokens: in the added tokens and in the vocabulary. Merges that
    involve them are removed."""
    model = dict(layout["model"])
    if model.get("type", "BPE") == "BPE":
        hidden = set(new)
        model["vocab"] = {by_id.get(i, word): i for word, i in model["vocab"].items()}
        # A converted sentencepiece vocabulary may have merges that form "</s>" from its letters.
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if hidden.isdisjoint((*pair, "".join(pair)))]
        model["unk_token"] = new.get(model.get("unk_token"), model.get("unk_token"))
    else:
        model["vocab"] = [[by_id.get(i, word), score] for i, (word, score) in enumerate(model["vocab"])]
    rows = [{**row, "content": by_id.get(row["id"], row["content"])} for row in layout["added_tokens"]]
    return {**layout, "model": model, "added_tokens": rows, "post_processor": None}


@dataclasses.dataclass(frozen=True)
class _Style:
    """How the words of a vocabulary are decoded to bytes."""

    to_bytes: Callable[[str], bytes]
    blanks: bool  # BLANK means a space
    leads: bool


def _style(decoder: Mapping[str, Any] | None, name: str) -> _Style:
    """Returns the style of a file's decoder. Raises ValueError for a decoder that jrl does not read, since its text
    may not follow from its tokens one by one."""
    steps = (decoder or {}).get("decoders", [decoder]) if decoder else []
    kinds = {step["type"]: step for step in steps}
    if set(kinds) == {"ByteLevel"}:
        return _Style(_byte_level, False, False)
    replaced = kinds.get("Replace", {"pattern": {"String": BLANK}, "content": " "})
    sound = replaced["pattern"] == {"String": BLANK} and replaced["content"] == " "
    if not kinds or not set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} or not sound:
        raise ValueError(f"{name}: decoder {sorted(kinds)} is not one that jrl reads (ByteLevel, Metaspace, or Replace "
                         "with ByteFallback)")  # fmt: skip
    leads = False
    if "Strip" in kinds:
        strip = kinds["Strip"]
        if (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
            raise ValueError(f"{name}: decoder Strip is {strip}; jrl reads one blank taken from the start")
        leads = True
    if "Metaspace" in kinds:
        space = kinds["Metaspace"]
        leads = (
            leads
            or space.get("prepend_scheme", "always" if space.get("add_prefix_space", True) else "never") != "never"
        )
    return _Style(_with_blanks, True, leads)


def _with_blanks(word: str) -> bytes:
    byte = _BYTE.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else utf8(word.replace(BLANK, " "))


def _byte_letters() -> dict[str, int]:
    """Returns {letter: byte} of byte-level vocabularies: printable bytes are written as themselves, the others as the
    characters from U+0100 on, in order (Radford et al. 2019, GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_LETTERS = _byte_letters()


def _byte_level(word: str) -> bytes:
    if all(letter in _LETTERS for letter in word):
        return bytes(_LETTERS[letter] for letter in word)
    return utf8(word)
