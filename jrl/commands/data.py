"""`jrl data inspect`: shows rows of a data file as the model will see them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.commands.rows import counted_rows
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("inspect",), help="inspect: show rows as the model will see them")
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        help="a data file: .jsonl, .jsonl.gz, .parquet or .array_record; or several, by a quoted pattern such as "
        "'train-*.parquet' (default: the task of --config)",
    )
    options.add_bindings(parser, "--config", "; without it, fields of Jsonl, or of Dataset with --layout")
    parser.add_argument("--config", metavar="CONFIG", type=Path,
                        help="sets the tokenizer, columns and lengths: a .gin file, or a name from "
                             "`jrl list configs` (default: bytes)")  # fmt: skip
    parser.add_argument("--layout", metavar="LAYOUT", help="how the file is written: a name from `jrl list layouts` "
                        "(default: the columns of Jsonl)")  # fmt: skip
    parser.add_argument("--stage", metavar="NAME", help="without FILE: the stage of --config whose task is shown")
    parser.add_argument("--take", metavar="TAKE", help="what a layout turns into examples, such as all_pairs")
    parser.add_argument("--against", metavar="EVAL", type=Path, action="append", default=[],
                        help="an evaluation set to compare the rows' prompts with; may be repeated")  # fmt: skip
    parser.add_argument("--against-layout", metavar="LAYOUT",
                        help="how the evaluation sets are written (default: the columns of Jsonl)")  # fmt: skip
    parser.add_argument("--ngram", type=options.number_of("words"), default=8, metavar="N",
                        help="words of an n-gram that counts as shared with an evaluation prompt "
                             "(default: 8)")  # fmt: skip
    parser.add_argument("--overlap", type=options.share, default=0.5, metavar="SHARE",
                        help="share of an evaluation prompt's words above which a row holds it "
                             "(default: 0.5)")  # fmt: skip
    parser.add_argument("--as", dest="source", metavar="SOURCE",
                        help="what rows become: a name from `jrl list sources`, such as Preferences "
                             "(default: prompts)")  # fmt: skip
    parser.add_argument(
        "--rows", type=options.number_of("rows", 0), default=3, metavar="N", help="rows to show (default: 3)"
    )
    parser.add_argument("--most", type=options.number_of("rows"), default=10_000, metavar="N",
                        help="rows that the statistics look at (default: 10000)")  # fmt: skip


def data(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")  # parts of a configuration may import JAX
    from jrl import paths
    from jrl.resolve import load_config
    from jrl.tools import inspect_data

    file, bindings = None if args.file is None else str(args.file), args.bindings
    is_file = lambda name: paths.is_remote(name) or bool(paths.matches(name))  # not a binding, in spite of its =
    if file is not None and "=" in file and not is_file(file):  # no file was given
        file, bindings = None, [file, *bindings]
    if file is not None and (more := [name for name in bindings if os.path.exists(name)]):
        raise ValueError(f"{file} and {more[0]}: name one file, or quote a pattern for several: 'train-*.parquet'")
    if bindings and args.config is None and file is None:
        raise ValueError(f"{bindings[0]}: a binding overrides --config, and none is given")
    config, parts = (None, None) if args.config is None else load_config(args.config, bindings)
    tables = None if parts is None else parts.tables
    read = inspect_data.Read(args.layout, args.take, args.stage, bindings=bindings if config is None else ())
    with counted_rows() as counted:
        opened = inspect_data.open_file(file, config, tables, args.source, read, counted)
        layout = inspect_data.Read(args.against_layout, option="--against-layout")
        open_evaluation = lambda path: inspect_data.open_file(str(path), None, None, None, layout, counted).source
        evaluation = [open_evaluation(path) for path in args.against]
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # no-color.org
    for line in inspect_data.lines(opened, args.rows, args.most, color):
        print(line)
    if evaluation:
        for line in inspect_data.contamination(opened, evaluation, args.ngram, args.overlap):
            print(line)
    return DONE


COMMAND = Command(
    "Show rows of a data file as the model will see them: tokens, which are learned from, lengths, duplicates.",
    "jrl data inspect pairs.jsonl --as Preferences --config gsm8k/qwen3-0.6b",
    add_arguments,
    data,
)
