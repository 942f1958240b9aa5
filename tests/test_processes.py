"""What processes exchange and agree on, with a table in memory in place of JAX's coordination service."""

import argparse
import contextlib
import dataclasses
import os
import random
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.clusters import cloud_tpu_cluster
from mutated_config import leaves, mutations
from processes_in_threads import Table, together

from jrl import cli
from jrl.device import joining, watchdog
from jrl.device import processes as processes_module
from jrl.device.processes import (
    LATE_SECONDS,
    LATE_STEPS,
    ONE,
    Cluster,
    HostLost,
    OtherProcessFailed,
    Processes,
    ProcessesDisagree,
    ProcessStatus,
    StoreLost,
    decode,
    encode,
)
from jrl.device.watchdog import LOST_SECONDS, Beats, lost_message
from jrl.learning.layout import Learner
from jrl.resolve import load_config
from jrl.rollout.scoring import HostScores, Scorer, Scoring, ScoringStopped, scores_of_all
from jrl.run import agreement, multihost
from jrl.run.agreement import check_covered, facts, journal_name, other_journals, source_digest
from jrl.run.checks import check_routes_sent
from jrl.run.launch import exit_code, free_port
from jrl.run.multihost import cluster_of
from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import VERIFIERS, merge
from jrl.tasks.verifiers.exact import Exact
from jrl.tasks.verifiers.journal import Journal


def test_arrays_and_json_come_back_as_they_were():
    value = {
        "a": np.arange(6, dtype=np.int8).reshape(2, 3),
        "b": [1.5, None, "two\nlines", {"c": np.float32(0.1)}],
        "nothing": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False]),
    }
    back = decode(encode(value))
    np.testing.assert_array_equal(back["a"], value["a"])
    assert back["a"].dtype == np.int8 and back["flags"].dtype == bool and back["nothing"].shape == (0, 4)
    assert back["b"][:3] == value["b"][:3] and back["b"][3]["c"] == np.float32(0.1)


def test_an_array_that_would_come_back_as_another_is_not_sent():
    with pytest.raises(TypeError, match="arrays of bfloat16 cannot be sent"):
        encode(np.zeros(2, jnp.bfloat16))


def test_every_process_gets_the_values_of_all_in_their_order_and_leaves_little_behind():
    def act(processes):
        for step in range(20):
            assert processes.exchange(f"step {step}", [step, processes.index]) == [[step, i] for i in range(3)]
        return processes.any("stop", processes.index == 2), processes.from_writer("steps", [processes.index])

    results, table = together(3, act)
    assert results == [(True, [0])] * 3
    assert len(table.list("exchange")) <= 6  # of 22 exchanges


def test_every_decision_is_the_same_in_all_processes_whoever_asked_for_it(trials):
    """Whether to stop, which one process may have been asked to, and what the writer alone knows."""
    draw = random.Random(0)
    for _ in range(trials(40, 200)):
        count, steps = draw.randrange(2, 6), draw.randrange(1, 12)
        asked = [[draw.random() < 0.15 for _ in range(count)] for _ in range(steps)]
        known = [[draw.randrange(9) for _ in range(count)] for _ in range(steps)]

        def act(processes, asked=asked, known=known):
            decided = []
            for step, (stop, saved) in enumerate(zip(asked, known)):
                decided.append((processes.from_writer(f"saved {step}", saved[processes.index]),
                                processes.any(f"stop {step}", stop[processes.index])))  # fmt: skip
                if decided[-1][1]:
                    break
            return decided

        last = next((step for step, stop in enumerate(asked) if any(stop)), steps - 1)
        expected = [(saved[0], any(stop)) for saved, stop in zip(known, asked)][: last + 1]
        assert together(count, act)[0] == [expected] * count


def test_one_process_exchanges_with_itself():
    assert ONE.exchange("here", 5) == [5] and ONE.any("stop", True) and not ONE.any("stop", False)
    assert ONE.share(7) == range(7) and ONE.writer and ONE.failure() is None
    ONE.agree("nothing", {"a": 1})
    ONE.barrier("here")


