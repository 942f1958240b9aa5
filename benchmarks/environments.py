"""The peers' own environments: one for each, built once into a cache folder from the versions in `peers/NAME.txt`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

PEERS = ("tunix", "trl")
VERSIONS = Path(__file__).parent / "peers"
STAMP = "versions.sha256"  # written last: which versions the environment has, and that they are all there


class Missing(RuntimeError):
    """A peer cannot be installed here. The message says why."""


def cache_folder(given: str | None) -> Path:
    """Returns where environments are kept: as given, or JRL_BENCHMARKS_CACHE, or under the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(given or os.environ.get("JRL_BENCHMARKS_CACHE", cache / "jrl" / "benchmarks")).expanduser()


def fingerprint(versions: Path) -> str:
    """Returns what an environment is known by: the versions in it and the interpreter's own."""
    return hashlib.sha256(versions.read_bytes() + repr(sys.version_info[:2]).encode()).hexdigest()


def python_of(name: str, cache: Path, versions: Path | None = None) -> str:
    """Returns the interpreter of a peer's environment, built first where it is not there or has other versions.

    Which registry is asked is pip's own configuration.

    Raises: Missing with the end of what pip said, where it cannot be built.
    """
    versions = VERSIONS / f"{name}.txt" if versions is None else versions
    folder = cache / name
    python, stamp = folder / "bin" / "python", folder / STAMP
    if stamp.exists() and stamp.read_text() == fingerprint(versions):
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"building {name}'s environment in {folder}: some minutes", file=sys.stderr, flush=True)
    commands = (
        [sys.executable, "-m", "venv", str(folder)],
        # The lists are complete; some packages ask for others that what is called does not need.
        [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "-r", str(versions)],
    )
    for command in commands:
        # nothing of this process's own packages may be seen there
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(command, capture_output=True, text=True, env=clean)
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip().splitlines()
            raise Missing(f"{name} cannot be installed: {' / '.join(output[-3:])}")
    stamp.write_text(fingerprint(versions))
    return str(python)
