"""What every system is given: the same texts, of the length that is said, and the same lengths of completions."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import limits, shapes
from benchmarks.limits import Limits
from benchmarks.shapes import SAMPLING, SHAPES, Sampling
from jrl.tasks.tokenizers.published import from_files


@pytest.mark.parametrize("vocab_size", [1024, 8192, 30000])
def test_prompts_have_exactly_their_tokens(vocab_size):
    files = {name: text.encode() for name, text in shapes.tokenizer_files(vocab_size).items()}
    tokenizer = from_files(files, "made", options=(), date="2000-01-01")
    assert (*tokenizer.end_ids, tokenizer.pad_id) == shapes.special_ids(vocab_size) == (vocab_size - 2, vocab_size - 1)
    texts = shapes.prompts(Sampling("", 4, 1, prompt_length=9), vocab_size, seed=0)
    ids = [tokenizer.encode(text) for text in texts]
    assert [len(i) for i in ids] == [9] * 4
    assert [tokenizer.decode(i) for i in ids] == texts
    assert len(set(texts)) == 4


def test_other_seeds_give_other_texts_and_repeated_ones_come_in_eights():
    case = Sampling("", 16, 1, distinct=False)
    texts = shapes.prompts(case, 8192, 0)
    assert [texts.index(text) for text in texts] == [0] * 8 + [8] * 8
    assert not set(texts) & set(shapes.prompts(case, 8192, 1))


def test_skewed_lengths_have_the_mean_that_is_said():
    lengths = shapes.lengths(next(case for case in SAMPLING if case.lengths == "geometric"))
    assert len(lengths) == 256 and lengths.min() >= 1 and lengths.max() == 128
    # 32 * (1 - (31/32) ** 128) = 31.45 is the mean after the cut; the mean of 256 such differs by less than 4
    assert abs(lengths.mean() - 31.45) < 4
    assert np.array_equal(lengths, shapes.lengths(SAMPLING[2]))


def test_the_shape_has_the_weights_that_are_said():
    shape = SHAPES["cpu"]
    # 512 * 64 * (2 * 8 + 2 * 4) + 3 * 512 * 1536 = 3,145,728 a layer; 8 of them and a head of 512 * 8192
    assert shape.layer_weights == 3_145_728
    assert shape.matmul_weights == 29_360_128
    assert shape.cache_bytes == 2 * 8 * 4 * 64 * 4


def test_least_time_of_a_sampling_call():
    shape, case = SHAPES["cpu"], Sampling("", 8, 1, slots=8)
    # Fast products: each of 128 steps reads 29,360,128 weights and 8 rows of 64 + 64.5 tokens, 16,384 bytes each.
    reads = 128 * (29_360_128 * 4 + 8 * 128.5 * 16_384) + 8 * 3_145_728 * 4
    assert limits.sampling_seconds(shape, case, Limits(1e30, 1e9, 1)) == pytest.approx(reads / 1e9)
    # Fast memory: 8 * 64 tokens through the layers, then 1024 through all; 4 * 8 * 512 operations a token seen.
    prefill = 512 * (2 * 25_165_824 + 16_384 * 32.5)
    decode = 1024 * (2 * 29_360_128 + 16_384 * 128.5)
    assert limits.sampling_seconds(shape, case, Limits(1e9, 1e30, 1)) == pytest.approx((prefill + decode) / 1e9)


def test_repeated_prompts_are_computed_once_in_the_least_time():
    shape, fast = SHAPES["cpu"], Limits(1e9, 1e30, 1)
    groups = Sampling("", 4, 8, prompt_length=512, completion_length=64)
    repeated = Sampling("", 32, 1, prompt_length=512, completion_length=64, distinct=False)
    assert limits.sampling_seconds(shape, groups, fast) == limits.sampling_seconds(shape, repeated, fast)
