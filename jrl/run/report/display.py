"""What a person watches while a run goes on: one live panel in a terminal, plain lines elsewhere. No JAX.

No thread of its own: the panel is drawn when the run says something. A new phase and a message are drawn at once,
progress at most ten times a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jrl.run.report.text import duration, percent, printable, sparkline

_log = logging.getLogger(__name__)


def scored_share(share: float) -> str:
    """Returns the share of completions that were scored as text; '' where it is all of them."""
    return percent(share) if share < 1 else ""


# Label, the metrics that may hold it (the first that a step brings), how it is written; '' leaves it out.
COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("reward", ("reward/mean",), "{:.3f}".format),
    ("scored", ("rollout/valid_share",), scored_share),  # the reward is the mean of these only
    ("loss", ("loss",), "{:.3g}".format),
    ("length", ("rollout/completion_length",), "{:.1f}".format),
    ("entropy", ("policy/entropy",), "{:.3f}".format),
    ("kl", ("kl_ref_k3", "approx_kl_k3"), "{:.2g}".format),
    ("tokens/s", ("time/tokens_per_second",), "{:,.0f}".format),
)
HISTORY_LINES = 40  # about so many lines of steps stay on the screen
_COUNTED = {"data": "rows read:", "sampling": "sampled", "scoring": "scored"}  # how a phase with a count is shown
_BETWEEN_DRAWS_SECONDS = 0.1
BAR_WIDTH = 24
_NOTE_WIDTH = 4000
_MESSAGE_LINES = 10  # of one message inside the panel; above it, all of it is printed
_RECENT_STEPS = 20  # time left goes by the median of these
_LONG_PHASE_SECONDS = 30.0  # after which a line says how far a counted phase is, where there is no panel


@dataclasses.dataclass(frozen=True)
class Display:
    """`phase(name, done, total)` says what the run does now and, where it is counted, how far it is; `step(metrics)`
    that a step ended ("step", "phase" and metrics). `note(text)` prints a message, `warn(topic, text)` one that is
    printed once per topic, `sample(prompt, completion, reward)` a rollout. `notice(text)` stays in the panel
    until the end. `close(text)` draws the panel a last time, prints `text` below it and gives the terminal back.

    Any thread may call them, a signal handler may not.
    """

    phase: Callable[..., None]
    step: Callable[[Mapping[str, Any]], None]
    note: Callable[[str], None]
    warn: Callable[[str, str], None]
    notice: Callable[[str], None]
    sample: Callable[[str, str, float | None], None]
    close: Callable[..., None]


def no_display() -> Display:
    """Returns a display that shows nothing, for the processes of a run other than the first."""
    nothing = lambda *_, **__: None
    return Display(**{field.name: nothing for field in dataclasses.fields(Display)})


def open_display(
    ends: Sequence[int],
    stream: TextIO | None = None,
    *,
    live: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Display:
    """Opens the display on `stream` (None: standard output), live where that is a terminal or `live` says so.

    Args:
      ends: the last step of every stage, for the bar and the time left; []: neither is shown.

    A stream that fails (a closed pipe or terminal) ends the display, is logged once, and never stops the run.
    """
    stream = sys.stdout if stream is None else stream
    console = _Console(file=stream, highlight=False, force_terminal=live, soft_wrap=True)
    live = console.is_terminal and not console.is_dumb_terminal if live is None else live
    display = _open_live(console, ends, clock) if live else _open_plain(console, ends, clock)
    lock = threading.RLock()  # a signal handler may log, in the middle of a draw
    failed = False
    log_routing = contextlib.ExitStack()

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def guard(*args: Any, **options: Any) -> None:
            nonlocal failed
            with lock:
                try:
                    if not failed:
                        call(*args, **options)
                except (OSError, ValueError) as error:
                    failed = True
                    log_routing.close()
                    _log.warning(
                        "the display failed (%s: %s); the run continues without it", type(error).__name__, error
                    )

        return guard

    calls = {field.name: guarded(vars(display)[field.name]) for field in dataclasses.fields(display)}
    if live and sys.stderr is not None and sys.stderr.isatty():
        log_routing.enter_context(route_logs(calls["note"], sys.stderr, logging.getLogger().handlers))

    def close(text: str = "") -> None:
        log_routing.close()
        calls["close"](text)

    return Display(**{**calls, "close": close})


@contextlib.contextmanager
def route_logs(note: Callable[[str], None], stream: TextIO, handlers: Sequence[logging.Handler]) -> Iterator[None]:
    """Inside, what `handlers` would write to `stream` goes to `note`: a panel is on the same terminal."""
    lines = _Lines(note)
    moved = [each for each in handlers if isinstance(each, logging.StreamHandler) and each.stream is stream]
    for handler in moved:
        handler.setStream(lines)
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(stream)


class _Lines(io.TextIOBase):
    """A stream of log records, one to a write."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def write(self, text: str) -> int:
        if text.strip():
            self._note(text.rstrip("\n"))
        return len(text)


