"""`jrl list` and `jrl help`: list and describe everything that can be configured."""

from __future__ import annotations

import argparse
import json

from jrl.commands import start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ("configs", "parts", "algos", "optimizers", "strategies", "curricula", "sources", "verifiers", "envs",
             "layouts", "families", "tokenizers", "models")  # fmt: skip
    parser.add_argument(
        "kind",
        choices=kinds,
        help="what to list: bundled configs, parts (the formulas that objectives compose), or a table",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    _add_parts(parser, "list its rows too")


def _add_parts(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument("--parts", metavar="PARTS.py", action="append", default=[],
                        help=f"a file of your own parts: {purpose}; may be repeated")  # fmt: skip


def show_list(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")
    from jrl.experiment import TABLES
    from jrl.plugins import load_parts
    from jrl.tools import catalog

    if args.parts and args.kind not in TABLES:
        raise ValueError(f"no part adds to {args.kind}; leave --parts out")
    tables = load_parts(args.parts).tables
    print(json.dumps(catalog.rows(args.kind, tables), indent=1) if args.json else catalog.table(args.kind, tables))
    return DONE


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", choices=("config",), metavar="TOPIC", help="config, or a command")
    parser.add_argument("section", nargs="?", metavar="SECTION",
                        help="one section or table of the configuration, such as Sampler or algos")  # fmt: skip
    _add_parts(parser, "describe its rows too")


def show_help(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")
    from jrl.config import describe, describe_section
    from jrl.experiment import Config, config_classes
    from jrl.plugins import load_parts

    tables = config_classes(load_parts(args.parts).tables)
    print(describe(Config, tables) if args.section is None else describe_section(Config, tables, args.section))
    return DONE


LIST = Command(
    "List configurations, formulas, objectives, optimizers, sampling strategies, curricula, sources, verifiers, "
    "environments, data layouts, model families, tokenizers or models of your own.",
    "jrl list configs",
    add_list_arguments,
    show_list,
)

HELP = Command(
    "Describe a command, the whole configuration, or one section of it.",
    "jrl help config Sampler",
    add_help_arguments,
    show_help,
)
