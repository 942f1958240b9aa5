"""What is measured: the shape of the model, the cases, their prompts and lengths. Imports nothing but the standard
library and numpy, because every system reads it inside its own environment.

Lengths of completions are given, not drawn: every system does the same number of useful tokens. The tokens `end` and
`pad` are never drawn, because the weights keep them out (see `jrl_side.weights`): no system is told to do anything
unusual for a completion to have its full length. Where lengths differ:

* jrl is given the most tokens of every row, which its sampling program takes as an array;
* a peer's loop runs until the longest row of its batch is done, as it does when rows end by themselves, since neither
  hands a finished row's place to another sequence. What it drew beyond a row's length does not count as useful.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import string
from typing import Literal, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A Qwen3-like decoder with a tied head."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: Literal["float32", "bfloat16"]

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrix products."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.mlp_width

    @property
    def head_weights(self) -> int:
        return self.width * self.vocab_size

    @property
    def matmul_weights(self) -> int:
        return self.layers * self.layer_weights + self.head_weights

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def cache_bytes(self) -> int:
        """Bytes that one token takes in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes


SHAPES = {
    "cpu": ModelShape(8, 512, 1536, 8, 4, 64, 8192, "float32"),
    "1.5b": ModelShape(28, 1536, 8960, 12, 2, 128, 151936, "bfloat16"),  # for an accelerator
    "test": ModelShape(2, 32, 64, 2, 1, 16, 1024, "float32"),  # says nothing about speed
}


class Sampling(NamedTuple):
    """One sampling call, text in to text out."""

    name: str
    prompts: int
    samples: int  # of each prompt
    prompt_length: int = 64
    completion_length: int = 128
    slots: int = 32  # rows decoded at once
    lengths: Literal["full", "geometric"] = "full"
    cache: int | None = None  # tokens of the cache that is allocated; None: prompt and completion
    distinct: bool = True  # False: neighbors in groups of eight are the same text, each prefilled on its own


SAMPLING = (
    Sampling("32 rows", 32, 1),
    Sampling("8 rows", 8, 1, slots=8),
    Sampling("32 x 8 through 32", 32, 8, lengths="geometric"),
    Sampling("256 through 32", 256, 1, lengths="geometric"),
    Sampling("32 rows, cache 1024", 32, 1, cache=1024),
    Sampling("prompts of 512 x 8", 4, 8, prompt_length=512, completion_length=64),
    Sampling("prompts of 512, repeated", 32, 1, prompt_length=512, completion_length=64, distinct=False),
)


class Learning(NamedTuple):
    """A step of GRPO, or only its update: prompts of one length, samples of each, completions of given lengths."""

    name: str
    prompts: int = 4
    samples: int = 8
    prompt_length: int = 64
    completion_length: int = 128
    lengths: Literal["full", "geometric"] = "full"

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples


UPDATE = Learning("update")
LEARNING = (Learning("fixed lengths"), Learning("skewed lengths", lengths="geometric"))


class Change(NamedTuple):
    """What one point of a sweep changes."""

    shape: dict[str, int] = {}
    case: dict[str, int] = {}


SWEEPS = {  # axis -> (value, what it changes)
    "sequences": [(8 * n, Change(case={"prompts": n})) for n in (1, 2, 4, 8)],
    "completion length": [(n, Change(case={"completion_length": n})) for n in (32, 64, 128, 256)],
    "vocabulary": [(n, Change(shape={"vocab_size": n})) for n in (2048, 8192, 16384, 32768)],
    "layers": [(n, Change(shape={"layers": n})) for n in (2, 4, 8, 16)],
}

PATTERN = ".*[a-m]"  # what the reward looks for: half of all completions end so
LEARNING_RATE = 1e-6

MEAN_LENGTH = 32  # of geometric lengths, before the cut


def lengths(case: Sampling | Learning) -> np.ndarray:
    """Returns the tokens of every completion, [prompts * samples] int32: the same in every system and every run."""
    count = case.prompts * case.samples
    if case.lengths == "full":
        return np.full(count, case.completion_length, np.int32)
    drawn = np.random.default_rng(0).geometric(1 / MEAN_LENGTH, count)
    return np.minimum(drawn, case.completion_length).astype(np.int32)


FIRST_WORD = 256 + 26 + 26**2  # bytes and the beginnings of words come before


def words(vocab_size: int) -> list[str]:
    """Returns the words that are one token each with the blank before them, of ids from FIRST_WORD on."""
    letters = itertools.product(string.ascii_lowercase, repeat=3)
    return ["".join(three) for three in itertools.islice(letters, vocab_size - FIRST_WORD - 2)]


class Batch(NamedTuple):
    """A batch to learn from, the same in every system: N sequences of the same prompt and completion length."""

    tokens: np.ndarray  # [N, P + C] int32
    prompt_length: int
    lengths: np.ndarray  # [N] int32, tokens of each completion
    advantages: np.ndarray  # [N] float32


def batch(case: Learning, vocab_size: int, seed: int) -> Batch:
    """Returns words at random, rows of a group with one prompt, and advantages at random."""
    rng = np.random.default_rng((seed, 1))
    draw = lambda *shape: rng.integers(FIRST_WORD, vocab_size - 2, size=shape, dtype=np.int32)
    prompt = np.repeat(draw(case.prompts, case.prompt_length), case.samples, axis=0)
    tokens = np.concatenate([prompt, draw(case.sequences, case.completion_length)], axis=1)
    return Batch(tokens, case.prompt_length, lengths(case), rng.normal(size=case.sequences).astype(np.float32))


def prompts(case: Sampling, vocab_size: int, seed: int) -> list[str]:
    """Returns the texts of a call, each of exactly `case.prompt_length` tokens. Other seeds give other texts."""
    rng = np.random.default_rng((seed, case.prompt_length))
    count = case.prompts if case.distinct else case.prompts // 8
    known = words(vocab_size)
    texts = ["".join(f" {known[i]}" for i in rng.integers(len(known), size=case.prompt_length)) for _ in range(count)]
    return texts if case.distinct else [text for text in texts for _ in range(8)]


END, PAD = "<|end|>", "<|pad|>"


def special_ids(vocab_size: int) -> tuple[int, int]:
    """Returns the ids of END and PAD: the last two."""
    return vocab_size - 2, vocab_size - 1


def tokenizer_files(vocab_size: int) -> dict[str, str]:
    """Returns name -> text of a published byte-level BPE tokenizer of `vocab_size` ids, in which a blank and a word of
    three letters are one token. It is made by rule, so that every system reads the same file."""
    blank = "\u0120"  # how byte-level BPE writes a blank
    vocabulary = {token: i for i, token in enumerate(byte_letters())}
    merges = []

    def merge(left: str, right: str) -> None:
        merges.append(f"{left} {right}")
        vocabulary[left + right] = len(vocabulary)

    beginnings = ["".join(two) for two in itertools.product(string.ascii_lowercase, repeat=2)]
    for text in [*string.ascii_lowercase, *beginnings, *words(vocab_size)]:
        merge(blank + text[:-1], text[-1])
    special = dict(zip((END, PAD), special_ids(vocab_size)))
    vocabulary |= special  # a large vocabulary has ids between that nothing fills
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for text, i in special.items()
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
                  "merges": merges},
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(config)}


def byte_letters() -> list[str]:
    """Returns the 256 letters that stand for bytes in byte-level BPE, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]