def _open_plain(console: Console, ends: Sequence[int], clock: Callable[[], float]) -> Display:
    pace = _Pace(ends, clock)
    announced: set[str] = set()
    warned: set[str] = set()
    printed, current, began = clock(), "", clock()

    def out(text: str) -> None:
        nonlocal printed
        printed = clock()
        console.print(Text(_encodable(text, console)), soft_wrap=True)

    def phase(name: str, done: int | None = None, total: int | None = None) -> None:
        nonlocal current, began
        if name != current:
            current, began = name, clock()
        if name not in announced:
            announced.add(name)
            out(f"{printable(name)} ...")
        elif done is not None and clock() - max(began, printed) >= _LONG_PHASE_SECONDS:
            out(phase_text(name, done, total))

    def step(metrics: Mapping[str, Any]) -> None:
        pace.step(metrics)
        if pace.due():
            out(history_line(pace, metrics))

    def note(text: str) -> None:
        for line in note_lines(text):
            out(line)

    def warn(topic: str, text: str) -> None:
        if topic not in warned:
            warned.add(topic)
            note(text)

    def sample(prompt: str, completion: str, reward: float | None) -> None:
        for line in sample_lines(prompt, completion, reward):
            out(line)

    def close(text: str = "") -> None:
        if text:
            note(text)

    return Display(phase=phase, step=step, note=note, warn=warn, notice=note, sample=sample, close=close)


def _open_live(console: Console, ends: Sequence[int], clock: Callable[[], float]) -> Display:
    pace = _Pace(ends, clock)
    shown = _Shown()
    warned: set[str] = set()
    drawn = -math.inf
    panel = Live(console=console, auto_refresh=False, transient=False, redirect_stdout=False, redirect_stderr=False)
    closed = False

    def encodable(text: str) -> str:
        return _encodable(text, console)

    def lines_of(text: str) -> list[str]:
        return [encodable(line) for line in note_lines(text)]

    def draw(*, now: bool = False) -> None:
        nonlocal drawn
        if not closed and (now or clock() - drawn >= _BETWEEN_DRAWS_SECONDS):
            drawn = clock()
            panel.start()
            panel.update(_panel(console, pace, shown), refresh=True)

    def above(lines: Sequence[str], style: str = "") -> None:
        """Prints lines above the panel, after the message that was in it until now."""
        texts = [
            *(Text(line, style=shown.style) for line in shown.message),
            *(Text(line, style=style) for line in lines),
        ]
        if shown.message:
            shown.message = []
            draw(now=True)
        if texts:
            console.print(Text("\n").join(texts), soft_wrap=True)

    def phase(name: str, done: int | None = None, total: int | None = None) -> None:
        changed = name != shown.phase
        shown.phase, shown.done, shown.total = name, done, total
        if changed:
            above([])
        draw(now=changed)

    def step(metrics: Mapping[str, Any]) -> None:
        pace.step(metrics)
        shown.metrics = metrics
        reward = _first(metrics, COLUMNS[0][1])
        if reward is not None and math.isfinite(reward):
            shown.rewards.append(float(reward))
        above([encodable(history_line(pace, metrics))] if pace.due() else [])
        draw(now=pace.done == pace.total)

    def message(text: str, style: str = "") -> None:
        if closed:
            above(lines_of(text), style)
        else:
            above([])
            shown.message, shown.style = lines_of(text), style
            draw(now=True)

    def warn(topic: str, text: str) -> None:
        if topic not in warned:
            warned.add(topic)
            message(text, "yellow")

    def notice(text: str) -> None:
        if closed:
            above(lines_of(text))
        elif lines_of(text) not in shown.notices:
            shown.notices.append(lines_of(text))
            draw(now=True)

    def sample(prompt: str, completion: str, reward: float | None) -> None:
        above([encodable(line) for line in sample_lines(prompt, completion, reward)], "dim")

    def close(text: str = "") -> None:
        nonlocal closed
        if not closed:
            above([])
            notices, shown.notices, shown.phase, shown.done = shown.notices, [], "", None
            draw(now=True)
            above([line for lines in notices for line in lines])
            closed = True
            panel.transient = pace.count == 0  # it never showed a step
            panel.stop()
        if text:
            above(lines_of(text))

    return Display(phase=phase, step=step, note=message, warn=warn, notice=notice, sample=sample, close=close)


@dataclasses.dataclass
class _Shown:
    """What the live panel shows."""

    phase: str = ""
    done: int | None = None
    total: int | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rewards: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=60))
    message: list[str] = dataclasses.field(default_factory=list)  # until the next phase, step or message
    style: str = ""  # of the message
    notices: list[list[str]] = dataclasses.field(default_factory=list)  # until the end


