"""SentencePiece: trained in process on the run's texts, or read from a model file. No JAX.

This module adds to the library:

* "\\u2581" (the library's symbol for a space) in a text is encoded as its three bytes, so it decodes to itself. This
  holds for a model trained here; an external model reads it as a space, as it always has;
* decoding joins the bytes of the pieces, so a text and its ids always agree byte for byte;
* a lone surrogate, which the library rejects, becomes U+FFFD.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import sentencepiece

from jrl import paths
from jrl.tasks.example import ROLES
from jrl.tasks.tokenizers.contract import (
    CONTROL_NAMES,
    SAVED_AS,
    Controlled,
    Controls,
    layout_bytes,
    padded_size,
    utf8,
    without_lead,
)
from jrl.tasks.tokenizers.spelling import BLANK, check_opens

MODEL_SAVED_AS = "tokenizer.model"
MAX_FILE_BYTES = 1 << 28
_LONGEST_WORD, _LONGEST_PHRASE = 16, 96  # characters of a piece; the first is the library's default
_PROBES = ("  a\n\tb ", "\u00e9 \u65e5\u672c \U0001f389", "x" + BLANK + "y", "\u2585\x00\ufeff", "007 + 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePiece:
    """A vocabulary trained on the texts of the run."""

    vocab_size: int = 1024  # most pieces, control ids and the 256 bytes included; a small corpus gives fewer
    model: Literal["bpe", "unigram"] = "bpe"  # algorithm that trains the vocabulary
    texts: int = 20_000  # most texts to train on: messages and answers of up to 4,096 examples, spread over the task
    # Pieces may span several words: if the texts repeat phrases, a question takes half as many tokens or fewer.
    phrases: bool = False
    path: str | None = None  # an existing .model file, used instead of training


@dataclasses.dataclass(frozen=True, eq=False)
class PieceTokenizer(Controlled):
    """See jrl.tasks.tokenizers.contract for the members. Construct it with `from_model`."""

    model: bytes  # the .model file
    processor: sentencepiece.SentencePieceProcessor
    controls: Controls
    vocab_size: int
    filled: int
    pieces: tuple[bytes, ...]  # [vocab_size], b"" for controls and unused ids
    leads: bool  # the model adds a space before a text
    trained_here: bool  # the model contains the control ids

    def encode(self, text: str) -> list[int]:
        text = utf8(text).decode()
        if not self.trained_here or BLANK not in text:
            return self.processor.encode(text)
        literal = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in BLANK.encode()]
        first, *rest = text.split(BLANK)
        ids = self.processor.encode(first)
        for part in rest:
            ids += literal + self.processor.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text = b"".join(self.pieces[i] for i in ids if 0 <= i < self.vocab_size).decode("utf-8", "replace")
        return without_lead(text, self.leads)

    def token_bytes(self) -> list[bytes]:
        return list(self.pieces)

    def save(self, folder: Path | str) -> None:
        paths.write_bytes_atomic(paths.local(folder) / MODEL_SAVED_AS, self.model)
        paths.write_bytes_atomic(paths.local(folder) / SAVED_AS, layout_bytes(self._layout()))

    def _layout(self) -> dict:
        return {
            "kind": "SentencePiece",
            "vocab_size": self.vocab_size,
            "controls": dataclasses.asdict(self.controls),
            "model_sha256": hashlib.sha256(self.model).hexdigest(),
        }


def build(config: SentencePiece, texts: Iterable[str]) -> PieceTokenizer:
    """Returns the tokenizer of `config.path`, or one trained on the first `config.texts` texts.

    The same texts in the same order give the same bytes.

    Raises: ValueError if there is no text to train on, the vocabulary is too small for the texts, or a model file would
        lose text.
    """
    if config.path is not None:
        try:
            model = paths.read_foreign(paths.readable(config.path), MAX_FILE_BYTES)
        except OSError as error:
            raise ValueError(f"SentencePiece.path: {config.path!r} cannot be read: {error.strerror}") from error
        check_opens("model", model, config.path)
        return from_model(model, config.path)
    return from_model(train(config, texts), "the trained model")


def train(config: SentencePiece, texts: Iterable[str]) -> bytes:
    """Returns the bytes of a model file trained on the first `config.texts` texts, without blank ones and those of more
    than 64 KiB, which the library skips."""
    chosen = [utf8(text).decode() for text in itertools.islice(texts, config.texts) if text.strip()]
    if not chosen:
        raise ValueError("SentencePiece: the task gives no text to train a vocabulary from")
    model = _trained(config, chosen)
    # Texts with no or hardly any space give no piece for it. The library would spell a space with the bytes of BLANK.
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return (
        _trained(config, chosen, required_chars=BLANK) if processor.is_unknown(processor.piece_to_id(BLANK)) else model
    )


def _trained(config: SentencePiece, texts: list[str], **options: str) -> bytes:
    """Returns the bytes of a model file trained on texts. options: of the library's trainer; the file contains them."""
    pad, bos, end, *roles = (_spelling(name) for name in CONTROL_NAMES)
    writer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=writer,
            model_type=config.model,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            **options,
            split_by_whitespace=not config.phrases,
            split_by_unicode_script=not config.phrases,
            max_sentencepiece_length=_LONGEST_PHRASE if config.phrases else _LONGEST_WORD,
            max_sentence_length=1 << 16,
            num_threads=1,  # the unigram trainer's sums depend on the order of threads
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,  # set explicitly, since pad takes its default 0
            pad_piece=pad,
            bos_piece=bos,
            eos_piece=end,
            control_symbols=roles,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"SentencePiece: no {config.model} vocabulary of {config.vocab_size} could be trained from {len(texts)} "
            f"texts ({error}); the 256 bytes, 8 controls and the characters of the texts must fit in vocab_size"
        ) from error
    return writer.getvalue()


