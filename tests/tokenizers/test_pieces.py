from __future__ import annotations

import io

import pytest
import sentencepiece

from jrl.tasks import tokenizers
from jrl.tasks.tokenizers.pieces import SentencePiece, build, train

TEXTS = [f"What is {a} plus {b}?\nIt is {a + b}." for a in range(20) for b in range(20)]


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_training_is_deterministic(model):
    config = SentencePiece(vocab_size=400, model=model)
    assert train(config, TEXTS) == train(config, TEXTS)


def test_training_shortens_its_own_texts():
    tokenizer = build(SentencePiece(vocab_size=400), TEXTS)
    # What| is| |0| plus| |5|?\n|It| is| |5|.
    assert len(tokenizer.encode("What is 0 plus 5?\nIt is 5.")) == 13


def test_digits_are_tokens_of_their_own():
    tokenizer = build(SentencePiece(vocab_size=400), TEXTS)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2026")] == ["2", "0", "2", "6"]


def test_phrases_are_pieces_where_they_are_asked_for():
    words, phrases = (build(SentencePiece(vocab_size=400, phrases=phrases), TEXTS) for phrases in (False, True))
    text = "What is 0 plus 5?\nIt is 5."
    assert len(phrases.encode(text)) < len(words.encode(text))
    assert b"What is" in phrases.token_bytes()
    assert b"What is" not in words.token_bytes()
    assert phrases.decode(phrases.encode(text)) == text


def test_other_texts_give_another_fingerprint():
    config = SentencePiece(vocab_size=400)
    assert build(config, TEXTS).fingerprint != build(config, ["entirely other words"] * 5).fingerprint


def test_only_the_first_texts_are_read():
    def texts():
        yield from TEXTS[:3]
        raise AssertionError("read a fourth text")

    assert build(SentencePiece(vocab_size=400, texts=3), texts()).encode("a")


@pytest.mark.parametrize("model", ["bpe", "unigram"])
@pytest.mark.parametrize("more", [[], ["1 = 1"]])
def test_a_space_that_the_texts_hardly_have_is_a_piece(model, more):
    texts = [f"{a}+{b}={a + b}" for a in range(100) for b in range(100)] + more
    tokenizer = build(SentencePiece(vocab_size=300, model=model), texts)
    assert tokenizer.decode(tokenizer.encode(" a  b\u2581")) == " a  b\u2581"
    assert len(tokenizer.encode(" ")) == 1


def test_nothing_to_train_from_is_refused():
    with pytest.raises(ValueError, match="no text"):
        build(SentencePiece(), ["", " \n"])


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 100"):
        build(SentencePiece(vocab_size=100), TEXTS)


def test_an_existing_model_file_keeps_its_controls(tmp_path):
    model = train(SentencePiece(vocab_size=400), TEXTS)
    (tmp_path / "m.model").write_bytes(model)
    tokenizer = build(SentencePiece(path=str(tmp_path / "m.model")), [])
    assert tokenizer.fingerprint == build(SentencePiece(vocab_size=400), TEXTS).fingerprint


def foreign_model(**options) -> bytes:
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=writer, vocab_size=400, hard_vocab_limit=False, minloglevel=2,
        **options,
    )  # fmt: skip
    return writer.getvalue()


def test_a_foreign_model_gets_controls_above_its_vocabulary(tmp_path):
    exact = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    (tmp_path / "m.model").write_bytes(foreign_model(byte_fallback=True, **exact))
    tokenizer = build(SentencePiece(path=str(tmp_path / "m.model")), [])
    filled = tokenizer.processor.vocab_size()
    assert tokenizer.pad_id == filled
    assert tokenizer.vocab_size >= filled + 7
    assert tokenizer.decode(tokenizer.encode("<s> a </s>")) == "<s> a </s>"


def test_a_model_that_loses_text_is_refused(tmp_path):
    (tmp_path / "m.model").write_bytes(foreign_model())
    with pytest.raises(ValueError, match="byte_fallback"):
        build(SentencePiece(path=str(tmp_path / "m.model")), [])


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "m.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"m\.model"):
        build(SentencePiece(path=str(tmp_path / "m.model")), [])
    with pytest.raises(ValueError, match="cannot be read"):
        build(SentencePiece(path=str(tmp_path / "none.model")), [])


def test_a_changed_model_file_is_refused_at_load(tmp_path):
    build(SentencePiece(vocab_size=400), TEXTS).save(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(train(SentencePiece(vocab_size=400), TEXTS[:50]))
    with pytest.raises(ValueError, match="laid out"):
        tokenizers.load(tmp_path)
