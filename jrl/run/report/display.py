"""What a person watches while a run goes on: one live panel in a terminal, plain lines elsewhere. No JAX.

No thread: the panel is drawn when the run says something, at most ten times a second.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jrl.run.report.text import duration, printable, sparkline

_log = logging.getLogger(__name__)

# Label, the metrics that may hold it (the first that a step brings), how it is written.
COLUMNS = (
    ("reward", ("reward/mean",), ".3f"),
    ("loss", ("loss",), ".3g"),
    ("length", ("rollout/completion_length",), ".1f"),
    ("entropy", ("policy/entropy",), ".3f"),
    ("kl", ("kl_ref_k3", "approx_kl_k3"), ".2g"),
    ("tokens/s", ("time/tokens_per_second",), ",.0f"),
)
PLAIN_LINES = 40  # about so many lines of steps where there is no terminal
_BETWEEN_DRAWS_SECONDS = 0.1
BAR_WIDTH = 24
_NOTE_WIDTH = 4000
_RECENT_STEPS = 20  # time left goes by the median of these


@dataclasses.dataclass(frozen=True)
class Display:
    """`phase(name)` says what the run does now, `step(metrics)` that a step ended ("step", "phase" and metrics),
    `note(text)` prints a line of ours, `sample(prompt, completion, reward)` one of the model's. `close()` gives the
    terminal back."""

    phase: Callable[[str], None]
    step: Callable[[Mapping[str, Any]], None]
    note: Callable[[str], None]
    sample: Callable[[str, str, float | None], None]
    close: Callable[[], None]


def open_display(
    total_steps: int,
    stream: TextIO | None = None,
    *,
    live: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Display:
    """Opens the display on `stream` (None: standard output), live where that is a terminal or `live` says so.

    Args:
      total_steps: of all phases; sizes the bar and the time left, 0 leaves both out.

    A stream that fails (a closed pipe or terminal) ends the display, is logged once, and never stops the run.
    """
    stream = sys.stdout if stream is None else stream
    console = _Console(file=stream, highlight=False, force_terminal=live, soft_wrap=True)
    live = console.is_terminal and not console.is_dumb_terminal if live is None else live
    display = _open_live(console, total_steps, clock) if live else _open_plain(console, total_steps, clock)
    failed = False

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def guard(*args: Any) -> None:
            nonlocal failed
            try:
                if not failed:
                    call(*args)
            except (OSError, ValueError) as error:
                failed = True
                _log.warning("the display is gone (%s: %s); the run goes on", type(error).__name__, error)

        return guard

    calls = {field.name: guarded(vars(display)[field.name]) for field in dataclasses.fields(display)}
    return Display(**calls)


def _open_plain(console: Console, total_steps: int, clock: Callable[[], float]) -> Display:
    pace = _Pace(total_steps, clock)
    every = max(1, total_steps // PLAIN_LINES)
    announced: set[str] = set()

    def out(text: str) -> None:
        console.print(Text(_encodable(text, console)), soft_wrap=True)

    def phase(name: str) -> None:
        if name not in announced:
            announced.add(name)
            out(f"{printable(name)} ...")

    def step(metrics: Mapping[str, Any]) -> None:
        pace.step(metrics)
        if pace.count == 1 or pace.done % every == 0 or pace.done == total_steps:
            of = f"/{total_steps}" if total_steps else ""
            parts = [f"step {pace.done}{of}", pace.name, *(f"{name} {value}" for name, value in shown(metrics))]
            out("  ".join([part for part in parts if part] + ([f"left {pace.left()}"] if pace.left() else [])))

    def note(text: str) -> None:
        for line in text.split("\n"):
            out(printable(line, _NOTE_WIDTH))

    def sample(prompt: str, completion: str, reward: float | None) -> None:
        for line in sample_lines(prompt, completion, reward):
            out(line)

    return Display(phase=phase, step=step, note=note, sample=sample, close=lambda: None)


def _open_live(console: Console, total_steps: int, clock: Callable[[], float]) -> Display:
    pace = _Pace(total_steps, clock)
    rewards: deque[float] = deque(maxlen=60)
    current: dict[str, Any] = {"phase": "", "metrics": {}}
    drawn = -math.inf
    panel = Live(console=console, auto_refresh=False, transient=False, redirect_stdout=False, redirect_stderr=False)
    closed = False

    def draw(*, now: bool = False) -> None:
        nonlocal drawn
        if not closed and (now or clock() - drawn >= _BETWEEN_DRAWS_SECONDS):
            drawn = clock()
            panel.start()
            panel.update(_panel(console, pace, current, rewards), refresh=True)

    def phase(name: str) -> None:
        current["phase"] = printable(name)
        draw(now=name.startswith(("compiling", "waiting")))

    def step(metrics: Mapping[str, Any]) -> None:
        pace.step(metrics)
        current["metrics"] = metrics
        reward = _first(metrics, COLUMNS[0][1])
        if reward is not None and math.isfinite(reward):
            rewards.append(float(reward))
        draw(now=pace.done == total_steps)

    def out(text: str, style: str = "") -> None:
        console.print(Text(_encodable(text, console), style=style), soft_wrap=True)

    def note(text: str) -> None:
        for line in text.split("\n"):
            out(printable(line, _NOTE_WIDTH))

    def sample(prompt: str, completion: str, reward: float | None) -> None:
        for line in sample_lines(prompt, completion, reward):
            out(line, "dim")

    def close() -> None:
        nonlocal closed
        if not closed:
            current["phase"] = ""
            draw(now=True)
            closed = True
            panel.stop()

    return Display(phase=phase, step=step, note=note, sample=sample, close=close)


def _panel(console: Console, pace: _Pace, current: Mapping[str, Any], rewards: deque[float]) -> Group:
    ascii_only = not console.encoding.lower().startswith("utf")
    head = Text(f"step {pace.done}/{pace.total}" if pace.total else f"step {pace.done}", style="bold")
    if pace.total:
        full = BAR_WIDTH * pace.done // pace.total
        head.append("  [" + "#" * full + "." * (BAR_WIDTH - full) + "]", style="not bold")
    for part in (printable(pace.name), f"{pace.left()} left" if pace.left() else "", current["phase"]):
        head.append(f"  {part}" if part else "", style="not bold")
    values = Text.assemble(*((f"{name} {value}  ") for name, value in shown(current["metrics"])))
    bars = Text(f"reward {sparkline(rewards, 60, ascii_only=ascii_only)}" if rewards else "", style="green")
    lines = [head, values, bars]
    for line in lines:
        # Cut at the width: a wrapped panel is taller than what the terminal takes back, and leaves rests behind.
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)


def shown(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) of every column that a step brings."""
    found = []
    for label, names, style in COLUMNS:
        value = _first(metrics, names)
        if value is not None:
            found.append((label, format(value, style)))
    return found


