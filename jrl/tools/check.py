"""Runs jrl's contract tests on a user's parts, for `jrl check my_parts.py`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl import paths
from jrl.algos.conformance import contract_tests_of, default_config
from jrl.learning.optimizers.conformance import CONTRACT_TESTS as OPTIMIZER_TESTS
from jrl.learning.optimizers.conformance import default_config as default_optimizer
from jrl.models.conformance import CONTRACT_TESTS as MODEL_TESTS
from jrl.plugins import Parts, load_parts
from jrl.rollout.scoring import Scoring
from jrl.rollout.strategies.conformance import contract_tests_of as strategy_tests_of
from jrl.run.report.text import printable_lines
from jrl.tasks.data.conformance import CONTRACT_TESTS as CURRICULUM_TESTS
from jrl.tasks.data.prompts import Visit
from jrl.tasks.envs.check import check_source
from jrl.tasks.envs.contract import check_opened
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.contract import MEMBERS
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import VerifierSpec, spec_of
from jrl.tasks.verifiers.contract import look_up
from jrl.tasks.verifiers.judge import judge
from jrl.tasks.verifiers.part_location import part_location
from jrl.tasks.verifiers.pool import Item, Pool
from jrl.tasks.wrong_result import WrongResult

# What a verifier judges where the parts' environments have no example for it, as docs/bring-your-own.md says.
PLAIN = Example("plain", (Message("user", "What is 2 + 2?"),), answer="4")
EXAMPLES = 8  # examples of each of the user's environments that the verifiers judge
HUGE = 100_000  # characters; the default Scoring.max_characters
# Completions that are wrong, unless one is the answer.
WRONG = ("5", "I do not know.", "The answer is\n\n**17 apples**")
MAY_RAISE = ("returns or raises on an empty text", "returns or raises on huge texts in time")
TEXTS = ("", "12+34=46", "<|user|> <s> </s>", " \t\n", "\u00e9 \u65e5\u672c \U0001f389", "\x00\ufffd")


Tests = Mapping[str, Callable[[Any, Any], None]]  # by name; each takes a row and a configuration of it


class ContractResult(NamedTuple):
    """The result of one contract test on one row."""

    name: str  # of the row
    test: str
    problem: str | None  # None: the test passed, or was skipped
    skipped: bool = False


def check_parts(parts: Sequence[str | Path]) -> list[ContractResult]:
    """Returns the results of all contract tests of every row that the files define. Raises PartError for a bad part."""
    loaded = load_parts(parts)
    results: list[ContractResult] = []
    for name in loaded.added["algos"]:
        row = loaded.tables["algos"][name]
        tests_of = lambda row, config: contract_tests_of(row)
        results += row_results(name, row, tests_of, lambda row=row: default_config(row))
    examples = _part_examples(loaded)
    for name in loaded.added["optimizers"]:
        row = loaded.tables["optimizers"][name]
        results += row_results(name, row, lambda row, config: OPTIMIZER_TESTS, lambda row=row: default_optimizer(row))
    for name in loaded.added["strategies"]:
        row = loaded.tables["strategies"][name]
        results += row_results(name, row, strategy_tests_of, row.config)
    for name in loaded.added["curricula"]:
        row = loaded.tables["curricula"][name]
        results += row_results(name, row, lambda row, config: CURRICULUM_TESTS, row.config)
    for name in loaded.added["verifiers"]:
        if loaded.added["envs"] and not examples:
            results.append(ContractResult(name, "no ENVS of the file give examples to judge; see below", None, True))
        else:
            results += check_verifier(name, loaded, examples)
    for name in loaded.added["envs"]:
        results += check_environment(name, loaded)
    for name in loaded.added["sources"]:
        results += check_stored_source(name, loaded.tables["sources"][name], examples)
    for name in loaded.added["tokenizers"]:
        results += check_tokenizer(name, loaded)
    for name in loaded.added["models"]:
        row = loaded.tables["models"][name]  # with a small vocabulary
        small = lambda row=row: dataclasses.replace(row.config(), vocab_size=24)
        results += row_results(name, row.model, lambda model, cfg: MODEL_TESTS, small)
    return results


def row_results(
    name: str, row: Any, tests_of: Callable[[Any, Any], Tests], default: Callable[[], Any]
) -> Iterator[ContractResult]:
    """Yields the results of tests that take a row and a configuration of it.

    Args:
      tests_of: (row, configuration) -> the tests. default: returns the default configuration.
    """
    config, tests = None, {}

    def prepare() -> None:
        nonlocal config, tests
        config = default()
        tests = tests_of(row, config)

    if (problem := _problem(prepare)) is not None:
        yield ContractResult(name, "has defaults", problem)
    for test, holds in tests.items():
        yield ContractResult(name, test.replace("_", " "), _problem(lambda holds=holds: holds(row, config)))


def check_verifier(name: str, parts: Parts, examples: Sequence[Example] = ()) -> Iterator[ContractResult]:
    """Yields the results of running a verifier of the parts in real workers: it loads, judges gold and wrong answers,
    handles empty and huge texts in time, gives the same verdicts twice, and reads answers in any text.

    Args:
      examples: of the parts' environments. Those that name other verifiers are left out; PLAIN is used if none is left.
    """
    make_spec = lambda: spec_of(parts.tables["verifiers"][name].config())
    if (problem := _problem(make_spec)) is not None:
        yield ContractResult(name, "has defaults", problem)
        return
    spec = make_spec()
    meant = lambda example: not example.verifiers or name in example.verifiers
    examples = [example for example in examples if meant(example)] or [PLAIN]
    # A verifier may raise on an empty or huge text: the row is masked. It must judge ordinary completions.
    huge = [text * (HUGE // len(text)) for text in ("1", "(", "<answer>")]
    cases = {
        "judges gold answers": [(example.answer, example) for example in examples if example.answer is not None],
        "judges wrong answers": [(text, example) for example in examples for text in WRONG if text != example.answer],
        MAY_RAISE[0]: [("", example) for example in examples],
        MAY_RAISE[1]: [(text, examples[-1]) for text in huge],
    }
    cases = {test: items for test, items in cases.items() if items}  # no example may have an answer
    asked = [item for items in cases.values() for item in items]
    try:
        # Two pools show verdicts that depend on the process. The second judges in reverse order.
        first = _verdicts(spec, parts, asked)
        second = _verdicts(spec, parts, asked[::-1])[::-1]
    except (ValueError, RuntimeError) as error:
        yield ContractResult(name, "loads in a worker, without JAX", str(error))
        return
    yield ContractResult(name, "loads in a worker, without JAX", None)
    tests = [test for test, items in cases.items() for _ in items]
    for test in cases:
        judged = [(item, verdict) for of_test, item, verdict in zip(tests, asked, first) if of_test == test]
        allowed = (Status.VERIFIER_ERROR,) if test in MAY_RAISE else ()
        yield ContractResult(name, test, _unjudged(judged, allowed))
    unstable = next((text for (text, _), a, b in zip(asked, first, second) if _differ(a, b)), None)
    problem = None if unstable is None else f"{unstable[:40]!r} got two verdicts"
    yield ContractResult(name, "gives the same verdict for the same text", problem)
    row = parts.tables["verifiers"][name]
    if row.read_answer is not None:
        texts = dict.fromkeys(text for text, _ in asked if len(text) < HUGE // 2)
        read = lambda: [row.answer_in(row.config(), text) for text in texts]
        yield ContractResult(name, "reads a text or None in any completion", _problem(read))


def _unjudged(judged: Sequence[tuple[tuple[str, Example], Verdict]], allowed: Sequence[Status]) -> str | None:
    """Returns the first verdict that has no reward and no allowed status, and what it is on; None: there is none."""
    for (text, example), verdict in judged:
        if not verdict.status.scorable and verdict.status not in allowed:
            return f"{verdict.status.name}: {verdict.detail} (the completion {text[:40]!r} of {described(example)})"
    return None


def described(example: Example) -> str:
    """Returns an example on one line: its last message, its answer, and its `info`, which verifiers may read."""
    origin = "" if example is PLAIN else "an example of ENVS, "
    return f"{origin}{example.messages[-1].content!r}, answer {example.answer!r}, info {dict(example.info)!r}"[:200]


def check_environment(name: str, parts: Parts) -> Iterator[ContractResult]:
    """Yields the results of the contract tests of jrl.tasks.envs.contract: one per problem, or one that passed."""
    row = parts.tables["envs"][name]
    if (problem := _problem(row.config)) is not None:
        yield ContractResult(name, "has defaults", problem)
        return
    problems: list[str] = []
    problem = _problem(lambda: problems.extend(check_source(lambda: _opened(name, row), 20, _reward_fn(parts))))
    for issue in [problem] if problem else problems or [None]:
        yield ContractResult(name, "is a source: same index, same example; JSON; gold answers score 1", issue)


def _opened(name: str, row: Any) -> Any:
    """Returns the source of an environment with its defaults. Raises ValueError if it opens something else."""
    source = row.open(row.config())
    check_opened(name, source)
    return source


def check_stored_source(name: str, row: Any, examples: Sequence[Example] = ()) -> Iterator[ContractResult]:
    """Yields the result of the contract test of jrl.tasks.data.stored: every visit gives a unit of adjacent rows that
    fit, or is counted with a cause; the same visits give the same rows.

    Args:
      examples: of the parts' own environments. Plain examples with an answer, a rejected answer and a label are tried
        too.
    """
    if (problem := _problem(row.config)) is not None:
        yield ContractResult(name, "has defaults", problem)
        return
    plain = [dataclasses.replace(PLAIN, answer=text, info={"rejected": "5", "label": 1}) for text in TEXTS]
    visits = [Visit(example, (0, i), (1, 2)) for i, example in enumerate([*plain, PLAIN, *examples])]
    tokenizer, width = TOKENIZERS["Bytes"].build(TOKENIZERS["Bytes"].config(), TEXTS), 16

    def fits() -> None:
        (rows, counts), (repeated, _) = (row.rows(row.config(), visits, tokenizer, width) for _ in range(2))
        count = len(rows.length)
        _require(rows.tokens.shape == rows.action_mask.shape == (count, width), f"rows are not [n, {width}]")
        _require(count == row.unit_size * (len(visits) - sum(counts.values())), "visits are neither rows nor counted")
        _require(bool((rows.unit == np.arange(count) // row.unit_size).all()), "units are not numbered in order")
        inside = np.arange(width) < rows.length[:, None]
        _require(bool((rows.action_mask <= inside).all()), "a token beyond a row's length is learned")
        _require(bool(rows.action_mask.any(axis=1).all()), "a row has no token to learn")
        _require(
            all(np.array_equal(a, b, equal_nan=True) for a, b in zip(rows, repeated)),
            "the same visits give different rows",
        )

    yield ContractResult(name, "gives rows that fit, or says why not", _problem(fits))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_tokenizer(name: str, parts: Parts) -> Iterator[ContractResult]:
    """Yields the results of the contract tests of jrl.tasks.tokenizers.contract."""
    row = parts.tables["tokenizers"][name]
    try:
        tokenizer = row.build(row.config(), TEXTS)
    except Exception as error:
        yield ContractResult(name, "builds from texts with its defaults", paths.first_line(error))
        return
    missing = [member for member in MEMBERS if not hasattr(tokenizer, member)]
    yield ContractResult(name, "has every member", f"it has no {', '.join(missing)}" if missing else None)
    if missing:
        return

    def check_round_trips() -> None:
        for text in TEXTS:
            _require(tokenizer.decode(tokenizer.encode(text)) == text, f"{text!r} does not")

    def check_controls() -> None:
        controls = {tokenizer.pad_id, tokenizer.bos_id, *tokenizer.end_ids, *tokenizer.role_ids.values()}
        for text in TEXTS:
            _require(not controls & set(tokenizer.encode(text)), f"{text!r} does")

    yield ContractResult(name, "texts round-trip exactly", _problem(check_round_trips))
    yield ContractResult(name, "no text encodes to a control id", _problem(check_controls))
    with tempfile.TemporaryDirectory() as folder:

        def check_saved() -> None:
            tokenizer.save(Path(folder))
            reloaded = load_tokenizer(Path(folder), parts.tables["tokenizers"])
            if reloaded.fingerprint != tokenizer.fingerprint:
                raise ValueError("it has another fingerprint when it is loaded again")

        yield ContractResult(name, "is the same when saved and loaded", _problem(check_saved))


def table(results: Sequence[ContractResult]) -> str:
    """Returns the results as text; the last line counts them."""
    if not results:
        return "the parts define no row to check"
    width = max(len(row.name) for row in results)
    lines, shown = [], set()
    for row in results:
        lines.append(f"{'skip' if row.skipped else 'FAIL' if row.problem else 'ok  '}  {row.name:<{width}}  {row.test}")
        problem = "as above" if (row.name, row.problem) in shown else row.problem or ""
        lines += [f"{'':{width + 8}}{line}" for line in problem.splitlines()[:6]]
        if row.problem is not None:
            shown.add((row.name, row.problem))
    num_failed, num_skipped = sum(row.problem is not None for row in results), sum(row.skipped for row in results)
    counted = f"{len(results) - num_failed - num_skipped} checks passed, {num_failed} failed"
    return printable_lines("\n".join(lines)) + f"\n{counted}{f', {num_skipped} skipped' if num_skipped else ''}"


def _problem(run: Callable[[], Any]) -> str | None:
    """Returns the message of the exception that `run` raises, and where in a part it arose, else None. User code may
    raise anything."""
    try:
        run()
    except AssertionError as error:
        return str(error) or "it does not hold"
    except Exception as error:
        message = str(error) if isinstance(error, WrongResult) else paths.first_line(error)
        location = part_location(error)
        return message if location is None else f"{message}\n{location}"
    return None


def _part_examples(parts: Parts) -> list[Example]:
    """Returns examples of the parts' environments that open with their defaults: verifiers may need their `info`."""
    examples: list[Example] = []
    for name in parts.added["envs"]:
        row = parts.tables["envs"][name]

        def add_examples(name: str = name, row: Any = row) -> None:
            source = _opened(name, row)
            examples.extend(source[i] for i in range(min(EXAMPLES, len(source))))

        _problem(add_examples)  # check_environment reports its problems
    return examples


