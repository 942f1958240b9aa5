from __future__ import annotations

import json
import os
import random
import socket
import tracemalloc
from pathlib import Path

import pytest

from jrl.tasks.envs import ENVS, Mixture, open_source
from jrl.tasks.envs.jsonl import CAUSES, Jsonl, open_jsonl
from jrl.tasks.example import Message
from jrl.tasks.stopping import StopRequested

GOOD = b'{"prompt": "1+1=", "answer": "2"}'
BAD = {
    "bad_utf8": [b'{"prompt": "\xff", "answer": "2"}', b"\x80\x81", b'{"prompt": "\xed\xa0\x80", "answer": "1"}'],
    "bom": [b"\xef\xbb\xbf" + GOOD],
    "blank": [b"", b"   ", b"\t"],
    "bad_json": [
        b"{",
        b'{"prompt": "a"',
        b"{'prompt': 'a'}",
        GOOD + GOOD,
        b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a\tb", "answer": "tab"}',
        b"\x00\x00",
        b"[1,]",
    ],
    "not_finite": [
        b'{"prompt": "a", "answer": "1", "x": NaN}',
        b'{"prompt": "a", "answer": "1", "x": -Infinity}',
        b'{"prompt": "a", "answer": "1", "x": 1e999}',
    ],
    "duplicate_key": [
        b'{"prompt": "a", "prompt": "b", "answer": "1"}',
        b'{"prompt": "a", "answer": "1", "x": {"k": 1, "k": 1}}',
    ],
    "too_deep": [
        b'{"prompt": "a", "answer": "1", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 65 + b"1" + b"}" * 65,
    ],
    "surrogate": [b'{"prompt": "\\ud800", "answer": "1"}', b'{"prompt": "a", "answer": "1", "x": ["\\uDFFF"]}'],
    "not_object": [b"1", b'"text"', b"null", b"[]", b"true"],
    "missing_field": [b"{}", b'{"question": "a", "answer": "1"}', b'{"prompt": null, "answer": "1"}'],
    "two_prompts": [b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}], "answer": "1"}'],
    "wrong_type": [
        b'{"prompt": 1, "answer": "1"}',
        b'{"prompt": ["a"], "answer": "1"}',
        b'{"prompt": "a", "answer": 1.5}',
        b'{"prompt": "a", "answer": true}',
        b'{"prompt": "a", "answer": ["1"]}',
        b'{"messages": "a", "answer": "1"}',
        b'{"messages": [], "answer": "1"}',
        b'{"messages": [{"role": "user"}], "answer": "1"}',
        b'{"messages": [{"role": "robot", "content": "a"}], "answer": "1"}',
        b'{"prompt": "a", "answer": "1", "verifiers": "Exact"}',
        b'{"prompt": "a", "answer": "1", "info": 3}',
        b'{"prompt": "a", "answer": "1", "id": {}}',
    ],
    "empty_prompt": [
        b'{"prompt": "", "answer": "1"}',
        b'{"prompt": " \\n", "answer": "1"}',
        b'{"messages": [{"role": "user", "content": ""}], "answer": "1"}',
    ],
    "answered_prompt": [
        b'{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], "answer": "2"}',
    ],
    "missing_answer": [b'{"prompt": "a"}', b'{"prompt": "a", "answer": null}', b'{"prompt": "a", "answer": " "}'],
    "too_long": [b'{"prompt": "' + b"a" * 400_000 + b'", "answer": "1"}'],
    "duplicate_id": [b'{"prompt": "b", "answer": "1", "id": "same"}'],
}
EVERY_BAD = [(cause, row) for cause, rows in BAD.items() for row in rows]
FIRST = b'{"prompt": "a", "answer": "1", "id": "same"}'


def write(path, rows, end=b"\n"):
    path.write_bytes(end.join(rows) + end)
    return str(path)


def test_every_cause_has_a_row_that_shows_it():
    assert set(BAD) == set(CAUSES)


