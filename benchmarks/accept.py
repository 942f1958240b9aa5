"""The first ten minutes on a new machine: does jrl do here what it does elsewhere? One JSON file, one page.

    python -m benchmarks.accept --out DIR            on the machine's own devices
    python -m benchmarks.accept --out DIR --devices 4    on virtual CPU devices, to try the command itself
    ... --steps 6 --rows "8 rows" update --bindings Decoder.layers=1   the same checks of shorter runs, as in tests

A run from its start to its end, one that is killed and resumed (the same bits), greedy tokens and log-probs against
this machine's CPU in float32, attention kernels against the reference, memory as planned and as used, and speed as a
share of what the hardware could do. Every check is a process of its own: one that aborts does not end the others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 12  # of a run; another one is killed in the middle
ON_ALL_DEVICES = ("Config.mesh=@MeshShape()", "MeshShape.data=-1", "Checkpoint.every=2")
PROMPTS = ("1+1=", "2+3=", "7+2=", "9+9=")
KERNELS = {"tpu": "splash", "gpu": "cudnn"}
LARGEST_DIFFERENCE = 1e-3  # of a log-prob between an accelerator and a CPU, both in float32
CHECK_SECONDS = 600


class Finding(NamedTuple):
    """What a check found. good: None where it does not apply here."""

    name: str
    good: bool | None
    text: str
    numbers: Mapping[str, Any] = {}
    seconds: float = 0.0


class Place(NamedTuple):
    """Where the checks run, and with what."""

    folder: Path
    devices: int | None  # virtual ones; None: the machine's own
    platform: str
    steps: int = STEPS
    rows: Sequence[str] = ("",)  # of `python -m benchmarks`: whose names hold one of these
    bindings: Sequence[str] = ()  # of the runs, such as those of a smaller model

    def jrl(self, command: str, *arguments: str, cpu: bool = False) -> str:
        """Returns what a command prints. Raises RuntimeError with its last words where it fails."""
        return output(self.command(command, *arguments), cpu=cpu)

    def command(self, command: str, *arguments: str) -> list[str]:
        virtual = ["--devices", str(self.devices)] if self.devices is not None and command in WITH_DEVICES else []
        return [sys.executable, "-m", "jrl.cli", command, *map(str, arguments), *virtual]

    def train(self, run: str, *bindings: str) -> list[str]:
        return self.command("train", "tiny", *ON_ALL_DEVICES, f"Online.steps={self.steps}", *self.bindings,
                            *bindings, "--run", str(self.folder / run))  # fmt: skip


WITH_DEVICES = ("train", "sample", "score")


def output(command: Sequence[str], *, cpu: bool = False) -> str:
    """Returns what a command prints. cpu: it runs on one device of the CPU."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"} if cpu else None
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, env=environment)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout


def check_installation(place: Place) -> Finding:
    place.jrl("doctor")
    return Finding("installation", True, "jrl doctor finds nothing wrong")


def check_run(place: Place) -> Finding:
    start = time.monotonic()
    output(place.train("whole"))
    rows = read_rows(place.folder / "whole" / "metrics.jsonl")
    usual = statistics.median(row["time/step_seconds"] for row in rows[2:])
    numbers = {"seconds": time.monotonic() - start, "first_reward": rows[0]["reward/mean"],
               "last_reward": rows[-1]["reward/mean"], "median_step_seconds": usual}  # fmt: skip
    return Finding(
        "a run", len(rows) == place.steps, f"{len(rows)} of {place.steps} steps, {usual:.3f} s a step", numbers
    )


def check_resume(place: Place) -> Finding:
    command, metrics = place.train("killed"), place.folder / "killed" / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + CHECK_SECONDS
    while process.poll() is None and time.monotonic() < end and len(read_rows(metrics)) < place.steps // 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(read_rows(metrics))
    output(command)
    whole, killed = (json.loads(place.jrl("fingerprint", str(place.folder / run), "--json"))["total"]
                     for run in ("whole", "killed"))  # fmt: skip
    text = "the same bits as the run that was not" if whole == killed else "other bits than the run that was not"
    return Finding("kill and resume", whole == killed, f"killed after {before} steps and resumed: {text}",
                   {"killed_after": before, "whole": whole, "killed": killed})  # fmt: skip


def check_tokens(place: Place) -> Finding:
    prompts = place.folder / "prompts.txt"
    prompts.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
    texts = []
    for cpu in (False, True):
        out = place.folder / f"greedy-{'cpu' if cpu else 'here'}.jsonl"
        asked = ("--prompts", prompts, "--temperature", "0", "--out", out)
        place.jrl("sample", place.folder / "whole", *asked, cpu=cpu)
        texts.append(out.read_text())
    same = texts[0] == texts[1]
    return Finding("greedy tokens", same, f"{'equal to' if same else 'other than'} the CPU's in float32")


def check_logprobs(place: Place, *bindings: str, name: str = "log-probs") -> Finding:
    rows = place.folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'text': prompt + '5'})}\n" for prompt in PROMPTS))
    found = []
    for cpu in (False, True):
        out = place.folder / f"scored-{'cpu' if cpu else name.replace(' ', '-')}.jsonl"
        place.jrl("score", place.folder / "whole", rows, *(() if cpu else bindings), "--out", out, cpu=cpu)
        found.append([value for row in read_rows(out) for value in row["logprobs"]])
    worst = max(abs(a - b) for a, b in zip(*found, strict=True))
    return Finding(name, worst < LARGEST_DIFFERENCE, f"at most {worst:.1e} nats from the CPU's reference",
                   {"largest_difference": worst})  # fmt: skip


