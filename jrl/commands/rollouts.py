"""`jrl rollouts`: shows what a run sampled, row by row."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE

# As jrl.tools.browse_rollouts.CODES, which imports JAX.
CODES = (
    "verdict: 0 correct, 1 wrong, 2 unparsable, 3 cpu_limit, 4 memory_limit, 5 output_limit, 6 crash, 7 forbidden, "
    "8 verifier_error, 9 infra_error, 10 padding; "
    "finish: 0 stop_token, 1 stop_string, 2 length, 3 tool_budget, 4 failed"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", type=Path, help="the folder of a run; it may be running")
    parser.add_argument("--where", metavar="CONDITION", default="",
                        help="a condition on rows, such as \"reward < 0.5 and completion contains 'So'\"; "
                        f"verdict and finish also take names: \"verdict == wrong\" ({CODES})")  # fmt: skip
    parser.add_argument("--columns", metavar="A,B", help="what to show of each row (default: step, "
                        "reward, valid, example_id and texts; in a file also what Dataset.layout = 'rollouts' "
                        "reads)")  # fmt: skip
    parser.add_argument(
        "--most",
        type=options.number_of("rows"),
        metavar="N",
        help="at most N rows (default: 20 on the screen, all in a file)",
    )
    parser.add_argument("--out", metavar="FILE", type=options.out_file, help="write the rows to a file, .jsonl or .csv")


def rollouts(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")  # only tensorstore reads the store, and the run may hold the device
    from jrl.run.bucket_run import readable
    from jrl.run.report.text import counted
    from jrl.tools import browse_rollouts as browse

    run = readable(args.source)
    folder = run / "rollouts"
    if not run.exists():
        raise ValueError(f"{args.source} does not exist; give the --run folder of jrl train")
    if not folder.exists():
        why = "the run stored none: Log.rollouts was False" if (run / "manifest.json").exists() else (
            "it is not a run folder; give the --run folder of jrl train")  # fmt: skip
        raise ValueError(f"{args.source} holds no rollouts: {why}")
    conditions = browse.parse_where(args.where)
    known = browse.columns_of(folder)
    asked = args.columns and [name.strip() for name in args.columns.split(",")]
    columns = browse.chosen_columns(known, asked, browse.SHOWN if args.out is None else browse.EXPORTED)
    if args.out is not None:
        count = browse.export(browse.select(folder, conditions, columns, args.most), columns, args.out)
        print(f"{counted(count, 'row')} with {', '.join(columns)} are in {args.out}")
        return DONE
    rows, most, shown = browse.select(folder, conditions, columns, None), 20 if args.most is None else args.most, 0
    for row in itertools.islice(rows, most):
        print(browse.show(row), end="\n\n")
        shown += 1
    has_more = shown == most and next(rows, None) is not None
    print(f"{counted(shown, 'row')} shown{'; --most N shows more, --out FILE writes all' if has_more else ''}. "
          f"Columns: {', '.join(sorted(known))}")  # fmt: skip
    return DONE


COMMAND = Command(
    "Show or export what a run sampled, row by row, filtered by conditions on its columns.",
    "jrl rollouts runs/tiny --where 'reward < 0.5' --columns step,reward,completion",
    add_arguments,
    rollouts,
)
