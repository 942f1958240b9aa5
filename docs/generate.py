"""Writes the pages that are made from data: docs/methods.md, papers.md, recipes.md and agreement.md.

    python docs/generate.py

What stands in them comes from the list of parts, the docstrings of the objectives, the headers of the configurations in
configs/algos/, what benchmarks/recipes.py measured of these (docs/recipes.json), and what `python -m
benchmarks.agreement` found (docs/agreement.json), so that they say what is there. A test compares them with what this
program writes.
"""

from __future__ import annotations

import csv
import importlib
import json
import pathlib
import re

from jrl.algos import ALGOS
from jrl.algos.parts import PARTS

ROOT = pathlib.Path(__file__).parents[1]
SECTIONS = {
    "S": "Sampling strategies",
    "R": "Rewards and their shaping",
    "F": "Filters and curricula",
    "A": "Advantages",
    "L": "Policy losses",
    "K": "KL and entropy terms",
    "G": "Reductions",
    "V": "Value learning",
    "P": "Preference, supervised and reward-model losses",
    "O": "Optimizers",
    "M": "Measurement",
}
GENERATED = "<!-- Written by docs/generate.py. Change the data that it reads, then run it again. -->\n"


def ids_of(text: str) -> set[str]:
    """Returns the part ids that a text names."""
    return set(re.findall(rf"\b([{''.join(SECTIONS)}]\d{{1,2}})\b", text))


def ordered(ids: set[str]) -> list[str]:
    """Returns part ids in the order of their sections and numbers."""
    return sorted(ids, key=lambda part: (list(SECTIONS).index(part[0]), int(part[1:])))


def module_of(name: str) -> str:
    """Returns the module of an objective, by its row in ALGOS."""
    return ALGOS[name].config.__module__


def parts_of_objectives() -> dict[str, set[str]]:
    """Returns the part ids that each objective's file names in its docstring."""
    return {name: ids_of(importlib.import_module(module_of(name)).__doc__) for name in ALGOS}


def recipes() -> dict[str, tuple[str, list[str]]]:
    """Returns {path: (first line of the header, titles of its papers)} of the configurations in configs/algos/."""
    headers = {}
    for path in sorted((ROOT / "configs" / "algos").glob("*.gin")):
        header = path.read_text(encoding="utf-8").split("\n\n")[0]
        lines = [line.removeprefix("#").strip() for line in header.splitlines()]
        titles = [line.removeprefix("Paper: ") for line in lines if line.startswith("Paper: ")]
        headers[path.relative_to(ROOT).as_posix()] = (lines[0], titles)
    return headers


def methods() -> str:
    """Returns docs/methods.md: a table of parts for each section, then the objectives and what they are made of."""
    users = parts_of_objectives()
    out = [
        "# Methods",
        GENERATED,
        "Every formula that is in jrl, where its code is and what checks it. The formulas are in "
        "[algorithms.md](algorithms.md); `jrl list parts --json` prints the same table.",
        "",
    ]
    for letter, title in SECTIONS.items():
        rows = [part for part in PARTS if part["id"][0] == letter]
        if not rows:
            continue
        out += [
            f"## {letter}: {title}",
            "",
            "| id | function | returns | tests | objectives |",
            "| --- | --- | --- | --- | --- |",
        ]
        for part in sorted(rows, key=lambda part: int(part["id"][1:])):
            used = ", ".join(name for name, ids in users.items() if part["id"] in ids)
            module, name = part["function"].split(":")
            signature = f"`{module.removeprefix('jrl.')}.{name}({', '.join(part['inputs'])})`"
            out.append(f"| {part['id']} | {signature} | {part['output']} | {len(part['tests'])} | {used} |")
        out.append("")
    out += ["## Objectives", "", "| name | what it is | parts | file |", "| --- | --- | --- | --- |"]
    for name in ALGOS:
        module = importlib.import_module(module_of(name))
        headline = module.__doc__.split("\n\n")[0].replace("\n", " ")
        path = f"{module_of(name).replace('.', '/')}.py"
        out.append(f"| `{name}` | {headline} | {', '.join(ordered(users[name]))} | {path} |")
    return "\n".join(out) + "\n"


