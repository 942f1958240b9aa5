"""`jrl score`: computes log-probs of given tokens or texts, or a classifier's rewards."""

from __future__ import annotations

import argparse
from pathlib import Path

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.commands.weights import reading_bar, weights_of
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model")
    parser.add_argument("rows", metavar="ROWS.jsonl", type=Path,
                        help='one JSON object a line: {"tokens": [ids]}, {"text": "..."} (bos is added), or '
                             '{"messages": [...]}, which ends with a message of the assistant')  # fmt: skip
    options.add_bindings(parser, "the run's configuration")
    parser.add_argument("--out", metavar="OUT.jsonl", type=options.out_file, required=True,
                        help='one {"tokens", "logprobs"} per row, in order, at temperature 1; logprobs[0] = 0; for a '
                             'classifier, {"tokens", "rewards"}, for a reward model of a run, {"tokens", '
                             '"reward"}')  # fmt: skip
    options.add_weights(parser)
    options.add_devices(parser)


def score(args: argparse.Namespace) -> int:
    start.prepare_jax(args)
    from jrl.models.heads import REWARD
    from jrl.run.bucket_run import readable
    from jrl.run.report.text import counted
    from jrl.run.trained import open_trained
    from jrl.tools.score import is_classifier, judge_file, score_file

    options.check_not_overwriting(args.out, args.rows)
    args.source = readable(args.source)
    if is_classifier(args.source):
        if args.bindings or args.step is not None or args.stage is not None or args.role != "policy":
            raise ValueError(f"{args.source} is a classifier: it takes no bindings, and has no steps, stages or roles")
        count = judge_file(args.source, args.rows, args.out, reading_bar())
        print(f"{counted(count, 'row')} scored by {args.source}; rewards are in {args.out}")
        return DONE
    trained = open_trained(
        args.source, args.bindings, args.step, announce=reading_bar(), stage=args.stage, role=args.role
    )
    count = score_file(trained, args.rows, args.out)
    what = "rewards" if REWARD in trained.heads else "log-probs"
    print(f"{counted(count, 'row')} scored with {weights_of(args.source, trained.step)}; {what} are in {args.out}")
    return DONE


COMMAND = Command(
    "Write the log-probs of given tokens or texts under a trained policy, or a classifier's rewards.",
    "jrl score runs/tiny rows.jsonl --out scored.jsonl",
    add_arguments,
    score,
)
