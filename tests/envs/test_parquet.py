"""The same rows as Parquet: equal examples, and bad rows and files named."""

from __future__ import annotations

import datetime
import json
import math
import os
import random

import pytest

from jrl.tasks.envs.columns import BadRow
from jrl.tasks.envs.dataset import Dataset, open_dataset
from jrl.tasks.envs.jsonl import Jsonl, open_jsonl
from jrl.tasks.envs.parquet import _most_bytes
from jrl.tasks.stopping import StopRequested

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"question": f"q{i}", "answer": f"so\n#### {i}", "level": i % 3, "tags": [f"t{i}"], "id": f"r{i}"}
        for i in range(40)]  # fmt: skip
GSM = dict(columns={"prompt": "question"}, answer_in="hash")


def write(path, rows, **options):
    parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    return str(path)


def test_examples_are_those_of_the_same_rows_as_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    lines = open_jsonl(Jsonl(path=str(tmp_path / "a.jsonl"), **GSM))
    source = open_jsonl(Jsonl(path=write(tmp_path / "a.parquet", ROWS, row_group_size=7), **GSM))
    order = [39, 0, 7, 6, 13, 14, *range(40)]
    assert [source[i] for i in order] == [lines[i] for i in order]
    assert source.fingerprint != lines.fingerprint
    assert source[3].info == {"level": 0, "tags": ["t3"], "solution": "so\n#### 3"}


@pytest.mark.parametrize(("kept", "groups"), [(1 << 30, 20), (1999, 3), (0, 1)])
def test_row_groups_stay_decoded_as_far_as_there_is_room(tmp_path, monkeypatch, kept, groups):
    rows = [{"prompt": "a" * 599, "answer": f"{i}"} for i in range(20)]
    # A group has 659 bytes in the file and 608 decoded: beside the one that is read, (1999 - 659) // 608 = 2 stay.
    path = write(tmp_path / "a.parquet", rows, row_group_size=1, use_dictionary=False, write_statistics=False)
    monkeypatch.setattr("jrl.tasks.envs.parquet.KEPT_BYTES", kept)
    source = open_jsonl(Jsonl(path=path))
    order = [19, 0, 5, 0, 19, 7, *range(20)]
    assert [source[i].answer for i in order] == [str(i) for i in order]
    decoded = [index for (_, index), *_ in source.reader._decoded._tables]
    assert decoded == list(range(19, 19 - groups, -1))


def test_rows_that_are_read_in_order_are_turned_into_python_together(tmp_path, monkeypatch):
    rows = [{"prompt": "a", "answer": f"{i}"} for i in range(40)]
    source = open_jsonl(Jsonl(path=write(tmp_path / "a.parquet", rows, row_group_size=7)))
    turned = []
    monkeypatch.setattr("jrl.tasks.envs.parquet._python", lambda table: turned.append(len(table)) or table.to_pylist())
    monkeypatch.setattr("jrl.tasks.envs.parquet.BATCH", 4)
    order = [*range(40), 3, 3, 2, 30]
    assert [source[i].answer for i in order] == [str(i) for i in order]
    # 40 = 5 x 7 + 5. The first alone, then up to 4 to the end of its group of 7: 1 + 4 + 2, then 4 + 3 in each.
    assert turned == [1, 4, 2, *[4, 3] * 4, 4, 1, 1, 1, 1]


def test_the_footer_of_many_row_groups_is_read_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", [{"prompt": "a", "answer": f"{i}"} for i in range(100)], row_group_size=1)
    footers, open_ = [], parquet.ParquetFile
    monkeypatch.setattr(
        parquet, "ParquetFile", lambda *args, metadata: footers.append(metadata) or open_(*args, metadata=metadata)
    )
    source = open_jsonl(Jsonl(path=path))
    assert [source[i].answer for i in range(99, -1, -1)] == [str(i) for i in range(99, -1, -1)]
    assert footers[0] is None and len(footers) > 100 and None not in footers[1:]


