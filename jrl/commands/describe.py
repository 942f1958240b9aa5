"""`jrl list` and `jrl help`: list and describe everything that can be configured."""

from __future__ import annotations

import argparse
import json

from jrl.commands import start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ("configs", "parts", "algos", "optimizers", "strategies", "curricula", "sources", "verifiers", "envs",
             "layouts", "families", "tokenizers")  # fmt: skip
    parser.add_argument(
        "kind",
        choices=kinds,
        help="what to list: bundled configs, parts (the formulas that objectives compose), or a table",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def show_list(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")
    from jrl.tools import catalog

    print(json.dumps(catalog.rows(args.kind), indent=1) if args.json else catalog.table(args.kind))
    return DONE


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", choices=("config",), metavar="TOPIC", help="config, or a command")
    parser.add_argument("section", nargs="?", metavar="SECTION",
                        help="one section or table of the configuration, such as Sampler or algos")  # fmt: skip


def show_help(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")
    from jrl.config import describe, describe_section
    from jrl.experiment import TABLES, Config, config_classes

    tables = config_classes(TABLES)
    print(describe(Config, tables) if args.section is None else describe_section(Config, tables, args.section))
    return DONE


LIST = Command(
    "List configurations, formulas, objectives, optimizers, sampling strategies, curricula, sources, verifiers, "
    "environments, data layouts, model families or tokenizers.",
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