def test_an_integer_that_python_does_not_convert_is_said_to_be_too_long(tmp_path):
    path = write(tmp_path / "rows.jsonl", [GOOD, b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}"])
    with pytest.raises(ValueError, match=r"line 2: .*an integer has more than 4300 digits; write it as a string"):
        open_jsonl(Jsonl(path=path))


@pytest.mark.parametrize("row", [b'{"prompt": "1+', b'{"prompt": "1+1=\t"}'])
def test_a_row_that_is_not_json_names_its_column_once(tmp_path, row):
    with pytest.raises(ValueError, match=r"line 1: .*[a-z] at column \d+") as refused:
        open_jsonl(Jsonl(path=write(tmp_path / "rows.jsonl", [row])))
    assert "at at" not in str(refused.value)


@pytest.mark.parametrize("text", ['[\n{"prompt": "a", "answer": "1"}\n]', '[{"prompt": "a", "answer": "1"}]', "[1,"])
def test_a_file_that_is_an_array_is_told_what_to_write(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"line 1: the row is not .*; write one object a line, not an array of them"):
        open_jsonl(Jsonl(path=str(tmp_path / "rows.jsonl")))


def test_a_row_with_a_prompt_and_messages_may_have_one_of_them_left_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", BAD["two_prompts"])
    with pytest.raises(
        ValueError, match=r"leave 'prompt' or 'messages' out. 'prompt': 'unused' in Jsonl.columns reads"
    ):
        open_jsonl(Jsonl(path=path))
    assert open_jsonl(Jsonl(path=path, columns={"prompt": "unused"}))[0].messages[0].content == "b"
    assert open_jsonl(Jsonl(path=path, columns={"messages": "unused"}))[0].messages[0].content == "a"


ASKED = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
BOXED = r"It is $\boxed{2}$."


@pytest.mark.parametrize(("columns", "answer_in", "row"), [
    ({"prompt": "question"}, "hash", {"question": "1+1?", "answer": "1+1=2\n#### 2"}),
    ({"prompt": "problem", "answer": "solution"}, "boxed", {"problem": "1+1?", "level": "Level 1", "solution": BOXED}),
    ({"prompt": "problem", "answer": "solution", "messages": "unused"}, "boxed",
     {"source": "aops", "problem": "1+1?", "solution": BOXED, "messages": ASKED}),
    ({"prompt": "problem"}, "whole", {"problem": "1+1?", "solution": BOXED, "answer": "2"}),
    ({"prompt": "problem", "messages": "unused"}, "whole",
     {"problem": "1+1?", "answer": "2", "generations": [BOXED], "messages": ASKED}),
    ({"prompt": "question", "answer": "final_answer"}, "whole", {"question": "1+1?", "final_answer": "2"}),
], ids=["GSM8K", "MATH", "NuminaMath-CoT", "NuminaMath-1.5", "OpenR1-Math", "DeepMath"])  # fmt: skip
def test_published_data_sets_are_read_by_the_columns_that_the_page_names(tmp_path, columns, answer_in, row):
    path = write(tmp_path / "rows.jsonl", [json.dumps(row).encode()])
    one = open_jsonl(Jsonl(path=path, columns=columns, answer_in=answer_in))[0]
    assert (one.messages, one.answer) == ((Message("user", "1+1?"),), "2")
    page = Path(__file__).parents[2].joinpath("docs/data-layouts.md").read_text()
    assert f"`{columns}` | {f'`{answer_in!r}`' if answer_in != 'whole' else ''}" in page


def test_messages_may_be_in_the_column_named_prompt(tmp_path):
    row = b'{"prompt": [{"role": "user", "content": "b"}], "answer": "1"}'
    path = write(tmp_path / "rows.jsonl", [row])
    assert open_jsonl(Jsonl(path=path, columns={"messages": "prompt"}))[0].messages == (Message("user", "b"),)


@pytest.mark.parametrize(("cause", "row"), EVERY_BAD, ids=[f"{c}-{i}" for i, (c, _) in enumerate(EVERY_BAD)])
def test_a_bad_row_is_refused_by_file_and_line_or_dropped_and_counted(tmp_path, cause, row):
    path = write(tmp_path / "rows.jsonl", [FIRST, row, GOOD])
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: ") as refused:
        open_jsonl(Jsonl(path=path, max_row_bytes=300_000))
    assert CAUSES[cause] in str(refused.value)
    source = open_jsonl(Jsonl(path=path, max_row_bytes=300_000, on_bad_row="drop", max_dropped=0.5))
    assert source.counts == {cause: 1}
    assert [source[i].messages[0].content for i in range(len(source))] == ["a", "1+1="]


def test_damaged_files_load_with_exact_counts_or_are_refused(tmp_path, trials):
    draw = random.Random(0)
    path = tmp_path / "rows.jsonl"
    short = [(cause, row) for cause, row in EVERY_BAD if len(row) < 10_000 and cause != "duplicate_id"]
    for _ in range(trials(400, 4_000)):
        rows, bad = [], {}
        for i in range(draw.randrange(1, 30)):
            if draw.random() < 0.2:
                cause, row = draw.choice(short)
                bad[cause] = bad.get(cause, 0) + 1
            else:
                row = json.dumps(
                    {"prompt": f"q{i}\n\u2028\u65e5", "answer": str(i)}, ensure_ascii=draw.random() < 0.5
                ).encode()
            rows.append(row)
        path.write_bytes(draw.choice([b"\n", b"\r\n"]).join(rows) + draw.choice([b"", b"\n"]))
        if rows[0].startswith(b"\xef\xbb\xbf"):  # which a file may begin with
            bad["bom"] -= 1
        while rows and not rows[-1].strip():  # blank lines at the end are no rows
            rows.pop()
            bad["blank"] -= 1
        bad = {cause: count for cause, count in bad.items() if count}
        config = Jsonl(path=str(path), on_bad_row="drop", max_dropped=1.0)
        if len(rows) == sum(bad.values()):
            with pytest.raises(ValueError, match="holds no rows"):
                open_jsonl(config)
            continue
        source = open_jsonl(config)
        assert {c: n for c, n in source.counts.items() if c != "duplicate_prompt"} == bad
        assert len(source) == len(rows) - sum(bad.values())
        for i in draw.sample(range(len(source)), len(source)):
            first = i == 0 and rows[0].startswith(b"\xef\xbb\xbf")
            assert source[i].messages[0].content == ("1+1=" if first else f"q{source[i].answer}\n\u2028\u65e5")


def test_random_bytes_never_escape_as_another_error(tmp_path):
    draw = random.Random(1)
    path = tmp_path / "rows.jsonl"
    for _ in range(300):
        data = bytearray(GOOD + b"\n" + GOOD.replace(b"1+1", b"2+2") + b"\n")
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(bytes(data))
        try:
            open_jsonl(Jsonl(path=str(path)))
        except ValueError as error:
            assert "rows.jsonl" in str(error)


def test_messages_task_verifiers_info_and_other_columns_are_kept(tmp_path):
    row = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "answer": 7, "id": "x", "task": "sums", "verifiers": ["Numeric"], "info": {"a": 1}, "level": 2,
    }  # fmt: skip
    example = open_jsonl(Jsonl(path=write(tmp_path / "r.jsonl", [json.dumps(row).encode()])))[0]
    assert example.messages == (Message("system", "s"), Message("user", "u"))
    assert (example.answer, example.id, example.task, example.verifiers) == ("7", "x", "sums", ("Numeric",))
    assert example.info == {"level": 2, "a": 1}


