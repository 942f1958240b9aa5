"""A data set in several files: the rows of all, one file after another."""

from __future__ import annotations

import gzip
import itertools
import json
import weakref
from pathlib import Path

import numpy as np
import pytest

from jrl import cli, paths
from jrl.resolve import load_config
from jrl.tasks.envs import parquet
from jrl.tasks.envs.columns import names_of
from jrl.tasks.envs.dataset import Dataset, open_dataset
from jrl.tasks.envs.jsonl import Jsonl, open_jsonl
from jrl.tasks.stopping import StopRequested

pytestmark = pytest.mark.fast

ROWS = [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(23)]
SIZES = (9, 1, 13)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def split(rows):
    starts = np.cumsum([0, *SIZES])
    return [rows[start:end] for start, end in itertools.pairwise(starts)]


def write(folder, ending):
    """Writes ROWS to files of SIZES rows. Returns the pattern that names them all."""
    folder.mkdir()
    for i, part in enumerate(split(ROWS)):
        path = folder / f"part-{i}{ending}"
        if ending == ".parquet":
            arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            writer.write_table(arrow.Table.from_pylist(part), path, row_group_size=4)
        else:
            path.write_bytes(gzip.compress(lines(part).encode()) if ending.endswith(".gz") else lines(part).encode())
    return str(folder / f"part-*{ending}")


def alpaca(pattern):
    """Overwrites the files of a pattern with a row of another layout. Returns the pattern."""
    for i, path in enumerate(paths.matches(pattern)):
        Path(path).write_text(lines([{"instruction": f"Say {i}.", "output": str(i)}]))
    return pattern


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_examples_are_those_of_one_file_with_all_rows(ending, tmp_path):
    one = tmp_path / "one" / f"part-*{ending.removesuffix('.gz').replace('.parquet', '.jsonl')}"  # a name with a star
    one.parent.mkdir()
    one.write_text(lines(ROWS))
    source, whole = open_jsonl(Jsonl(path=write(tmp_path / "many", ending))), open_jsonl(Jsonl(path=str(one)))
    order = [22, 0, 8, 9, 10, *range(23)]  # 8 | 9 | 10: the last of the first file, the only one of the second
    text = lambda example: (example.messages, example.answer, example.task)
    assert [text(source[i]) for i in order] == [text(whole[i]) for i in order]
    assert [source[i].id for i in (0, 9, 22)] == [f"part-*{ending}/{n}" for n in (1, 10, 23)]
    assert source[0].task == "part" and len(source) == 23


def test_a_bad_row_is_named_by_its_own_file_and_line(tmp_path):
    for name, text in {
        "a": "\n",
        "b": lines(ROWS[:2]) + "\n\n",
        "c": lines(ROWS[2:3]) + "[]\n" + lines(ROWS[3:4]),
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    pattern = str(tmp_path / "*.jsonl")
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: the row is not an object"):
        open_jsonl(Jsonl(path=pattern))
    source = open_jsonl(Jsonl(path=pattern, on_bad_row="drop", max_dropped=0.5))
    assert [source[i].answer for i in range(4)] == ["1", "2", "3", "4"] and source.counts == {"not_object": 1}
    (tmp_path / "c.jsonl").write_text(lines([{**ROWS[0], "id": "x"}]))
    (tmp_path / "b.jsonl").write_text(lines([ROWS[1], {**ROWS[2], "id": "x"}]))
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1: the row repeats the id .* \(/.*b\.jsonl, line 2\)"):
        open_jsonl(Jsonl(path=pattern))
    (tmp_path / "c.jsonl").write_text(lines([{"instruction": 3}]))
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1: "):
        open_dataset(Dataset(path=pattern, layout="alpaca"))


def test_rows_of_a_group_may_be_in_different_files(tmp_path):
    row = lambda text, reward: {"step": 1, "group": 0, "reward": reward, "valid": True, "prompt": "Name a prime.",
                                "completion": text}  # fmt: skip
    (tmp_path / "0.jsonl").write_text(lines([row("7", 1.0)]))
    (tmp_path / "1.jsonl").write_text(lines([row("8", 0.0)]))
    source = open_dataset(Dataset(path=str(tmp_path / "*.jsonl"), layout="rollouts"))
    assert len(source) == 1 and source[0].answer == "7" and source[0].task == tmp_path.name


def test_the_fingerprint_follows_the_rows_and_every_file_is_read(tmp_path):
    pattern = write(tmp_path / "many", ".jsonl")
    before, source = open_jsonl(Jsonl(path=pattern)).fingerprint, open_jsonl(Jsonl(path=pattern))
    assert source.fingerprint == before
    last = tmp_path / "many" / "part-2.jsonl"
    last.write_text(lines(ROWS[10:22]))
    assert open_jsonl(Jsonl(path=pattern)).fingerprint != before and source[0].answer == "1"
    with pytest.raises(ValueError, match=r"part-2\.jsonl changed while it was being read"):
        source[15]
    with pytest.raises(StopRequested):
        open_jsonl(Jsonl(path=pattern), lambda: True)


def test_decoded_row_groups_are_bounded_over_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.tasks.envs.parquet.KEPT_BYTES", 0)
    source = open_jsonl(Jsonl(path=write(tmp_path / "many", ".parquet")))
    assert [source[i].answer for i in (22, 0, 9, 22)] == ["23", "1", "10", "23"]
    (parts,) = {reader._decoded for reader in source.reader._readers}
    assert len(parts._tables) == 1


def test_rows_as_python_are_bounded_over_all_files(tmp_path, monkeypatch):
    source, batches, to_python = open_jsonl(Jsonl(path=write(tmp_path / "many", ".parquet"))), [], parquet._python

    class Rows(list):
        """A list that weak references may name."""

    def counted(table):
        rows = Rows(to_python(table))
        batches.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(parquet, "_python", counted)
    assert [source[i].answer for i in range(23)] == [str(i + 1) for i in range(23)]
    assert len(batches) > 3 and sum(batch() is not None for batch in batches) == 1


def test_a_pattern_that_stands_for_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"Jsonl\.path: '.*/x-\*\.jsonl' cannot be read: no file has such a name"):
        open_jsonl(Jsonl(path=str(tmp_path / "x-*.jsonl")))
    (tmp_path / "[a]?.jsonl").write_text("")  # only a star stands for other characters
    assert paths.matches(str(tmp_path / "[a]?*")) == [str(tmp_path / "[a]?.jsonl")]
    assert paths.matches(str(tmp_path / "[[]a]?.jsonl")) == paths.matches(str(tmp_path / "[a]??.json*")) == []


