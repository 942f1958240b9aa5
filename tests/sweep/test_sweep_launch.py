"""Members as child processes. The child here is a script that ends as its argument says."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from jrl.run.checkpoints.lock import hold_run
from jrl.run.identity import RefusedIdentity
from jrl.tools.sweep import launch
from jrl.tools.sweep import progress as progress_lines
from jrl.tools.sweep.launch import Ended, ProgressCallbacks, is_finished, last_words, train_members
from jrl.tools.sweep.members import Member
from jrl.tools.sweep.progress import last_row, open_progress, time_left
from jrl.tools.sweep.runs import RunResult

CHILD = """
import json, pathlib, signal, sys, time
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(exist_ok=True)
if what == "fail":
    print("a line", flush=True); print("jrl: the learning rate is too high", flush=True); sys.exit(4)
if what == "wait":
    def leave(number, frame):
        (folder / "saved").write_text(str(number)); sys.exit(75)
    signal.signal(signal.SIGTERM, leave)
    (folder / "ready").write_text("")
    time.sleep(60)
if what == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has its background jobs ignore it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "ready").write_text("")
    time.sleep(60)
(folder / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\\n')
(folder / "summary.json").write_text(json.dumps({"steps": 3, "seconds": {"total": 1.0}, "eval": {}}))
"""
PROGRAM = (sys.executable, "-c", CHILD)


@pytest.fixture(autouse=True)
def checks_often(monkeypatch):
    """A member that another process trains is looked at every tenth of a second."""
    monkeypatch.setattr(launch, "RECHECK_SECONDS", 0.1)


def member(name):
    return Member(name, (), (), name, 3, "0", {})


def silent(**given):
    nothing = lambda *_: None
    return ProgressCallbacks(
        **{"began": nothing, "elsewhere": nothing, "ended": nothing, "tick": nothing, "close": nothing, **given}
    )


def train(folder, what, jobs=1, stop=None, progress=None, **given):
    """Trains a member for each (name, how it ends)."""
    members = [member(name) for name in what]
    commands = {name: [str(folder / name), how] for name, how in what.items()}
    stop = stop or threading.Event()
    ended = train_members(members, commands, folder, jobs, stop, progress or silent(), PROGRAM, **given)
    return {name: found.code for name, found in ended.items()}


def wait_for(*files):
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_member_that_fails_does_not_stop_the_others(tmp_path):
    assert train(tmp_path, {"a": "fail", "b": "done", "c": "fail"}) == {"a": 4, "b": 0, "c": 4}
    assert [is_finished(tmp_path, member(name)) for name in "abc"] == [False, True, False]
    assert last_words(tmp_path, Ended(member("a"), 4, 1.0)) == "the learning rate is too high"
    assert (tmp_path / "logs" / "a.log").read_text().startswith("a line\n")


def test_what_a_member_says_last_may_have_several_lines_unless_it_was_killed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("jrl: note\njrl: a holds another run:\n  part: other text\nUse another.\n")
    assert last_words(tmp_path, Ended(member("a"), 3, 1.0)) == "a holds another run: part: other text Use another."
    assert last_words(tmp_path, Ended(member("a"), -9, 1.0)) == "a holds another run:"
    assert last_words(tmp_path, Ended(member("a"), 4, 1.0, "its updates\nwere not finite")) == (
        "its updates were not finite"
    )


def test_a_member_with_fewer_steps_than_asked_for_is_not_finished(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"steps": 2, "seconds": {"total": 1.0}, "eval": {}}))
    assert not is_finished(tmp_path, member("a"))


def test_no_more_members_than_jobs_train_at_once(tmp_path):
    now, most = set(), []
    progress = silent(
        began=lambda m: (now.add(m.name), most.append(len(now))), ended=lambda found: now.remove(found.member.name)
    )
    assert set(train(tmp_path, dict.fromkeys("abcde", "done"), 2, progress=progress).values()) == {0}
    assert max(most) == 2 and len(most) == 5


def test_a_stop_asks_the_members_to_save_and_begins_no_other(tmp_path):
    stop = threading.Event()
    asks = threading.Thread(target=lambda: (wait_for(tmp_path / "a" / "ready", tmp_path / "b" / "ready"), stop.set()))
    asks.start()
    assert train(tmp_path, {"a": "wait", "b": "wait", "c": "done"}, 2, stop) == {"a": 75, "b": 75}
    asks.join()
    assert (tmp_path / "a" / "saved").read_text() == str(int(signal.SIGTERM))
    assert not (tmp_path / "c").exists()


def test_no_member_starts_once_the_check_refuses_it_and_those_that_train_end(tmp_path):
    calls, ended = [], []

    def check(member):
        calls.append(member.name)
        if len(calls) > 2:
            raise RefusedIdentity("mine.py has changed")

    progress = silent(ended=lambda found: ended.append((found.member.name, found.code)))
    with pytest.raises(RefusedIdentity, match=r"mine\.py has changed"):
        train(tmp_path, dict.fromkeys("abcd", "done"), 2, progress=progress, check=check)
    assert set(ended) == {("a", 0), ("b", 0)} and calls == ["a", "b", "c"]


def test_an_interrupt_ends_members_at_once_that_do_not_save(tmp_path):
    children = []

    def interrupt(running):
        if (tmp_path / "a" / "ready").exists():
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, {"a": "deaf"}, progress=silent(tick=interrupt, began=children.append))
    assert time.monotonic() - began < 30 and children  # SIGINT ends it, and not its 60 seconds


def test_a_member_that_another_process_trains_is_waited_for(tmp_path):
    lock = hold_run(tmp_path / "a")
    seen = []

    def release(found, holder):
        seen.append((found.name, holder["pid"]))
        threading.Timer(0.5, lock.release).start()

    (tmp_path / "a" / "summary.json").write_text(json.dumps({"steps": 3, "seconds": {"total": 90.0}, "eval": {}}))
    shown = silent(elsewhere=release, ended=lambda found: seen.append(found.seconds))
    assert train(tmp_path, {"a": "fail"}, progress=shown) == {"a": 0}  # it need not run again
    assert [found for found, *_ in seen[:-1]] == ["a"] and seen[-1] == 90.0  # of its training, not of the wait


def test_a_member_that_another_process_left_unfinished_is_trained(tmp_path):
    lock = hold_run(tmp_path / "a")
    release = lambda found, holder: threading.Timer(0.1, lock.release).start()
    assert train(tmp_path, {"a": "done"}, progress=silent(elsewhere=release)) == {"a": 0}


def test_a_child_finds_jrl_as_its_parent_did_and_not_in_the_folder_where_it_starts(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    code = (
        "import pathlib, sys, threading\n"
        "from jrl.tools.sweep.launch import ProgressCallbacks, train_members\n"
        "from jrl.tools.sweep.members import Member\n"
        "nothing = lambda *_: None\n"
        "found = train_members([Member('m', (), (), '', 1, '0', {})], {'m': ['--version']}, pathlib.Path('out'), 1,\n"
        "                      threading.Event(), ProgressCallbacks(*[nothing] * 5))\n"
        "print(found['m'].code, open('out/logs/m.log').read())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("0 jrl "), done.stderr


def test_progress_is_a_line_a_member_with_count_and_time_left(tmp_path):
    stream = io.StringIO()
    train(tmp_path, {"a": "done", "b": "fail"}, progress=open_progress(tmp_path, 3, 1, 1, (), stream))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "began  a"
    assert lines[1].startswith("[2/3] done   a  3 steps in ") and "reward/mean 0.5" in lines[1]
    assert lines[1].endswith(" left")
    assert lines[3] == "[2/3] FAILED b (exit code 4): the learning rate is too high"


def test_a_long_message_of_a_failed_member_is_cut_in_its_line_and_whole_at_the_end(tmp_path):
    """A paragraph stood there twice."""
    stream, why = io.StringIO(), "not finite; " * 20
    failed = Ended(member("a"), 4, 1.0, why)
    open_progress(tmp_path, 1, 0, 1, (), stream).ended(failed)
    # 239 characters without the last space
    line = f"[0/1] FAILED a (exit code 4): {why[:120]} ... (119 more characters)\n"
    assert stream.getvalue() == line
    assert last_words(tmp_path, failed) == why.strip()


def test_progress_says_where_a_member_stopped(tmp_path):
    stream = io.StringIO()
    progress = open_progress(tmp_path, 2, 0, 2, ("reward/mean",), stream)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 4}\n')
    for name in "ab":
        progress.ended(Ended(member(name), 75, 1.0))
    assert stream.getvalue() == "[0/2] stopped a before its first step\n[0/2] stopped b after step 4\n"


def test_where_there_is_no_terminal_a_line_a_minute_says_how_far_members_are(tmp_path, monkeypatch):
    seconds, stream = iter([0, 59, 60, 90, 120]), io.StringIO()
    monkeypatch.setattr(progress_lines, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    progress = open_progress(tmp_path, 6, 0, None, ("reward/mean",), stream)
    for step, name in enumerate("abcde", 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    for running in ("ab", "ab", "abcde", "abcde"):  # after 59, 60, 90 and 120 seconds
        progress.tick([member(name) for name in running])
    assert stream.getvalue() == "0/6 done; a 1/3; b 2/3\n0/6 done; 5 members at steps 1 to 5\n"


def test_metrics_that_no_member_will_have_are_told_when_the_first_is_finished(tmp_path, monkeypatch):
    stream, read = io.StringIO(), []
    found = RunResult(tmp_path, "0", {}, [{"step": 1, "reward/mean": 0.5}], {"eval/after_rl": 0.4}, finished=True)
    monkeypatch.setattr(progress_lines, "read_run", lambda folder: read.append(folder.name) or found)
    progress = open_progress(tmp_path, 3, 0, 1, ("eval/after_rl", "reward/maen"), stream)
    for name, code in (("a", 4), ("b", 0), ("c", 0)):
        progress.ended(Ended(member(name), code, 1.0))
    notes = [line for line in stream.getvalue().splitlines() if line.startswith("note")]
    assert read == ["b"]
    assert notes == [
        "note: another --metric may be given later, and what is finished stays: b has no metric 'reward/maen'; did you "
        "mean reward/mean? (metrics: eval/after_rl, reward/mean, step)"
    ]


def test_time_left_counts_the_members_that_train_at_once():
    assert time_left([10, 20], 4, 2) == "30 s"  # mean 15 s, 4 members, 2 at a time
    assert time_left([10], 1, 8) == "10 s"
    assert time_left([], 3, 1) == "" and time_left([5], 0, 1) == ""


def test_members_of_a_population_that_end_together_leave_no_time(tmp_path):
    stream = io.StringIO()
    progress = open_progress(tmp_path, 2, 0, None, ("reward/mean",), stream)
    for name in "ab":
        progress.ended(Ended(member(name), 0, 72.0))
    assert not any(line.endswith(" left") for line in stream.getvalue().splitlines())


def test_the_last_row_is_the_last_whole_line(tmp_path):
    assert last_row(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert last_row(tmp_path) == {"step": 2}
