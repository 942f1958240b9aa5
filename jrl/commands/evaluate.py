"""`jrl eval`: measures accuracy on held-out prompts, or a reward on pairs of answers."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.commands.rows import START_OF_LINE, counted_rows
from jrl.commands.weights import reading_bar
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model; "
                        "several are shown in one table")  # fmt: skip
    of_pairs = "; with --pairs, fields of Jsonl, or of Dataset with --layout, say how that file is read"
    options.add_bindings(parser, "the run's configuration, or --config", of_pairs)
    parser.add_argument("--config", metavar="CONFIG", type=Path,
                        help="the task and the verifiers for published models: a .gin file, or a name from "
                             "`jrl list configs`")  # fmt: skip
    parser.add_argument("--out", metavar="FILE.json", type=options.out_file, help="also write the numbers to this file")
    parser.add_argument("--diversity", action="store_true",
                        help="also measure distinct n-grams and self-BLEU of each prompt's samples")  # fmt: skip
    parser.add_argument("--reference", metavar="SOURCE", type=Path,
                        help="also measure the KL to the policy of this run or published model, and how far apart a "
                             "prompt's samples are in its hidden states")  # fmt: skip
    parser.add_argument("--reference-step", metavar="N", type=int, help="a saved step of --reference (the newest)")
    parser.add_argument("--proxy", metavar="RUN", type=Path,
                        help="also measure what this run's reward model gives the samples; with --reference and "
                             "at least five sources or --steps, where more of it stops paying")  # fmt: skip
    parser.add_argument("--proxy-role", metavar="NAME", default="reward", help="that reward model's role (reward)")
    parser.add_argument("--pairs", metavar="FILE", type=Path,
                        help="measure a reward on pairs of answers instead: --role's reward head, each label of a "
                             "published classifier, or with --reference the implicit reward of a policy")  # fmt: skip
    parser.add_argument("--layout", metavar="NAME", help="how the rows of --pairs are written, a name from `jrl "
                        "list layouts` (rows with prompt, answer and rejected)")  # fmt: skip
    parser.add_argument("--steps", metavar="N,N,...", type=_steps_of, default=[],
                        help="several saved steps, a row of the table for each")  # fmt: skip
    options.add_weights(parser)
    options.add_devices(parser)


def _steps_of(text: str) -> list[int]:
    if not all(part.isascii() and part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} are not steps, such as 10,20,30")
    return [int(part) for part in text.split(",")]


def evaluate(args: argparse.Namespace) -> int:
    start.prepare_jax(args)
    from jrl.tools import evaluate_sources, evaluation, judged_wins

    more = sources_among(args.bindings)
    addresses, bindings = [args.source, *map(Path, more)], args.bindings[len(more) :]
    options.check_not_overwriting(args.out, args.config, args.pairs)
    if args.step is not None and args.steps:
        raise ValueError("--steps names the steps already; leave --step out")
    if args.reference_step is not None and args.reference is None:
        raise ValueError("--reference-step is a saved step of --reference, which is not given")
    section = "Jsonl." if args.layout is None else "Dataset."
    of_file = [binding for binding in bindings if args.pairs is not None and binding.startswith(section)]
    bindings = [binding for binding in bindings if binding not in of_file]
    only = args.source if len(addresses) == 1 else None
    open_options = evaluate_sources.OpenOptions(bindings, args.config, only, reading_bar())
    sources = evaluate_sources.sources_of(addresses, args.steps or [args.step], open_options, args.stage, args.role)
    open_model = lambda address, **of: evaluate_sources.open_model(address, open_options, **of)
    open_reference = None
    if args.reference is not None:
        open_reference = lambda: open_model(args.reference, step=args.reference_step)
    if args.pairs is not None:
        return evaluate_pairs(args, sources, open_reference, bindings, of_file)
    evaluate_sources.check_evaluation_given(addresses, open_options)
    reference = None if open_reference is None else open_reference()
    proxy = None if args.proxy is None else open_model(args.proxy, role=args.proxy_role)
    shown = sys.stderr.isatty()
    show = lambda text: shown and print(f"{START_OF_LINE}{text}", end="", file=sys.stderr, flush=True)
    announce = lambda done, total: show(f"{done}/{total} prompts")
    warn = lambda warning: print(f"{START_OF_LINE if shown else ''}{warning}", file=sys.stderr)
    asked = evaluation.Asked(args.diversity, reference, proxy)
    with counted_rows() as counted:
        results, last, visits = evaluate_sources.evaluate_sources(sources, asked, announce, warn, counted)
    # First: if the sources cannot be compared, or a judge fails, nothing is lost.
    evaluate_sources.write_results(args.out, results)
    print(evaluation.table(results[0]) if len(results) == 1 else evaluation.side_by_side(results))
    answers = None if args.out is None else args.out.with_suffix(".judges")
    if judged := evaluate_sources.judge_sources(results, last, visits, answers):
        names = [result["source"] for result in results]
        print("\n".join(line for name, wins in judged.items() for line in judged_wins.lines(name, names, wins)))
        wins_of = lambda number: {name: wins[number] for name, wins in judged.items()}
        results = [{**result, "judged": wins_of(number)} for number, result in enumerate(results)]
        evaluate_sources.write_results(args.out, results)
    return DONE


def evaluate_pairs(
    args: argparse.Namespace,
    sources: Sequence[Any],
    open_reference: Callable[[], Any] | None,
    bindings: Sequence[str],
    of_file: Sequence[str],
) -> int:
    """`jrl eval --pairs`: measures rewards on pairs of answers.

    Args:
      bindings: those of the sources' configurations.
      of_file: those that say how the file of pairs is read.
    """
    from jrl.tools import reward_quality
    from jrl.tools.evaluate_sources import write_results

    if args.proxy is not None or args.diversity:
        raise ValueError("--pairs measures a reward on answers that are given; leave --proxy and --diversity out")
    with counted_rows() as counted:
        compared = reward_quality.read_pairs(args.pairs, args.layout, of_file, counted)
    chosen = bool(bindings or args.steps or args.step is not None or args.stage is not None or args.role != "policy")
    results = reward_quality.measure_sources(sources, compared, open_reference, reading_bar(), chosen=chosen)
    print(reward_quality.table(results))
    write_results(args.out, results)
    return DONE


def sources_among(words: Sequence[str]) -> list[str]:
    """Returns the sources: the words before the first binding. Folders of sweep members have an equals sign, too."""
    from jrl import paths

    is_source = lambda word: "=" not in word or paths.is_remote(word) or os.path.isdir(word)
    return list(itertools.takewhile(is_source, words))


COMMAND = Command(
    "Evaluate a trained policy on held-out prompts: avg@k, pass@k, majority@k, with intervals.",
    "jrl eval runs/tiny Data.held_out_every=10 'Config.eval=@Eval()' Eval.prompts=8 Eval.samples=4",
    add_arguments,
    evaluate,
)
