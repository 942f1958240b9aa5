"""What is printed."""

from __future__ import annotations

import statistics

from benchmarks.limits import Limits

SAMPLING_HEAD = (
    f"{'sampling':<26} {'system':<13} {'seconds':>8} {'tokens/s':>9} {'of limit':>8} {'jrl':>6}  runs (disturbed)"
)


LEARNING_HEAD = (
    f"{'learning':<26} {'system':<13} {'seconds':>8} {'tokens/s':>9} {'of limit':>8} {'jrl':>6} {'GiB':>6}  "
    "runs (disturbed)"
)


def limits_line(limits: Limits) -> str:
    return (
        f"this machine: {limits.matmul / 1e9:.0f} G matmul operations/s, reads {limits.read / 1e9:.1f} GB/s, "
        f"copies {limits.copy / 1e9:.1f} GB/s (read and written)"
    )


def lines(name: str, row: dict, memory: bool) -> str:
    """Returns a line for each system of a row: medians, the share of what the hardware could do, and the ratio to jrl.

    Args:
      row: "systems": name -> {"seconds": of its runs, "disturbed", "tokens", perhaps "peak_bytes", and "agrees" where
        it may have done other work, and has no ratio then}, and "roofline_seconds".
    """
    out = []
    systems = row["systems"]
    for system, result in systems.items():
        if "missing" in result:
            out.append(f"{name:<26} {system:<13} {result['missing']}")
            continue
        if not result["seconds"]:
            out.append(f"{name:<26} {system:<13} disturbed {result['disturbed']} times, nothing measured")
            continue
        median = statistics.median(result["seconds"])
        ratio = ""
        if not result.get("agrees", True):
            ratio = "other"
        elif system != "jrl" and systems.get("jrl", {}).get("seconds"):
            ratio = f"{median / statistics.median(systems['jrl']['seconds']):.2f}x"
        peak = f" {result['peak_bytes'] / 2**30:6.2f}" if memory else ""
        share = 100 * row["roofline_seconds"] / median
        out.append(
            f"{name:<26} {system:<13} {median:8.3f} {result['tokens'] / median:9.0f} {share:7.0f}% {ratio:>6}{peak}  "
            f"{len(result['seconds'])} ({result['disturbed']})"
        )
    return "\n".join(out)


def sampling_lines(name: str, row: dict) -> str:
    return lines(name, row, memory=False)


def learning_lines(name: str, row: dict) -> str:
    return lines(name, row, memory=True)


def parts_line(parts: dict[str, float]) -> str:
    """Returns where the time of one of jrl's steps went, waiting for the device between the parts."""
    return f"{'':<26} {'jrl':<13} " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())


START_HEAD = f"{'process to first step':<26} {'system':<13} {'seconds':>8}  runs (disturbed)"


def start_lines(name: str, row: dict) -> str:
    out = []
    for system, result in row["systems"].items():
        if not result.get("seconds"):
            out.append(f"{name:<26} {system:<13} {result.get('missing', 'always disturbed')}")
        else:
            median = statistics.median(result["seconds"])
            out.append(f"{name:<26} {system:<13} {median:8.1f}  {len(result['seconds'])} ({result['disturbed']})")
    return "\n".join(out)


def sweep_line(axis: str, point: dict) -> str:
    if not point["seconds"]:
        return f"{axis:<20} {point['value']:>6}  always disturbed"
    median = statistics.median(point["seconds"])
    share = 100 * point["roofline_seconds"] / median
    return (
        f"{axis:<20} {point['value']:>6} {median:8.3f} s  {share:4.0f}% of the limit  "
        f"{point['peak_bytes'] / 2**30:5.2f} GiB  {len(point['seconds'])} ({point['disturbed']})"
    )


FIELDS = ("loss", "gradient_norm", "logprobs")
AGREE = 1e-3  # relative difference to jrl up to which two systems do the same work


def agrees(jrl: dict, peer: dict) -> bool:
    """Returns whether two systems computed the same loss, gradient norm and summed log-probs on the same batch."""
    return all(abs(peer[field] - jrl[field]) <= AGREE * abs(jrl[field]) for field in FIELDS)


def equal_work(updates: dict[str, dict]) -> str:
    """Returns a line for each system: what it computed on the same batch of sequences."""
    lines = [f"{'on one batch':<26} {'system':<13} {'loss':>12} {'gradient norm':>14} {'log-probs':>12}"]
    for system, row in updates.items():
        if system == "jrl" or "jrl" not in updates:
            verdict = ""
        else:
            verdict = "  agrees" if agrees(updates["jrl"], row) else "  differs: its rows do not count"
        lines.append(
            f"{'':<26} {system:<13} {row['loss']:12.6f} {row['gradient_norm']:14.6f} {row['logprobs']:12.2f}{verdict}"
        )
    return "\n".join(lines)