def test_the_task_of_the_rows_is_what_the_names_share(tmp_path):
    assert names_of("data/train-*-of-3.jsonl.gz") == ("train-*-of-3.jsonl.gz", "train")
    assert names_of("/data/sums/*.parquet") == ("sums/*.parquet", "sums")
    tasks = ("*.parquet", "../*.parquet", "a-b.parquet", "sums/*/*.parquet", "*/*.parquet", "sums-*/train.parquet")
    assert [names_of(path)[1] for path in tasks] == ["rows", "rows", "a-b", "sums", "rows", "train"]
    sums, again, others = (write(tmp_path / name, ".jsonl").replace("part-*", "*") for name in ("sums", "again", "b"))
    first, moved = open_jsonl(Jsonl(path=sums)), open_jsonl(Jsonl(path=again))
    assert first[0].task == "sums" and moved[0].task == "again" and first.fingerprint != moved.fingerprint
    opened = [open_dataset(Dataset(path=path, layout="alpaca")) for path in map(alpaca, (sums, others))]
    assert [source[0].task for source in opened] == ["sums", "b"]
    assert opened[0].fingerprint != opened[1].fingerprint


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    pattern = alpaca(write(tmp_path / "many", ".jsonl"))
    (tmp_path / "many" / "part-7.jsonl").symlink_to("gone")
    problem = r"\.path: '.*/part-7\.jsonl' cannot be read: No such file or directory"
    with pytest.raises(ValueError, match=problem):
        open_dataset(Dataset(path=pattern, layout="alpaca"))
    with pytest.raises(ValueError, match=problem):
        open_jsonl(Jsonl(path=pattern, needs_answer=False, columns={"prompt": "instruction"}))


def test_a_bad_row_is_refused_before_the_next_file_is_opened(tmp_path):
    pattern = alpaca(write(tmp_path / "many", ".jsonl"))
    (tmp_path / "many" / "part-1.jsonl").unlink()
    (tmp_path / "many" / "part-1.jsonl").symlink_to("gone")
    with pytest.raises(ValueError, match=r"part-0\.jsonl, line 1: the row lacks a field"):
        open_jsonl(Jsonl(path=pattern))


def test_a_pattern_in_a_configuration_is_found_beside_it(tmp_path, monkeypatch):
    write(tmp_path / "many", ".jsonl")
    config = tmp_path / "own.gin"
    config.write_text("include 'tiny.gin'\nConfig.task = @Jsonl()\nJsonl.path = 'many/part-*.jsonl'\n")
    assert load_config(str(config))[0].task.path == str(tmp_path / "many" / "part-*.jsonl")


def test_data_inspect_reads_a_pattern_and_asks_to_quote_what_the_shell_wrote_out(tmp_path, capsys):
    pattern = write(tmp_path / "many", ".jsonl")
    assert cli.main(["data", "inspect", pattern]) == 0
    assert "23 of 23 rows, 0 of them with a repeated prompt" in capsys.readouterr().out
    (tmp_path / "many").rename(tmp_path / "year=2024")
    pattern = str(tmp_path / "year=*" / "part-*.jsonl")  # no binding, in spite of its =
    assert cli.main(["data", "inspect", pattern]) == 0
    assert "23 of 23 rows" in capsys.readouterr().out
    assert cli.main(["data", "inspect", *paths.matches(pattern)]) == 2
    assert "part-1.jsonl: name one file, or quote a pattern for several: 'train-*.parquet'" in capsys.readouterr().err
