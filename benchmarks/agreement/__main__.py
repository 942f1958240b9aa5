"""Every advantage, loss, KL term, reduction and value against implementations that are not ours.

    python -m benchmarks.agreement --out docs/agreement.json           all of it, 1,000 cases each
    python -m benchmarks.agreement --out F.json --only gspo gae        of these functions
    python -m benchmarks.agreement --out F.json --cases 50 --seed 1    fewer, others
    python -m benchmarks.agreement --out F.json --python PYTHON        where the libraries are

Each part is compared with a plain loop over tokens or pairs (advantage_loops.py, loss_loops.py, preference_loops.py),
masked entries NaN, values and derivatives; and with TRL, verl, AReaL and rlax where they have the function (rows.py),
on cases that both define alike. Objectives of pairs and of labeled answers are compared with TRL's trainers too
(preferences.py), by the names of its losses. The bar is 1e-5, relative above 1. The libraries run in an environment of
their own, which is built when first needed (benchmarks/peers/agreement.txt; some minutes); without it their rows say
why they are missing. A part without a loop, or a difference above the bar, ends the command with 1. All of it takes
some minutes on 2 cores; docs/generate.py writes docs/agreement.md from its result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.agreement import compare, preferences
from benchmarks.agreement.preferences import ARRAY_ROWS, ArrayRow, PreferenceRow
from benchmarks.agreement.preferences import ROWS as PREFERENCES
from benchmarks.agreement.rows import ROWS
from benchmarks.environments import Missing, cache_folder, python_of

LIBRARIES = ("trl", "verl", "areal", "rlax")


def write(path: Path, result: dict) -> None:
    """Writes the result with a comparison a line."""
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(result[key])}" for key in ("cases", "seed", "versions"))
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    path.write_text(f'{{\n{head},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")


def against_preferences(
    rows: list[PreferenceRow | ArrayRow], args: argparse.Namespace, add: Callable, versions: dict[str, str]
) -> None:
    """Compares objectives of stored answers with TRL's trainers, and adds what came of it."""
    cases = {row.name: preferences.cases_of(row, args.cases, args.seed) for row in rows}
    named = lambda row: (row.id, preferences.function_of(row), f"trl {row.name}")
    try:
        python = args.python or python_of("agreement", cache_folder(args.cache))
        theirs = compare.library_answers(preferences.LIBRARY, cases, python)
    except (Missing, RuntimeError) as error:
        for row in rows:
            add(*named(row), None, f"not installed: {error}")
        return
    versions["trl"] = str(theirs["version"])
    for row in rows:
        if f"{row.name}/failed" in theirs:
            add(*named(row), None, str(theirs[f"{row.name}/failed"]))
            continue
        ours = preferences.answers(row, cases[row.name])
        pairs = zip(ours, (theirs[f"{row.name}/value"], theirs[f"{row.name}/slope"]))
        add(*named(row), tuple(compare.difference(a, b) for a, b in pairs), row.note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with a row for every comparison")
    parser.add_argument("--only", nargs="*", help="functions of the parts list")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", help="interpreter of an environment with the libraries")
    parser.add_argument("--cache", help="folder of the environments that this command builds")
    args = parser.parse_args()
    preferences = compare.preferences_compared()
    parts = {part["function"].rpartition(":")[2]: part for part in compare.parts_compared()} | preferences
    unknown = set(args.only or ()) - set(parts) - {row.name for row in (*PREFERENCES, *ARRAY_ROWS)}
    if unknown:
        parser.error(f"no part has the function {', '.join(sorted(unknown))}: see `jrl list parts`")
    rows: list[dict] = []
    versions: dict[str, str] = {}

    def report(name: str, against: str, worst: tuple[float, float | None] | None, note: str = "") -> None:
        add(parts[name]["id"], parts[name]["function"], against, worst, note)

    def add(id: str, function: str, against: str, worst: tuple[float, float | None] | None, note: str) -> None:
        name = function.rpartition(":")[2]
        value, slope = worst or (None, None)
        agrees = None if worst is None else max(value, slope or 0) <= compare.BAR
        row = {"id": id, "function": function, "against": against}
        rows.append(row | {"difference": value, "of_derivative": slope, "agrees": agrees, "note": note})
        figures = " ".join("-" if x is None else f"{x:.1e}" for x in (value, slope))
        print(
            f"{ {True: 'agrees', False: 'DIFFERS', None: 'missing'}[agrees]:<8}{id:<4} {name} {against}: "
            f"{figures} {note if worst is None else ''}",
            flush=True,
        )
        write(args.out, {"cases": args.cases, "seed": args.seed, "versions": versions, "rows": rows})

    for name, part in parts.items():
        if args.only and name not in args.only:
            continue
        if name in preferences:
            report(name, "loop", compare.against_preference_loop(part, args.cases, args.seed))
        elif compare.loop_of(part) is None:
            report(name, "loop", None, "there is no loop for it")
        else:
            report(name, "loop", compare.against_loop(part, args.cases, args.seed))
    wanted = [row for row in ROWS if not args.only or row.part in args.only]
    for library in LIBRARIES:
        of_library = [row for row in wanted if row.library == library]
        if not of_library:
            continue
        cases = {row.name: compare.shared_cases(row, args.cases, args.seed) for row in of_library}
        try:
            python = args.python or python_of("agreement", cache_folder(args.cache))
            answers = compare.library_answers(library, cases, python)
        except (Missing, RuntimeError) as error:
            for row in of_library:
                report(row.part, f"{library} {row.name}", None, f"not installed: {error}")
            continue
        versions[library] = str(answers["version"])
        for row in of_library:
            if f"{row.name}/failed" in answers:
                report(row.part, f"{library} {row.name}", None, str(answers[f"{row.name}/failed"]))
            else:
                worst = compare.against_library(row, cases[row.name], answers)
                report(row.part, f"{library} {row.name}", worst, row.note)
    stored = [row for row in (*PREFERENCES, *ARRAY_ROWS) if not args.only or row.name in args.only]
    if stored:
        against_preferences(stored, args, add, versions)
    agreed = sum(row["agrees"] is True for row in rows)
    print(f"{agreed} of {len(rows)} comparisons agree to {compare.BAR:g}")
    if any(row["agrees"] is False or (row["against"] == "loop" and not row["agrees"]) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