def test_a_row_without_an_id_is_named_by_its_number(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": None, "answer": "1"}, {"prompt": "c", "answer": "1"}]
    path = write(tmp_path / "a.parquet", rows, row_group_size=2)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: the row lacks a field"):
        open_jsonl(Jsonl(path=path))
    source = open_jsonl(Jsonl(path=path, on_bad_row="drop", max_dropped=0.5))
    assert [source[i].id for i in range(2)] == ["a.parquet/1", "a.parquet/3"]
    assert source.counts == {"missing_field": 1}


def test_texts_and_lists_are_read_from_views_too(tmp_path):
    texts = arrow.array(["a", "b"], arrow.string_view())
    lists = arrow.array([["u"], ["v"]], arrow.list_view(arrow.string_view()))
    table = arrow.table({"prompt": texts, "answer": texts, "tags": lists})
    try:
        parquet.write_table(table, tmp_path / "a.parquet")
    except arrow.ArrowNotImplementedError:
        pytest.skip(f"pyarrow {arrow.__version__} writes no views")
    source = open_jsonl(Jsonl(path=str(tmp_path / "a.parquet")))
    assert (source[1].answer, source[1].info, source.counts) == ("b", {"tags": ["v"]}, {})


def test_a_struct_with_a_name_twice_is_skipped_and_counted(tmp_path):
    numbers = arrow.array([1, 2])
    twice = arrow.StructArray.from_arrays([numbers, numbers], ["k", "k"])
    table = arrow.table({"prompt": ["a", "b"], "answer": ["1", "2"], "x": twice})
    parquet.write_table(table, tmp_path / "a.parquet")
    source = open_jsonl(Jsonl(path=str(tmp_path / "a.parquet")))
    assert (source[0].info, source.counts) == ({}, {"unread_column": 1})


def test_bad_values_are_named_by_their_row(tmp_path):
    good = {"prompt": "a", "answer": "1", "x": 1.0}
    cases = [
        ({"x": float("nan")}, "NaN"),
        ({"answer": None}, "has no answer"),
        ({"prompt": "b" * 400}, "max_row_bytes"),
        ({"prompt": ""}, "empty prompt"),
    ]
    for change, message in cases:
        path = write(tmp_path / "a.parquet", [good, good | change])
        with pytest.raises(ValueError, match="row 2") as refused:
            open_jsonl(Jsonl(path=path, max_row_bytes=300))
        assert message in str(refused.value)


def test_a_row_may_have_as_many_bytes_as_json_as_the_limit_says(tmp_path):
    row = {"prompt": 'é"' * 100, "answer": "1", "tokens": [1, -2], "parts": [{"x": 0.5, "y": None}]}
    size = len(json.dumps(row, ensure_ascii=False).encode())
    path = write(tmp_path / "a.parquet", [row])
    assert open_jsonl(Jsonl(path=path, max_row_bytes=size))[0].messages[0].content == row["prompt"]
    with pytest.raises(ValueError, match=f"row 1: the row is longer than max_row_bytes: max_row_bytes is {size - 1}"):
        open_jsonl(Jsonl(path=path, max_row_bytes=size - 1))


def test_no_value_has_more_bytes_as_json_than_its_bound():
    random_ = random.Random(0)

    def value(depth):
        pieces = ["\x01", '"', "\\", "a", "é", "€", "😀", "\n"]
        kinds = [lambda: "".join(random_.choices(pieces, k=random_.randrange(9))), lambda: -random_.getrandbits(64),
                 lambda: -random_.random() * 10.0 ** random_.randint(-308, 308), lambda: None,
                 lambda: random_.random() < 0.5,
                 lambda: [-(1 << 63)] * random_.randrange(4),
                 lambda: [value(depth - 1) for _ in range(random_.randrange(4))],
                 lambda: {f"{i}\x01": value(depth - 1) for i in range(random_.randrange(4))}]  # fmt: skip
        return random_.choice(kinds if depth else kinds[:6])()

    for _ in range(2000):
        one = value(3)
        assert len(json.dumps(one, ensure_ascii=False).encode()) <= _most_bytes(one)
    for bad in (math.inf, [0.5, math.nan], {"x": [1, -math.inf]}):
        with pytest.raises(BadRow, match="NaN"):
            _most_bytes(bad)


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    prompts = arrow.array([b"a", b"\xff", b"c"]).view(arrow.string())
    parquet.write_table(arrow.table({"prompt": prompts, "answer": ["1"] * 3}), tmp_path / "a.parquet")
    source = open_jsonl(Jsonl(path=str(tmp_path / "a.parquet"), on_bad_row="drop", max_dropped=0.5))
    assert source.counts == {"bad_utf8": 1}
    assert [source[i].messages[0].content for i in range(2)] == ["a", "c"]


def test_columns_that_json_does_not_have_are_left_out_and_counted(tmp_path):
    row = {"prompt": "a", "answer": "1", "image": b"\x00", "when": datetime.date(2020, 1, 1), "deep": [{"k": [1]}]}
    source = open_jsonl(Jsonl(path=write(tmp_path / "a.parquet", [row])))
    assert source.counts == {"unread_column": 2}
    assert source[0].info == {"deep": [{"k": [1]}]}


def test_what_json_has_of_a_nested_column_is_read(tmp_path):
    """As in WildChat, whose answers have a time each."""
    now = datetime.datetime(2023, 4, 9, tzinfo=datetime.UTC)
    messages = [
        {"role": "user", "content": "Hi", "timestamp": None, "header": {"agent": "m", "hash": b"1"}},
        {"role": "assistant", "content": "Hello", "timestamp": now, "header": None},
    ]
    rows = [{"conversation": messages, "model": "m", "timestamp": now, "only": [{"at": now}]}]
    rows += [{"conversation": [], "model": "m"}, {"conversation": None, "model": "m"}]
    path = write(tmp_path / "a.parquet", rows)
    source = open_dataset(Dataset(path=path, layout="conversation", on_bad_row="drop", max_dropped=0.7))
    assert [message.content for message in source[0].messages] == ["Hi"]
    assert (source[0].answer, source[0].info) == ("Hello", {"model": "m"})
    assert source.counts == {"empty": 1, "missing_field": 1, "unread_column": 2, "unread_field": 1}
    (first, second, third) = (row() for _, _, row in source.reader.each())
    assert first["conversation"][0] == {"role": "user", "content": "Hi", "header": {"agent": "m"}}
    assert first["conversation"][1] == {"role": "assistant", "content": "Hello", "header": None}
    assert (second, third) == ({"conversation": [], "model": "m"}, {"conversation": None, "model": "m"})


def test_leaves_are_counted_through_maps_and_extensions(tmp_path):
    pair = arrow.struct([("x", arrow.int64()), ("y", arrow.int64())])
    types = {"prompt": arrow.string(), "m": arrow.map_(arrow.string(), pair),
             "u": arrow.fixed_shape_tensor(arrow.int32(), [2]),
             "s": arrow.struct([("m", arrow.map_(arrow.string(), pair)), ("kept", arrow.string())]),
             "answer": arrow.string()}  # fmt: skip
    row = {"prompt": "a", "answer": "1", "s": {"m": None, "kept": "k"}, "m": None, "u": None}
    table = arrow.Table.from_pylist([row], schema=arrow.schema(list(types.items())))
    parquet.write_table(table, tmp_path / "a.parquet")
    source = open_jsonl(Jsonl(path=str(tmp_path / "a.parquet")))
    assert (source[0].answer, source[0].info) == ("1", {"s": {"kept": "k"}})
    assert source.counts == {"unread_column": 2, "unread_field": 1}


def test_damaged_and_missing_files_are_refused_with_their_name(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, ROWS)
    intact = path.read_bytes()
    for data in (b"", b"PAR1", intact[:-1], intact[: len(intact) // 2], intact[:-8] + b"\xff\xff\xff\x7fPAR1"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.parquet is damaged, or not a Parquet file"):
            open_jsonl(Jsonl(path=str(path), **GSM))
    for name in ("none.parquet", "folder.parquet"):
        (tmp_path / "folder.parquet").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"{name}.*cannot be read"):
            open_jsonl(Jsonl(path=str(tmp_path / name)))
    with pytest.raises(ValueError, match="holds no rows"):
        open_jsonl(Jsonl(path=write(tmp_path / "empty.parquet", ROWS[:0])))


def test_reading_stops_when_it_is_asked_to(tmp_path):
    asked = []
    path = write(tmp_path / "a.parquet", ROWS)
    for last in (0, 20):  # in the hash, and among the rows
        asked.clear()
        with pytest.raises(StopRequested, match=r"reading .*a\.parquet"):
            open_jsonl(Jsonl(path=path, **GSM), lambda last=last: asked.append(1) or len(asked) > last)
        assert len(asked) == last + 1


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet' is a named pipe, not a file"):
        open_jsonl(Jsonl(path=str(tmp_path / "a.parquet")))


def test_every_flipped_byte_gives_an_error_that_names_the_file_or_rows(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, ROWS[:5], compression="none")
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 41):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            source = open_jsonl(Jsonl(path=str(path), **GSM))
            assert [source[i] for i in range(len(source))]
        except ValueError as error:
            assert "a.parquet" in str(error)


def test_a_row_group_that_claims_too_much_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", ROWS)
    monkeypatch.setattr("jrl.tasks.envs.parquet.MAX_GROUP_BYTES", 100)
    with pytest.raises(ValueError, match=r"unpacks to \d+ bytes; the limit is 100"):
        open_jsonl(Jsonl(path=path, **GSM))


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path):
    path = write(tmp_path / "a.parquet", ROWS)
    source = open_jsonl(Jsonl(path=path, **GSM))
    write(tmp_path / "a.parquet", ROWS[:-1])
    with pytest.raises(ValueError, match="changed"):
        source[0]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"jrl-jax\[parquet\]"):
        open_jsonl(Jsonl(path=str(tmp_path / "a.parquet")))
