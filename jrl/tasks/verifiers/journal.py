"""Journal of verdicts that depend on time or on the machine, so that a resumed run gets the same ones.

A killed run samples its last steps again, bit for bit. A verifier computes the same result, but may or may not meet its
deadline. A verdict that cannot be trained on is therefore written here before it is used, and replayed. For a judge,
whose answers may differ between calls, this is done for every verdict.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

from jrl.paths import sync_dir
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import VerifierSpec


class Journal:
    """An append-only JSONL file. Must be closed. An incomplete last line, left by a kill, is dropped on opening."""

    def __init__(self, path: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]] = ()):
        """Args: others: journals of other processes, which are only read."""
        self.path = pathlib.Path(path)
        self._known: dict[str, tuple[Verdict, ...]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        self._file = open(self.path, "ab", buffering=0)  # unbuffered: a buffer could write a failed entry later
        if new:
            sync_dir(self.path.parent)
        intact_bytes = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._learn(line, f"{self.path}, line {number}")
                except ValueError:
                    self._file.close()
                    raise
                intact_bytes += len(line)
        self._file.truncate(intact_bytes)
        self._end = intact_bytes
        for other in others:
            lines = pathlib.Path(other).read_bytes().split(b"\n")[:-1]
            for number, line in enumerate(lines, 1):
                self._learn(line, f"{other}, line {number}")

    def __len__(self) -> int:
        return len(self._known)

    def _learn(self, line: bytes, where: str) -> None:
        """Adds the entry of a line. Raises ValueError naming the line if it is not one."""
        try:
            entry = json.loads(line)
            self._known[entry["key"]] = tuple(
                Verdict(Status[v["status"]], v["reward"], v["detail"]) for v in entry["verdicts"]
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: not an entry of a verdict journal: {error!r}") from error

    def recall(self, key: str) -> tuple[Verdict, ...] | None:
        """Returns the verdicts stored under `key`, or None."""
        return self._known.get(key)

    def keep(self, entries: Iterable[tuple[str, tuple[Verdict, ...]]]) -> None:
        """Appends entries and returns once they are on the disk.

        Raises:
            OSError: the disk is full or gone; the file is truncated to complete entries first.
        """
        new = [(key, verdicts) for key, verdicts in entries if key not in self._known]
        if not new:
            return
        data = "".join(
            json.dumps(
                {
                    "key": key,
                    "verdicts": [{"status": v.status.name, "reward": v.reward, "detail": v.detail} for v in verdicts],
                }
            )
            + "\n"
            for key, verdicts in new
        ).encode()
        try:
            written = 0
            while written < len(data):  # a disk that fills up may accept a part first
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), self._end)
            raise
        self._end += len(data)
        self._known.update(new)

    def close(self) -> None:
        self._file.close()


def rows_text(rows: Sequence[VerifierSpec]) -> str:
    """Returns the canonical JSON of verifiers for `journal_key`."""
    return json.dumps([[row.name, row.fields] for row in rows], sort_keys=True)


def journal_key(uid: Sequence[int], sample: int, completion: str, example_id: str, judges: str) -> str:
    """Returns the key of a verdict: "words in hex/number/sha256 of completion, example id and verifiers".

    Args: judges: `rows_text` of the verifiers; the caller reuses it for many completions.
    """
    content = f"[{json.dumps(completion)}, {json.dumps(example_id)}, {judges}]"
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f"{''.join(f'{int(word):08x}' for word in uid)}/{int(sample)}/{digest}"
