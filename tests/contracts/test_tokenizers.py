"""What holds for every row of the tokenizer table."""

from __future__ import annotations

import random

import pytest

from jrl import tokenizers
from jrl.example import ROLES, Message
from jrl.tokenizers import TOKENIZERS

TEXTS = [
    "What is 12 + 34?\nThe answer is 46.",
    "\tindented  text,\u00e9\u00e8 \u65e5\u672c\u8a9e \U0001f389\n",
    "<answer>7</answer>",
    *(f"{a}+{b}={a + b}" for a in range(30) for b in range(30)),
]
FORGERIES = ["<|user|>", "<|end|>", "<pad>", "<s>", "</s>", "<|pad|>", "<|bos|>", "<unk>", "<0x41>", "[INST]"]


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request):
    row = TOKENIZERS[request.param]
    return row.build(row.config(), TEXTS)


def control_ids(tokenizer) -> set[int]:
    return {tokenizer.pad_id, tokenizer.bos_id, tokenizer.end_id, *tokenizer.role_ids.values()}


def random_text(draw: random.Random) -> str:
    alphabets = (
        lambda: chr(draw.randrange(128)),
        lambda: chr(draw.randrange(0xD800)),
        lambda: chr(draw.randrange(0xE000, 0x110000)),
        lambda: draw.choice(" \n\t\r\x00\u2581\u2585\ufeff\u200d\u0301"),
        lambda: draw.choice(FORGERIES),
        lambda: draw.choice("0123456789+-= "),
    )
    return "".join(draw.choice(alphabets)() for _ in range(draw.randrange(24)))


def test_two_thousand_random_texts_come_back_exactly(tokenizer):
    draw = random.Random(0)
    pieces, controls = tokenizer.token_bytes(), control_ids(tokenizer)
    for _ in range(2000):
        text = random_text(draw)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(pieces[i] for i in ids) == text.encode()
        assert not controls.intersection(ids)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_typed_markers_never_become_control_ids(tokenizer):
    for text in [*FORGERIES, *(f"<|{role}|>" for role in ROLES), *(f"x<|{role}|>y" for role in ROLES)]:
        assert not control_ids(tokenizer).intersection(tokenizer.encode(text))
        # In a prompt, exactly the structure's own controls: bos, role, end, assistant.
        ids = tokenizer.encode_prompt([Message("user", text)])
        assert [i for i in ids if i in control_ids(tokenizer)] == [
            tokenizer.bos_id,
            tokenizer.role_ids["user"],
            tokenizer.end_id,
            tokenizer.role_ids["assistant"],
        ]


def test_control_ids_are_distinct_and_decode_to_nothing(tokenizer):
    ids = control_ids(tokenizer)
    assert len(ids) == 3 + len(ROLES)
    assert set(tokenizer.role_ids) == set(ROLES)
    assert tokenizer.decode(sorted(ids)) == ""
    assert all(tokenizer.token_bytes()[i] == b"" for i in ids)


def test_lone_surrogates_become_the_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"


def test_every_id_of_the_padded_vocabulary_decodes(tokenizer):
    assert tokenizer.vocab_size % 8 == 0
    assert len(tokenizer.token_bytes()) == tokenizer.vocab_size
    for i in range(tokenizer.vocab_size):
        assert tokenizer.decode([i]) == tokenizer.token_bytes()[i].decode("utf-8", "replace")


def test_every_byte_can_be_said(tokenizer):
    assert {bytes([b]) for b in range(256)} <= set(tokenizer.token_bytes())


def test_saved_tokenizer_is_the_same_one(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = tokenizers.load(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.vocab_size == tokenizer.vocab_size
    assert again.role_ids == tokenizer.role_ids
    text = "12+34=46 \u65e5\u672c"
    assert again.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_building_twice_gives_the_same_fingerprint(name):
    row = TOKENIZERS[name]
    assert row.build(row.config(), TEXTS).fingerprint == row.build(row.config(), TEXTS).fingerprint


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "Runes"}')
    with pytest.raises(ValueError, match="'Runes'"):
        tokenizers.load(tmp_path)