def papers() -> str:
    """Returns docs/papers.md: a row for each paper, which of its parts are here, and the configurations that run it."""
    here = {part["id"] for part in PARTS}
    runs: dict[str, list[str]] = {}
    for path, (_, titles) in recipes().items():
        for title in titles:
            runs.setdefault(title, []).append(path)
    with open(ROOT / "docs" / "papers.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    out = [
        "# The papers behind jrl",
        GENERATED,
        f"{len(rows)} papers on fine-tuning language models with reinforcement learning, and what of each is here. Ids "
        'are those of [methods.md](methods.md). "Not yet" names the parts that jrl does not have.',
        "",
        "| paper | what it brings | here | not yet | run it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        wanted = set(row["parts"].split())
        found, missing = ordered(wanted & here), ordered(wanted - here)
        listed = ", ".join(f"`{path}`" for path in runs.pop(row["title"], []))
        cells = [row["title"], row["contribution"], ", ".join(found), ", ".join(missing), listed]
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if runs:
        out += ["", "Configurations of papers beside these:", ""]
        out += [f"* {title}: {', '.join(f'`{path}`' for path in paths)}" for title, paths in sorted(runs.items())]
    return "\n".join(out) + "\n"


def shown(run: dict) -> str:
    """Returns a run's mean outcomes, first and last, and the interval of their difference."""
    gain, width = run["last"] - run["first"], run["half_width"]
    return f"{run['first']:.2f} to {run['last']:.2f} ({gain:+.2f} ± {width:.2f})"


def verdict(runs: list[dict]) -> str:
    """Returns what the intervals of several runs say: how many are above 0, how many below."""
    above = sum(run["last"] - run["first"] > run["half_width"] for run in runs)
    below = sum(run["first"] - run["last"] > run["half_width"] for run in runs)
    return f"{above} of {len(runs)}" + (f", {below} worse" if below else "")


def measured() -> str:
    """Returns docs/recipes.md: what each recipe reached on the toy task, on every seed and with nothing to learn."""
    results = json.loads((ROOT / "docs" / "recipes.json").read_text(encoding="utf-8"))
    headers = {pathlib.Path(path).stem: header for path, (header, _) in recipes().items()}
    found = {name: entry for name, entry in results["recipes"].items() if name in headers and entry["runs"]}
    every = lambda kind: [run for entry in found.values() for run in entry[kind]]
    above = lambda runs: sum(run["last"] - run["first"] > run["half_width"] for run in runs)
    below = lambda runs: sum(run["first"] - run["last"] > run["half_width"] for run in runs)
    runs, controls = every("runs"), every("controls")
    learned = sum(above(entry["runs"]) == len(entry["runs"]) for entry in found.values())
    out = [
        "# The recipes, measured",
        GENERATED,
        f"What `python -m benchmarks.recipes` found of {len(found)} recipes in [`configs/algos/`](../configs/algos) on"
        " the toy task of `toy.gin`: the mean outcome in the first and in the last five sampling calls, of the prompts"
        " sampled in both, and the 95 % interval of the difference, paired by prompt. A recipe has learned on a seed"
        " where its interval lies above 0. Of a recipe of stored rows it is the share of pairs in the right order in"
        " the first and in the last five steps; of `kto` by how much good answers gained more than bad ones.",
        "",
        f"Hardware: {results['hardware']}. Versions: {results['versions']}. {results['note']}",
        "",
        f"* {learned} of {len(found)} recipes learned on every seed: {above(runs)} of {len(runs)} runs;"
        f" {below(runs)} got worse.",
        f"* The control: {len(controls) - above(controls) - below(controls)} of {len(controls)} intervals include 0,"
        f" {above(controls)} are above it and {below(controls)} below; 5 of 100 would be outside by chance. In a"
        " control nothing says which answer belongs to which prompt: rewards are dealt out anew among the completions"
        " of every batch, and the demonstrations that the policy starts from among their prompts: it starts at chance."
        " An outcome counts above chance there, less the share of the batch's other prompts that the completion would"
        " have answered.",
        f"* {results['warm_start']}",
        "* Seconds are of a whole program with everything compiled, and of the processors; `x 3` where three seeds"
        " share it.",
        "",
        "| recipe | what it is | learned | by seed: first to last | control, above chance | s, warm | processor s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in sorted(found.items()):
        warm = [run for run in entry["runs"] + entry["controls"] if run["warm"]]
        fastest = min(warm, key=lambda run: run["seconds"], default=None)
        seeds = f" x {fastest['together']}" if fastest and fastest["together"] > 1 else ""
        cells = [
            f"`{name}`",
            headers[name],
            verdict(entry["runs"]),
            "; ".join(map(shown, entry["runs"])),
            "; ".join(map(shown, entry["controls"])),
            "" if fastest is None else f"{fastest['seconds']:.0f}{seeds}",
            "" if fastest is None else f"{min(run['processor_seconds'] for run in warm):.0f}",
        ]
        out.append("| " + " | ".join(cells) + " |")
    missing = sorted(set(headers) - set(found) - {"toy"})
    if missing:
        out += ["", f"Not measured yet: {', '.join(f'`{name}`' for name in missing)}."]
    return "\n".join(out) + "\n"


AGREEMENT = """\
`python -m benchmarks.agreement --out docs/agreement.json` compares every advantage, loss, KL term, reduction and value
on {cases:,} seeded random cases (seed {seed}): with a plain loop over rows and tokens, and with {versions} where they
have it. A difference is |ours - theirs| / max(1, |theirs|), the largest of all entries and cases; of a loss also that
of its derivative by the log-probs, values or logits. The bar is 1e-5.

The loops were written from [algorithms.md](algorithms.md) and the names of the inputs, before the functions were read.
Conventions that the formulas leave open were taken over afterwards: the order of axes, weights of 1 where masked, NaN
for a baseline before the first batch, which noise Clip-Cov takes first, ties in KL-Cov, no reset before the first step,
and the proximal log-probs of a token that the current weights drew. One comparison found a mistake, which is mended:
the KL form of A-LoL also penalized rows with an advantage of 0 or less, which do not learn.

Cases for the loops have ragged masks with gaps, rows and steps without a token, rows without a verdict, groups of one,
equal rewards, log-ratios beyond the clamp, and NaN wherever an entry is masked. Cases for the libraries are those that
both define alike: every row has a token and a verdict, every group two rows or more, and no log-ratio needs a clamp.
The last column says where the two part elsewhere; E1 to E9 are the rules of algorithms.md.

## Libraries

| id | ours | theirs | difference | of the derivative | elsewhere |
| --- | --- | --- | --- | --- | --- |"""


def agreement() -> str:
    """Returns docs/agreement.md: what each part was compared with, and the largest differences."""
    result = json.loads((ROOT / "docs" / "agreement.json").read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    introduction = AGREEMENT.format(cases=result["cases"], seed=result["seed"], versions=versions)
    out = ["# Agreement with implementations that are not ours", GENERATED, introduction]
    figure = lambda x: "" if x is None else "0" if x == 0 else f"{x:.1e}"
    cells = lambda row: [figure(row["difference"]), figure(row["of_derivative"])]
    ours = lambda row: f"`{row['function'].removeprefix('jrl.').replace(':', '.')}`"
    rows = [row for row in result["rows"] if row["against"] != "loop"]
    for row in sorted(rows, key=lambda row: ordered({each["id"] for each in rows}).index(row["id"])):
        out.append("| " + " | ".join([row["id"], ours(row), row["against"], *cells(row), row["note"]]) + " |")
    out += ["", "## Loops", "", "| id | function | difference | of the derivative |", "| --- | --- | --- | --- |"]
    for row in result["rows"]:
        if row["against"] == "loop":
            out.append("| " + " | ".join([row["id"], ours(row), *cells(row)]) + " |")
    return "\n".join(out) + "\n"


PAGES = {
    "docs/methods.md": methods,
    "docs/papers.md": papers,
    "docs/recipes.md": measured,
    "docs/agreement.md": agreement,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")
        print(f"wrote {name}")
