"""`jrl rollouts`: conditions that are read and not evaluated, rows across blocks, files."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest

from jrl import cli
from jrl.commands.rollouts import CODES
from jrl.run.report.rollouts import open_rollouts
from jrl.tasks.envs.dataset import Dataset, open_dataset
from jrl.tools import browse_rollouts as browse

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of three steps of four rows; the reward of a row is its number over 10, the last one's NaN."""
    folder = tmp_path_factory.mktemp("run")
    store = open_rollouts(folder / "rollouts", rows=0)
    for step in range(3):
        reward = np.arange(4 * step, 4 * step + 4, dtype=np.float32) / 10
        if step == 2:
            reward[3] = np.nan
        tokens = np.tile(np.arange(3, dtype=np.int32), (4, 1))
        texts = [f"it's {i}\n\x1b[31m" for i in range(4 * step, 4 * step + 4)]
        ids = [f"e{i}" for i in range(4)]
        fields = {"reward": reward, "tokens": tokens, "verdict": np.int8([0, 1, 1, 8]), "finish": np.int8([0, 2, 0, 2])}
        store.append(step, fields, ["ask"] * 4, texts, ids, np.zeros((4, 2), np.uint32))
    store.close()
    return folder


def rewards(run, where, most=None):
    rows = browse.select(run / "rollouts", browse.parse_where(where), ["reward"], most)
    return [round(row["reward"], 4) for row in rows]


@pytest.mark.parametrize(
    "where, expected",
    [
        ("reward < 0.25", [0, 0.1, 0.2]),
        ("reward >= 0.9 ", [0.9, 1.0]),
        ("step == 1", [0.4, 0.5, 0.6, 0.7]),
        ("step != 1 and reward > 0.2", [0.3, 0.8, 0.9, 1.0]),
        ("completion contains 's 7' and step <= 1", [0.7]),
        ('completion contains "it\'s 1"', [0.1, 1.0, np.nan]),
        ("example_id == 'e2'", [0.2, 0.6, 1.0]),
        ("example_id == e2 and step > 1", [1.0]),
        ("prompt == 'none'", []),
        ("verdict == 'wrong' and step == 1", [0.5, 0.6]),
        ("verdict == 1 and step == 1", [0.5, 0.6]),
        ("verdict == Verifier_Error and step < 2", [0.3, 0.7]),
        ("verdict <= unparsable and finish != stop_token", [0.1, 0.5, 0.9]),
    ],
)
def test_rows_by_their_columns(run, where, expected, monkeypatch):
    for block in (5, browse.BLOCK_ROWS):
        monkeypatch.setattr(browse, "BLOCK_ROWS", block)
        np.testing.assert_array_equal(np.float32(rewards(run, where)), np.float32(expected))


def test_as_many_rows_as_asked_for(run):
    assert rewards(run, "", most=2) == [0, 0.1]
    assert rewards(run, "", most=0) == []
    assert len(rewards(run, "")) == 12


