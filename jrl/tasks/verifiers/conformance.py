"""Contract tests for every row of VERIFIERS, jrl's or a user's; a failing test raises AssertionError.

A test takes the spec of a row, the parts that define it and an example it can judge, and uses real workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.contract import VerifierSpec
from jrl.tasks.verifiers.pool import Item, Pool
from jrl.tasks.verifiers.source import PartSource

LIMITS = {"cpu_seconds": 2.0, "wall_seconds": 20.0, "memory_mb": 1024}
TEXTS = (
    "", " \n\t", "4", "four", r"\boxed{4}", "<think>2 + 2</think><answer>4</answer>", "#### 4", "nan", "-inf", "1e999",
    "None", "[[[[", "{" * 500, "(" * 500 + "4" + ")" * 500, r"\frac{1}{0}", r"\boxed{9^{9^{9^9}}}", "9**9**9**9",
    "__import__('os').abort()", "import os; os._exit(0)", "%s%n{0.__class__}", "\x00\x01\x1b[31m", "\ud800",
    "\u202e4\u200b", "４", "a" * 50_000, "a " * 25_000, "\n" * 50_000, "<answer>" * 5_000, "é́" * 20_000, "4 " * 20_000,
    "4=4\n" * 2_000,
)  # fmt: skip


def says_the_same_of_the_same(spec: VerifierSpec, parts: Sequence[PartSource], example: Example) -> None:
    """An item gets the same verdict when it is scored again, in another order, among others and by other workers."""
    forward = _ask(spec, parts, example, TEXTS, workers=1)
    backward = _ask(spec, parts, example, (*TEXTS, *TEXTS)[::-1], workers=2)[::-1]
    for index, (text, verdict) in enumerate(zip(TEXTS, forward)):
        for other in (backward[index], backward[index + len(TEXTS)]):
            _true(other == verdict, f"{spec.name} returns {verdict} for {text[:40]!r}, and {other} the second time")


def judges_any_text(spec: VerifierSpec, parts: Sequence[PartSource], example: Example) -> None:
    """Empty, huge and hostile texts get a verdict from the verifier within its deadline."""
    for text, verdict in zip(TEXTS, _ask(spec, parts, example, TEXTS, workers=2)):
        _true(
            verdict.status.scorable or verdict.status is Status.FORBIDDEN,
            f"{spec.name} ends in {verdict.status.name} on {text[:40]!r} ({len(text)} characters): {verdict.detail}",
        )


CONTRACT_TESTS: dict[str, Callable[[VerifierSpec, Sequence[PartSource], Example], None]] = {
    "says the same of the same": says_the_same_of_the_same,
    "judges any text": judges_any_text,
}


def _ask(
    spec: VerifierSpec, parts: Sequence[PartSource], example: Example, texts: Sequence[str], *, workers: int
) -> list[Verdict]:
    """Returns a verdict for each text. Raises ValueError if a part does not load without JAX."""
    with Pool([spec], parts, workers=workers, **LIMITS) as pool:
        return [verdict for (verdict,) in pool.collect(pool.submit([Item(text, example, (0,)) for text in texts]))]


def _true(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
