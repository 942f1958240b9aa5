"""A library's side of a comparison: cases in, its answers out. Runs in the library's environment, without jrl.

    python -m benchmarks.agreement.side CASES.npz ANSWERS.npz verl

The last argument is a file of benchmarks/agreement/peers/, which begins with the library's name.

CASES.npz has `row/input` -> [cases, ...] for every row of the comparison. ANSWERS.npz gets `row/value` and, where the
library's loss has a derivative, `row/slope`; or `row/failed`, the error of a row that the library would not compute.
`version` is the library's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import numpy as np


def main() -> None:
    cases_path, answers_path, library = sys.argv[1:]
    rows = importlib.import_module(f"benchmarks.agreement.peers.{library}").ROWS
    cases = np.load(cases_path)
    answers = {"version": np.asarray(importlib.metadata.version(library.partition("_")[0]))}
    for row in sorted({key.split("/")[0] for key in cases.files}):
        given = {key.split("/")[1]: cases[key] for key in cases.files if key.split("/")[0] == row}
        count = len(next(iter(given.values())))
        try:
            results = [rows[row](**{name: array[k] for name, array in given.items()}) for k in range(count)]
        except Exception as error:  # another library's failure is a row of the table, not an end of the command
            answers[f"{row}/failed"] = np.asarray(f"{type(error).__name__}: {error}")
            continue
        answers[f"{row}/value"] = np.stack([np.asarray(value) for value, _ in results])
        if results[0][1] is not None:
            answers[f"{row}/slope"] = np.stack([np.asarray(slope) for _, slope in results])
    np.savez(answers_path, **answers)


if __name__ == "__main__":
    main()
