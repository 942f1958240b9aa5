"""What a tokenizer is, and how a conversation becomes ids. No JAX.

A tokenizer is any object with

    vocab_size: int               rows of the embedding, at first a multiple of 8; ids that nothing fills decode to ""
    filled: int                   one more than the largest id that means something
    pad_id, bos_id, end_id: int   `end_id` ends a message; it is what the policy is taught to stop with
    end_ids: tuple[int, ...]      every token that the policy stops with; `end_id` is the first
    start_ids: tuple[int, ...]    what a text that is not a conversation begins with: bos, or nothing
    role_ids: dict[str, int]      one control id for each of example.ROLES; empty where a chat template marks roles
    fingerprint: str              sha256 (hex) of everything that decides ids
    encode(text) -> list[int]     never a control id, whatever the text says
    decode(ids) -> str            control ids dropped, bytes that are no UTF-8 become U+FFFD
    token_bytes() -> list[bytes]  by id; b"" for a control id. Joined, these are the UTF-8 of a decoded text
    leads: bool                   a blank goes in front of every text that is encoded, and `decode` takes one away
    encode_prompt(messages) -> list[int]
    save(folder) -> None          writes what `jrl.tasks.tokenizers.load(folder)` reads

Role markers are placed by id and have no spelling in text, so no prompt can forge one. A published tokenizer may
normalize (NFC, a blank in front): what comes back is then the normalized text, which is what the model has read.
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
    load: Callable[[Path, dict], Any]  # (folder, what SAVED_AS holds there) -> the tokenizer that was saved


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
    """The members that follow from `self.controls`, and the prompt that role ids mark."""

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
    """Returns the UTF-8 of `text`; a lone surrogate, which has none, becomes U+FFFD."""
    return _SURROGATES.sub("\ufffd", text).encode()


def layout_bytes(layout: Mapping[str, Any]) -> bytes:
    """Returns the one spelling of a layout: what SAVED_AS holds, and what fingerprints are taken of."""
    return json.dumps(layout, indent=1, sort_keys=True).encode() + b"\n"


def padded_size(size: int) -> int:
    """Returns the least multiple of 8 that is at least `size`: what tensor shards and matrix units like."""
    return -(-size // 8) * 8


def without_lead(text: str, leads: bool) -> str:
    """Returns `text` without the blank that a tokenizer which `leads` has put in front."""
    return text[1:] if leads and text.startswith(" ") else text