def test_processes_at_different_places_are_an_error_that_names_both():
    results, _ = together(2, lambda p: p.exchange(["save 5", "scores"][p.index], 1))
    for error in results:
        assert isinstance(error, RuntimeError)
        assert "process 1 (machine-1)" in str(error) and "save 5" in str(error) and "scores" in str(error)


def test_a_difference_names_process_field_and_both_values():
    def act(processes):
        processes.agree("configuration", {"rate": "0.1" if processes.index != 1 else "0.2", "seed": 3})

    for error in together(3, act)[0]:
        assert isinstance(error, ProcessesDisagree)
        for part in ("rate", "0.1", "0.2", "process 0 (machine-0)", "process 1 (machine-1)"):
            assert part in str(error)
        assert "seed" not in str(error) and "process 2" not in str(error)


def test_a_field_that_one_process_does_not_have_is_a_difference():
    results, _ = together(2, lambda p: p.agree("plugins", {"plugin a.py": "12"} if p.index else {}))
    assert all("plugin a.py: not there in process 0" in str(error) for error in results)


def test_any_fact_that_one_process_has_otherwise_stops_all_by_its_name(trials):
    """A setting of a configuration, or something else that must be equal, differs in one of two to five processes."""
    draw = random.Random(0)
    config, parts = load_config("configs/rlhf-tiny.gin", [])
    known = facts(config, parts, Processes(0, 2))
    others = [name for name in known if not name.startswith("configuration ")]
    changed = [(leaf, one) for leaf in leaves(config) for one, _ in mutations(config, leaf)]
    for _ in range(trials(60, 500)):
        if draw.random() < 0.7:
            leaf, other = draw.choice(changed)
            name, theirs = f"configuration {leaf.name}", facts(other, parts, Processes(0, 2))
        else:
            name = draw.choice(others)
            theirs = {each: value for each, value in known.items() if each != name}
            theirs |= draw.choice([{}, {name: f"another {known[name]}"}])
        count = draw.randrange(2, 6)
        odd = draw.randrange(count)
        every = [theirs if i == odd else known for i in range(count)]
        for error in together(count, lambda p, every=every: p.agree("facts", every[p.index]))[0]:
            assert isinstance(error, ProcessesDisagree), (name, error)
            assert name in str(error) and f"process {odd or 1} (machine-{odd or 1})" in str(error), str(error)


def test_who_waits_for_a_process_that_has_failed_raises_its_message_and_code():
    def act(processes):
        if processes.index == 1:
            processes.fail("the disk is full", 4)
            return None
        return processes.exchange("scores", 0)

    (error, _), _ = together(2, act)
    assert isinstance(error, OtherProcessFailed) and error.code == 4
    assert "process 1 (machine-1)" in str(error) and "the disk is full" in str(error)


