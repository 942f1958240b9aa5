from __future__ import annotations

import io
import itertools
import logging
import random
import re
import threading

import pytest

from jrl.run.report.display import note_lines, open_display, phase_text, route_logs, sample_lines
from jrl.run.report.text import duration, printable, sparkline
from jrl.tools import browse_rollouts, chat


def rows(count: int, phase: str = "rl"):
    for step in range(1, count + 1):
        yield {"step": step, "phase": phase, "reward/mean": step / count, "policy/entropy": 1.5, "loss": float("nan")}


def ticking():
    """A clock that moves one second whenever it is read."""
    counter = itertools.count()
    return lambda: float(next(counter))


def screen(stream: io.StringIO) -> list[str]:
    """Returns the lines that a terminal shows after what was written: newlines, returns, cursor up, erased lines."""
    lines, row, column = [""], 0, 0
    for code in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", stream.getvalue()):
        if code == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif code == "\r":
            column = 0
        elif code == "\x1b[1A":
            row -= 1
        elif code == "\x1b[2K":
            lines[row] = ""
        elif not code.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + code + lines[row][column + len(code) :]
            column += len(code)
    return [line.rstrip() for line in lines]


def open_live(total: int, clock=lambda: 0.0):
    """A live display whose clock stands still, so that only what is drawn at once is drawn."""
    stream = io.StringIO()
    return open_display([total], stream, live=True, clock=clock), stream


def row(step: int, **metrics):
    return {"step": step, "phase": "rl", "reward/mean": 0.5, **metrics}


def test_without_a_terminal_there_are_plain_lines_and_no_escapes():
    stream, now = io.StringIO(), [0.0]
    display = open_display([80], stream, clock=lambda: now[0])
    for row in rows(80):
        now[0] += 1.0
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
    display = open_display([10], stream, live=True, clock=ticking())
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
        display = open_display([1], stream, live=live)
        quiet = len(stream.getvalue())
        display.sample("a\x1b]0;title\x07\nb", "\x1b[2J\x9b31m\u202eevil\r[red]x[/red] \ud800", 0.5)
        text = stream.getvalue()[quiet:]
        assert "\\x1b]0;title\\x07\\nb" in text
        assert "\\x1b[2J\\x9b31m\\u202eevil\\x0d[red]x[/red] \\ud800  [reward 0.5]" in text
        assert not {"\x07", "\x9b", "\u202e", "\r\n"} & set(text) and "\x1b[2J\x9b" not in text
        display.close()


