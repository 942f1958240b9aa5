"""Stop strings over token ids, against searching the decoded bytes."""

import numpy as np
import pytest

from jrl.rollout import stop_strings


def run(table: stop_strings.StopTable, tokens: list[int]) -> int | None:
    """Index of the token that completes a stop string."""
    state = 0
    for index, token in enumerate(tokens):
        state = table.next[state, token]
        if table.accept[state]:
            return index
    return None


def search(strings: list[str], token_bytes: list[bytes], tokens: list[int]) -> int | None:
    """The same by brute force: the shortest prefix whose bytes hold a stop string."""
    text = b""
    for index, token in enumerate(tokens):
        text += token_bytes[token]
        if any(string.encode() in text for string in strings):
            return index
    return None


def test_equals_searching_the_bytes_on_random_strings_and_tokenizations():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        alphabet = "abé"[: rng.integers(1, 4)]
        word = lambda low, high, alphabet=alphabet: "".join(rng.choice(list(alphabet), rng.integers(low, high)))
        strings = [word(1, 6) for _ in range(rng.integers(1, 5))]
        token_bytes = [b"", b""] + [bytes([b]) for b in alphabet.encode()] + [word(1, 5).encode() for _ in range(6)]
        table = stop_strings.build(strings, token_bytes)
        tokens = rng.integers(0, len(token_bytes), 12).tolist()
        actual = search(strings, token_bytes, tokens)
        assert run(table, tokens) == actual, (strings, token_bytes, tokens)
        hits += actual is not None
    assert 100 < hits < 600  # both outcomes were met


def test_a_string_is_found_inside_a_token_and_across_tokens():
    token_bytes = [b"", b"x<en", b"d>y", b"a<end>b", b"d"]
    table = stop_strings.build(["<end>"], token_bytes)
    assert run(table, [3]) == 0
    assert run(table, [1, 2]) == 1
    assert run(table, [1, 4, 4]) is None


def test_a_control_token_leaves_the_state():
    table = stop_strings.build(["ab"], [b"", b"a", b"b"])
    assert run(table, [1, 0, 0, 2]) == 3


def test_a_string_that_is_the_suffix_of_a_longer_one_is_found():
    # "abcd" is under way when "bc" is complete: the accepting state must come from the suffix.
    table = stop_strings.build(["abcd", "bc"], [b"a", b"b", b"c", b"d"])
    assert run(table, [0, 1, 2]) == 2


def test_acceptance_is_absorbing_and_one_state():
    table = stop_strings.build(["a", "bb"], [b"a", b"b", b"c"])
    assert table.accept.sum() == 1 and table.next.dtype == np.int32
    end = int(np.flatnonzero(table.accept)[0])
    assert (table.next[end] == end).all()


def test_no_strings_never_accept():
    table = stop_strings.build([], [b"a", b"b"])
    assert not table.accept.any() and run(table, [0, 1, 0]) is None


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop_strings"):
        stop_strings.build(["a", ""], [b"a"])


def test_a_part_of_a_character_does_not_match():
    # U+00E9 is c3 a9; a9 alone ends another character too.
    table = stop_strings.build(["é"], [b"\xc3", b"\xa9", b"\xc2"])
    assert run(table, [2, 1, 0, 1]) == 3
