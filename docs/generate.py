"""Writes the pages that are made from data: docs/methods.md, papers.md, recipes.md, agreement.md, data-layouts.md and
reliability.md.

    python docs/generate.py

What stands in them comes from the list of parts, the table of layouts, the docstrings of the objectives, the headers of
the configurations in configs/algos/, what benchmarks/recipes.py measured of these (docs/recipes.json), and what
`python -m benchmarks.agreement` and `python -m benchmarks.reliability` found (docs/agreement.json,
docs/reliability.json), so that they say what is there. A test compares them with what this program writes.
"""

from __future__ import annotations

import csv
import importlib
import json
import pathlib
import re
import sys

from jrl.algos import ALGOS
from jrl.algos.parts import PARTS
from jrl.tasks.envs.layouts import LAYOUTS

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks is no part of the package

from benchmarks.reliability_goals import ASKED, GOALS  # noqa: E402

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
    return set(re.findall(rf"(?<![\w-])([{''.join(SECTIONS)}]\d{{1,2}})\b", text))


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


def miniatures() -> dict[str, list[str]]:
    """Returns {title of a paper: pages of docs/experiments/ on it}, by their lines "Paper: TITLE"."""
    pages: dict[str, list[str]] = {}
    for path in sorted((ROOT / "docs" / "experiments").glob("*.md")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Paper: "):
                pages.setdefault(line.removeprefix("Paper: "), []).append(path.stem)
    return pages


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
    shown = miniatures()
    with open(ROOT / "docs" / "papers.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    out = [
        "# The papers behind jrl",
        GENERATED,
        f"{len(rows)} papers on fine-tuning language models with reinforcement learning, and what of each is here. Ids "
        'are those of [methods.md](methods.md). "Not yet" names the parts that jrl does not have.',
        "",
        "| paper | what it brings | here | not yet | run it | miniature |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        wanted = set(row["parts"].split())
        found, missing = ordered(wanted & here), ordered(wanted - here)
        listed = ", ".join(f"`{path}`" for path in runs.pop(row["title"], []))
        pages = ", ".join(f"[{page}](experiments/{page}.md)" for page in shown.pop(row["title"], []))
        cells = [row["title"], row["contribution"], ", ".join(found), ", ".join(missing), listed, pages]
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if shown:
        raise ValueError(f"docs/experiments: no row of papers.tsv has the title {next(iter(shown))!r}")
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


def of_outcomes(entry: dict) -> str:
    """Returns what became of the outcomes of a recipe that learns by scores, in words; "" of others."""
    if "outcomes" not in entry:
        return ""
    runs = [dict(zip(("first", "last", "half_width"), one)) for one in entry["outcomes"]]
    return f". Outcomes: {'; '.join(map(shown, runs))}"


def warm_runs(entry: dict) -> list[dict]:
    """Returns the runs of a recipe with everything compiled before, or all of them where none was."""
    every = entry["runs"] + entry["controls"]
    return [run for run in every if run["warm"]] or every


def quickest(entry: dict) -> dict:
    """Returns the run of a recipe that took the least time, of those with everything compiled if there are any."""
    return min(warm_runs(entry), key=lambda run: run["seconds"])


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
    seconds = {name: quickest(entry)["seconds"] for name, entry in found.items()}
    fast = {most: sum(took <= most for took in seconds.values()) for most in (20, 60)}
    out = [
        "# The recipes, measured",
        GENERATED,
        f"`python -m benchmarks.recipes` trained {len(found)} recipes of [`configs/algos/`](../configs/algos) on the"
        " toy task of `toy.gin`. The table compares the mean outcome in the first five sampling calls with that in"
        " the last five, over the prompts sampled in both, and has the 95 % interval of the difference, paired by"
        " prompt. A recipe has learned on a seed if its interval lies above 0. Where the policy samples nothing, or"
        " learns from a reward model, the measure is another one:",
        "",
        "* Stored pairs: the share of pairs in the right order in the first and in the last five steps, with the"
        " interval of a share of so many pairs.",
        "* Other stored rows: for `kto`, by how much good answers gained more than bad ones; for `a_lol`, `r_gold`"
        " and `step_awr`, the covariance of the advantage and the log-prob of a token; for `iql`, that of the row's"
        " reward and the log-prob; else the log-prob. These have Welch's interval over steps.",
        "* Reward models that the recipe trains: the mean score, since the policy can learn no more than that. The"
        " outcomes follow it; they need not rise.",
        "",
        f"Hardware: {results['hardware']}. Versions: {results['versions']}. {results['note']}",
        "",
        f"* {learned} of {len(found)} recipes learned on every seed: {above(runs)} of {len(runs)} runs;"
        f" {below(runs)} got worse.",
        f"* The control: {len(controls) - above(controls) - below(controls)} of {len(controls)} intervals include 0,"
        f" {above(controls)} are above it and {below(controls)} below; by chance, 5 of 100 would exclude it. In a"
        " control, nothing says which answer belongs to which prompt: rewards are permuted among the completions of"
        " every batch, and the demonstrations that the policy starts from among their prompts. So the policy starts"
        " at chance. The table has the outcomes above chance: less the share of the batch's other prompts that the"
        " completion would have answered. Recipes measured by the log-prob of what they imitate have no control: it"
        " rises in any case.",
        f"* {results['warm_start']}",
        "* Seconds are of a run with everything compiled, without the start of Python, and of the processors; `x"
        f" 3`: three seeds share one program. `with compiling` marks runs that also compiled. {fast[20]} recipes"
        f" take at most 20 s, {fast[60]} at most 60.",
        "",
        "| recipe | what it is | learned | by seed: first to last | control, above chance | s | processor s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in sorted(found.items()):
        fastest, warm = quickest(entry), warm_runs(entry)
        seeds = f" x {fastest['together']}" if fastest["together"] > 1 else ""
        compiling = "" if fastest["warm"] else " with compiling"
        cells = [
            f"`{name}`",
            headers[name],
            verdict(entry["runs"]),
            "; ".join(map(shown, entry["runs"])) + of_outcomes(entry),
            "; ".join(map(shown, entry["controls"])),
            f"{fastest['seconds']:.0f}{seeds}",
            f"{min(run['processor_seconds'] for run in warm):.0f}{compiling}",
        ]
        out.append("| " + " | ".join(cells) + " |")
    missing = sorted(set(headers) - set(found) - {"toy"})
    if missing:
        out += ["", f"Not in the table: {', '.join(f'`{name}`' for name in missing)}."]
    return "\n".join(out) + "\n"


AGREEMENT = """\
`python -m benchmarks.agreement --out docs/agreement.json` compares every advantage, loss, KL term, reduction and value,
and the losses of section P, on {cases:,} seeded random cases (seed {seed}): with a plain loop over rows and tokens, and
with {versions} where they have it; the objectives of pairs and of labeled answers also, from log-probs of tokens to a
mean over a batch, with the losses of TRL's trainers. A difference is |ours - theirs| / max(1, |theirs|), the largest of
all entries and cases; of a loss also that of its derivative by the log-probs, values or logits. The bar is 1e-5.

The loops were written from [algorithms.md](algorithms.md) and the names of the inputs, before the functions were read.
Conventions that the formulas leave open were taken over afterwards: the order of axes, weights of 1 where masked, NaN
for a baseline before the first batch, which noise Clip-Cov takes first, ties in KL-Cov, no reset before the first step,
and the proximal log-probs of a token that the current weights drew. One comparison found a mistake, which is mended:
the KL form of A-LoL also penalized rows with an advantage of 0 or less, which do not learn. The loops of section P are
by the author of some of its tests; there one found that the reward model learned from pairs with an empty answer. Their
derivatives are central differences of the loops.

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


RELIABILITY = """\
What jrl promises to runs that last for weeks and to whoever trains on text that nobody has read, goal by goal, and what
`python -m benchmarks.reliability --out docs/reliability.json` found, with `--trials full` where the result says so. A
trial is a test, or one of the cases that a test counts; "32 of 1,000" had fewer than the goal asks for. What one host
cannot show, and what was not tried, is in the last column. [SECURITY.md](../SECURITY.md) has the threat model.
{tried} of {goals} goals are tried, {failed} failed.
{hardware}; {versions}.
"""
AREAS = {
    "R": "Exactness and resuming",
    "K": "Checkpoints",
    "N": "Numbers",
    "V": "Verifiers",
    "H": "Hosts",
    "W": "Sampler and learner",
    "C": "Configuration",
    "D": "Data",
    "E": "Surroundings",
    "S": "Security",
}


def trials_of(result: dict, asked: int) -> str:
    """Returns how many trials a goal had, and how many it asks for where it had fewer."""
    more = f" of {asked:,}" if result["trials"] < asked else ""
    return f"{result['trials']:,}{more} ({result['size']})"


def reliability() -> str:
    """Returns docs/reliability.md: each goal, its trials and their result, and what is not promised."""
    results = json.loads((ROOT / "docs" / "reliability.json").read_text(encoding="utf-8"))
    tried = {name: result for name, result in results["goals"].items() if name in GOALS}
    counts = {"tried": len(tried), "goals": len(GOALS), "failed": sum(bool(one["failed"]) for one in tried.values())}
    introduction = RELIABILITY.format(**counts, hardware=results["hardware"], versions=results["versions"])
    out = ["# Reliability", GENERATED, introduction]
    for letter, area in AREAS.items():
        out += [f"## {area}", "", "| goal | promise | trials | result | not promised, or not shown |"]
        out.append("| --- | --- | --- | --- | --- |")
        for name, goal in GOALS.items():
            if name[0] != letter:
                continue
            one = tried.get(name)
            result = "" if one is None else f"{len(one['failed'])} failed" if one["failed"] else "none failed"
            count = "" if one is None else trials_of(one, ASKED.get(name, 0))
            out.append(f"| {name} | {goal.promise} | {count} | {result or 'not tried'} | {goal.limits} |")
        out.append("")
    return "\n".join(out)


DATA = """\
A stage learns from a data set as it is published: name the file and its layout.

```
Config.task = @Dataset()
Dataset.path = 'ultrafeedback.parquet'   # or .jsonl, .jsonl.gz, .array_record with a JSON text in each record
Dataset.layout = 'ultrafeedback'
pairs/Offline.source = @Preferences()
```

Each layout becomes prompts with answers, and `Dataset.take` says what examples are made of these:

| take | an example is | for |
| --- | --- | --- |
| `best_and_worst` | the best answer, and in `info.rejected` the worst | `Preferences` |
| `best_and_random` | the same with any of the answers that are worse, as Zephyr's pairs (P27) | `Preferences` |
| `all_pairs` | the same of every two answers of which one is better | `Preferences` |
| `best` | the best answer | `Demonstrations` |
| `each` | every answer alone, with its label, score and attributes in `info` | `Demonstrations`, `Labeled`, `Rated` |
| `last_turn` | the last answer of a conversation | `Demonstrations` |
| `every_turn` | every answer of it, after what was said before | `Demonstrations` |

An Online stage takes the same examples as prompts. `Dataset.rank_by` chooses what several answers are ranked by. A pair
of answers with scores has `info.score`, `info.rejected_score` and `info.margin`. `Dataset.system` is a system message
for conversations without one.

jrl refuses a row that a layout does not understand, and names file, row, field and the layouts that could read it.
`Dataset.on_bad_row = 'drop'` drops such rows and counts them by cause, up to `Dataset.max_dropped`. Prompts that give
no example are not bad rows, but are counted: `unanswered`, `single_answer`, `unranked`, `tied`, `same_answers`.

A data set in several files has a `*` in its path: `Dataset.path = 'ultrafeedback/train-*.parquet'`. The files are read
as one, in the order of their names, and errors name the file and the row in it. The path of `Jsonl` may have one too.
A gs:// address names one file.

Rows are read in a random order. Of the Parquet files of a path up to 1 GiB of row groups stays unpacked in memory, so a
larger data set is read faster with small row groups (pyarrow's `row_group_size`, 100 rows or so for long solutions).

`jrl data inspect FILE --layout LAYOUT --as SOURCE` shows the rows as the model will see them. `jrl list layouts --json`
prints the table below.

## A prompt and an answer in columns

`Jsonl` reads them from columns of any name, and puts the other columns into `info`, for a verifier of your own:

| data set | `Jsonl.columns` | `Jsonl.answer_in` |
| --- | --- | --- |
| GSM8K | `{'prompt': 'question'}` | `'hash'` |
| MATH | `{'prompt': 'problem', 'answer': 'solution'}` | `'boxed'` |
| NuminaMath-CoT | `{'prompt': 'problem', 'answer': 'solution', 'messages': 'unused'}` | `'boxed'` |
| NuminaMath-1.5, Big-Math | `{'prompt': 'problem'}` | |
| OpenR1-Math | `{'prompt': 'problem', 'messages': 'unused'}` | |
| DeepMath-103K | `{'prompt': 'question', 'answer': 'final_answer'}` | |
| APPS | `{'prompt': 'question', 'answer': 'input_output'}`: the tests, as a text of JSON | |

A row without an answer, such as a proof, is bad: `Jsonl.on_bad_row = 'drop'`, and `Jsonl.max_dropped` if they are many.
`jrl data inspect FILE "Jsonl.columns={'prompt': 'question'}" "Jsonl.answer_in='hash'" --as Demonstrations` shows the
answers.

Step labels have no layout. Write such rows for `StepLabels`, and set `Jsonl.needs_answer = False`:

```json
{"prompt": "2+2+3=?", "steps": ["2+2=4", "4+3=8"], "labels": [1, 0]}
```

In Math-Shepherd's `label`, every step ends with + or -; PRM800K rates the completions of a step 1, 0 or -1, of which
its authors count 1 and 0 as right.

## Mixtures, duplicates, contamination

Tasks nest: a mixture of filtered data sets is one.

```
Config.task = @Mixture()
Mixture.tasks = [@chat/Filtered(), @math/Dataset()]
Mixture.weights = (3, 1)                 # exact shares in every epoch; a weight of 0 is refused
chat/Filtered.task = @chat/Dataset()
chat/Filtered.evaluation = [@test/Dataset()]
```

The order is a function of the run's seed and the position in it, so that a resumed run reads on bit for bit.
`Filtered` drops, only reports, or refuses two kinds of examples: those with the prompt, answer, rejected answer and
label of an earlier one (`duplicates`), and those whose prompt has the same words as an evaluation prompt, or shares
n-grams with it that cover more than `overlap` of its words (`contaminated`). The 8-grams and the threshold of one half
follow Tulu 3 (2411.15124, section 3.2), which counts tokens instead of words. `jrl data inspect FILE --against EVAL`
names the rows and shows lengths, duplicates and shares of tasks; without FILE it shows the task of `--config`. The
published file of DAPO-Math-17k has every prompt 100 times, of which `Filtered` keeps one.

[configs/data/mixture.gin](../configs/data/mixture.gin) learns from such a mixture. A stage may have data of its own
(`Offline.task`), so that imitation, preferences and rewards that can be verified are one run:
[configs/data/pipeline.gin](../configs/data/pipeline.gin), `jrl data inspect --config CONFIG --stage NAME`.

## What a run sampled

`jrl rollouts RUN --out rows.jsonl --where 'step > 100'` writes rollouts in the layout `rollouts`, from which every
offline method learns: `best` for imitation, `best_and_worst`, `best_and_random` and `all_pairs` for preferences, `each`
for labels. A prompt of several messages is one text there, and completions are encoded anew. `jrl replay RUN --step N`
repeats updates from the store's own tokens, bit for bit.

## Layouts

| layout | data sets | take: the first is the default | ranked by: likewise |
| --- | --- | --- | --- |"""


def data_layouts() -> str:
    """Returns docs/data-layouts.md: every layout and a row of it."""
    out = ["# Data layouts", GENERATED, DATA]
    listed = lambda names: ", ".join(f"`{name}`" for name in names)
    for name, row in LAYOUTS.items():
        out.append(f"| [`{name}`](#{name}) | {row.of} | {listed(row.takes)} | {listed(row.rank_by)} |")
    for name, row in LAYOUTS.items():
        rows = [json.dumps(one, ensure_ascii=False) for one in row.example]
        out += ["", f"### {name}", "", "```json", *rows, "```"]
    return "\n".join(out) + "\n"


PAGES = {
    "docs/data-layouts.md": data_layouts,
    "docs/methods.md": methods,
    "docs/papers.md": papers,
    "docs/recipes.md": measured,
    "docs/agreement.md": agreement,
    "docs/reliability.md": reliability,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")
        print(f"wrote {name}")
