"""Plants the faults of a table in a copy of the project, one at a time, and runs the tests that should notice.

    python -m benchmarks.mutants --named --out F.json                       all of named_mutants.json
    python -m benchmarks.mutants --named --out F.json --only NAME ...       some, by name or by file

What formulas compute, `benchmarks.mutants` changes by itself; here are the places around them: packing, the sampler,
the learner, the optimizer, checkpoints, journals, data. An entry of the table has a name, a file, a text that stands
there once, what replaces it, and the tests that mirror the place. A fault is killed where one of these tests fails, and
survives where all pass; its `equivalent`, where it has one, says why it makes no difference.

Faults that F.json already holds are not planted again, so that a run can be left and go on. Each runs in a process of
its own. 171 faults take about NN minutes on 2 cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("named_mutants.json")
FIELDS = {"name", "file", "text", "replacement", "tests"}
SKIPPED = (".git", ".venv", "__pycache__", "*.pyc", ".*_cache", "shared", "build", "dist")
HANGS_SECONDS = 600  # a fault may make a loop endless


def named_mutants(path: Path = TABLE, root: Path = ROOT) -> list[dict]:
    """Returns the table's entries.

    Raises:
        ValueError: an entry's text does not stand in its file once (any more), what replaces it is no Python, a test is
            not there, or a name stands there twice.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    names = [row["name"] for row in rows]
    for row in rows:
        where = f"{path.name}: {row['name']}"
        if row.keys() - {"equivalent"} != FIELDS or not row["tests"] or row["text"] == row["replacement"]:
            raise ValueError(f"{where} needs {', '.join(sorted(FIELDS))}, each once and not empty")
        if names.count(row["name"]) > 1:
            raise ValueError(f"{where} stands there twice")
        if not row.get("equivalent", "-").strip():
            raise ValueError(f"{where}: say why it makes no difference")
        faulty(row, root)
        for test in row["tests"]:
            file, _, function = test.partition("::")
            if not (root / file).is_file():
                raise ValueError(f"{where}: there is no {file}")
            if function and f"\ndef {function.partition('[')[0]}(" not in (root / file).read_text(encoding="utf-8"):
                raise ValueError(f"{where}: there is no {test}")
    return rows


def faulty(row: dict, root: Path) -> str:
    """Returns the source of an entry's file with its fault."""
    source = (root / row["file"]).read_text(encoding="utf-8")
    if source.count(row["text"]) != 1:
        raise ValueError(
            f"{row['name']}: {row['text']!r} stands {source.count(row['text'])} times in {row['file']}, and once was "
            "expected; renew the entry"
        )
    changed = source.replace(row["text"], row["replacement"])
    compile(changed, row["file"], "exec")
    return changed


def failing_test(tests: Sequence[str], root: Path, cache: Path) -> str | None:
    """Returns the first of the tests that fails, in a process of its own; None: all pass."""
    # As pytest-xdist tells its workers, so that the tests share what they compile with those of the other faults.
    shared = {"PYTEST_XDIST_WORKER": "mutants", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    quick = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # pyproject.toml's options are pytest-xdist's too.
    command += ["-o", "addopts=--strict-markers", "-rfE", "-m", "not slow", *tests]
    process = subprocess.Popen(
        command, cwd=root, env={**os.environ, **shared, **quick}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=HANGS_SECONDS)
    except subprocess.TimeoutExpired:
        return f"a test took more than {HANGS_SECONDS} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a failed test has started too
        process.wait()
    if process.returncode == 0:
        return None
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if process.returncode not in (1, 2) and not process.returncode < 0:
        raise RuntimeError(f"pytest ended with {process.returncode}: {printed[-2000:]}")
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else f"pytest ended with {process.returncode}"


@contextlib.contextmanager
def copied(root: Path = ROOT) -> Iterator[Path]:
    """Yields a copy of the project, to plant faults in."""
    with tempfile.TemporaryDirectory(prefix="jrl-mutants-") as folder:
        target = Path(folder) / "jrl"
        shutil.copytree(root, target, ignore=shutil.ignore_patterns(*SKIPPED))
        yield target


def try_mutants(rows: Sequence[dict], out: Path) -> list[dict]:
    """Returns each entry with the test that noticed its fault, in the order of the table, and writes them as they come.

    Raises:
        RuntimeError: tests fail without a fault.
    """
    known = {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))} if out.exists() else {}
    results = [known[row["name"]] for row in rows if known.get(row["name"], {}).items() >= row.items()]
    tried = {row["name"] for row in results}
    sound: set[tuple[str, ...]] = set()
    with copied() as root:
        cache = root.parent / "compiled"
        for row in sorted((row for row in rows if row["name"] not in tried), key=lambda row: row["tests"]):
            tests = tuple(row["tests"])
            if tests not in sound:
                if failed := failing_test(tests, root, cache):
                    raise RuntimeError(f"{failed} fails without a fault")
                sound.add(tests)
            target = root / row["file"]
            before, began = target.read_text(encoding="utf-8"), time.perf_counter()
            target.write_text(faulty(row, root), encoding="utf-8")
            try:
                killer = failing_test(tests, root, cache)
            finally:
                target.write_text(before, encoding="utf-8")
            result = {**row, "killed_by": killer, "seconds": round(time.perf_counter() - began, 1)}
            results.append(result)
            others = [row for name, row in known.items() if name not in {row["name"] for row in results}]
            out.write_text(json.dumps([*results, *others], indent=1), encoding="utf-8")
            verdict = "killed    " if killer else "equivalent" if row.get("equivalent") else "SURVIVED  "
            print(f"{verdict} {row['name']}: {killer or row['file']}", flush=True)
    return results


def main(out: Path, only: Sequence[str] | None) -> None:
    """Tries the table's faults, or those with these names or files. Ends with code 1 where one survives."""
    rows = named_mutants()
    if unknown := {*(only or ())} - {row["name"] for row in rows} - {row["file"] for row in rows}:
        raise SystemExit(f"no fault of {TABLE.name} has the name or the file {', '.join(sorted(unknown))}")
    results = try_mutants([row for row in rows if not only or {row["name"], row["file"]} & {*only}], out)
    killed = sum(row["killed_by"] is not None for row in results)
    equivalent = [row for row in results if row.get("equivalent")]
    survivors = [row for row in results if not row["killed_by"] and not row.get("equivalent")]
    stale = [row for row in equivalent if row["killed_by"]]
    print(
        f"{len(results)} faults: {killed} killed, {len(equivalent) - len(stale)} equivalent, {len(survivors)} survived"
    )
    for row in stale:
        print(f"{row['name']} is killed, so it is not equivalent: drop its reason from {TABLE.name}")
    if survivors or stale:
        raise SystemExit(1)