def _verdicts(spec: VerifierSpec, parts: Parts, asked: Sequence[tuple[str, Example]]) -> list[Verdict]:
    limits = Scoring()
    with Pool(
        [spec],
        parts.sources,
        workers=2,
        cpu_seconds=limits.cpu_seconds,
        wall_seconds=limits.wall_seconds,
        memory_mb=limits.memory_mb,
    ) as pool:
        return [verdict for (verdict,) in pool.collect(pool.submit([Item(text, of, (0,)) for text, of in asked]))]


def _differ(a: Verdict, b: Verdict) -> bool:
    """Returns whether two verdicts differ. Unscorable ones do not count: a deadline may cut off only one of the two."""
    judged = a.status.scorable and b.status.scorable
    return judged and dataclasses.replace(a, detail="") != dataclasses.replace(b, detail="")


def _reward_fn(parts: Parts) -> Callable[[str, Example], float]:
    """Returns a function (completion, example) -> reward of the first verifier that the example names; 1 if it names
    none, or one with fields that only a configuration has."""
    verifiers = parts.tables["verifiers"]

    def reward(completion: str, example: Example) -> float:
        if not example.verifiers:
            return 1.0
        verifier, *_ = [look_up(verifiers, name, f"example {example.id!r}") for name in example.verifiers]
        try:
            config = verifier.config()
        except TypeError:  # a field has no default, such as Regex.pattern
            return 1.0
        verdict = judge(verifier, config, completion, example)
        return verdict.reward if verdict.status <= Status.UNPARSABLE else float("nan")

    return reward
