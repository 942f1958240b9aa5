"""Stop strings as an automaton over token ids, so that the device finds them with one gather per token. No JAX.

The strings are matched in the bytes that tokens stand for, so the tokenization of a text does not matter: the
automaton of Aho and Corasick (1975) over bytes, run over every token's bytes from every state, gives a table
`next[state, token]`. A sequence that contains a stop string, even one that ends in the middle of a token, is in the
single accepting state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class StopTable(NamedTuple):
    """The automaton. A sequence starts in state 0 at its first sampled token: the prompt is not matched."""

    next: np.ndarray  # [states, V] int32
    accept: np.ndarray  # [states] bool, a stop string has been completed


def build(stop_strings: Sequence[str], token_bytes: Sequence[bytes]) -> StopTable:
    """Returns the table of `stop_strings` over a vocabulary.

    Args:
      stop_strings: non-empty strings, matched as UTF-8.
      token_bytes: the bytes of each token id, length V; b"" for control tokens, which leave the state as it is.

    Raises:
      ValueError: a stop string is empty, or the vocabulary is.
    """
    if not token_bytes:
        raise ValueError("token_bytes is empty: a stop table needs the bytes of every token of the vocabulary")
    for string in stop_strings:
        if not string:
            raise ValueError(
                f"Sampler.stop_strings: '' in {tuple(stop_strings)!r} would stop every sequence; remove it"
            )
    step, accept = _byte_automaton([string.encode() for string in stop_strings])
    lengths = np.array([len(token) for token in token_bytes])
    width = max(int(lengths.max()), 1)
    token_matrix = np.frombuffer(b"".join(token.ljust(width, b"\0") for token in token_bytes), np.uint8)
    token_matrix = token_matrix.reshape(len(token_bytes), width)
    next_state = np.repeat(np.arange(len(accept), dtype=np.int32)[:, None], len(token_bytes), axis=1)
    for i in range(int(lengths.max())):
        longer = lengths > i
        next_state[:, longer] = step[next_state[:, longer], token_matrix[longer, i]]
    return StopTable(next=next_state, accept=accept)


def _byte_automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns step [states, 256] int32 and accept [states] bool. The accepting state is the last; it absorbs."""
    children: list[dict[int, int]] = [{}]
    ends: list[bool] = [False]
    for string in strings:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][byte]
        ends[state] = True
    # Breadth first: a state's suffix is shorter than the state, so its row and its `ends` are final when they are read.
    step = np.zeros((len(children), 256), np.int32)
    suffix = [0] * len(children)
    queue: deque[int] = deque([0])
    while queue:
        state = queue.popleft()
        ends[state] = ends[state] or ends[suffix[state]]
        if state:
            step[state] = step[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = int(step[state, byte]) if state else 0
            step[state, byte] = child
            queue.append(child)
    return _merge_ends(step, np.array(ends))


def _merge_ends(step: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the automaton with all its ends merged into one absorbing state."""
    accepting = int((~ends).sum())
    renumber = np.where(ends, accepting, np.cumsum(~ends) - 1).astype(np.int32)
    remaining = renumber[step[~ends]]
    if not ends.any():
        return remaining, np.zeros(len(remaining), bool)
    absorbing = np.full((1, 256), accepting, np.int32)
    return np.concatenate([remaining, absorbing]), np.arange(accepting + 1) == accepting