def check_kernels(place: Place) -> Finding:
    kernel = KERNELS.get(place.platform)
    if kernel is None:
        return Finding("kernels", None, f"jrl has no attention kernel for {place.platform.upper()}s")
    return check_logprobs(place, f"Decoder.attention={kernel!r}", name="kernels")


def check_memory(place: Place) -> Finding:
    virtual = [] if place.devices is None else ["--devices", str(place.devices)]
    command = [sys.executable, "-m", "benchmarks.accept", "--memory", *virtual, "--bindings", *place.bindings]
    numbers = json.loads(output(command).splitlines()[-1])
    if numbers["used"] is None:
        return Finding("memory", None, "these devices do not say how much they use", numbers)
    ratio = numbers["used"] / numbers["planned"]
    return Finding("memory", ratio < 1.1, f"{ratio:.2f} of what is planned", numbers)


def check_speed(place: Place) -> Finding:
    out = place.folder / "speed.json"
    shape, in_use = ("test", ["--in-use"]) if place.platform == "cpu" else ("1.5b", [])
    output([sys.executable, "-m", "benchmarks", "--out", str(out), "--only", "jrl", "--what", "sampler", "update",
            "--repeats", "1", "--rows", *place.rows, "--shape", shape, *in_use])  # fmt: skip
    shares = {}
    for name, row in json.loads(out.read_text())["rows"].items():
        seconds = row["systems"].get("jrl", {}).get("seconds")
        if seconds:
            shares[name] = row["roofline_seconds"] / statistics.median(seconds)
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    note = "; a small shape, which says nothing about speed" if shape == "test" else ""
    return Finding("speed", bool(shares), f"share of what the hardware could do: {text}{note}", shares)


CHECKS: tuple[Callable[[Place], Finding], ...] = (
    check_installation,
    check_run,
    check_resume,
    check_tokens,
    check_logprobs,
    check_kernels,
    check_memory,
    check_speed,
)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file of JSON objects; [] where there is none."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def memory(args: argparse.Namespace) -> dict[str, float | None]:
    """Returns {"planned","used"}: bytes of a device for the programs of a short run."""
    import tempfile

    from jrl.commands.start import prepare_jax

    prepare_jax(args)

    import jax

    import jrl
    from jrl.resolve import load_config
    from jrl.tools.plan import budget
    from jrl.tools.plan.case import make_case

    bindings = [*ON_ALL_DEVICES, "Online.steps=2", *args.bindings]
    config, parts = load_config("tiny", bindings)
    _, planned = budget.peak(make_case(config, parts, jax.device_count()))
    with tempfile.TemporaryDirectory() as folder:
        jrl.train("tiny", bindings, run=Path(folder) / "run")
    return {"planned": float(planned), "used": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}


def machine(devices: int | None) -> dict[str, Any]:
    """Returns what the machine is, as a process of its own finds it."""
    code = (
        "import json, jax, platform; d = jax.devices(); "
        "print(json.dumps({'platform': d[0].platform, 'kind': d[0].device_kind, 'devices': len(d), "
        "'jax': jax.__version__, 'python': platform.python_version()}))"
    )
    return json.loads(output([sys.executable, "-c", code], cpu=devices is not None).splitlines()[-1])


def examine(place: Place, checks: Sequence[Callable[[Place], Finding]] = CHECKS) -> list[Finding]:
    """Returns what every check found, one after another. A check that fails is a finding too."""
    findings = []
    for check in checks:
        start = time.monotonic()
        try:
            found = check(place)
        except Exception as error:  # whatever it is, it is what this machine has to say
            name = check.__name__.removeprefix("check_")
            found = Finding(name, False, f"{type(error).__name__}: {str(error)[-600:]}")
        findings.append(found._replace(seconds=time.monotonic() - start))
        print(line(findings[-1]), flush=True)
    return findings


def line(found: Finding) -> str:
    return f"{ {True: 'ok', False: '!!', None: '--'}[found.good] }  {found.name}: {found.text} ({found.seconds:.0f} s)"


def page(about: Mapping[str, Any], findings: Sequence[Finding]) -> str:
    """Returns the findings as Markdown."""
    head = ", ".join(f"{name} {value}" for name, value in about.items())
    rows = [f"| {'--' if f.good is None else 'ok' if f.good else '**failed**'} | {f.name} | {one_line(f.text)} | "
            f"{f.seconds:.0f} |" for f in findings]  # fmt: skip
    return "\n".join(["# Acceptance", "", head, "", "| | check | found | seconds |", "| --- | --- | --- | --- |", *rows,
                      ""])  # fmt: skip


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new folder, for accept.json, accept.md and the runs")
    parser.add_argument("--devices", type=int, help="virtual CPU devices (default: the machine's own devices)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run, at least 4 (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="of the speed, only rows whose name "
                        "holds one of these texts")  # fmt: skip
    parser.add_argument("--bindings", nargs="*", default=[], metavar="NAME=VALUE", help="of the runs")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(memory(args)))
        return 0
    if args.out is None or args.out.exists():
        parser.error(f"--out is {args.out}; name a folder that does not exist yet")
    if args.steps < 4:
        parser.error(f"--steps is {args.steps}; a run that is killed in the middle and resumed has at least 4")
    args.out.mkdir(parents=True)
    about = machine(args.devices)
    findings = examine(
        Place(args.out.absolute(), args.devices, about["platform"], args.steps, args.rows, args.bindings)
    )
    content = {"machine": about, "findings": [found._asdict() for found in findings]}
    (args.out / "accept.json").write_text(json.dumps(content, indent=1) + "\n")
    (args.out / "accept.md").write_text(page(about, findings))
    print(f"written to {args.out / 'accept.md'} and {args.out / 'accept.json'}")
    return 0 if all(found.good is not False for found in findings) else 4


if __name__ == "__main__":
    sys.exit(main())
