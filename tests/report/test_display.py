from __future__ import annotations

import io
import itertools
import logging

import pytest

from jrl.run.report.display import open_display, sample_lines
from jrl.run.report.text import duration, printable, sparkline


def rows(count: int, phase: str = "rl"):
    for step in range(1, count + 1):
        yield {"step": step, "phase": phase, "reward/mean": step / count, "policy/entropy": 1.5, "loss": float("nan")}


def ticking():
    """A clock that moves one second whenever it is read."""
    counter = itertools.count()
    return lambda: float(next(counter))


def test_without_a_terminal_there_are_plain_lines_and_no_escapes():
    stream = io.StringIO()
    display = open_display(80, stream, clock=ticking())
    for row in rows(80):
        display.phase("sampling")
        display.step(row)
    display.note("saved\nand verified")
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines.count("sampling ...") == 1
    assert "step 2/80  rl  reward 0.025  loss nan  entropy 1.500  left 1 min 18 s" in lines
    assert sum(line.startswith("step") for line in lines) == 41
    assert lines[-3].startswith("step 80/80") and lines[-2:] == ["saved", "and verified"]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_panel_that_is_given_back():
    stream = io.StringIO()
    display = open_display(10, stream, live=True, clock=ticking())
    for row in rows(10):
        display.phase("sampling")
        display.step(row)
    display.close()
    display.close()
    text = stream.getvalue()
    assert "step 10/10" in text and "[########################]" in text and "▁" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_model_text_reaches_no_terminal_as_commands():
    for live in (False, True):
        stream = io.StringIO()
        display = open_display(1, stream, live=live)
        quiet = len(stream.getvalue())
        display.sample("a\x1b]0;title\x07\nb", "\x1b[2J\x9b31m\u202eevil\r[red]x[/red] \ud800", 0.5)
        text = stream.getvalue()[quiet:]
        assert "\\x1b]0;title\\x07\\nb" in text
        assert "\\x1b[2J\\x9b31m\\u202eevil\\x0d[red]x[/red] \\ud800  [reward 0.5]" in text
        assert not {"\x07", "\x9b", "\u202e", "\r\n"} & set(text) and "\x1b[2J\x9b" not in text
        display.close()


def test_printable_bounds_and_escapes():
    assert printable("plain é 汉 🙂 a b") == "plain é 汉 🙂 a b"
    assert printable("x" * 1000, limit=10) == "xxxxxxxxxx ... (990 more characters)"
    assert printable("\x00\x7f\u2028\U000e0041\ue000") == "\\x00\\x7f\\u2028\\U000e0041\\ue000"
    assert printable("") == ""


def test_a_row_that_was_not_scored_says_so():
    assert sample_lines("p", "c", None)[1].endswith("[not scored]")
    assert sample_lines("p", "c", float("nan"))[1].endswith("[not scored]")


def test_a_narrow_encoding_gets_escapes_not_a_crash():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    for live in (False, True):
        display = open_display(2, stream, live=live)
        display.sample("é", "汉", 1.0)
        for row in rows(2):
            display.step(row)
        display.close()
    stream.flush()
    assert b"\\xe9" in raw.getvalue() and b"step 2/2" in raw.getvalue()


@pytest.mark.parametrize("live", [False, True])
def test_a_stream_that_breaks_ends_the_display_and_not_the_run(live, caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("nobody reads")

    with caplog.at_level(logging.WARNING):
        display = open_display(3, Broken(), live=live)
        for row in rows(3):
            display.phase("sampling")
            display.step(row)
            display.note("note")
        display.close()
    assert caplog.text.count("the display is gone (BrokenPipeError") == 1


def test_what_may_take_long_is_shown_at_once():
    stream = io.StringIO()
    display = open_display(40, stream, live=True, clock=lambda: 0.0)
    for phase in ("sampling", "compiling update", "waiting for the compiler", "update"):
        display.phase(phase)
    shown = stream.getvalue()
    assert "compiling update" in shown and "waiting for the compiler" in shown and "phase update" not in shown
    display.close()


def test_time_left_forgets_the_phase_before():
    stream = io.StringIO()
    now = [0.0]
    display = open_display(40, stream, clock=lambda: now[0])
    for step in range(1, 21):
        now[0] += 100.0 if step <= 10 else 2.0
        display.step({"step": step, "phase": "sft" if step <= 10 else "rl"})
    lines = stream.getvalue().splitlines()
    assert lines[1].endswith("left 1 h 03 min")
    assert "left" not in lines[10]
    assert lines[-1] == "step 20/40  rl  left 40 s"


def test_sparklines_and_durations():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█" and sparkline([5, 5]) == "▁▁" and sparkline([]) == ""
    assert sparkline(range(100), width=3) == "▁▅█"
    assert sparkline([0, 7], ascii_only=True) == "_#"
    assert [duration(s) for s in (-1, 59.4, 61, 3600, 7620)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 07 min",
    ]