@pytest.mark.parametrize(("rows", "count"), [(16, 2), (5, 3), (2, 4)])
def test_the_shares_of_all_processes_are_all_rows_once(rows, count):
    shares = [Processes(i, count).share(rows) for i in range(count)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_any_number_of_rows_is_shared_out_once_among_any_number_of_processes(trials):
    draw = random.Random(0)
    for _ in range(trials(60, 2_000)):
        rows, count = draw.randrange(200), draw.randrange(1, 40)
        shares = [Processes(i, count).share(rows) for i in range(count)]
        assert [row for share in shares for row in share] == list(range(rows))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_scores_of_all_processes_are_joined_in_the_order_of_the_processes():
    def scores(index):
        rows = [2, 1][index]
        filled = lambda value, dtype: np.full(rows, value, dtype)
        return HostScores(
            reward=filled(index + 0.5, np.float32),
            valid=filled(index == 0, bool),
            verdict=filled([Status.CORRECT, Status.FORBIDDEN][index], np.int8),
            outcome=filled(index, np.float32),
            components={["Regex", "Length"][index]: filled(1, np.float32)},
            details=[["", ""], ["late"]][index],
            spans=[[((3, 0.5),), ()], [((1, 1.0), (2, 2.0))]][index],
        )

    for found in together(2, lambda p: scores_of_all(scores(p.index), p))[0]:
        np.testing.assert_array_equal(found.reward, np.float32([0.5, 0.5, 1.5]))
        np.testing.assert_array_equal(found.valid, [True, True, False])
        np.testing.assert_array_equal(found.verdict, [Status.CORRECT, Status.CORRECT, Status.FORBIDDEN])
        np.testing.assert_array_equal(found.components["Regex"], np.float32([1, 1, np.nan]))
        np.testing.assert_array_equal(found.components["Length"], np.float32([np.nan, np.nan, 1]))
        assert found.details == ["", "", "late"]
        assert found.counts["CORRECT"] == 2 and found.counts["FORBIDDEN"] == 1
        assert found.spans == [((3, 0.5),), (), ((1, 1.0), (2, 2.0))]


def test_a_process_whose_beat_stands_still_is_lost_and_one_that_is_slow_is_not():
    now = [0.0]
    beats = Beats(3, clock=lambda: now[0])
    beat = lambda number, place: encode({"number": number, "place": place})
    for second in range(1, 30):
        now[0] = float(second)
        beats.hear({"beat/0": beat(second, "step 4"), "beat/1": beat(min(second, 5), "step 3, scoring"),
                    "beat/2": beat(second // 5, "step 4")})  # fmt: skip
        assert beats.lost(0) == ([1] if second - 5 > LOST_SECONDS else [])
    processes = Processes(0, 3, Table(), ("process 0", "process 1 (b)", "process 2"))
    assert lost_message(processes, beats, [1, 2]).startswith("process 1 (b), process 2 are gone or do not answer. ")
    message = lost_message(processes, beats, [1])
    assert "process 1 (b) is gone or does not answer" in message and "step 3, scoring, heard from 24 s ago" in message


def test_no_process_that_is_slow_is_lost_and_each_that_ends_is(trials):
    """Beats of two to six processes over ten minutes, seconds apart. One of them ends, in every second trial."""
    draw = random.Random(0)
    beat = lambda number: encode({"number": number, "place": "step 4"})
    now = [0.0]
    for trial in range(trials(20, 200)):
        now[0], count = 0.0, draw.randrange(2, 7)
        beats, mine = Beats(count, clock=lambda: now[0]), draw.randrange(count)
        slowest = [draw.uniform(1, LOST_SECONDS - 1) for _ in range(count)]
        ending = draw.choice([i for i in range(count) if i != mine]) if trial % 2 else None
        ends, numbers, due, last = draw.uniform(60, 500), [0] * count, [0.0] * count, [0.0] * count
        while now[0] < 600:
            now[0] += 0.5
            for i in range(count):
                if now[0] >= due[i] and not (i == ending and now[0] > ends):
                    numbers[i], last[i] = numbers[i] + 1, now[0]
                    due[i] = now[0] + draw.uniform(0.5, slowest[i])
            beats.hear({f"beat/{i}": beat(number) for i, number in enumerate(numbers) if number})
            silent = ending is not None and now[0] - last[ending] > LOST_SECONDS
            assert beats.lost(mine) == ([ending] if silent else []), (trial, now[0])
        assert (ending is None) or beats.lost(mine) == [ending]


def test_an_exchange_without_the_service_names_process_0():
    class Gone(Table):
        def wait(self, key, seconds):
            raise StoreLost("the coordination service of process 0 does not answer: UNAVAILABLE")

        def list(self, folder):
            return self.wait(folder, 0)

    alone = Processes(1, 2, Gone(), ("process 0 (a)", "process 1 (b)"))
    for call in (lambda: alone.exchange("step", None), alone.check):
        with pytest.raises(
            HostLost, match=r"^process 0 \(a\) is gone or does not answer\. Start all .*\n.*UNAVAILABLE$"
        ):
            call()


def test_process_0_does_not_say_of_itself_that_it_is_gone(monkeypatch):
    said, left, act = [], [], []
    monkeypatch.setattr(watchdog, "leave", left.append)
    monkeypatch.setattr(watchdog, "at_abort", lambda aborted: act.append(aborted) or contextlib.nullcontext())
    for index in (0, 1):
        with watchdog.watching(Processes(index, 2, Table(), ("process 0 (a)", "process 1 (b)")), said.append):
            act[-1]()
    assert left == [76, 76]
    assert said[0].startswith("this process was aborted, and no other one is missing")
    assert "start each once" in said[0] and "is gone" not in said[0]
    assert said[1].startswith("process 0 (a) is gone or does not answer")


def test_process_0_that_was_paused_loses_nobody():
    """Nobody was heard from meanwhile: its own clock went on without it."""
    now = [0.0]
    beats = [Beats(2, clock=lambda: now[0]) for _ in range(2)]
    said = {f"beat/{i}": encode({"number": 1, "place": "step 4"}) for i in range(2)}
    for each in beats:
        each.hear(said)
    now[0] = LOST_SECONDS + 1
    assert beats[0].lost(0) == [] and beats[1].lost(1) == [0]
    beats[0].hear(said)  # all were paused, and process 1 has not beaten since
    assert beats[0].lost(0) == []
    for _ in range(int(LOST_SECONDS) + 1):
        now[0] += 1
        beats[0].hear(said)
    assert beats[0].lost(0) == [1]


def test_process_0_says_at_an_abort_who_is_lost(monkeypatch):
    said, left, act = [], [], []
    monkeypatch.setattr(watchdog, "leave", left.append)
    monkeypatch.setattr(watchdog, "at_abort", lambda aborted: act.append(aborted) or contextlib.nullcontext())
    monkeypatch.setattr(watchdog.Beats, "lost", lambda beats, mine: [1])
    with watchdog.watching(Processes(0, 2, Table(), ("process 0 (a)", "process 1 (b)")), said.append):
        act[0]()
    assert left[0] == 76 and said[0].startswith("process 1 (b) is gone or does not answer")


def test_the_coordination_service_is_lost_where_it_does_not_answer():
    def gone(*arguments):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Failed to send RPC\nmore")

    store = joining._ServiceStore(
        types.SimpleNamespace(blocking_key_value_get_bytes=gone, key_value_dir_get_bytes=gone)
    )
    for call in (lambda: store.wait("key", 1), lambda: store.list("folder")):
        with pytest.raises(StoreLost, match=r"does not answer: UNAVAILABLE: Failed to send RPC$"):
            call()


def test_who_has_ended_is_found_without_waiting_for_it():
    def act(processes):
        processes.check()
        processes.barrier("both")
        if processes.index:
            processes.fail("the disk is full", 4)
        processes.barrier("told")
        processes.check()

    (first, second), _ = together(2, act)
    assert isinstance(first, OtherProcessFailed) and first.code == 4 and second is None


def test_a_service_that_does_not_answer_means_that_process_0_is_lost():
    now = [0.0]
    beats = Beats(2, clock=lambda: now[0])
    now[0] = LOST_SECONDS + 1
    assert beats.lost(1) == [0]


def test_a_step_is_late_by_the_median_of_the_steps_before(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(processes_module.time, "monotonic", lambda: now[0])
    status = ProcessStatus()
    for step, second in enumerate([100.0, 110.0, 120.0, 170.0], start=1):  # the first one compiles
        now[0] = second
        assert status.overdue() is None
        status.ended(step)
    now[0] = 170.0 + LATE_STEPS * 10 + LATE_SECONDS  # the median of 10, 10 and 50
    assert status.overdue() is None
    now[0] += 1
    assert status.overdue() == LATE_STEPS * 10 + LATE_SECONDS + 1


def test_a_step_of_any_length_is_late_after_three_medians_and_half_a_minute(monkeypatch, trials):
    draw, now = random.Random(0), [0.0]
    monkeypatch.setattr(processes_module.time, "monotonic", lambda: now[0])
    for _ in range(trials(20, 200)):
        status, median = ProcessStatus(), 10 ** draw.uniform(-2, 3)
        for step in range(1, draw.randrange(3, 31)):
            now[0] += median * (1 if step > 1 else 100)  # the first one compiles
            status.ended(step)
        ended, limit = now[0], LATE_STEPS * median + LATE_SECONDS
        now[0] = ended + 0.999 * limit
        assert status.overdue() is None
        now[0] = ended + 1.001 * limit
        assert status.overdue() == pytest.approx(1.001 * limit)


def test_a_step_that_takes_long_is_told_once_and_ends_no_process(monkeypatch, trials):
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.005)
    monkeypatch.setattr(processes_module, "LATE_SECONDS", 0.02)
    left, draw = [], random.Random(0)
    monkeypatch.setattr(watchdog, "leave", left.append)
    for _ in range(trials(1, 20)):
        table, said, late = Table(), [], threading.Event()
        hosts = [Processes(i, 2, table, ("process 0 (a)", "process 1 (b)")) for i in range(2)]
        steps = draw.randrange(3, 7)

        def say(text, said=said, late=late, hosts=hosts, steps=steps):
            if hosts[0].status.step == steps:  # an earlier step may be late on a busy machine
                said.append(text)
                late.set()

        with contextlib.ExitStack() as stack:
            for host in hosts:
                stack.enter_context(watchdog.watching(host, say))
            for step in range(1, steps + 1):
                time.sleep(draw.uniform(0.001, 0.01))
                for host in hosts:
                    host.status.ended(step)
            hosts[1].status.begin("scoring")
            assert late.wait(60)
            time.sleep(0.1)
        assert len(said) == 1 and "no step has ended for" in said[0] and "process 1 (b)" in said[0]
    assert left == []


def test_an_abort_of_another_thread_ends_the_process_with_a_code_of_ours():
    code = (
        "import os, threading, time\n"
        "from jrl.device.watchdog import at_abort, leave\n"
        "with at_abort(lambda: leave(76)):\n"
        "    threading.Thread(target=os.abort).start()\n"
        "    time.sleep(20)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 76


def test_process_0_leaves_when_all_have_read_why_the_run_ends(monkeypatch):
    """It holds the coordination service, without which JAX aborts the others."""
    monkeypatch.setattr(multihost, "TOLD_SECONDS", 0)
    left = []

    def act(processes):
        try:
            if processes.writer:
                raise ValueError("the folder is held")
            processes.exchange("folder", None)
        except (ValueError, OtherProcessFailed) as error:
            if not processes.writer:
                time.sleep(0.3)
            multihost.tell(processes, error, lambda error: (str(error), 2))
            left.append((processes.index, processes.ended_by.code, str(processes.ended_by)))

    assert together(3, act)[0] == [None] * 3
    why = "process 0 (machine-0) has ended: the folder is held"
    assert sorted(left[:2]) == [(1, 2, why), (2, 2, why)] and left[2] == (0, 2, "the folder is held")


OF_SERVICE = jax.errors.JaxRuntimeError, "UNAVAILABLE: Socket closed"
OF_COLLECTIVE = ValueError, "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:28586"


@pytest.mark.parametrize(("kind", "text"), [OF_SERVICE, OF_COLLECTIVE], ids=["service", "collective"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_that_a_device_or_the_service_began_waits_for_the_watchdog_to_name_who_is_gone(
    monkeypatch, wrapped, kind, text
):
    """Orbax makes a TimeoutError of it, and a save that fails another error; the first to be said would be that."""
    slept = []
    monkeypatch.setattr(multihost, "time", types.SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))

    def failed():
        try:
            try:
                raise kind(text)
            except kind as error:
                raise TimeoutError("waiting at a barrier") from error
        except TimeoutError as error:
            return OSError(f"step 5 could not be saved: {error}").with_traceback(None), error

    saved, cause = failed()
    saved.__cause__ = cause if wrapped else None
    processes = Processes(1, 2, Table())
    multihost.tell(processes, saved, lambda error: (str(error), 4))
    waits = multihost.LOST_SECONDS + 3 * multihost.BEAT_SECONDS
    assert slept == [*[waits] * wrapped, multihost.TOLD_SECONDS]


def test_a_full_disk_is_told_at_once(monkeypatch):
    """TensorStore's error has a status of absl's, as a collective's has whose peer is gone."""
    slept = []
    monkeypatch.setattr(multihost, "time", types.SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    full = "RESOURCE_EXHAUSTED: Failed writing: 'x': No space left on device [os_error_code='28']"
    saved = OSError(f"step 5 could not be saved: {full}")
    saved.__cause__ = ValueError(full)
    multihost.tell(Processes(1, 2, Table()), saved, lambda error: (str(error), 4))
    assert slept == [multihost.TOLD_SECONDS]


def test_process_0_does_not_wait_forever_for_a_process_that_is_gone(monkeypatch):
    monkeypatch.setattr(multihost, "TOLD_SECONDS", 0)
    monkeypatch.setattr(multihost, "ALL_SECONDS", 0.2)
    began = time.monotonic()
    multihost.tell(Processes(0, 2, Table()), ValueError("full"), lambda error: (str(error), 4))
    assert 0.2 <= time.monotonic() - began < 5


def test_an_abort_after_another_process_has_failed_ends_with_that_ones_code():
    code = (
        "import os, sys, threading, time\n"
        "from processes_in_threads import Table\n"
        "from jrl.device.processes import Processes\n"
        "from jrl.device.watchdog import watching\n"
        "table = Table()\n"
        "processes = Processes(1, 2, table)\n"
        "Processes(0, 2, table).fail('the folder is held', 2)\n"
        "with watching(processes, lambda text: print(text, flush=True)):\n"
        "    processes.failure()\n"
        "    threading.Thread(target=os.abort).start()\n"
        "    time.sleep(20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path(__file__).parent, capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"process 0 has ended: the folder is held\n"), done.stderr


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([75, 75], 75), ([76, -9], 76), ([2, 76], 2), ([76, 4], 4), ([0, -6], 76), ([3, 3], 3)],
)
def test_the_exit_code_of_all_processes(codes, code):
    assert exit_code(codes) == code


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("host:1", 2, None), "--process-index"),
        (("host:1", 2, 2), "from 0 to 1"),
        (("host", 2, 1), "HOST:PORT"),
        ((None, 2, 0), "--coordinator"),
        (("localhost:0", 2, 1), "from 1 to 65535"),
        (("localhost:65536", 2, 1), "from 1 to 65535"),
        (("localhost:¹", 2, 1), "HOST:PORT"),
        (("no such host:8476", 2, 1), "knows no host 'no such host'"),
        (("a" * 70 + ".b:8476", 2, 1), "knows no host"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments, part):
    with pytest.raises(ValueError, match=part):
        cluster_of(*arguments)


def test_addresses_of_both_families_are_taken():
    assert cluster_of("127.0.0.1:8476", 2, 1) == Cluster("127.0.0.1:8476", 2, 1)
    assert cluster_of("[::1]:65535", 2, 0) == Cluster("[::1]:65535", 2, 0)
    assert joining.host_and_port("[::1]:65535") == ("::1", 65535)


def test_a_name_server_that_does_not_answer_is_waited_for(monkeypatch):
    def fail(*arguments, **options):
        raise socket.gaierror(socket.EAI_AGAIN, "later")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert cluster_of("host:8476", 2, 1) == Cluster("host:8476", 2, 1)
    assert not joining.wait_for_listener("host:8476", time.monotonic() + 0.1)


def test_an_address_that_nobody_answers_is_left_before_a_native_client_starts(tmp_path):
    """JAX's client would abort with a stack trace."""
    environment = {**os.environ, "JRL_START_SECONDS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "jrl.cli", "train", "tiny", "--run", str(tmp_path / "run"), "--coordinator",
         f"127.0.0.1:{free_port()}", "--process-count", "2", "--process-index", "1"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 76, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "no run of 2 processes began at 127.0.0.1:" in line and "in 2 s" in line
    assert not (tmp_path / "run").exists()


def test_a_process_0_that_starts_later_is_waited_for():
    port = free_port()
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def listen():
        listening.bind(("127.0.0.1", port))
        listening.listen()

    later = threading.Timer(0.3, listen)
    later.start()
    assert joining.wait_for_listener(f"127.0.0.1:{port}", time.monotonic() + 30)
    later.join()
    listening.close()


@pytest.mark.parametrize("hosts", ["t1v-0", "t1v-0,t1v-1,t1v-2"])
def test_the_hosts_of_a_tpu_slice_are_found_where_there_are_several(monkeypatch, hosts):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    for name, value in {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}.items():
        monkeypatch.setenv(name, value)  # or JAX asks a server that is not here
    assert cluster_of(None, None, None) == (Cluster(None, 3, 0) if "," in hosts else None)


def test_elsewhere_a_process_without_flags_is_alone():
    assert cluster_of(None, None, None) is None


def test_routes_are_not_sent_from_processes_that_only_sample():
    replayed = types.SimpleNamespace(stages=[types.SimpleNamespace(learner=Learner(routes="replayed"))])
    check_routes_sent(replayed, mesh_of(0, 1), 2)
    check_routes_sent(types.SimpleNamespace(stages=[types.SimpleNamespace(learner=Learner())]), mesh_of(0, 0), 2)
    with pytest.raises(ValueError, match="give every process devices of Config"):
        check_routes_sent(replayed, mesh_of(0, 0), 2)


@dataclasses.dataclass(eq=False)
class OneAxis:
    """What `check_covered` reads of a mesh."""

    devices: np.ndarray
    size: int
    shape: dict[str, int]


def test_a_folder_that_another_does_not_see_is_the_writers(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "SEEN_SECONDS", 0.2)
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "lock").write_text("held by process 0")
    for error in together(2, lambda p: agreement.check_shared_folder(tmp_path / "ab"[p.index], p))[0]:
        assert isinstance(error, ProcessesDisagree)
        assert f"process 1 (machine-1) does not see {tmp_path / 'a'} of process 0 (machine-0)" in str(error)


def mesh_of(*processes):
    """Returns a mesh whose devices are of these processes."""
    devices = np.array([types.SimpleNamespace(process_index=index) for index in processes], object)
    return OneAxis(devices, len(processes), {"data": len(processes), "fsdp": 1})


def test_every_process_has_a_device_of_some_mesh_and_process_0_learns(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 6)
    three = Processes(0, 3, Table(), ("process 0 (a)", "process 1 (b)", "process 2 (c)"))
    check_covered(mesh_of(0, 0, 1, 1, 2, 2), None, three)
    check_covered(mesh_of(0, 0, 1), mesh_of(2, 2, 1), three)
    with pytest.raises(ValueError, match=r"Config.mesh {'data': 3} take 3 of 6 devices, and none of process 2 \(c\)"):
        check_covered(mesh_of(0, 0, 1), None, three)
    with pytest.raises(ValueError, match=r"Config.mesh \(one device\) take 1 of 6 devices, and none of process 1"):
        check_covered(mesh_of(0), None, three)
    with pytest.raises(ValueError, match=r"Config.sampler_mesh {'data': 2} take 4 of 6 .* none of process 1 \(b\)"):
        check_covered(mesh_of(0, 0), mesh_of(2, 2), three)
    with pytest.raises(ValueError, match=r"process 0 \(a\), which writes .* has no device of Config.mesh"):
        check_covered(mesh_of(1, 1), mesh_of(0, 2), three)
    with pytest.raises(ValueError, match=r"none of process 0 \(a\)"):
        check_covered(mesh_of(1, 1), mesh_of(2, 2), three)


def test_journals_of_other_processes_are_found_also_by_fewer(tmp_path):
    for name in ("journal.jsonl", "journal-1.jsonl", "journal-2.jsonl", "metrics.jsonl"):
        (tmp_path / name).touch()
    assert journal_name(0) == "journal.jsonl"
    assert [path.name for path in other_journals(tmp_path, 1)] == ["journal-2.jsonl", "journal.jsonl"]


def test_the_source_digest_sees_a_changed_line_and_a_moved_file(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    first = source_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    second = source_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, source_digest(tmp_path)}) == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends the children of a process that dies")
def test_processes_are_asked_to_stop_when_what_started_them_is_killed():
    code = (
        "import subprocess, sys\n"
        "from jrl.run.launch import stop_with_parent\n"
        "child = [sys.executable, '-c', 'import signal; signal.sigwait([signal.SIGTERM]); print(1, flush=True)']\n"
        "subprocess.Popen(child, preexec_fn=lambda: (signals(), stop_with_parent()))\n"
        "print(0, flush=True)\n"
        "input()\n"
    )
    blocked = "import signal\nsignals = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    launcher = subprocess.Popen([sys.executable, "-c", blocked + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout.readline() == b"0\n"
    launcher.kill()
    assert launcher.stdout.read() == b"1\n"  # to its end: the child has ended too
    launcher.communicate()


class Judged:
    """A pool that has judged already."""

    def __init__(self, verdicts):
        self.verdicts, self.counts = verdicts, {"workers_started": 2}

    def submit(self, items):
        assert len(items) == len(self.verdicts)

    def collect(self, *_):
        return [(verdict,) for verdict in self.verdicts]

    def close(self):
        pass


def test_the_share_of_lost_rows_is_of_all_processes(tmp_path):
    """Process 1 loses two of its four rows: two of eight, and half of its own."""
    good, bad = Verdict(Status.CORRECT, 1.0), Verdict(Status.VERIFIER_ERROR, None, "on purpose")

    def lost(processes, limit):
        config = Scoring(verifiers=(Exact(),), stop_above_verifier_errors=limit)
        pool = Judged([good] * 4 if processes.writer else [good, bad, bad, good])
        path = tmp_path / f"{limit}-{processes.index}.jsonl"
        scorer = Scorer(config, merge(VERIFIERS), pool, Journal(path))
        examples = [Example("e", (Message("user", "2 + 2?"),), answer="4")] * 4
        keys = [((7, 9), 4 * processes.index + row) for row in range(4)]
        try:
            return int((~scorer.collect(scorer.submit(["4"] * 4, examples, keys), processes=processes).valid).sum())
        finally:
            scorer.close()

    some, _ = together(2, lambda processes: lost(processes, 0.25))
    assert some == [0, 2]
    many, _ = together(2, lambda processes: lost(processes, 0.2))
    for error in many:
        assert isinstance(error, ScoringStopped)
        assert "2 of 8 completions (25%)" in str(error) and "Exact (2): on purpose" in str(error)
    assert (tmp_path / "0.2-1.jsonl").read_bytes() == b"" != (tmp_path / "0.25-1.jsonl").read_bytes()


def test_what_another_process_said_is_repeated_as_it_is(capsys):
    """Also where its error was unforeseen: that traceback is in its own log."""

    def ends(args):
        raise OtherProcessFailed("process 1 has ended: Unexpected internal error: KeyError: 'x'", 1)

    assert cli.guarded(ends, argparse.Namespace(command="eval", traceback=False)) == 1
    assert capsys.readouterr().err == "jrl: process 1 has ended: Unexpected internal error: KeyError: 'x'\n"
