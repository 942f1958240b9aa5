"""Whose processor time is whose, which runs are thrown away, and what is left of a row."""

from __future__ import annotations

import pytest

from benchmarks import quiet
from benchmarks.quiet import Usage


def process(proc, number, parent, name, *ticks):
    """Writes /proc/PID/stat: number, name, state, parent, nine fields, then user, system and ended children's time."""
    (proc / str(number)).mkdir()
    text = " ".join(map(str, [number, f"({name})", "S", parent, *range(9), *ticks, 20, 0]))
    (proc / str(number) / "stat").write_text(text + "\n")


def test_our_time_is_that_of_the_root_and_all_below_it(tmp_path):
    process(tmp_path, 1, 0, "init", 1000, 0, 0, 0)
    process(tmp_path, 10, 1, "command", 1, 2, 3, 4)
    process(tmp_path, 11, 10, "a) S 1 (b", 10, 20, 0, 0)  # a name may hold anything
    process(tmp_path, 12, 11, "grandchild", 100, 0, 0, 0)
    process(tmp_path, 13, 1, "somebody", 500, 500, 0, 0)
    assert quiet.own(10, quiet.stats(tmp_path)) == 10 + 30 + 100


def test_busy_time_counts_other_guests_and_no_waiting(tmp_path):
    # user nice system idle iowait irq softirq steal
    (tmp_path / "stat").write_text("cpu  10 20 30 4000 5000 1 2 4 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert quiet.usage(tmp_path).busy == 10 + 20 + 30 + 1 + 2 + 4


@pytest.mark.parametrize("others, disturbed", [(0, False), (10, False), (11, True)])
def test_a_run_is_disturbed_where_others_used_too_much(others, disturbed):
    # 1 second of 2 processors at 100 ticks: 0.02 * 200 + 6 = 10 ticks may be others'
    before, after = Usage(busy=1000, own=500), Usage(busy=1000 + 150 + others, own=500 + 150)
    assert quiet.disturbed(before, after, 1.0, 2, 100) is disturbed


def test_calls_are_made_in_turn_until_each_has_its_runs():
    order, disturbed = [], {("b", 1)}

    def call(name):
        order.append(name)
        return float(order.count(name))

    def watch(call):
        seconds = call()
        return seconds, (order[-1], seconds) in disturbed

    a, b = quiet.in_turn([lambda: call("a"), lambda: call("b")], repeats=3, watch=watch)
    assert order == ["a", "b", "a", "b", "a", "b", "b"]
    assert a == ([1.0, 2.0, 3.0], 0)
    assert b == ([2.0, 3.0, 4.0], 1)
    assert a.median == 2.0


def test_a_call_that_is_always_disturbed_is_given_up():
    (runs,) = quiet.in_turn([lambda: 1.0], repeats=3, most_disturbed=4, watch=lambda call: (call(), True))
    assert runs == ([], 5)


def test_on_a_machine_in_use_disturbed_runs_count_and_are_counted():
    (runs,) = quiet.in_turn([lambda: 1.0], repeats=3, keep_disturbed=True, watch=lambda call: (call(), True))
    assert runs == ([1.0, 1.0, 1.0], 3)
