from __future__ import annotations

from jrl.tasks.tokenizers.incremental import IncrementalDecoder

BYTES = [bytes([i]) for i in range(256)]


def test_a_character_is_held_back_until_its_last_byte():
    decoder = IncrementalDecoder(BYTES, leads=False)
    # U+1F389 is f0 9f 8e 89
    assert [decoder.feed([i]) for i in (0x61, 0xF0, 0x9F, 0x8E, 0x89, 0x62)] == ["a", "", "", "", "\U0001f389", "b"]
    assert decoder.close() == ""


def test_what_never_becomes_a_character_is_said_at_the_end():
    decoder = IncrementalDecoder(BYTES, leads=False)
    assert decoder.feed([0x61, 0xE6, 0x97]) == "a"
    assert decoder.close() == b"\xe6\x97".decode("utf-8", "replace")


def test_a_broken_character_does_not_hold_back_the_next():
    assert IncrementalDecoder(BYTES, leads=False).feed([0xE6, 0x61]) == "\ufffda"


def test_only_the_blank_in_front_is_taken_away():
    decoder = IncrementalDecoder([b" a", b" ", b""], leads=True)
    assert [decoder.feed([i]) for i in (2, 0, 0, 1)] == ["", "a", " a", " "]
    assert IncrementalDecoder([b"a", b" "], leads=True).feed([0, 1]) == "a "
