"""The pool: one verdict an item, in the items' order, whoever judges it and however it ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from verifier_fakes import HOSTILE, example, row

from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import frames
from jrl.tasks.verifiers.pool import Item, Pool, ScoringAbandoned
from jrl.tasks.verifiers.source import PartSource

HOSTILE_NAMES = {
    "good": Status.CORRECT,
    "sleeps": Status.CPU_LIMIT,
    "busy": Status.CPU_LIMIT,
    "ignores_signals": Status.CPU_LIMIT,
    "stops_itself": Status.CPU_LIMIT,
    "big_integer": Status.CPU_LIMIT,
    "exits": Status.CRASH,
    "leaves": Status.VERIFIER_ERROR,
    "segfaults": Status.CRASH,
    "aborts": Status.CRASH,
    "recurses": Status.VERIFIER_ERROR,
    "grows": Status.MEMORY_LIMIT,
    "forks": Status.VERIFIER_ERROR,
    "threads": Status.VERIFIER_ERROR,
    "connects": Status.VERIFIER_ERROR,
    "writes": Status.VERIFIER_ERROR,
    "kills_parent": Status.VERIFIER_ERROR,
    "prints": Status.CORRECT,
    "prints_for_ever": Status.CPU_LIMIT,
    "garbage": Status.CRASH,
    "floods": Status.OUTPUT_LIMIT,
    "closes": Status.CRASH,
    "forges": Status.CRASH,
    "raises": Status.VERIFIER_ERROR,
    "interrupts": Status.VERIFIER_ERROR,
    "says_nan": Status.VERIFIER_ERROR,
    "says_nothing": Status.VERIFIER_ERROR,
    "says_text": Status.VERIFIER_ERROR,
    "says_true": Status.CORRECT,
    "says_complex": Status.VERIFIER_ERROR,
}


def open_pool(*names: str, parts=(HOSTILE,), **limits) -> Pool:
    limits = {"workers": 2, "cpu_seconds": 0.3, "wall_seconds": 1.5, "memory_mb": 512} | limits
    return Pool([row(name) for name in names], parts, **limits)


def verdicts_of(pool: Pool, items: list[Item]) -> list[tuple]:
    return [tuple((v.status, v.reward) for v in verdicts) for verdicts in pool.collect(pool.submit(items))]


@pytest.fixture
def nothing_leaks():
    """No process, thread or descriptor outlives the pools of the test."""
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}, me.num_fds(), threading.active_count()
    yield
    after = {child.pid for child in me.children(recursive=True)}, me.num_fds(), threading.active_count()
    assert after == before


def test_every_hostile_verifier_gets_its_one_verdict_and_disturbs_no_other(nothing_leaks, trials):
    good, names = 0, list(HOSTILE_NAMES)
    trials(len(names))
    with open_pool(*names) as pool:
        items = []
        for index in range(len(names)):
            items += [Item("4", example(), (good, index, good)), Item("5", example(), (good,))]
        verdicts = verdicts_of(pool, items)
        assert verdicts_of(pool, [Item("4", example(), (good,))] * 10) == [((Status.CORRECT, 1.0),)] * 10
        assert len(pool.worker_pids()) == 2
        if "seccomp" not in pool.layers:
            pytest.skip(f"this machine confines workers by {pool.layers} only")
    actual = {name: verdicts[2 * index][1][0] for index, name in enumerate(names)}
    assert actual == HOSTILE_NAMES
    assert all(v[0] == v[2] == (Status.CORRECT, 1.0) for v in verdicts[::2])
    assert all(v == ((Status.WRONG, 0.0),) for v in verdicts[1::2])
    assert all((status.scorable) == (reward is not None) for v in verdicts for status, reward in v)
    assert not os.path.exists("/tmp/jrl-verifier-wrote")


def test_verdicts_depend_neither_on_the_number_of_workers_nor_on_the_order(trials):
    trials(6 * 60)
    texts = [str(n % 7) for n in range(60)]
    answers = {}
    for workers in (1, 2, 4):
        for turn in range(2):
            order = sorted(range(60), key=lambda n: (n * 37 + turn * 11) % 61)
            with open_pool("good", "draws", "exits", "raises", workers=workers) as pool:
                items = [Item(texts[n], example(), (0, 1, 2) if n % 20 == 0 else (1, 0, 3)) for n in order]
                verdicts = verdicts_of(pool, items)
            answers[workers, turn] = [verdicts[order.index(n)] for n in range(60)]
    assert len({str(answer) for answer in answers.values()}) == 1


def test_a_killed_worker_is_replaced_and_the_item_it_had_not_begun_is_tried_again(nothing_leaks):
    with open_pool("good") as pool:
        for pid in pool.worker_pids():
            os.kill(pid, signal.SIGKILL)
        assert verdicts_of(pool, [Item("4", example(), (0,))] * 20) == [((Status.CORRECT, 1.0),)] * 20
        assert len(pool.worker_pids()) == 2


def test_a_deadline_says_which_time_has_passed():
    with open_pool("sleeps", "busy") as pool:
        ((sleeps, busy),) = pool.collect(pool.submit([Item("4", example(), (0, 1))]))
    assert sleeps.status is busy.status is Status.CPU_LIMIT
    assert (sleeps.detail, busy.detail) == ("took longer than 1.5 s of wall time", "took more CPU time than 0.3 s")


def kill_template(pool: Pool) -> None:
    """Kills the template and waits until its workers, which the kernel ends with it, are gone too."""
    workers = [psutil.Process(pid) for pid in pool.worker_pids() if psutil.pid_exists(pid)]
    os.kill(pool.template_pid, signal.SIGKILL)
    psutil.wait_procs(workers, timeout=30)


def test_a_killed_template_is_replaced_with_its_workers(nothing_leaks):
    with open_pool("good") as pool:
        for turn in range(3):
            kill_template(pool)
            assert verdicts_of(pool, [Item("4", example(), (0,))] * 20) == [((Status.CORRECT, 1.0),)] * 20
            assert pool.counts["templates_started"] == turn + 2


ORPHAN = """
import os, socket, time
from jrl.tasks.verifiers.confine import read_access
from jrl.tasks.verifiers.fork_server import Bounds, become_worker
ours, theirs = socket.socketpair()
template = os.fork()
if template == 0:
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        while os.getppid() == parent:
            time.sleep(0.01)
        become_worker(theirs.fileno(), parent, socket.socket(), [], Bounds(512, 1.0, []), read_access([]))
    os._exit(0)
