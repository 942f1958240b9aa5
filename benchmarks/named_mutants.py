"""Plants the faults of a table in a copy of the project, one at a time, and runs the tests that should notice.

    python -m benchmarks.named_mutants --out F.json                     all of named_mutants.json
    python -m benchmarks.named_mutants --out F.json --only NAME ...     some, by name or by file

What formulas compute, `benchmarks.mutants` changes by itself; here are the places around them: packing, the sampler,
the learner, the optimizer, checkpoints, journals, data. An entry of the table has a name, a file, a text that stands
there once, what replaces it, and the tests that mirror the place. A fault is killed where one of these tests fails, and
survives where all pass; its `equivalent`, where it has one, says why it makes no difference.

Faults that F.json already holds are not planted again, so that a run can be left and go on. Each runs in a process of
its own, forked from one that has imported JAX and nothing of the project.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("named_mutants.json")
FIELDS = {"name", "file", "text", "replacement", "tests"}
SKIPPED = (".git", ".venv", "__pycache__", "*.pyc", ".*_cache", "shared", "build", "dist")
HANGS_SECONDS = 240  # a fault may make a loop endless
# As tests/conftest.py sets them for JAX, which is imported before it here. The first as pytest-xdist tells its workers:
# what is compiled is shared with the tests of the other faults.
ENVIRONMENT = {
    "PYTEST_XDIST_WORKER": "mutants",
    "JAX_PLATFORMS": "cpu",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
}


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


class Failures:
    """A pytest plugin that notes which tests, or files, fail."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.found.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tests: Sequence[str], root: Path, printed: Path, answer: Any) -> None:
    """Runs tests of a copy of the project in this process, and sends the first that fails; None: all pass."""
    os.setsid()  # what tests start ends with them
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    failures = Failures()
    # pyproject.toml's options are pytest-xdist's too.
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=--strict-markers"]
    code = pytest.main([*options, "-m", "not slow", *tests], plugins=[failures])
    answer.send(failures.found[0] if failures.found else None if code == 0 else f"pytest ended with {code!r}")
    os._exit(0)


def failing_test(tests: Sequence[str], root: Path) -> str | None:
    """Returns the first of the tests that fails, in a process of its own; None: all pass."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jax", "pytest", "optax", "flax.struct"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(tests, root, root.parent / "printed", send))
    process.start()
    send.close()
    try:
        if not receive.poll(HANGS_SECONDS):
            return f"a test took more than {HANGS_SECONDS} s"
        return receive.recv()
    except EOFError:
        process.join()
        return f"the process ended with {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Yields a copy of the project, to plant faults in."""
    with tempfile.TemporaryDirectory(prefix="jrl-mutants-") as folder:
        target = Path(folder) / "jrl"
        shutil.copytree(root, target, ignore=shutil.ignore_patterns(*SKIPPED))
        yield target


def try_mutants(rows: Sequence[dict], out: Path, project: Path = ROOT) -> list[dict]:
    """Returns each entry with the test that noticed its fault, and writes them as they come.

    Raises:
        RuntimeError: tests fail without a fault.
    """
    known = {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))} if out.exists() else {}
    results = {row["name"]: known[row["name"]] for row in rows if known.get(row["name"], {}).items() >= row.items()}
    left = [row for row in rows if row["name"] not in results]
    sound: set[tuple[str, ...]] = set()
    with copied(project) if left else contextlib.nullcontext() as root:
        for row in left:
            tests = tuple(row["tests"])
            if tests not in sound:
                if failed := failing_test(tests, root):
                    raise RuntimeError(f"{failed} fails without a fault:\n{(root.parent / 'printed').read_text()}")
                sound.add(tests)
            target = root / row["file"]
            before, times, began = target.read_bytes(), target.stat(), time.perf_counter()
            target.write_text(faulty(row, root), encoding="utf-8")
            # Compiled sources are told apart by seconds and bytes, which two faults may share.
            os.utime(target, (len(results), len(results)))
            try:
                killer = failing_test(tests, root)
            finally:
                target.write_bytes(before)
                os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
            results[row["name"]] = {**row, "killed_by": killer, "seconds": round(time.perf_counter() - began, 1)}
            out.write_text(json.dumps([*({**known, **results}).values()], indent=1), encoding="utf-8")
            verdict = "killed    " if killer else "equivalent" if row.get("equivalent") else "SURVIVED  "
            print(f"{verdict} {row['name']}: {killer or row['file']}", flush=True)
    return list(results.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file: every fault and the test that noticed")
    parser.add_argument("--only", nargs="*", help="names of faults, or files that they are in")
    args = parser.parse_args()
    rows = named_mutants()
    if unknown := {*(args.only or ())} - {row["name"] for row in rows} - {row["file"] for row in rows}:
        raise SystemExit(f"no fault of {TABLE.name} has the name or the file {', '.join(sorted(unknown))}")
    chosen = [row for row in rows if not args.only or {row["name"], row["file"]} & {*args.only}]
    with tempfile.TemporaryDirectory(prefix="jrl-compiled-") as cache:
        os.environ.update(ENVIRONMENT, JAX_COMPILATION_CACHE_DIR=cache)
        try:
            results = try_mutants(chosen, args.out)
        except KeyboardInterrupt:
            raise SystemExit(f"interrupted; {args.out} has the faults so far, and the same command goes on") from None
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


if __name__ == "__main__":
    main()