@pytest.mark.parametrize(
    "where, message",
    [
        ("reward", "cannot read 'reward'"),
        ("reward = 1", "cannot read 'reward = 1'"),
        ("reward < 1 and", "ends with `and`"),
        ("reward < 1 or step > 2", "cannot read"),
        ("__import__('os') == 1", "cannot read"),
        ("rewrad < 1", "no column 'rewrad'; did you mean reward"),
        ("tokens == 1", "tokens holds an array in each row"),
        ("reward == high", "reward is a number, and 'high' is not"),
        ("completion == 3", "completion is text, and 3.0 is not"),
        ("reward contains 1", "`contains` is for texts"),
        (
            "verdict == right",
            "'right' is no verdict. It is one of correct (0), wrong (1), unparsable (2), cpu_limit (3)",
        ),
        (
            "finish == 'stop'",
            "'stop' is no finish. It is one of stop_token (0), stop_string (1), length (2), tool_budget",
        ),
        ("verdict contains 'wrong'", "`contains` is for texts"),
    ],
)
def test_what_is_no_condition_is_refused_with_what_would_be(run, where, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rewards(run, where)


def test_the_command_shows_rows_without_obeying_them(run, capsys):
    assert cli.main(["rollouts", str(run), "--where", "step == 2", "--most", "1"]) == 0
    out = capsys.readouterr().out
    assert "step 2" in out and "reward 0.8" in out and "completion: it's 8\n    \\x1b[31m" in out and "\x1b" not in out
    assert "1 row shown; --most N shows more" in out and "Columns: completion, example_id" in out
    assert cli.main(["rollouts", str(run), "--columns", "nope"]) == 2
    assert "no column 'nope'" in capsys.readouterr().err
    assert cli.main(["rollouts", str(run.parent)]) == 2
    assert f"{run.parent} holds no rollouts: it is not a run folder" in capsys.readouterr().err
    (run.parent / "manifest.json").write_text("{}")
    assert cli.main(["rollouts", str(run.parent)]) == 2
    assert "the run stored none: Log.rollouts was False" in capsys.readouterr().err


def test_the_command_shows_which_rewards_are_of_no_score(tmp_path, capsys):
    store = open_rollouts(tmp_path / "rollouts", rows=0)
    fields = {"reward": np.float32([0, 0]), "valid": np.array([True, False])}
    store.append(1, fields, ["p", "p"], ["a", "b"], ["e", "e"], np.zeros((2, 2), np.uint32))
    store.close()
    assert cli.main(["rollouts", str(tmp_path), "--where", "reward < 0.5"]) == 0
    out = capsys.readouterr().out
    assert "step 1  reward 0  valid true" in out and "step 1  reward 0  valid false" in out
    assert cli.main(["rollouts", str(tmp_path), "--most", "2"]) == 0
    assert "2 rows shown. Columns" in capsys.readouterr().out  # there are no more
    assert cli.main(["rollouts", str(tmp_path), "--where", "reward < 0.5 and valid == true"]) == 0
    assert "1 row shown" in capsys.readouterr().out


def test_codes_are_shown_with_their_names_which_the_help_lists(run, capsys):
    columns = ["--columns", "verdict,finish,reward"]
    assert cli.main(["rollouts", str(run), "--where", "verdict == wrong", "--most", "1", *columns]) == 0
    assert "verdict 1 (wrong)  finish 2 (length)  reward 0.1\n" in capsys.readouterr().out
    listed = [f"{column}: " + ", ".join(f"{code.value} {code.name.lower()}" for code in codes)
              for column, codes in browse.CODES.items()]  # fmt: skip
    assert "; ".join(listed) == CODES


def test_rows_in_files(run, tmp_path, capsys):
    for name in ("rows.jsonl", "rows.csv"):
        columns = ["--columns", "reward,tokens,completion"]
        assert cli.main(["rollouts", str(run), "--where", "step == 2", *columns, "--out", str(tmp_path / name)]) == 0
        assert "4 rows with reward, tokens, completion" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[-1] == {"reward": None, "tokens": [0, 1, 2], "completion": "it's 11\n\x1b[31m"}
    with open(tmp_path / "rows.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["tokens"] for row in table] == ["[0, 1, 2]"] * 4 and table[0]["completion"] == "it's 8\n\x1b[31m"
    assert cli.main(["rollouts", str(run), "--out", str(tmp_path / "rows.txt")]) == 2
    assert ".jsonl or .csv" in capsys.readouterr().err


def test_exported_rollouts_are_training_data(tmp_path, capsys):
    store = open_rollouts(tmp_path / "rollouts", rows=0)
    for step in (1, 2):
        fields = {"reward": np.float32([0, 1, 0.5, 0.5]), "group": np.int32([0, 0, 1, 1]), "valid": np.ones(4, bool)}
        texts = [f"{step}.{i}" for i in range(4)]
        store.append(step, fields, ["p", "p", "q", "q"], texts, ["e", "f"], np.zeros((2, 2), np.uint32))
    store.close()
    out = tmp_path / "rows.jsonl"
    assert cli.main(["rollouts", str(tmp_path), "--out", str(out)]) == 0
    assert "8 rows with step, group, reward, valid, example_id, prompt, completion" in capsys.readouterr().out
    source = open_dataset(Dataset(path=str(out), layout="rollouts"))
    assert [(source[i].messages[0].content, source[i].answer, source[i].info["rejected"]) for i in range(2)] == [
        ("p", "1.1", "1.0"), ("p", "2.1", "2.0")]  # fmt: skip
    assert len(source) == 2 and source.counts == {"tied": 2, "duplicate_prompt": 1}