os.waitpid(template, 0)
theirs.close()
ours.settimeout(30)
print(len(ours.recv(1)), "bytes")
"""


def test_a_worker_whose_template_died_before_it_could_be_told_ends():
    """Else it would judge on, though nobody could reap it."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 bytes\n", done.stderr


def test_a_template_that_cannot_come_back_is_our_failure_and_no_wrong_answer(tmp_path):
    once = tmp_path / "loaded"
    part = PartSource(
        "once.py",
        f"""
import os
if os.path.exists({str(once)!r}): raise RuntimeError("only once")
open({str(once)!r}, "w").close()
def good(completion, example): return 1.0
VERIFIERS = {{"good": good}}
""",
    )
    with open_pool("good", parts=(part,)) as pool:
        assert verdicts_of(pool, [Item("4", example(), (0,))]) == [((Status.CORRECT, 1.0),)]
        kill_template(pool)
        verdicts = pool.collect(pool.submit([Item("4", example(), (0,))] * 3))
        assert [v.status for (v,) in verdicts] == [Status.INFRA_ERROR] * 3
        assert "only once" in verdicts[0][0].detail
        once.unlink()
        assert verdicts_of(pool, [Item("4", example(), (0,))]) == [((Status.CORRECT, 1.0),)]


def test_closing_answers_what_is_still_due(nothing_leaks):
    pool = open_pool("sleeps", wall_seconds=100.0)
    ticket = pool.submit([Item("4", example(), (0,))] * 5)
    time.sleep(0.05)
    pool.close()
    assert [v.status for (v,) in pool.collect(ticket)] == [Status.INFRA_ERROR] * 5
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit([])


def test_a_stop_request_kills_what_is_judged_and_leaves_other_batches_alone(nothing_leaks):
    with open_pool("sleeps", "good", "busy", wall_seconds=100.0, cpu_seconds=100.0) as pool:
        given_up = pool.submit([Item("4", example(), (0, 2, 1))] * 5)
        other = pool.submit([Item("4", example(), (1,))] * 5)
        time.sleep(0.3)
        start = time.monotonic()
        with pytest.raises(ScoringAbandoned, match="0 of 5 completions"):
            pool.collect(given_up, lambda: True)
        assert [v.reward for (v,) in pool.collect(other, lambda: False)] == [1.0] * 5
        assert time.monotonic() - start < 2.0
        assert {v.status for item in given_up.verdicts for v in item} == {Status.INFRA_ERROR}
        start = time.monotonic()
    assert time.monotonic() - start < 2.0


