"""`jrl sweep` and `jrl compare` from end to end, on members of one step."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import sys

import pytest
from run_folders import rewards, write_run
from small_model import BIGRAM, part_in

from jrl import cli, exit_codes
from jrl.commands import start
from jrl.run.identity import RefusedIdentity
from jrl.tools.sweep import manifest, population, sweeping
from jrl.tools.sweep.members import read_sweep
from jrl.tools.sweep.sweeping import ComparisonOptions, hold_sweep, report_sweep

TINY = ["Online.prompts=4", "Online.samples=4", "Scoring.workers=1"]
RATES = "AdamW.learning_rate=[1e-3, 3e-3]"


@pytest.fixture
def command(capsys, monkeypatch):
    """Returns a function: arguments -> (exit code, standard output, standard error)."""
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None, devices=None: None)

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_members_are_trained_compared_and_not_trained_again(command, tmp_path, monkeypatch):
    # The first member's prompts are longer than their limit: it fails, and does not stop the second.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # children of one device
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # they import small_model too
    out, tiny = tmp_path / "sweep", [*TINY, BIGRAM, part_in(tmp_path)]
    asked = ["sweep", "tiny", *tiny, "Data.prompt_length=[2, 8]", "Online.steps=1", "--out", out]
    code, text, err = command(*asked)
    assert code == exit_codes.STOPPED
    assert "prompt_length=2 failed with exit code 2: " in err and "more than Data.prompt_length = 2" in err
    assert "1 of 2 members are finished" in err
    assert "prompt_length=2 is not finished, and is left out" in text
    written = json.loads((out / "sweep.json").read_text())
    assert [(m["finished"], m["exit_code"]) for m in written["members"]] == [(False, 2), (True, 0)]
    assert [row["variant"] for row in written["comparison"]["metrics"]["reward/mean"]] == ["prompt_length=8"]
    assert (out / "report.html").exists() and (out / "curves-reward-mean.svg").exists()

    before = (out / "prompt_length=8" / "metrics.jsonl").stat().st_mtime_ns
    code, text, _ = command(*asked, "--baseline", "prompt_length=2")
    assert code == exit_codes.STOPPED and "1 of them finished before" in text and "began  prompt_length=2" in text
    assert "began  prompt_length=8" not in text
    assert "no run of the baseline prompt_length=2 is finished" in text
    assert (out / "prompt_length=8" / "metrics.jsonl").stat().st_mtime_ns == before

    code, text, _ = command("compare", out, "--out", tmp_path / "page")
    assert code == exit_codes.DONE and "all runs" in text
    assert json.loads((tmp_path / "page" / "comparison.json").read_text())["compared"] == []
    code, _, told = command("compare", out, "--metric", "reward/maen", "--out", tmp_path / "page")
    assert code == 2 and "no run has the metric 'reward/maen'; did you mean reward/mean?" in told
    code, text, _ = command("compare", out / "prompt_length=8", "--json")
    assert code == exit_codes.DONE and json.loads(text)["metrics"]["reward/mean"][0]["variant"] == "all runs"

    code, _, err = command("sweep", "tiny", *tiny, "Data.prompt_length=[8, 9]", "Online.steps=1", "--out", out)
    assert code == exit_codes.OTHER_RUN and "Data.prompt_length: 2, 8, now 8, 9" in err

    with open(tmp_path / "bigram.py", "a") as file:
        file.write("# another version\n")
    code, text, err = command(*asked)
    assert code == exit_codes.OTHER_RUN and not text
    assert f"differ from those that {out / 'prompt_length=8'} began with: bigram.py. Rest" in err and "--accept" in err
    assert command(*asked, "--print")[:2] == (exit_codes.OTHER_RUN, "")
    code, text, _ = command(*asked, "--accept-change")  # the first member fails as before, the second is finished
    assert code == exit_codes.STOPPED and "1 of them finished before" in text


def test_commands_for_a_folder_of_something_else_are_not_printed(command, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, out, err = command("sweep", "tiny", RATES, "--out", tmp_path, "--print")
    assert code == exit_codes.OTHER_RUN and "is not a sweep and contains notes.txt" in err and not out
    code, out, err = command("sweep", "tiny", RATES, "--out", tmp_path / "notes.txt", "--print")
    assert code == exit_codes.REFUSED and err == f"jrl: {tmp_path / 'notes.txt'}: Not a directory\n" and not out


def test_print_lists_commands_and_runs_nothing(command, tmp_path):
    out = tmp_path / "a folder"
    code, text, _ = command("sweep", "tiny", RATES, "Run.seed=[0..1]", "Online.objective=@DrGRPO()", "--devices", "2",
                              "--accept-change", "--out", out, "--print")  # fmt: skip
    assert code == exit_codes.DONE and not out.exists()
    lines = [shlex.split(line) for line in text.splitlines()]
    assert len(lines) == 4
    assert lines[3] == [
        "jrl", "train", "tiny", "Online.objective=@DrGRPO()", "AdamW.learning_rate=0.003", "Run.seed=1",
        "--run", str(out / "learning_rate=0.003,seed=1"), "--devices", "2", "--accept-change",
    ]  # fmt: skip


def test_members_that_printed_commands_have_trained_are_reported_and_those_with_other_settings_refused(
    command, tmp_path
):
    asked, out = [RATES, "Online.steps=1"], tmp_path / "out"
    first, second = read_sweep("tiny", asked).members
    write_run(out / first.name, rows=rewards(0.5), seed=first.seed, settings=first.settings)
    code, text, _ = command("sweep", "tiny", *asked, "--out", out, "--print")
    assert code == exit_codes.DONE and len(text.splitlines()) == 2 and not (out / "sweep.json").exists()
    write_run(out / second.name, rows=rewards(0.7), seed=second.seed, settings=second.settings)
    code, text, _ = command("sweep", "tiny", *asked, "--out", out)
    assert code == exit_codes.DONE and "2 members in" in text and "2 of them finished before" in text
    assert [m["finished"] for m in json.loads((out / "sweep.json").read_text())["members"]] == [True, True]

    other = first.settings | {"GRPO.clip_low": "0.1"}
    write_run(tmp_path / "b" / first.name, rows=rewards(0.5), seed=7, settings=other)
    for more in ([], ["--print"], ["--accept-change"]):
        code, text, err = command("sweep", "tiny", *asked, "--out", tmp_path / "b", *more)
        assert code == exit_codes.OTHER_RUN and not text
        assert f"{first.name} has other settings:\n  GRPO.clip_low: 0.1, now 0.2\n  Run.seed: 7, now 0\n" in err
    assert [path.name for path in (tmp_path / "b").iterdir()] == [first.name]

    moved = ["Config.task=@Jsonl()", *asked]
    begun, now = (read_sweep("tiny", [*moved, f"Jsonl.path='{path}'"]).members[0] for path in ("old", "new"))
    write_run(tmp_path / "c" / begun.name, rows=rewards(0.5), settings=begun.settings)
    assert begun.settings != now.settings
    assert (
        command("sweep", "tiny", *moved, "Jsonl.path='new'", "--out", tmp_path / "c", "--print")[0] == exit_codes.DONE
    )


@pytest.mark.parametrize(("steps", "code"), [(1, exit_codes.DONE), (2, exit_codes.PREEMPTED)])
def test_a_stop_leaves_the_report_out_unless_all_members_are_finished(command, tmp_path, monkeypatch, steps, code):
    asked = [RATES, "Online.steps=1"]
    for member, count in zip(read_sweep("tiny", asked).members, (1, steps)):
        write_run(tmp_path / "out" / member.name, rows=rewards(*[0.5] * count), settings=member.settings)
    train_sweep = sweeping.train_sweep

    def stopped(*args, **given):
        signal.raise_signal(signal.SIGTERM)
        return train_sweep(*args, **given)

    monkeypatch.setattr(sweeping, "train_sweep", stopped)
    assert command("sweep", "tiny", *asked, "--out", tmp_path / "out")[0] == code
    assert (tmp_path / "out" / "report.html").exists() == (code == exit_codes.DONE)


def test_members_of_an_interrupted_population_are_not_trained_one_by_one(command, tmp_path):
    asked = ["sweep", "tiny", RATES, "--out", tmp_path / "out"]
    population.write_members(tmp_path / "out", {"members": ["learning_rate=0.001", "learning_rate=0.003"]})
    manifest.write(tmp_path / "out", manifest.describe(read_sweep("tiny", [RATES])))
    for more in ([], ["--print"]):
        code, text, err = command(*asked, *more)
        assert code == exit_codes.REFUSED and "continue it with --population" in err and not text
    population.write_members(tmp_path / "out", {"members": ["learning_rate=0.003"], population.AGAIN: True})
    assert command(*asked, "--print")[0] == exit_codes.DONE  # it has ended, and this member failed


def test_members_in_a_bucket_are_printed_and_not_trained(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = "gs://bucket/sweeps/rates"
    code, text, _ = command("sweep", "tiny", RATES, "--out", out, "--print")
    assert code == exit_codes.DONE
    assert [shlex.split(line)[-1] for line in text.splitlines()] == [
        f"{out}/learning_rate=0.001",
        f"{out}/learning_rate=0.003",
    ]
    code, _, err = command("sweep", "tiny", RATES, "--out", out)
    assert code == exit_codes.REFUSED and f"jrl: {out} is in a bucket" in err and "--print" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["AdamW.learning_rat=[1, 2]"], "did you mean learning_rate"),
        ([RATES, "--baseline", "learning_rate=5"], "fits no variant: learning_rate=0.001; "),
        ([RATES, "Online.samples=[4, 8]", "--baseline", "learning_rate=1e-3"], "fits several variants: "),
        ([RATES, "--baseline", "samples=4"], "samples is the same in all runs"),
        (["Run.seed=[0, 1]", "--baseline", "seed=0"], "needs a second variant"),
        ([RATES, "--by", "samples"], "samples is the same in all runs"),
        ([RATES, "Online.lag=[0, 1]", "--how", "pairs", "--by", "lag"], "compared on the same tasks"),
        ([RATES, "--jobs", "0"], "at least 1"),
        ([RATES, "--seed", "0"], "go with --how random"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(command, tmp_path, arguments, message):
    code, _, err = command("sweep", "tiny", *arguments, "--out", tmp_path / "out")
    assert code == exit_codes.REFUSED and message in err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(command, tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    code, _, err = command("sweep", "tiny", RATES, "--out", tmp_path)
    assert code == exit_codes.OTHER_RUN and "is not a sweep and contains thesis.txt" in err
    (tmp_path / "manifest.json").write_text("{}")
    assert "is a run, not a sweep" in command("sweep", "tiny", RATES, "--out", tmp_path)[2]
    (tmp_path / "sweep.json").write_text('{"format": 1, "mem')
    code, _, err = command("sweep", "tiny", RATES, "--out", tmp_path)
    assert code == exit_codes.REFUSED and "sweep.json is not JSON" in err


def test_a_sweep_is_the_same_however_it_is_written_and_another_where_its_file_changed(tmp_path):
    (tmp_path / "base.gin").write_text("include 'tiny.gin'\n")
    (tmp_path / "tiny.gin").write_text(open("configs/tiny.gin").read())
    read = lambda *bindings: read_sweep(str(tmp_path / "base.gin"), bindings)
    hold_sweep(tmp_path / "out", read(RATES)).release()
    manifest.check_folder(tmp_path / "out", read("AdamW.learning_rate=[0.001, 0.003]", "Log.samples=0"))
    with open(tmp_path / "base.gin", "a") as file:
        file.write("Online.prompts = 8\n")
    with pytest.raises(ValueError, match=r"base\.gin has changed since that sweep began"):
        manifest.check_folder(tmp_path / "out", read(RATES))


def test_members_with_other_parts_files_are_refused_and_those_of_another_folder_are_not(tmp_path):
    sweep = read_sweep("tiny", [RATES, BIGRAM, part_in(tmp_path)])
    (digest,) = sweep.parts.values()
    first, second = (tmp_path / "out" / member.name for member in sweep.members)
    write_run(first, rows=[], parts={"elsewhere/bigram.py": digest})
    manifest.check_parts(tmp_path / "out", sweep)
    write_run(second, rows=[], parts={"bigram.py": digest, "more.py": digest})
    with pytest.raises(RefusedIdentity, match=rf"those that {second} began with: more\.py\. "):
        manifest.check_parts(tmp_path / "out", sweep)
    written = json.loads((second / "manifest.json").read_text())
    del written["identity"]["parts"]  # a version of jrl that did not record them
    (second / "manifest.json").write_text(json.dumps(written))
    with pytest.raises(RefusedIdentity, match=rf"those that {second} began with: bigram\.py\. "):
        manifest.check_parts(tmp_path / "out", sweep)


def test_parts_files_that_change_while_a_sweep_runs_are_refused(tmp_path):
    sweep = read_sweep("tiny", [RATES, BIGRAM, part_in(tmp_path)])
    begun = tmp_path / "out" / sweep.members[0].name
    check = functools.partial(manifest.check_unchanged, tmp_path / "out")
    file = tmp_path / "bigram.py"
    text = file.read_text()
    file.write_text(text + "# another version\n")
    check(sweep, sweep.members[0])  # no member has begun
    write_run(begun, rows=[], parts=sweep.parts)
    with pytest.raises(RefusedIdentity, match=rf"those that {begun} began with: bigram\.py\. "):
        check(sweep, sweep.members[1])
    check(sweep, sweep.members[1], accept_change=True)
    file.unlink()
    with pytest.raises(RefusedIdentity, match=rf"those that {begun} began with: bigram\.py\. "):
        check(sweep, sweep.members[1])
    with pytest.raises(RefusedIdentity, match=r"learning_rate=0\.003 cannot start any more: .*bigram\.py"):
        check(sweep, sweep.members[1], accept_change=True)
    file.write_text(text)
    check(sweep, sweep.members[1])


def test_a_gin_file_that_changes_while_a_sweep_runs_starts_no_member_and_a_comment_does(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text("include 'tiny.gin'\nOnline.steps = 1\n")
    sweep = read_sweep(str(file), [RATES, "Online.prompts=4"])
    member = sweep.members[1]
    for text, problem in (
        ("# a comment\nOnline.prompts = 8\n", None),  # the command line replaces it
        ("Online.samples = 4\n", r"mine\.gin, .* has changed since the sweep began, so learning_rate=0\.003 and"),
        ("Online.sample = 4\n", r"learning_rate=0\.003 cannot start any more: .*did you mean samples"),
    ):
        file.write_text("include 'tiny.gin'\nOnline.steps = 1\n" + text)
        with contextlib.nullcontext() if problem is None else pytest.raises(RefusedIdentity, match=problem):
            manifest.check_unchanged(tmp_path / "out", sweep, member)
    # It had changed when the member read it, after the check.
    write_run(tmp_path / "out" / member.name, rows=rewards(0.5), settings=member.settings | {"Online.samples": "4"})
    options = ComparisonOptions(metrics=(), by=(), baseline=None, statistic="mean")
    with pytest.raises(RefusedIdentity, match=r"0\.003 has other settings:\n  Online\.samples: 4, now 8\n"):
        report_sweep(sweep, tmp_path / "out", {}, options)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"baseline": "learning_rate=1e-3"}, "fits several variants"),
        ({"by": ("learning_rate",)}, "no run with parts"),
    ],
)
def test_a_sweep_whose_parts_file_changed_is_reported_without_what_cannot_be_compared(tmp_path, chosen, reason):
    sweep = read_sweep("tiny", [RATES, "Run.seed=[0, 1]", "Online.steps=1"])
    for member, version in zip(sweep.members, "1222"):
        write_run(
            tmp_path / member.name, rows=rewards(0.5), seed=member.seed, settings=member.settings,
            parts={"mine.py": version},
        )  # fmt: skip
    options = ComparisonOptions(metrics=(), by=(), baseline=None, statistic="mean")
    comparison = report_sweep(sweep, tmp_path, {}, options._replace(**chosen))
    assert [(row.variant.label, row.value.n) for row in comparison.metrics["reward/mean"]] == [
        ("learning_rate=0.001, parts={'mine.py': '1'}", 1),
        ("learning_rate=0.001, parts={'mine.py': '2'}", 1),
        ("learning_rate=0.003, parts={'mine.py': '2'}", 2),
    ]
    assert comparison.notes[0].startswith("--by and --baseline are left out: ") and reason in comparison.notes[0]
    assert (tmp_path / "report.html").exists()


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    sweep = read_sweep("tiny", [RATES])
    lock = hold_sweep(tmp_path / "out", sweep)
    with pytest.raises(ValueError, match="is being swept by process"):
        hold_sweep(tmp_path / "out", sweep)
    lock.release()
    hold_sweep(tmp_path / "out", sweep).release()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["Online.steps=[1, 2]", "--population"], "one program, and Online.steps is part of"),
        ([RATES, "--population", "--jobs", "2"], "--jobs is for members in separate processes"),
        ([RATES, "--population", "--print"], "--print is for members in separate processes"),
    ],
)
def test_a_population_that_cannot_be_is_refused_before_anything_is_written(command, tmp_path, arguments, reason):
    code, _, err = command("sweep", "tiny", *TINY, *arguments, "--out", tmp_path / "sweep")
    assert code == exit_codes.REFUSED and reason in err
    assert not (tmp_path / "sweep").exists()
