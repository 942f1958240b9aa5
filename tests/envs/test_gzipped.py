"""The same rows compressed: equal examples from any place, small memory, damage named."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import tracemalloc

import pytest

from jrl.tasks.envs import gzipped
from jrl.tasks.envs.gzipped import CHUNK, SPAN
from jrl.tasks.envs.jsonl import Jsonl, open_jsonl


def rows(count: int, width: int = 10) -> bytes:
    draw = random.Random(0)
    return b"".join(
        json.dumps({"prompt": f"{i} " + draw.randbytes(width).hex(), "answer": str(i)}).encode() + b"\n"
        for i in range(count)
    )


def test_examples_are_those_of_the_plain_file(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + rows(50) + b"\n")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + rows(50) + b"\n"))
    plain, packed = (open_jsonl(Jsonl(path=str(tmp_path / name))) for name in ("rows.jsonl", "rows.jsonl.gz"))
    assert len(packed) == 50
    assert packed.reader.digest() == plain.reader.digest()
    for i in (49, 0, 7, 3):
        assert packed[i].messages == plain[i].messages
        assert (packed[i].id, packed[i].task) == (f"rows.jsonl.gz/{i + 1}", "rows")


@pytest.mark.parametrize("zeros", [1, 512, 3 * CHUNK])
def test_zeros_after_a_member_are_padding_as_for_gzip(tmp_path, zeros):
    member, padding = gzip.compress(rows(50)), bytes(zeros)
    (tmp_path / "rows.jsonl.gz").write_bytes(member + padding + member + padding)
    assert len(gzip.decompress(member + padding + member + padding).splitlines()) == 100
    source = open_jsonl(Jsonl(path=str(tmp_path / "rows.jsonl.gz")))
    assert len(source) == 100 and source[75].answer == "25" and source[3].answer == "3"


def test_the_fingerprint_is_of_the_text_and_not_of_how_it_was_compressed(tmp_path):
    fingerprints = []
    for level, when in ((1, 0), (9, 1)):
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows(50), level, mtime=when))
        fingerprints.append(open_jsonl(Jsonl(path=str(tmp_path / "rows.jsonl.gz"))).fingerprint)
    assert fingerprints[0] == fingerprints[1]


@pytest.fixture
def decompressed(monkeypatch):
    """Sizes of the pieces of text that are decompressed."""
    sizes, readinto = [], gzipped._Text.readinto

    def counted(text, buffer):
        ready = bool(text.ready)
        size = readinto(text, buffer)
        sizes.append(0 if ready else size)
        return size

    monkeypatch.setattr(gzipped._Text, "readinto", counted)
    return sizes


def test_rows_far_into_a_file_of_several_members_are_found_in_any_order_from_near_by(tmp_path, decompressed):
    text = rows(3000, width=1000)
    assert len(text) > 5 * SPAN
    half = len(text) // 2
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(text[:half]) + gzip.compress(b"") + gzip.compress(text[half:]))
    source = open_jsonl(Jsonl(path=str(path)))
    order = random.Random(1).sample(range(3000), 40)
    decompressed.clear()
    assert [source[i].answer for i in order] == [str(i) for i in order]
    # On average half a span and the row's piece: from the beginning, each would take half of the text.
    assert sum(decompressed) / len(order) < SPAN < len(text) / 5


def test_rows_in_order_take_no_more_than_two_passes(tmp_path, decompressed):
    text = rows(3000, width=1000)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(text[:3_000_000]) + gzip.compress(text[3_000_000:]))
    source = open_jsonl(Jsonl(path=str(path)))
    decompressed.clear()
    assert [source[i].answer for i in range(3000)] == [str(i) for i in range(3000)]
    # A piece is decompressed again where the row before ran into it. From the last saved state it would be 500 times.
    assert sum(decompressed) < 2 * len(text)
    nearby = [i + j for i in random.Random(2).sample(range(2990), 30) for j in (0, 1, -1, 3, 2, 5, -2)]
    assert [source[i % 3000].answer for i in nearby] == [str(i % 3000) for i in nearby]


def test_a_file_that_shrank_to_a_thousandth_is_not_read_again_from_its_beginning(tmp_path):
    row = b'{"prompt": "' + b"x" * 20_000 + b'", "answer": "%d"}\n'
    text = b"".join(row % i for i in range(500))
    half = len(text) // 2
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(text[:half]) + gzip.compress(text[half:]))
    source = open_jsonl(Jsonl(path=str(path)))
    starts = [state.text for state in source.reader._gzip._states]
    assert all(SPAN <= after - before <= SPAN + CHUNK for before, after in itertools.pairwise(starts))
    assert starts[-1] >= len(text) - SPAN - CHUNK
    assert [source[i].answer for i in range(499, -1, -7)] == [str(i) for i in range(499, -1, -7)]


def test_memory_does_not_grow_with_the_text(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress((b'{"prompt": "' + b"x" * 20_000 + b'", "answer": "1"}\n') * 1000))
    tracemalloc.start()
    source = open_jsonl(Jsonl(path=str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) == 1000
    assert peak < 4_000_000  # the text has 20 MB


@pytest.mark.parametrize("change", [lambda d: b"", lambda d: d[:-1], lambda d: d[: len(d) // 2], lambda d: b"{}" + d,
                                    lambda d: d[:40] + b"\xff" * 8 + d[48:], lambda d: d + b"x"])  # fmt: skip
def test_a_damaged_file_is_refused_by_name(tmp_path, change):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(change(gzip.compress(rows(500))))
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz is damaged"):
        open_jsonl(Jsonl(path=str(path)))


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(rows(5)))
    source = open_jsonl(Jsonl(path=str(path)))
    path.write_bytes(gzip.compress(rows(6)))
    with pytest.raises(ValueError, match="changed"):
        source[0]