def from_model(model: bytes, name: str) -> PieceTokenizer:
    """Returns the tokenizer of a model file's bytes. A model trained here contains the control ids; for an external one
    they are placed above its vocabulary. `name` is the model's origin, for errors.

    An external model may normalize (compatibility forms, a leading space, runs of spaces merged): the ids are those of
    the library, and decoding returns the normalized text.

    Raises: ValueError if it is not a model, or would lose text: it has no piece for some character and no byte
        fallback.
    """
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"{name} is not a sentencepiece model: {error}") from error
    filled = processor.vocab_size()
    ids = {n: processor.piece_to_id(_spelling(n)) for n in CONTROL_NAMES}
    trained_here = all(processor.is_control(i) for i in ids.values())
    if trained_here:
        controls = Controls(ids["pad"], ids["bos"], ids["end"], {role: ids[role] for role in ROLES})
    else:
        controls = Controls.at(filled)
        filled += len(CONTROL_NAMES)
    vocab_size = padded_size(filled)
    pieces = [_piece_bytes(processor, i) for i in range(processor.vocab_size())]
    pieces += [b""] * (vocab_size - len(pieces))
    # Whether the model adds a space to a text that does not start with one.
    leads = bool(first := processor.encode("x")) and pieces[first[0]].startswith(b" ")
    tokenizer = PieceTokenizer(model, processor, controls, vocab_size, filled, tuple(pieces), leads, trained_here)
    for probe in _PROBES:
        read = probe if trained_here else processor.normalize(probe).replace(BLANK, " ")
        back = tokenizer.decode(tokenizer.encode(probe))
        if back != (read if trained_here else without_lead(read, leads)):
            raise ValueError(
                f"{name}: the text {probe!r} is read as {read!r} and comes back as {back!r}; "
                "a model needs byte_fallback"
            )
    return tokenizer


def load(folder: Path, layout: dict) -> PieceTokenizer:
    """Returns the tokenizer saved in `folder`. Raises ValueError if its files do not match."""
    model = folder / MODEL_SAVED_AS
    if not paths.exists(model):
        raise ValueError(f"{folder / SAVED_AS} needs {MODEL_SAVED_AS} in the same folder")
    data = paths.read_foreign(model, MAX_FILE_BYTES, within=folder)
    check_opens("model", data, str(model))
    tokenizer = from_model(data, str(model))
    if layout != tokenizer._layout():
        raise ValueError(f"{folder / SAVED_AS}: laid out as {layout}, but {MODEL_SAVED_AS} gives {tokenizer._layout()}")
    return tokenizer


def _spelling(control: str) -> str:
    return f"<|{control}|>"  # only a name in the model file: control symbols are never matched in text


def _piece_bytes(processor: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
    if processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i):
        return b""
    piece = processor.id_to_piece(i)
    return bytes([int(piece[3:5], 16)]) if processor.is_byte(i) else piece.replace(BLANK, " ").encode()