def sample_lines(prompt: str, completion: str, reward: float | None) -> list[str]:
    """Returns the lines that show one rollout: model text with nothing in it that a terminal obeys."""
    said = "not scored" if reward is None or math.isnan(reward) else f"reward {reward:.3g}"
    return [f"  prompt      {printable(prompt)}", f"  completion  {printable(completion)}  [{said}]"]


def _first(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    return next((float(metrics[name]) for name in names if metrics.get(name) is not None), None)


def _encodable(text: str, console: Console) -> str:
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


class _Console(Console):
    """A console that leaves a closed pipe to its caller: `jrl train | head` must not end the run, as rich would."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads the output any more")


class _Pace:
    """How fast steps of the present phase end."""

    def __init__(self, total: int, clock: Callable[[], float]) -> None:
        self.total, self.done, self.count, self.name = total, 0, 0, ""
        self._clock, self._last = clock, None
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self, metrics: Mapping[str, Any]) -> None:
        now, name = self._clock(), str(metrics.get("phase", ""))
        if name != self.name:
            self._seconds.clear()  # steps of another phase say nothing of these
        elif self._last is not None:
            self._seconds.append(now - self._last)
        self.name, self._last = name, now
        self.done, self.count = int(metrics["step"]), self.count + 1

    def left(self) -> str:
        """Returns the time left as text; '' while it is not known."""
        if not self._seconds or self.done >= self.total:
            return ""
        return duration(statistics.median(self._seconds) * (self.total - self.done))