def _panel(console: Console, pace: _Pace, shown: _Shown) -> Group:
    ascii_only = not console.encoding.lower().startswith("utf")
    phase = _encodable(phase_text(shown.phase, shown.done, shown.total), console)
    lines = [_head(pace, phase)]
    if values := columns(shown.metrics):
        lines.append(Text("  ".join(f"{name} {value}" for name, value in values)))
    if shown.rewards:
        lines.append(Text(f"reward {sparkline(shown.rewards, 60, ascii_only=ascii_only)}", style="green"))
    for message, style in [(shown.message, shown.style), *((notice, "bold yellow") for notice in shown.notices)]:
        wrapped = [row for line in message for row in Text(line, style=style).wrap(console, console.width)]
        if len(wrapped) > _MESSAGE_LINES:
            wrapped = [*wrapped[: _MESSAGE_LINES - 1], Text("...", style=style)]
        lines += wrapped
    for line in lines:
        # Cut at the width: a wrapped panel is taller than what rich erases, and would leave lines behind.
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)


def _head(pace: _Pace, phase: str) -> Text:
    """Returns the first line of the panel. Before a step has ended, the steps of a resumed run are unknown."""
    if pace.count == 0:
        return Text(phase)
    head = Text(f"step {pace.done}/{pace.total}" if pace.total else f"step {pace.done}", style="bold")
    if pace.total:
        full = min(BAR_WIDTH * pace.done // pace.total, BAR_WIDTH)
        head.append("  [" + "#" * full + "." * (BAR_WIDTH - full) + "]", style="not bold")
    for part in (printable(pace.name), f"{pace.left()} left{pace.of_stage()}" if pace.left() else "", phase):
        head.append(f"  {part}" if part else "", style="not bold")
    return head


def phase_text(name: str, done: int | None = None, total: int | None = None) -> str:
    """Returns 'scoring', or 'scored 37 of 128' where the phase is counted."""
    if done is None:
        return printable(name)
    count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
    return f"{_COUNTED[name]} {count}" if name in _COUNTED else f"{printable(name)}: {count}"


def columns(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) of every column that a step brings."""
    values = [(label, _first(metrics, names), text_of) for label, names, text_of in COLUMNS]
    texts = [(label, text_of(value)) for label, value, text_of in values if value is not None]
    return [(label, text) for label, text in texts if text]


def history_line(pace: _Pace, metrics: Mapping[str, Any]) -> str:
    """Returns a finished step as one line."""
    of = f"/{pace.total}" if pace.total else ""
    left = f"left {pace.left()}{pace.of_stage()}" if pace.left() else ""
    parts = [
        f"step {pace.done}{of}",
        printable(pace.name),
        *(f"{name} {value}" for name, value in columns(metrics)),
        left,
    ]
    return "  ".join(filter(None, parts))


def note_lines(text: str) -> list[str]:
    """Returns the lines of a message, each printable."""
    return [printable(line, _NOTE_WIDTH) for line in text.split("\n")]


def sample_lines(prompt: str, completion: str, reward: float | None) -> list[str]:
    """Returns the lines that show one rollout: model text with nothing in it that a terminal obeys."""
    score = "not scored" if reward is None or math.isnan(reward) else f"reward {reward:.3g}"
    return [f"  prompt      {printable(prompt)}", f"  completion  {printable(completion)}  [{score}]"]


def _first(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    return next((float(metrics[name]) for name in names if metrics.get(name) is not None), None)


def _encodable(text: str, console: Console) -> str:
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


class _Console(Console):
    """A console that leaves a closed pipe to its caller: `jrl train | head` must not end the run, as rich would."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the output has no reader any more")


class _Pace:
    """How fast steps of the present stage end."""

    def __init__(self, ends: Sequence[int], clock: Callable[[], float]) -> None:
        self.total, self.done, self.count, self.name = max(ends, default=0), 0, 0, ""
        self._ends, self._every = ends, max(1, self.total // HISTORY_LINES)
        self._clock, self._last = clock, None
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self, metrics: Mapping[str, Any]) -> None:
        now, name = self._clock(), str(metrics.get("phase", ""))
        if name != self.name:
            self._seconds.clear()  # steps of another stage say nothing of these
        elif self._last is not None:
            self._seconds.append(now - self._last)
        self.name, self._last = name, now
        self.done, self.count = int(metrics["step"]), self.count + 1

    def due(self) -> bool:
        """Whether the step that just ended gets a line that stays."""
        return self.count == 1 or self.done % self._every == 0 or self.done == self.total

    def left(self) -> str:
        """Returns the time that is left of this stage as text; '' while it is not known."""
        rest = min((end - self.done for end in self._ends if end >= self.done), default=0)
        return duration(statistics.median(self._seconds) * rest) if rest and self._seconds else ""

    def of_stage(self) -> str:
        """Returns " of STAGE", which the time left is of; "" in the last stage. How fast later ones are is unknown."""
        return "" if self.done > max(self._ends[:-1], default=0) else f" of {printable(self.name)}"