def test_an_example_written_as_json_reads_back_equal(tmp_path):
    from jrl.tasks.envs.addition import Addition, open_addition

    source = open_addition(Addition())
    rows = [json.dumps(source[i].to_json()).encode() for i in range(20)]
    again = open_jsonl(Jsonl(path=write(tmp_path / "r.jsonl", rows)))
    assert [again[i] for i in range(20)] == [source[i] for i in range(20)]


def test_columns_of_another_layout_are_mapped(tmp_path):
    path = write(tmp_path / "gsm.jsonl", [b'{"question": "q", "final": "4", "prompt": "not this"}'])
    config = Jsonl(path=path, columns={"prompt": "question", "answer": "final"}, system="s", verifiers=("Exact",))
    example = open_jsonl(config)[0]
    assert example.messages == (Message("system", "s"), Message("user", "q"))
    assert (example.answer, example.verifiers, example.task) == ("4", ("Exact",), "gsm")
    assert example.info == {"prompt": "not this"}
    with pytest.raises(ValueError, match="'question'"):
        Jsonl(path=path, columns={"question": "prompt"})


def test_answers_may_be_missing_where_the_config_says_so(tmp_path):
    path = write(tmp_path / "r.jsonl", [b'{"prompt": "a"}'])
    assert open_jsonl(Jsonl(path=path, needs_answer=False))[0].answer is None