def test_progress_counts_items_and_is_told_seldom():
    progress = []
    with open_pool("good") as pool:
        pool.collect(pool.submit([Item("4", example(), (0, 0))] * 300), progress=lambda *now: progress.append(now))
        pool.collect(pool.submit([]), progress=lambda *now: progress.append(now))
    assert progress[-2:] == [(300, 300), (0, 0)]
    assert progress == sorted(set(progress[:-1])) + progress[-1:]


def test_a_row_added_later_is_loaded_when_it_is_needed():
    with open_pool("good") as pool:
        place = pool.add_row(row("Exact"))
        assert pool.add_row(row("Exact")) == place
        items = [Item("4", example(), (0, place)), Item("5", example(), (place,))]
        assert verdicts_of(pool, items) == [((Status.CORRECT, 1.0),) * 2, ((Status.WRONG, 0.0),)]


def test_a_row_that_does_not_load_is_refused_and_the_pool_goes_on():
    with open_pool("good") as pool:
        with pytest.raises(ValueError, match=r"\'Exakt\'"):
            pool.add_row(row("Exakt"))
        with pytest.raises(ValueError, match="Length has low 5 and high 4"):
            pool.add_row(row("Length", low=5, high=4))
        with pytest.raises(ValueError, match="at most 16777216 are sent"):
            pool.add_row(row("Regex", pattern="a" * frames.REQUEST_LIMIT))
        assert verdicts_of(pool, [Item("4", example(), (0, pool.add_row(row("Exact"))))]) == [
            ((Status.CORRECT, 1.0),) * 2
        ]


def test_two_batches_can_be_under_way_and_collected_in_any_order():
    with open_pool("good") as pool:
        first = pool.submit([Item("4", example(), (0,))] * 50)
        second = pool.submit([Item("5", example(), (0,))] * 50)
        assert [v.reward for (v,) in pool.collect(second)] == [0.0] * 50
        assert [v.reward for (v,) in pool.collect(first)] == [1.0] * 50
        assert pool.collect(pool.submit([])) == []


@pytest.mark.parametrize("text", ["", "\x00", "\ud800", "\u202e\u200b", "é" * 3, '"}\n{"token": 1}', "x" * 1_000_000])
def test_any_text_arrives_unchanged(text):
    with open_pool("good", workers=1) as pool:
        assert verdicts_of(pool, [Item(text, example(text), (0,))]) == [((Status.CORRECT, 1.0),)]


def test_what_is_too_large_to_send_is_forbidden():
    with open_pool("good", workers=1) as pool:
        assert verdicts_of(pool, [Item("x" * (17 << 20), example(), (0,))]) == [((Status.FORBIDDEN, None),)]


def test_an_example_that_is_no_json_is_refused_by_name():
    with open_pool("good", workers=1) as pool, pytest.raises(ValueError, match="the info of example 'odd'"):
        pool.submit([Item("4", example(id="odd", info={"when": object()}), (0,))])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import jax\nVERIFIERS = {}", "bad.py imports jax"),
        ("VERIFIERS = 5", "VERIFIERS has type int"),
        ("VERIFIERS = {'Exact': print}", "the verifier name 'Exact' is taken"),
        ("VERIFIERS = {'a': 5}", r"VERIFIERS\['a'\] has type int"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError"),
        ("x = 1\nboom", "NameError.*bad.py:2"),
    ],
)
def test_a_part_that_does_not_load_is_refused_with_its_place(source, message, nothing_leaks):
    with pytest.raises(ValueError, match=message):
        open_pool("Exact", parts=(PartSource("bad.py", source),))


def test_an_unknown_row_is_refused_with_the_nearest_name(nothing_leaks):
    with pytest.raises(ValueError, match=r"'Exakt'.*Did you mean 'Exact'"):
        open_pool("Exakt")


