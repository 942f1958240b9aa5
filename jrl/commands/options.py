"""Arguments that several commands share, and parsers of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

RUN_FILES = ("config.gin", "config.json", "goodput.jsonl", "journal.jsonl", "manifest.json", "metrics.jsonl",
             "summary.json")  # fmt: skip


def add_bindings(parser: argparse.ArgumentParser, over: str, more: str = "") -> None:
    parser.add_argument(
        "bindings",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help=f"overrides {over}, in gin syntax: Sampler.temperature=0.7{more}",
    )


def add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="start N virtual CPU devices (see MeshShape)")
    parser.add_argument(
        "--no-compile-cache",
        action="store_true",
        help="compile everything again; by default compiled programs are cached in JAX_COMPILATION_CACHE_DIR, else in "
        "$XDG_CACHE_HOME/jrl/xla (~/.cache/jrl/xla)",
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="a saved step (default: the newest)")


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=step_or_best, metavar="N",
                        help="a saved step, or best: the one with the highest held-out accuracy, if Eval.every "
                             "evaluates saved steps (default: the newest)")  # fmt: skip
    parser.add_argument("--stage", metavar="NAME", help="the newest saved step of this stage of the run, such as sft")
    parser.add_argument(
        "--role", metavar="NAME", default="policy", help="a model of the run, such as reward (default: policy)"
    )


def step_or_best(text: str) -> int | str:
    if text != "best" and not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; give its number, or best")
    return text if text == "best" else int(text)


def add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metric", action="append", default=[], metavar="NAME",
                        help="of metrics.jsonl, or an evaluation such as eval/after_rl; may be repeated (reward/mean, "
                             "and the last evaluation)")  # fmt: skip
    parser.add_argument("--by", action="append", default=[], metavar="NAME",
                        help="compare the values of this setting; other settings that differ are tasks, within which "
                             "runs are resampled; may be repeated (all that differ)")  # fmt: skip
    parser.add_argument("--baseline", metavar="NAME=VALUE,...",
                        help="the variant that the others are compared with: the probability that they improve on "
                             "it")  # fmt: skip
    parser.add_argument("--statistic", choices=("mean", "iqm", "gap"), default="mean",
                        help="over a variant's runs: the mean, the interquartile mean, or the optimality gap, how far "
                             "they fall short of 1 (mean)")  # fmt: skip


def folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a folder")
    scheme, separator, place = text.partition("://")
    if scheme == "gs" and separator and place[:1] in ("", "/"):  # Path would drop these slashes
        raise argparse.ArgumentTypeError(f"{text} names no bucket; it is gs://BUCKET/NAME")
    return Path(text)


def out_file(text: str) -> Path:
    """Returns the path of a file to write. Refuses the files of a run."""
    from jrl import paths

    path = Path(text)
    if path.name in RUN_FILES and paths.exists(path.parent / "manifest.json"):
        raise argparse.ArgumentTypeError(f"{path} is a file of the run in {path.parent}; choose another name")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def check_not_overwriting(out: Path | None, *sources: str | Path | None) -> None:
    """Raises ValueError if a command would overwrite a file that it reads."""
    from jrl import paths

    for source in sources if out is not None else ():
        local = source is not None and not paths.is_remote(source)
        if local and out.resolve() in (Path(file).resolve() for file in paths.matches(str(source))):
            raise ValueError(f"--out is {out}, which this command reads; choose another name")


def number_of(what: str, least: int = 1) -> Callable[[str], int]:
    """Returns a parser of an argument that counts `what`, at least `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}; it must be at least {least}")
        return int(text)

    return read


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; it must be in [0, 1]")
    return value
