"""What is printed."""

from __future__ import annotations

import statistics

from benchmarks.limits import Limits

SAMPLING_HEAD = (
    f"{'sampling':<26} {'system':<13} {'seconds':>8} {'tokens/s':>9} {'of limit':>8} {'jrl':>6}  runs (thrown)"
)


def limits_line(limits: Limits) -> str:
    return (
        f"this machine: {limits.matmul / 1e9:.0f} G matmul operations/s, reads {limits.read / 1e9:.1f} GB/s, "
        f"copies {limits.copy / 1e9:.1f} GB/s (read and written)"
    )


def sampling_line(name: str, row: dict) -> str:
    """Returns a line for each system of a row."""
    lines = []
    systems = {system: found for system, found in row.items() if isinstance(found, dict)}
    for system, found in systems.items():
        if not found["seconds"]:
            lines.append(f"{name:<26} {system:<13} disturbed {found['thrown']} times, nothing measured")
            continue
        median = statistics.median(found["seconds"])
        ratio = ""
        if system != "jrl" and systems.get("jrl", {}).get("seconds"):
            ratio = f"{median / statistics.median(systems['jrl']['seconds']):.2f}x"
        lines.append(
            f"{name:<26} {system:<13} {median:8.3f} {found['tokens'] / median:9.0f} "
            f"{100 * row['roofline_seconds'] / median:7.0f}% {ratio:>6}  {len(found['seconds'])} ({found['thrown']})"
        )
    return "\n".join(lines)
