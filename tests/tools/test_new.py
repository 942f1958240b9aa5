"""What `jrl new` writes: complete, sound, and never over somebody's files."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import jax
import pytest

import jrl
from jrl import cli
from jrl.device.sharding import MeshShape, make_mesh
from jrl.plugins import load_parts
from jrl.tasks.envs.columns import Jsonl
from jrl.tasks.envs.jsonl import open_jsonl
from jrl.tools.check import check_parts
from jrl.tools.new import create, template


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create(Path("sums"))
    return tmp_path / "sums"


def test_a_gin_file_a_parts_file_and_ten_rows_are_written_as_the_template_has_them(task):
    assert {path.name: path.read_text() for path in task.iterdir()} == template("sums")
    rows = [json.loads(line) for line in (task / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == 10 and len({row["prompt"] for row in rows}) == 10
    assert all(eval_sum(row["prompt"]) == row["answer"] for row in rows)


def test_a_disk_that_is_full_leaves_no_folder(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("jrl.paths.write_bytes_atomic", full)
        create(tmp_path / "sums")
    create(tmp_path / "sums")


def eval_sum(prompt):
    left, right = prompt.rstrip("=").split("+")
    return str(int(left) + int(right))


def test_the_template_names_its_own_files_and_follows_its_name():
    files = template("a-b_c", "tasks/a-b_c")
    assert set(files) == {"a-b_c.gin", "a-b_c.py", "a-b_c.jsonl"}
    gin = files["a-b_c.gin"]
    assert "parts = ['a-b_c.py']" in gin and "Jsonl.path = 'a-b_c.jsonl'" in gin
    assert "jrl train tasks/a-b_c/a-b_c.gin --run runs/a-b_c" in gin
    assert "{" not in gin and "{{" not in files["a-b_c.py"]


def test_its_verifier_keeps_the_contract(task):
    actual = check_parts([task / "sums.py"])
    assert actual and all(row.problem is None for row in actual)


def test_its_verifier_pays_for_near_answers_and_its_rows_are_read(task):
    source = open_jsonl(Jsonl(path=str(task / "sums.jsonl")))
    close = load_parts([task / "sums.py"]).tables["verifiers"]["Close"]
    score = lambda text: close.score(close.config(), text, source[0])
    assert [score(text) for text in ("3", " 3\n", "4", "9", "x", "", "٣")] == [1.0, 1.0, 0.75, 0.0, 0.0, 0.0, 0.0]


def test_the_command_prints_three_commands_to_try(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "tasks/sums"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  jrl check tasks/sums/sums.py",
        "  jrl train tasks/sums/sums.gin --run runs/sums",
        "  jrl sample runs/sums",
    ]


@pytest.mark.parametrize("name", ["9lives", "..", ".", "a b", "ü", "a'b"])
def test_a_name_that_is_no_plain_word_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name]) == 2
    assert f"{name!r} cannot name a task; use letters" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_refused_and_left_alone(task, capsys):
    (task / "sums.gin").write_text("mine")
    assert cli.main(["new", "sums"]) == 2
    assert "sums exists already; choose another name" in capsys.readouterr().err
    assert (task / "sums.gin").read_text() == "mine"


def test_it_trains_as_it_is(task):
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        summary = jrl.train("sums/sums.gin", ["warm/Offline.steps=1", "Online.steps=2", "Log.writers=()"], run="run")
    assert summary["steps"] == 3
