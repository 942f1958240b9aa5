"""Measures the rollout store: rows written and read back a second, of one writer or several, one after the other.

    python -m benchmarks.rollout_store --rows 200000 --width 64 --folder /dev/shm/store

Prints one JSON object: rows, what they take on disk, and rows a second of writing (a commit every COMMIT steps) and of
reading all of them in blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from jrl.run.report.rollouts import open_rollouts, snapshot

ROWS, GROUP, COMMIT = 256, 8, 10  # rows of a step, of a group; steps of a commit


def step_of(number: int, width: int) -> tuple:
    """Returns a step as a run of GRPO appends it."""
    rng = np.random.default_rng(number)
    by_token = lambda dtype, values: values.astype(dtype)
    fields = {
        "tokens": by_token(np.int32, rng.integers(0, 50_000, (ROWS, width))),
        "length": np.full(ROWS, width, np.int32),
        "action_mask": np.tile(np.arange(width) >= width // 4, (ROWS, 1)),
        "sampler_logprobs": by_token(np.float32, rng.normal(size=(ROWS, width))),
        "finish": np.zeros(ROWS, np.int8),
        "group": np.arange(ROWS, dtype=np.int32) // GROUP,
        "sample": np.arange(ROWS, dtype=np.int32) % GROUP,
        "version": np.full((ROWS, width), number, np.int32),
        "turn": np.zeros((ROWS, width), np.int8),
        "weights_fingerprint": np.uint32(number),
        "reward": rng.random(ROWS).astype(np.float32),
        "valid": np.ones(ROWS, bool),
        "verdict": np.zeros(ROWS, np.int8),
    }
    prompts = [f"What is {row // GROUP} + {number}?" for row in range(ROWS)]
    completions = [f"It is {row // GROUP + number}, I think." for row in range(ROWS)]
    ids = [f"sum-{number}-{group}" for group in range(ROWS // GROUP)]
    return number, fields, prompts, completions, ids, np.zeros((len(ids), 2), np.uint32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=64, help="tokens of a row (default: 64)")
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--block", type=int, default=32_768, help="rows read at a time (default: 32768)")
    parser.add_argument(
        "--folder", type=Path, help="a new one, where the store is made and removed (default: a temporary one)"
    )
    args = parser.parse_args()
    if args.folder is not None and args.folder.exists():
        parser.error(f"--folder {args.folder} exists, and would be removed; name a new one")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="jrl-rollouts-"))
    steps = -(-args.rows // ROWS)
    made = [step_of(number, args.width) for number in range(COMMIT)]
    started = time.perf_counter()
    for writer in range(args.writers):
        store = open_rollouts(folder, rows=0, writer=writer, writers=args.writers)
        for appended, number in enumerate(range(writer, steps, args.writers), 1):
            store.append(number, *made[number % COMMIT][1:])
            if appended % COMMIT == 0:
                store.commit()
        store.close()
    written, store = time.perf_counter() - started, snapshot(folder)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        for start in range(0, store.rows, args.block):
            store.read(start, min(start + args.block, store.rows))
        seconds.append(time.perf_counter() - started)
    files = [path for path in folder.rglob("*") if path.is_file()]
    print(json.dumps({
        "rows": store.rows,
        "width": args.width,
        "writers": args.writers,
        "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 1),
        "files": len(files),
        "written_rows_a_second": round(store.rows / written),
        "read_rows_a_second": [round(store.rows / one) for one in seconds],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }))  # fmt: skip
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
