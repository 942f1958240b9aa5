"""Rewards of spans of a completion's text, on the tokens that end them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.tasks.tokenizers.incremental import IncrementalDecoder


def span_rewards(
    spans: Sequence[tuple[tuple[int, float], ...]], tokens: np.ndarray, action_mask: np.ndarray, tokenizer: Any
) -> np.ndarray:
    """Returns R16's rewards of spans, each on the token that completes its last character, [N, T] float32.

    If no token completes a span's last character (invalid UTF-8 at the end), the completion's last token is rewarded.

    Args:
      spans: [n], for each row (characters of the completion up to the end of the span, its reward); () for none.
        Rows after the first n are padding.
      tokens: [N, T] int32. action_mask: [N, T] bool, the tokens of the completion's text.

    Source: Wu et al. 2306.01693 section 3; a tool's answer is not part of the completion's text.
    """
    rewards = np.zeros(tokens.shape, np.float64)
    pieces = tokenizer.token_bytes() if any(spans) else []
    for row, row_spans in enumerate(spans):
        columns = np.flatnonzero(action_mask[row])
        if not row_spans or not len(columns):
            continue
        decoder = IncrementalDecoder(pieces, tokenizer.leads)
        ends = list(itertools.accumulate(len(decoder.feed([token])) for token in tokens[row, columns].tolist()))
        for end, reward in row_spans:
            rewards[row, columns[min(bisect.bisect_left(ends, end), len(columns) - 1)]] += reward
    return rewards.astype(np.float32)
