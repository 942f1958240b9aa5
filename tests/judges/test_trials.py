"""Two thousand verdicts of a judge that fails often: none lost or doubled, a device that hardly waits, and six kills
that change no bit. Run by hand:

pytest -m slow tests/judges/test_trials.py -s
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_in import Faults, StandIn

pytestmark = pytest.mark.slow

STEPS, ROWS = 8, 272
TIMEOUT, LATENCY = 2.0, 0.1
# Every answer takes a tenth of a second; above 80 requests a second the server sends the rest away.
FAULTS = Faults(errors=0.2, timeouts=0.05, hang_seconds=1.2 * TIMEOUT, requests_per_second=80, latency_seconds=LATENCY)
# Kills: how often a batch is announced before, and the seconds after it.
KILLS = [(1, 0.5), (2, 1.0), (2, 0.1), (2, 2.0), (1, 0.0), (2, 1.5)]


def command(folder, address):
    announce = Path(__file__).parents[1] / "trials" / "announce.py"
    bindings = [
        f"Online.prompts={ROWS // 8}", "Online.samples=8", f"Online.steps={STEPS}", "Checkpoint.every=1",
        "Log.samples=0",
        "Config.judges=[@Judge()]", "Judge.model='stand-in'", f"Judge.address='{address}'", "Judge.concurrency=64",
        f"Judge.timeout_seconds={TIMEOUT}", "Judge.attempts=12", "Judge.backoff_seconds=0.1",
        "AdamW.learning_rate=1e-5",  # so that few completions are alike
    ]  # fmt: skip
    return [sys.executable, str(announce), "train", "configs/tiny.gin", *bindings, "--run", str(folder)]


def finish(folder, address):
    done = subprocess.run(command(folder, address), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def kill_after(folder, address, times, seconds):
    """Starts the run and kills it so many seconds after its `times`-th batch is being judged. Returns its steps."""
    process = subprocess.Popen(command(folder, address), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        times -= line.strip() == "NOW scoring"
        if times == 0:
            break
    time.sleep(random.Random(seconds).uniform(0, 2 * seconds))
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and alive, "the process had ended before it was killed"
    return len(rows(folder))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def contents(folder):
    said = subprocess.run([sys.executable, "-m", "jrl.cli", "fingerprint", str(folder), "--json"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    table = [{k: v for k, v in row.items() if not k.startswith(("time/", "host/"))} for row in rows(folder)]
    return json.loads(said.stdout), table


def journal(folder):
    """Returns key -> verdicts of a run's journal, where each key is there once."""
    lines = (folder / "judges" / "judge.journal.jsonl").read_text().splitlines()
    entries = {entry["key"]: entry["verdicts"] for entry in map(json.loads, lines)}
    assert len(entries) == len(lines), "a verdict came twice"
    return entries


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    with StandIn(FAULTS, seed=16) as server:
        finish(folder, server.address)
        return folder, server


def test_no_verdict_is_lost_or_doubled_and_the_device_hardly_waits(straight):
    folder, server = straight
    verdicts = journal(folder)
    lost = [said for said in verdicts.values() if said[0]["status"] == "INFRA_ERROR"]
    assert len(verdicts) == STEPS * ROWS and not lost
    assert all(row["rollout/valid_share"] == 1 for row in rows(folder))
    counted = lambda name: sum(row[f"host/judge/judge/{name}"] for row in rows(folder))
    asked = counted("requests")
    assert asked + counted("cached") + counted("shared") == STEPS * ROWS
    assert asked >= 2000 and len(server.answered) == asked + 1  # and the first question
    said = server.said
    # What a busy machine answered too late was asked again, and what came late was not read.
    late = sum(server.answered.values()) - len(server.answered)
    assert late <= counted("timeout") + counted("connection") - said["timeouts"] + 1
    assert min(said["errors"], said["timeouts"], said["limited"]) > 0
    one_after_another = LATENCY * (said["answer"] + said["errors"]) + TIMEOUT * said["timeouts"]
    waited = sum(row["time/judge/judge/wait_seconds"] for row in rows(folder))
    print(f"\n{STEPS * ROWS} verdicts of {asked:.0f} requests in {sum(said.values())} attempts: {dict(said)}; "
          f"0 lost, 0 doubled; the device waited {waited:.1f} s, one after another {one_after_another:.1f} s: "
          f"{waited / one_after_another:.1%}")  # fmt: skip
    assert waited < 0.1 * one_after_another


def test_six_kills_change_no_bit(straight, tmp_path):
    with StandIn(FAULTS, seed=61) as server:
        for times, seconds in KILLS:
            print(f"killed with {kill_after(tmp_path, server.address, times, seconds)} of {STEPS} rows written")
        finish(tmp_path, server.address)
        doubled = sum(count - 1 for body, count in server.answered.items() if b"2 + 2?" not in body)
    assert contents(tmp_path) == contents(straight[0])
    assert journal(tmp_path) == journal(straight[0])
    print(f"bit-identical; {len(server.answered)} questions, {doubled} answered again since a kill took the answer")
