"""The contract of a tokenizer, and the encoding of a conversation. No JAX.

A tokenizer is any object with

    vocab_size: int               rows of the embedding, at first a multiple of 8; unused ids decode to ""
    filled: int                   one more than the largest id in use
    pad_id, bos_id, end_id: int   `end_id` ends a message; the policy is trained to stop with it
    end_ids: tuple[int, ...]      every token at which the policy stops; `end_id` is the first
    start_ids: tuple[int, ...]    the first ids of a text that is not a conversation: bos, or none
    role_ids: dict[str, int]      one control id for each of example.ROLES; empty if a chat template marks roles
    fingerprint: str              sha256 (hex) of everything that decides ids
    encode(text) -> list[int]     never a control id, whatever the text says
    decode(ids) -> str            control ids are dropped, bytes that are not UTF-8 become U+FFFD
    token_bytes() -> list[bytes]  by id; b"" for a control id. Joined, they are the UTF-8 of the decoded text
    leads: bool                   `encode` adds a space before every text, and `decode` removes one
    encode_prompt(messages) -> list[int]
    save(folder) -> None          writes what `jrl.tasks.tokenizers.load(folder)` reads

Role markers are inserted by id and have no spelling in text, so no prompt can forge one. A published tokenizer may
normalize text (NFC, a leading space): decoding then returns the normalized text, which is what the model reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl.tasks.example import ROLES, Message

CONTROL_NAMES = ("pad", "bos", "end", *ROLES)
MEMBERS = (
    "vocab_size", "filled", "pad_id", "bos_id", "end_id", "end_ids", "start_ids", "role_ids", "fingerprint", "leads",
    "encode", "decode", "token_bytes", "encode_prompt", "save",
)  # fmt: skip
SAVED_AS = "tokenizer.json"
_SURROGATES = re.compile("[\ud800-\udfff]")


class Tokenizer(NamedTuple):
    """A row of the tokenizer table."""

    config: type  # frozen dataclass
    build: Callable[[Any, Iterable[str]], Any]  # (config, texts of the run) -> tokenizer
    load: Callable[[Path, dict], Any]  # (folder, contents of SAVED_AS there) -> the saved tokenizer


@dataclasses.dataclass(frozen=True)
class Controls:
    """The ids that no text can produce."""

    pad_id: int
    bos_id: int
    end_id: int
    role_ids: Mapping[str, int]  # keys are jrl.tasks.example.ROLES

    @staticmethod
    def at(first: int) -> Controls:
        """Returns the controls laid out from id `first` in the order of CONTROL_NAMES."""
        pad, bos, end, *roles = range(first, first + len(CONTROL_NAMES))
        return Controls(pad_id=pad, bos_id=bos, end_id=end, role_ids=dict(zip(ROLES, roles)))


class Controlled:
    """The members that derive from `self.controls`, and prompts with role ids."""

    controls: Controls

    pad_id = property(lambda self: self.controls.pad_id)
    bos_id = property(lambda self: self.controls.bos_id)
    end_id = property(lambda self: self.controls.end_id)
    end_ids = property(lambda self: (self.controls.end_id,))
    start_ids = property(lambda self: (self.controls.bos_id,))
    role_ids = property(lambda self: dict(self.controls.role_ids))
    fingerprint = property(lambda self: hashlib.sha256(layout_bytes(self._layout())).hexdigest())

    def encode_prompt(self, messages: Iterable[Message]) -> list[int]:
        return prompt_ids(messages, self.encode, self.controls)


def prompt_ids(messages: Iterable[Message], encode: Callable[[str], list[int]], controls: Controls) -> list[int]:
    """Returns bos, then for each message its role id, its text and end, then the assistant's role id.

    Raises: ValueError for a role outside jrl.tasks.example.ROLES.
    """
    ids = [controls.bos_id]
    for message in messages:
        if message.role not in controls.role_ids:
            raise ValueError(f"role {message.role!r} is not one of {', '.join(controls.role_ids)}")
        ids += [controls.role_ids[message.role], *encode(message.content), controls.end_id]
    return [*ids, controls.role_ids["assistant"]]


def utf8(text: str) -> bytes:
    """Returns the UTF-8 of `text`. A lone surrogate, which UTF-8 cannot encode, becomes U+FFFD."""
    return _SURROGATES.sub("\ufffd", text).encode()


def layout_bytes(layout: Mapping[str, Any]) -> bytes:
    """Returns the canonical JSON of a layout: the contents of SAVED_AS, and the input of fingerprints."""
    return json.dumps(layout, indent=1, sort_keys=True).encode() + b"\n"


def padded_size(size: int) -> int:
    """Returns the smallest multiple of 8 that is at least `size`, for sharding and for matrix units."""
    return -(-size // 8) * 8


def without_lead(text: str, leads: bool) -> str:
    """Returns `text` without the leading space that a tokenizer with `leads` adds."""
    return text[1:] if leads and text.startswith(" ") else text