COMMANDS = (
    "\x1b[31m", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x9b2J", "\x1b[6n", "\r", "\b\b\b", "\0", "\x7f", "\x0e",
    "\u202e", "\u2066", "\u200b", "\u2028", "\u0085", "\ud800", "\U000e0041", "\ue000", "\n", "\t", "\v\f", "<script>",
    "=1+1", "| a | b |", "```", "[jrl] step 9", "x" * 3000, "\u0301" * 200, "\x1bP1$r\x1b\\", "\x1bc",
)  # fmt: skip


def test_no_text_of_a_model_commands_a_terminal(trials):
    draw = random.Random(0)
    for _ in range(trials(300)):
        pieces = (draw.choice((*COMMANDS, "plain", " ", "é汉🙂")) for _ in range(draw.randrange(1, 9)))
        text, stream = "".join(pieces), io.StringIO()
        chat.show(text, [chat.Completion(text, "length")], stream)
        row = {"reward": 0.5, "example_id": text, "prompt": text, "completion": text}
        shown = [stream.getvalue(), browse_rollouts.show(row), *sample_lines(text, text, None), *note_lines(text)]
        for line in (line for lines in shown for line in lines.split("\n")):
            assert line.isprintable(), repr(line)
        assert stream.getvalue().count("\n") == 2 and len(printable(text)) < 400 * len("\\U000e0041") + 30


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
        display = open_display([2], stream, live=live)
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
        display = open_display([3], Broken(), live=live)
        for row in rows(3):
            display.phase("sampling")
            display.step(row)
            display.note("note")
        display.close()
    assert caplog.text.count("the display failed (BrokenPipeError") == 1


def test_what_may_take_long_is_shown_at_once():
    stream = io.StringIO()
    display = open_display([40], stream, live=True, clock=lambda: 0.0)
    for phase in ("sampling", "compiling update", "waiting for the compiler", "update"):
        display.phase(phase)
    shown = stream.getvalue()
    assert "compiling update" in shown and "waiting for the compiler" in shown and "phase update" not in shown
    display.close()


def test_a_new_phase_is_drawn_at_once_and_its_progress_is_throttled():
    now = [0.0]
    display, stream = open_live(10, lambda: now[0])
    display.phase("sampling")
    assert screen(stream) == ["sampling"]
    display.phase("scoring", done=0, total=128)
    assert screen(stream) == ["scored 0 of 128"]
    display.phase("scoring", 36, 128)
    assert screen(stream) == ["scored 0 of 128"]
    now[0] += 0.2
    display.phase("scoring", 37, 128)
    assert screen(stream) == ["scored 37 of 128"]
    display.close()


def test_a_counted_phase_says_how_far_it_is():
    assert phase_text("scoring") == "scoring"
    assert phase_text("scoring", 37, 1280) == "scored 37 of 1,280"
    assert phase_text("data", 812_000) == "rows read: 812,000"
    assert phase_text("evaluating", 3, 40) == "evaluating: 3 of 40"
    assert phase_text("read\x1b", 3) == "read\\x1b: 3"


def test_a_message_is_in_the_panel_until_the_next_phase_and_then_above_it():
    display, stream = open_live(1)
    display.phase("sampling")
    display.step(row(1))
    display.note("40 examples")
    history = "step 1/1  rl  reward 0.500"
    panel = ["step 1/1  [########################]  rl  {}", "reward 0.500", "reward ▁"]
    at = lambda phase: [line.format(phase) for line in panel]
    assert screen(stream) == [history, *at("sampling"), "40 examples"]
    display.phase("sampling", 1, 2)
    assert screen(stream) == [history, *at("sampling"), "40 examples"]
    display.phase("scoring")
    assert screen(stream) == [history, "40 examples", *at("scoring")]
    display.note("one")
    display.note("two")
    display.sample("p", "c", 1.0)
    above = [history, "40 examples", "one", "two", "  prompt      p", "  completion  c  [reward 1]"]
    assert screen(stream) == [*above, *at("scoring")]
    display.close()


def test_a_stop_notice_survives_phases_and_steps_and_stays_above_the_last_panel():
    display, stream = open_live(10)
    display.phase("sampling")
    display.notice("Stopping")
    assert screen(stream) == ["sampling", "Stopping"]
    display.notice("Stopping")
    display.phase("updating")
    display.step(row(1))
    display.phase("saving")
    assert screen(stream).count("Stopping") == 1 and screen(stream)[-1] == "Stopping"
    display.close()
    shown = screen(stream)
    assert shown[0] == "step 1/10  rl  reward 0.500" and shown[1] == "Stopping" and shown.count("Stopping") == 1
    assert shown[2:] == ["step 1/10  [##......................]  rl", "reward 0.500", "reward ▁", ""]


def test_the_live_display_leaves_the_lines_of_the_plain_one_above_the_panel():
    plain = io.StringIO()
    first, (second, live) = open_display([80], plain, clock=ticking()), open_live(80, ticking())
    for each in rows(80):
        first.step(each)
        second.step(each)
    first.close()
    second.close()
    lines = lambda stream: [re.sub("  left.*", "", line) for line in stream if re.match(r"step \d+/80  rl", line)]
    assert len(lines(screen(live))) == 41 and lines(screen(live)) == lines(plain.getvalue().splitlines())


def test_closing_draws_the_panel_once_more_and_the_closing_line_below_it():
    display, stream = open_live(3)
    for each in rows(3):
        display.phase("scoring", 5, 8)
        display.step(each)
    display.close("Done: 3 steps\nTry the policy")
    display.close()
    display.note("after")
    shown = screen(stream)
    assert shown[3:] == [
        "step 3/3  [########################]  rl", "reward 1.000  loss nan  entropy 1.500", "reward ▁▄█",
        "Done: 3 steps", "Try the policy", "after", "",
    ]  # fmt: skip


def test_a_panel_that_never_showed_a_step_is_taken_away():
    display, stream = open_live(3)
    display.phase("data")
    display.close("This run already has 60 steps; you asked for 30. Nothing to do.")
    assert screen(stream) == ["This run already has 60 steps; you asked for 30. Nothing to do.", ""]


def test_a_long_message_is_cut_in_the_panel_and_complete_above_it():
    display, stream = open_live(3)
    display.phase("data")
    display.note("\n".join(f"line {i}" for i in range(20)))
    assert screen(stream)[-2:] == ["line 8", "..."]
    display.phase("model")
    assert screen(stream) == [*(f"line {i}" for i in range(20)), "model"]
    display.close()


@pytest.mark.parametrize("live", [False, True])
def test_a_warning_is_said_once_for_a_topic(live):
    stream = io.StringIO()
    display = open_display([3], stream, live=live)
    for step in (1, 2):
        display.step(row(step))
        display.warn("scoring", f"few at step {step}")
        display.warn("signal", "no signal")
    display.close()
    text = "\n".join(screen(stream))
    assert text.count("few at step") == 1 and "few at step 1" in text and text.count("no signal") == 1


def test_a_step_line_has_the_scored_share_only_below_one():
    stream = io.StringIO()
    display = open_display([3], stream)
    display.step(row(1, **{"rollout/valid_share": 1.0}))
    display.step(row(2, **{"rollout/valid_share": 0.125}))
    display.step({"step": 3, "phase": "rl", "reward/mean": None, "rollout/valid_share": 0.0})
    assert [re.sub("  left.*", "", line) for line in stream.getvalue().splitlines()] == [
        "step 1/3  rl  reward 0.500",
        "step 2/3  rl  reward 0.500  scored 12 %",
        "step 3/3  rl  scored 0 %",
    ]


def test_other_threads_can_give_notice_while_the_panel_is_drawn():
    display, stream = open_live(200)
    threads = [threading.Thread(target=display.notice, args=(f"notice {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for each in rows(200):
        display.phase(f"phase {each['step']}")
        display.step(each)
    for thread in threads:
        thread.join()
    display.close()
    shown = screen(stream)
    assert sorted(line for line in shown if line.startswith("notice")) == [f"notice {i}" for i in range(8)]
    assert sum(line.startswith("step 200/200  [") for line in shown) == 1


def test_log_records_for_the_terminal_of_the_panel_are_shown_as_messages():
    stderr, other, messages = io.StringIO(), io.StringIO(), []
    handlers = [logging.StreamHandler(stderr), logging.StreamHandler(other), logging.NullHandler()]
    record = logging.makeLogRecord({"msg": "a warning\nof two lines"})
    with route_logs(messages.append, stderr, handlers):
        for handler in handlers:
            handler.handle(record)
    handlers[0].handle(record)
    assert messages == ["a warning\nof two lines"]
    assert stderr.getvalue() == other.getvalue() == "a warning\nof two lines\n"


@pytest.mark.parametrize("live", [False, True])
def test_time_left_is_of_the_stage_until_the_last(live):
    stream = io.StringIO()
    now = [0.0]
    display = open_display([10, 40], stream, clock=lambda: now[0], live=live)
    for step in range(1, 21):
        now[0] += 100.0 if step <= 10 else 2.0
        display.step({"step": step, "phase": "sft" if step <= 10 else "rl"})
    lines = [line for line in screen(stream) if re.match(r"step \d+/40  (sft|rl)(  left|$)", line)]
    assert lines[1] == "step 2/40  sft  left 13 min 20 s of sft"  # eight steps of 100 s
    assert "left" not in lines[9] and "left" not in lines[10]
    assert lines[-1] == "step 20/40  rl  left 40 s"
    if live:
        assert "13 min 20 s left of sft" in stream.getvalue() and "40 s left" in stream.getvalue()


def test_without_a_panel_a_long_phase_says_every_half_minute_how_far_it_is():
    stream, now = io.StringIO(), [0.0]
    display = open_display([40], stream, clock=lambda: now[0])
    display.phase("scoring")
    for done in range(1, 8):
        now[0] += 10.0
        display.phase("scoring", done, 128)
    display.step({"step": 1, "phase": "rl"})  # whatever is printed, the half minute begins anew
    for done in range(3):
        now[0] += 10.0
        display.phase("scoring", done, 128)
    for done in range(8):  # no phase of these is long
        now[0] += 20.0
        display.phase("sampling" if done % 2 else "scoring", 0, 128)
    assert stream.getvalue().splitlines() == [
        "scoring ...",
        "scored 3 of 128",
        "scored 6 of 128",
        "step 1/40  rl",
        "scored 2 of 128",
        "sampling ...",
    ]


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