def test_default_ids_name_the_line_even_after_dropped_rows(tmp_path):
    path = write(tmp_path / "r.jsonl", [b"{", GOOD, b"1", GOOD])
    source = open_jsonl(Jsonl(path=path, on_bad_row="drop", max_dropped=0.5))
    assert [source[i].id for i in range(2)] == ["r.jsonl/2", "r.jsonl/4"]
    assert source.counts == {"bad_json": 1, "not_object": 1, "duplicate_prompt": 1}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("tail", [[b""], [b"", b"  ", b"\t"]])
def test_blank_lines_at_the_end_are_no_rows(tmp_path, tail, end):
    source = open_jsonl(Jsonl(path=write(tmp_path / "r.jsonl", [GOOD, FIRST, *tail], end)))
    assert (len(source), source.counts) == (2, {})
    with pytest.raises(ValueError, match=r"r\.jsonl, line 2: the row is blank"):
        open_jsonl(Jsonl(path=write(tmp_path / "r.jsonl", [GOOD, *tail, FIRST], end)))


def test_a_byte_order_mark_is_read_over_at_the_beginning_only(tmp_path):
    source = open_jsonl(Jsonl(path=write(tmp_path / "r.jsonl", [b"\xef\xbb\xbf" + GOOD, FIRST]), max_row_bytes=50))
    assert [source[i].messages[0].content for i in range(2)] == ["1+1=", "a"]
    with pytest.raises(ValueError, match=r"line 2: the row begins with a byte order mark: only the file may"):
        open_jsonl(Jsonl(path=write(tmp_path / "r.jsonl", [FIRST, b"\xef\xbb\xbf" + GOOD])))


def test_the_longest_row_allowed_may_stand_behind_a_byte_order_mark(tmp_path):
    path = write(tmp_path / "r.jsonl", [b"\xef\xbb\xbf" + GOOD, FIRST], b"\r\n")
    assert open_jsonl(Jsonl(path=path, max_row_bytes=max(len(GOOD), len(FIRST))))[0].answer == "2"
    with pytest.raises(ValueError, match="line 2: the row is longer than max_row_bytes"):
        open_jsonl(Jsonl(path=path, max_row_bytes=len(GOOD)))
    with pytest.raises(ValueError, match="line 1: the row is longer than max_row_bytes"):
        open_jsonl(Jsonl(path=path, max_row_bytes=len(GOOD) - 1))


def test_reading_stops_when_it_is_asked_to(tmp_path):
    asked = []
    path = write(tmp_path / "r.jsonl", [GOOD] * 100)
    with pytest.raises(StopRequested, match=r"asked to stop while reading .*r\.jsonl"):
        open_jsonl(Jsonl(path=path), lambda: asked.append(1) or len(asked) > 50)
    mixture = Mixture(tasks=(Mixture(tasks=(Jsonl(path=path),)), Jsonl(path=path)))
    with pytest.raises(StopRequested, match="reading"):
        open_source(mixture, ENVS, lambda: asked.append(1) or len(asked) > 200)
    assert len(open_source(mixture, ENVS)) == 200


