"""What holds for every row of the tokenizer table."""

from __future__ import annotations

import random

import published_forms
import pytest

from jrl.tasks import tokenizers
from jrl.tasks.example import ROLES, Message
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.contract import MEMBERS
from jrl.tasks.tokenizers.incremental import IncrementalDecoder

TEXTS = [
    "What is 12 + 34?\nThe answer is 46.",
    "\tindented  text,\u00e9\u00e8 \u65e5\u672c\u8a9e \U0001f389\n",
    "<answer>7</answer>",
    *(f"{a}+{b}={a + b}" for a in range(30) for b in range(30)),
]
FORGERIES = [
    "<|user|>",
    "<|end|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<pad>",
    "<s>",
    "</s>",
    "<|pad|>",
    "<|bos|>",
    "<unk>",
    "<0x41>",
    "[INST]",
]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as a byte-level model without a normalizer is published: texts come back exactly."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    return published_forms.byte_level("llama3", tmp_path_factory.mktemp("published") / "model")


def config_of(name: str, published):
    return TOKENIZERS[name].config(**({"path": str(published)} if name == "HuggingFace" else {}))


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request, published):
    return TOKENIZERS[request.param].build(config_of(request.param, published), TEXTS)


def control_ids(tokenizer) -> set[int]:
    return {tokenizer.pad_id, tokenizer.bos_id, *tokenizer.end_ids, *tokenizer.role_ids.values()}


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
    bare = control_ids_of(tokenizer.encode_prompt([Message("user", "plain")]), tokenizer)
    if tokenizer.role_ids:
        # In a prompt, exactly the structure's own controls: bos, role, end, assistant.
        user, assistant = tokenizer.role_ids["user"], tokenizer.role_ids["assistant"]
        assert bare == [tokenizer.bos_id, user, tokenizer.end_id, assistant]
    for text in [*FORGERIES, *(f"<|{role}|>" for role in ROLES), *(f"x<|{role}|>y" for role in ROLES)]:
        assert not control_ids(tokenizer).intersection(tokenizer.encode(text))
        assert control_ids_of(tokenizer.encode_prompt([Message("user", text)]), tokenizer) == bare


def control_ids_of(ids, tokenizer) -> list[int]:
    return [i for i in ids if tokenizer.token_bytes()[i] == b""]


def test_control_ids_are_distinct_and_decode_to_nothing(tokenizer):
    ids = control_ids(tokenizer)
    assert set(tokenizer.role_ids) in (set(ROLES), set())
    assert len({tokenizer.bos_id, tokenizer.end_id, *tokenizer.role_ids.values()}) == 2 + len(tokenizer.role_ids)
    assert tokenizer.end_ids[0] == tokenizer.end_id
    assert set(tokenizer.start_ids) <= {tokenizer.bos_id}
    assert tokenizer.decode(sorted(ids)) == ""
    assert all(tokenizer.token_bytes()[i] == b"" for i in ids)


def test_every_member_is_there(tokenizer):
    assert [member for member in MEMBERS if not hasattr(tokenizer, member)] == []


def test_lone_surrogates_become_the_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"


def test_every_id_of_the_padded_vocabulary_decodes(tokenizer):
    assert tokenizer.vocab_size % 8 == 0
    assert max(control_ids(tokenizer)) < tokenizer.filled <= tokenizer.vocab_size
    assert not any(tokenizer.token_bytes()[tokenizer.filled :])
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
def test_building_twice_gives_the_same_fingerprint(name, published):
    row, config = TOKENIZERS[name], config_of(name, published)
    assert row.build(config, TEXTS).fingerprint == row.build(config, TEXTS).fingerprint


def test_tokens_decoded_one_by_one_are_the_text_and_never_half_a_character(tokenizer):
    draw = random.Random(1)
    for _ in range(200):
        text = random_text(draw)
        decoder = IncrementalDecoder(tokenizer.token_bytes(), tokenizer.leads)
        parts = [decoder.feed([i]) for i in tokenizer.encode(text)]
        assert "".join(parts) == text
        assert decoder.close() == ""


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "Runes"}')
    with pytest.raises(ValueError, match="'Runes'"):
        tokenizers.load(tmp_path)
