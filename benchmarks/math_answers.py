"""What a verdict of MathEqual costs on hostile text, and whether any such text is accepted.

    python -m benchmarks.math_answers --out FILE.json --strings 100000

Strings are generated from a seed: random characters and tokens, damaged answers, deep nesting, towers, huge numbers,
long sums, near misses of the gold answer. Each is judged against a gold answer in this process, and its CPU time
taken. Those of the kind "equal" are correct, those of the kind "near" are not. Prints a row for each kind and writes
milliseconds, memory, wrong verdicts, exceptions, and the slowest strings.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

from jrl.tasks.verdict import Status
from jrl.tasks.verifiers.expressions.terms import NoAnswer
from jrl.tasks.verifiers.math_equal import MathEqual, compare, preload

GOLDS = (
    "5", "-17", "1/3", r"\frac{7}{12}", "3.14", r"2^{2004}", r"\sqrt{2}+\sqrt{3}", r"\frac{1+\sqrt{5}}{2}",
    r"2\pi", r"e^{3}-1", r"\ln 2+\sin 1", "x^2-1", r"\frac{n(n+1)}{2}", r"\binom{n}{2}", r"\sin^2 x-\cos y",
    "3+4i", "(1,2)", r"\{1,2,3\}", "1, 2", r"(-\infty,2]\cup(3,\infty)", "x=5", "y=2x+1", r"x\le 3",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"90^\circ", r"5\text{ cm}", "1011_2", "A", "even",
)  # fmt: skip
NUMBERS = ("0", "1", "2", "3", "7", "10", "12", "0.5", "999", "1000003", "9" * 40)
TOKENS = (
    *NUMBERS, "x", "y", "n", "i", "e", "+", "-", "*", "/", "^", "_", "{", "}", "(", ")", "[", "]", "|", "!",
    ",", ";", "=",
    "<", " ", r"\frac", r"\sqrt", r"\binom", r"\pi", r"\sin", r"\cos", r"\tan", r"\ln", r"\log", r"\exp", r"\arcsin",
    r"\left(", r"\right)", r"\cdot", r"\pm", r"\infty", r"\cup", r"\{", r"\}", r"\text{ cm}", r"\%", r"^\circ", "&",
    r"\\", r"\begin{pmatrix}", r"\end{pmatrix}", r"\overline{3}", r"\lfloor", r"\rfloor", r"\le", r"\in", "$", r"\$",
)  # fmt: skip


def expression(draw: random.Random, depth: int) -> str:
    """Returns an expression of the grammar that is read."""
    if depth == 0:
        return draw.choice((*NUMBERS, "x", "n", r"\pi", "e", "i"))
    a, b = expression(draw, depth - 1), expression(draw, draw.randrange(depth))
    return draw.choice(
        (
            f"{a}+{b}", f"({a})-({b})", f"({a})({b})", rf"\frac{{{a}}}{{{b}}}", rf"\sqrt{{{a}}}", rf"\sqrt[3]{{{b}}}",
            f"({a})^{{{b}}}", f"({a})^{{{draw.randrange(1, 40)}}}", rf"\sin({a})", rf"\cos\left({a}\right)",
            rf"\ln({a})", f"e^{{{a}}}", rf"|{a}|", rf"\arctan({a})", rf"\tan({a})", rf"\lfloor {a}\rfloor",
            f"({b})!", rf"\binom{{{a}}}{{{b}}}", rf"\log_{{{b}}}({a})",
        )
    )  # fmt: skip


def _repeated(draw: random.Random) -> str:
    """Returns one piece of text many times."""
    count = int(4096 ** draw.random())
    opening, middle, closing = draw.choice(
        (
            ("{", "5", "}"), ("(", "5", ")"), ("|", "5", "|"), (r"\sqrt{", "2", "}"), (r"\frac{1}{1+", "2", "}"),
            (r"\sin(", "1", ")"), ("e^{", "1", "}"), ("2^{", "2", "}"), (r"\sqrt", "2", ""), ("x_{", "1", "}"),
            (r"\left(", "x", r"\right)"), (r"\{", "1", r"\}"), ("-", "5", ""), (r"\ln|", "2", "|"),
            (r"\text{", "5", "}"),
            ("", "5", "!"), ("", "x", "_1"), ("", "5", r"\%"), ("[", "1", ")"), (r"\lfloor", "2.5", r"\rfloor"),
            ("(1+", "x", ")^2"), (r"\sqrt{1+", "x", "}"), (r"\cos(x", "", ")"), (r"\binom{", "9", "}{2}"),
            (r"\begin{pmatrix}", "1", r"\end{pmatrix}"), ("$", "5", "$"), (r"\boxed{", "5", "}"), ("1+", "1", ""),
        )
    )  # fmt: skip
    return opening * count + middle + closing * count


def _long(draw: random.Random) -> str:
    """Returns a sum, product or list of many parts."""
    part: Callable[[int], str] = draw.choice(
        (
            lambda k: f"9^{{{900 - k % 800}}}", lambda k: rf"\sqrt{{{k + 2}}}", lambda k: rf"\frac{{1}}{{{k + 1}!}}",
            lambda k: rf"\sin {k}", lambda k: rf"\ln({k + 2})", lambda k: f"x^{{{k}}}", lambda k: f"{k}!",
            lambda k: f"x_{k}",
            lambda k: rf"\frac{{1}}{{9^{{{k}}}+1}}", lambda k: rf"e^{{{k}}}", lambda k: rf"\binom{{{k + 900}}}{{450}}",
            lambda k: rf"\sqrt[{k % 60 + 2}]{{{k + 2}+\sqrt{{{k + 3}}}}}", lambda k: rf"\sin({k}x)", lambda k: f"{k}",
            lambda k: rf"\sin(10^{{{k}}})", lambda k: "3" * 50, lambda k: rf"(x+{k})^{{999}}",
            lambda k: rf"2^{{x+{k}}}",
            lambda k: rf"\frac{{{k}}}{{x-{k}}}", lambda k: rf"\sqrt{{x+{k}}}",
            lambda k: rf"\arctan\frac{{1}}{{{k + 1}}}",
            lambda k: f"{4900 + k % 100}!", lambda k: f"10^{{-{k}}}", lambda k: rf"\cos\frac{{\pi}}{{{k + 1}}}",
            lambda k: rf"|x-{k}|", lambda k: rf"({k},{k + 1})", lambda k: rf"\{{{k}\}}", lambda k: f"n!^{{{k}}}",
        )
    )  # fmt: skip
    join = draw.choice(("+", "-", r"\cdot ", ",", r"\cup ", "/", " "))
    return join.join(part(k) for k in range(int(600 ** draw.random())))[:4096]


def _huge(draw: random.Random) -> str:
    """Returns numbers, powers, factorials, roots and binomials of enormous size."""
    n = draw.choice((50, 1000, 4999, 10**6, 10**9, 10**30, 10**300))
    k = draw.randrange(2, 10 ** draw.randrange(1, 12))
    return draw.choice(
        (
            f"{k}^{{{n}}}", f"{n}!", rf"\binom{{{n}}}{{{k}}}", rf"\binom{{{n}}}{{{n // 2}}}", f"10^{{-{n}}}",
            f"{k}^{{{k}^{{{k}}}}}",
            rf"\sqrt[{n}]{{{k}}}", rf"\sqrt[64]{{{n}}}", f"e^{{{n}}}", rf"\sin({n})", rf"e^{{-{n}}}",
            rf"\ln({n}!)", f"x^{{{n}}}",
            f"({k}!)^{{{k}}}", f"1.{'3' * min(k, 900)}", "7" * min(k, 4000), f"1e{n}", f"1e-{min(n, 9999)}",
            rf"{k}^{{1/{k}}}",
            rf"(1+10^{{-{n}}})^{{{n}}}", rf"\tan({n}\pi/{k})", rf"2^{{\sqrt{{{n}}}}}", rf"(1+\sqrt{{{k}}})^{{{n}}}",
            rf"(2+3i)^{{{k}}}", rf"\lfloor 10^{{{n}}}\pi\rfloor", rf"e^{{e^{{{k}}}}}", rf"\sqrt{{2}}^{{{k}}}",
            f"{k}_{{{n}}}",
        )
    )  # fmt: skip


def _damaged(draw: random.Random) -> str:
    text = list(draw.choice(GOLDS) + draw.choice(("", draw.choice(GOLDS))))
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(text) + 1)
        text[place : place + draw.randrange(3)] = draw.choice((*TOKENS, "\0", "\u200b", "５", "é"))
    return "".join(text)


def _near(draw: random.Random) -> tuple[str, str]:
    """Returns an expression, and itself changed by what is not 0."""
    gold = draw.choice(GOLDS[:16]) if draw.random() < 0.5 else constant(draw, draw.randrange(1, 4))
    change = draw.choice(
        ("1", "10^{-50}", "10^{-300}", r"\frac{1}{2^{200}}", "e^{-200}", r"\frac{1}{200!}", r"10^{-40}\pi")
    )
    return gold, f"{gold}{draw.choice('+-')}{change}"


def _equal(draw: random.Random) -> tuple[str, str]:
    """Returns an expression twice, in two notations."""
    a, b = constant(draw, draw.randrange(1, 3)), constant(draw, draw.randrange(1, 3))
    return draw.choice(
        (
            (f"{a}+{b}", f"{b}+{a}"), (f"({a})({b})", rf"({b})\cdot({a})"),
            (f"({a}+{b})^2", f"({a})^2+2({a})({b})+({b})^2"),
            (rf"\frac{{{a}}}{{7}}+{b}", rf"\frac{{{a}+7({b})}}{{7}}"), (f"{a}, 77{b}", rf"77{b}, {a}"),
            (f"{a}", rf"\frac{{3({a})}}{{3}}"),
            (f"({a}-({b}))({a}+{b})", f"({a})^2-({b})^2"), (f"{a}+{b}x", f"x({b})+{a}"),
            (f"e^{{{a}}}e^x", f"e^{{x+{a}}}"),
        )
    )  # fmt: skip


def constant(draw: random.Random, depth: int) -> str:
    """Returns an expression with a value."""
    if depth == 0:
        return str(draw.randrange(1, 30))
    a, b = constant(draw, depth - 1), constant(draw, depth - 1)
    return draw.choice(
        (f"({a}+{b})", rf"({a})({b})", rf"\frac{{{a}}}{{{b}}}", rf"\sqrt{{{a}}}", rf"\ln(1+{a})", rf"\arctan({a})",
         rf"\sqrt[3]{{{a}}}", rf"({a})^{{3}}", rf"\sin({a})", r"\pi")
    )  # fmt: skip


KINDS: dict[str, Callable[[random.Random], str | tuple[str, str]]] = {
    "characters": lambda draw: "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x2FFF))))
                                       for _ in range(int(4096 ** draw.random()))),
    "tokens": lambda draw: "".join(draw.choice(TOKENS) for _ in range(int(1000 ** draw.random()))),
    "grammar": lambda draw: expression(draw, draw.randrange(1, 7)),
    "damaged": _damaged,
    "repeated": _repeated,
    "long": _long,
    "huge": _huge,
    "near": _near,
    "equal": _equal,
}  # fmt: skip
EXPECTED = {"equal": True, "near": False}  # kinds whose verdict is known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="JSON file with every figure")
    parser.add_argument("--strings", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(KINDS), nargs="+", default=tuple(KINDS))
    args = parser.parse_args()
    report = measure(args.strings, args.seed, args.kind)
    args.out.write_text(json.dumps(report, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
    columns = ("strings", "p50_ms", "p99_ms", "max_ms", "wrong", "exceptions")
    print(f"{'kind':12}" + "".join(f"{name:>12}" for name in columns))
    for name, row in report["kinds"].items():
        print(f"{name:12}" + "".join(f"{row[column]:12}" for column in columns))
    print(f"memory above the start: {report['memory_mb']} MB")


def measure(strings: int, seed: int, kinds: tuple[str, ...] | list[str]) -> dict:
    """Returns the figures of each kind and of all together."""
    preload()
    draw = random.Random(seed)
    start_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    milliseconds: dict[str, list[float]] = collections.defaultdict(list)
    wrong, raised, slowest = [], [], []
    for number in range(strings):
        kind = kinds[number % len(kinds)]
        text = KINDS[kind](draw)
        gold, answer = text if isinstance(text, tuple) else (draw.choice(GOLDS), text)
        begin = time.thread_time()
        try:
            verdict = compare(MathEqual(), gold, answer)
        except NoAnswer:  # of the gold answer
            continue
        except Exception as error:
            raised.append((kind, gold, answer, repr(error)))
            continue
        spent = 1000 * (time.thread_time() - begin)
        milliseconds[kind].append(spent)
        slowest.append((round(spent, 3), kind, gold, answer))
        if len(slowest) > 1000:
            slowest = sorted(slowest, reverse=True)[:20]
        if kind in EXPECTED and (verdict.status is Status.CORRECT) != EXPECTED[kind]:
            wrong.append((kind, gold, answer, verdict.detail))
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kb) / 1024
    rows = {
        kind: {
            **_percentiles(milliseconds[kind]),
            "wrong": sum(row[0] == kind for row in wrong),
            "exceptions": sum(row[0] == kind for row in raised),
        }
        for kind in kinds
    }
    rows["all"] = {
        **_percentiles([value for values in milliseconds.values() for value in values]),
        "wrong": len(wrong),
        "exceptions": len(raised),
    }
    return {
        "seed": seed,
        "memory_mb": round(memory, 1),
        "kinds": rows,
        "slowest": sorted(slowest, reverse=True)[:20],
        "wrong": wrong[:50],
        "exceptions": raised[:50],
    }


def _percentiles(values: list[float]) -> dict:
    ordered = sorted(values) or [0.0]
    share = lambda q: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3)
    return {"strings": len(values), "p50_ms": share(0.5), "p99_ms": share(0.99), "max_ms": share(1.0)}


if __name__ == "__main__":
    main()