def test_pipes_sockets_and_devices_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    os.mkfifo(tmp_path / "rows.jsonl.gz")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket.jsonl"))
    for name, message in (
        (tmp_path / "rows.jsonl", "a named pipe"),
        (tmp_path / "rows.jsonl.gz", "a named pipe"),
        (tmp_path / "socket.jsonl", "a socket"),
        ("/dev/zero", "a device"),
    ):
        with pytest.raises(ValueError, match=f"{name}' is {message}, not a file"):
            open_jsonl(Jsonl(path=str(name)))
    server.close()


def test_dropping_has_a_ceiling(tmp_path):
    path = write(tmp_path / "r.jsonl", [GOOD] * 8 + [b"{"] * 2)
    assert len(open_jsonl(Jsonl(path=path, on_bad_row="drop", max_dropped=0.2))) == 8
    with pytest.raises(ValueError, match=r"2 of 10 rows are bad.* = 0\.1 of them: 2 bad_json\. The first: .*line 9"):
        open_jsonl(Jsonl(path=path, on_bad_row="drop", max_dropped=0.1))
    many = write(tmp_path / "many.jsonl", [GOOD] * 71 + [b"{"] * 29)  # 0.29 * 100 is 28.999999999999996
    assert len(open_jsonl(Jsonl(path=many, on_bad_row="drop", max_dropped=0.29))) == 71
    all_bad = write(tmp_path / "bad.jsonl", [b"{"] * 2)
    with pytest.raises(ValueError, match=r"holds no rows that can be used: 2 bad_json\. The first: .*line 1"):
        open_jsonl(Jsonl(path=all_bad, on_bad_row="drop", max_dropped=1.0))
    with pytest.raises(ValueError, match=r"Jsonl\.max_dropped is 1\.5; it is a share"):
        Jsonl(path=path, max_dropped=1.5)


def test_missing_file_folder_and_empty_file_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    for name, message in (("none.jsonl", "cannot be read"), ("", "cannot be read"), ("empty.jsonl", "no rows")):
        with pytest.raises(ValueError, match=message):
            open_jsonl(Jsonl(path=str(tmp_path / name)))


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path):
    path = write(tmp_path / "r.jsonl", [GOOD, GOOD])
    source = open_jsonl(Jsonl(path=path))
    write(tmp_path / "r.jsonl", [b"{}", GOOD, GOOD])
    with pytest.raises(ValueError, match="changed"):
        source[0]


def test_fingerprint_follows_the_bytes_and_not_the_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = open_jsonl(Jsonl(path=write(tmp_path / "a" / "r.jsonl", [GOOD])))
    moved = open_jsonl(Jsonl(path=write(tmp_path / "b" / "r.jsonl", [GOOD])))
    edited = open_jsonl(Jsonl(path=write(tmp_path / "b" / "r.jsonl", [GOOD.replace(b"2", b"3")])))
    assert first.fingerprint == moved.fingerprint != edited.fingerprint


def test_memory_does_not_grow_with_the_file(tmp_path):
    row = json.dumps({"prompt": "x" * 10_000, "answer": "1"}).encode()
    path = write(tmp_path / "r.jsonl", [row.replace(b"xx", f"{i:02d}".encode(), 1) for i in range(500)])
    tracemalloc.start()
    source = open_jsonl(Jsonl(path=path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) == 500
    assert peak < 500_000  # the file holds 5 MB


def test_a_huge_line_is_skipped_in_small_pieces(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(GOOD + b"\n" + b"[" * 20_000_000 + b"\n" + GOOD + b"\n")
    tracemalloc.start()
    source = open_jsonl(Jsonl(path=str(path), on_bad_row="drop", max_dropped=0.5, max_row_bytes=1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.counts == {"too_long": 1, "duplicate_prompt": 1}
    assert source[1].id == "r.jsonl/3"
    assert peak < 1_000_000
