from __future__ import annotations

import random

import pytest

from jrl.tasks.example import ROLES, Message
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.bytes import Bytes, build


def test_ids_are_the_bytes_of_utf8():
    assert build(Bytes(), []).encode("aé\n") == [97, 0xC3, 0xA9, 10]


def test_prompt_is_bos_then_marked_messages_then_the_assistant():
    tokenizer = build(Bytes(), [])
    # 256 pad, 257 bos, 258 end, then system 259, user 260, assistant 261, tool 262
    ids = tokenizer.encode_prompt([Message("system", "a"), Message("user", "b")])
    assert ids == [257, 259, 97, 258, 260, 98, 258, 261]
    assert tokenizer.role_ids == dict(zip(ROLES, (259, 260, 261, 262)))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.end_id, tokenizer.vocab_size) == (256, 257, 258, 264)


def test_unknown_role_is_named():
    with pytest.raises(ValueError, match="'robot'"):
        build(Bytes(), []).encode_prompt([Message("robot", "a")])


def test_broken_utf8_decodes_to_the_replacement_character():
    assert build(Bytes(), []).decode([97, 0xC3, 98]) == "a\ufffdb"


def test_build_does_not_read_the_texts():
    def texts():
        raise AssertionError("read")
        yield ""

    assert TOKENIZERS["Bytes"].build(Bytes(), texts()).encode("a") == [97]


def test_decode_ignores_control_unfilled_and_out_of_range_ids():
    tokenizer = build(Bytes(), [])
    ids = [97, *range(256, 264), 98, 10**6, -1]
    random.Random(0).shuffle(ids)
    assert sorted(tokenizer.decode(ids)) == ["a", "b"]