def test_workers_hold_no_secret_and_no_jax(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    part = PartSource(
        "look.py",
        """
import json, os, sys
from jrl.tasks.verdict import Status, Verdict
def look(completion, example):
    heavy = ("jax", "jaxlib", "flax", "optax", "grain", "tensorstore", "numpy", "http")
    modules = [m for m in sys.modules if m.split(".")[0] in heavy]
    fds = [fd for fd in os.listdir("/proc/self/fd") if "socket" in os.path.realpath("/proc/self/fd/" + fd)]
    said = [sorted(os.environ), len(fds), os.getsid(0) == os.getpid()]
    return Verdict(Status.CORRECT, float(len(modules)), json.dumps(said))
VERIFIERS = {"look": look}
""",
    )
    with open_pool("look", "Exact", parts=(part,)) as pool:
        ((verdict,),) = pool.collect(pool.submit([Item("4", example(), (0,))]))
        with open(f"/proc/{pool.template_pid}/environ") as file:
            environment = file.read()
        threads = psutil.Process(pool.template_pid).num_threads()
        with open(f"/proc/{pool.template_pid}/maps") as file:
            maps = file.read()
    assert verdict.reward == 0.0
    names, sockets, starts_session = json.loads(verdict.detail)
    assert (sockets, starts_session, threads) == (1, True, 1)
    assert "SECRET_TOKEN" not in names and "hush" not in environment
    assert "jaxlib" not in maps


@pytest.mark.slow
def test_a_thousand_deaths_leave_the_pool_as_it_was(nothing_leaks, trials):
    names = ["good", "exits", "segfaults", "aborts", "garbage", "floods", "closes", "forges"]
    with open_pool(*names) as pool:
        items = [Item("4", example(), (0, 1 + n % 7, 0)) for n in range(trials(1_000))]
        verdicts = verdicts_of(pool, items)
        assert len(pool.worker_pids()) == 2
    assert all(v[0] == v[2] == (Status.CORRECT, 1.0) and not v[1][0].scorable for v in verdicts)


@pytest.mark.slow
def test_verdicts_depend_on_no_other_item_in_twenty_orders(nothing_leaks, trials):
    """Half of the items are hostile, and most of those end their worker; the first orders are of all items, the others
    of a few."""
    draw, benign = random.Random(0), ("good", "draws", "says_true")
    hostile = (
        "exits",
        "segfaults",
        "aborts",
        "garbage",
        "floods",
        "closes",
        "forges",
        "raises",
        "says_nan",
        "recurses",
    )
    names = (*benign, *hostile)
    rows = [draw.choice(range(3) if n % 2 else range(3, len(names))) for n in range(trials(4_000))]
    items = [Item(draw.choice("45"), example(), (row,)) for row in rows]
    with open_pool(*names) as pool:
        expected = verdicts_of(pool, items)
    for (verdict,), place in zip(expected, rows):
        assert (verdict[1] is None) == (place >= 3), names[place]
    for turn in range(20):
        order = draw.sample(range(len(items)), len(items) if turn < 4 else 200)
        with open_pool(*names, workers=1 + turn % 3) as pool:
            assert verdicts_of(pool, [items[n] for n in order]) == [expected[n] for n in order], turn


@pytest.mark.slow
def test_hangs_each_end_in_time(nothing_leaks, trials):
    names = ["good", "sleeps", "busy", "ignores_signals", "stops_itself", "big_integer"]
    with open_pool(*names, cpu_seconds=0.2, wall_seconds=0.5) as pool:
        verdicts = verdicts_of(pool, [Item("4", example(), (0, 1 + n % 5, 0)) for n in range(trials(100, 1_000))])
    assert all([s for s, _ in v] == [Status.CORRECT, Status.CPU_LIMIT, Status.CORRECT] for v in verdicts)


@pytest.mark.slow
def test_two_hundred_thousand_items_leave_memory_and_descriptors_flat(nothing_leaks, trials):
    with open_pool("good") as pool:
        me = psutil.Process()
        for _ in range(10):
            pool.collect(pool.submit([Item("4", example(), (0,))] * 1000))
        memory, fds = me.memory_info().rss, me.num_fds()
        for _ in range(trials(200_000) // 1000):
            pool.collect(pool.submit([Item("4", example(), (0,))] * 1000))
        assert me.memory_info().rss - memory < 50 << 20
        assert me.num_fds() == fds
