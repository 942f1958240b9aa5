"""The command line. It imports JAX only when a command needs it: a typo is reported at once."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jrl import __version__
from jrl.commands import COMMANDS
from jrl.commands.exits import exit_code, from_other_process, last_checkpoint, message
from jrl.exit_codes import DONE, EXIT_CODES_HELP, INTERRUPTED, REFUSED, STOPPED, UNFORESEEN
from jrl.run.report.text import printable_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. An error is printed as one message on standard error."""
    try:
        code = _run(argv)
        flush_output()
        return code
    except BrokenPipeError:  # from printing help, before a command runs
        discard_output()
        return DONE
    except OSError as error:  # likewise
        print(f"jrl: {error}", file=sys.stderr)
        return STOPPED


def _run(argv: Sequence[str] | None) -> int:
    if argv is None:
        # Traced and compiled programs stay alive; to scan them in every collection takes a tenth of a short run.
        gc.set_threshold(50_000, 10, 10)
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # print a model's text in any encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="jrl: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        print(overview())
        return DONE if argv else REFUSED
    if argv[0] in ("-V", "--version"):
        print(f"jrl {__version__}")
        return DONE
    if argv[0] == "help" and argv[1] in COMMANDS:
        argv = [*argv[1:], "--help"]
    name = argv[0]
    if name not in COMMANDS:
        return unknown_command(name, COMMANDS)
    if name == "help" and argv[1] != "config" and not argv[1].startswith("-"):
        return unknown_command(argv[1], (*COMMANDS, "config"))
    parser = parser_of(name)
    try:
        args = parser.parse_intermixed_args(argv[1:])
    except SystemExit as exiting:
        return int(exiting.code or 0)
    return guarded(COMMANDS[name].run, args)


def overview() -> str:
    """Returns the text of `jrl --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "jrl trains language models with reinforcement learning, in JAX.",
            "",
            "usage: jrl COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "start here:",
            "  jrl train tiny --run runs/tiny                 a run of one minute",
            "  jrl list configs                               the configurations that come with jrl",
            "  jrl new mine                                   a small task to start from",
            "  jrl help train                                 the arguments of a command",
            "  jrl help config                                every field of a configuration",
            "",
            EXIT_CODES_HELP,
        ]
    )


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of one command."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"jrl {name}",
        description=command.summary,
        epilog=f"example:\n  {command.example}\n\n{EXIT_CODES_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    parser.set_defaults(command=name)
    parser.add_argument("--traceback", action="store_true", default=_wants_traceback(os.environ),
                        help="print the traceback of an error (or set JRL_TRACEBACK=1)")  # fmt: skip
    return parser


def _wants_traceback(environment: Mapping[str, Any]) -> bool:
    return environment.get("JRL_TRACEBACK", "") not in ("", "0")


def unknown_command(name: str, known: Iterable[str]) -> int:
    from jrl.config.errors import nearest

    guess = nearest(name, known)
    hint = f"; did you mean {guess}?" if guess else ""
    print(f"jrl: unknown command {name!r}{hint or '.'} Available: {', '.join(known)}", file=sys.stderr)
    return REFUSED


def guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command and returns its exit code. An error is printed as one message."""
    try:
        code = run(args)
        flush_output()
        return code
    except KeyboardInterrupt:
        print(f"jrl: interrupted. {last_checkpoint(args)}".rstrip(), file=sys.stderr)
        return finish(args, INTERRUPTED)
    except BrokenPipeError:
        discard_output()
        return DONE
    except Exception as error:
        code = exit_code(error)
        several = getattr(args, "several", None)
        prefix = "jrl" if several is None else f"jrl, {several}"
        # A verifier's error may quote a model's text, which must not send control sequences to the terminal.
        text = printable_lines(message(error, code, last_checkpoint(args)))
        with contextlib.suppress(OSError):  # standard error may be on the full disk
            if (code == UNFORESEEN and not from_other_process(error)) or args.traceback:
                traceback.print_exc()
            print(f"{prefix}: {text}", file=sys.stderr)
        return finish(args, code)


def finish(args: argparse.Namespace, code: int) -> int:
    """Returns the exit code of a command that has failed. One of several processes exits here: at a normal exit, JAX
    could wait forever for the others."""
    if getattr(args, "several", None) is not None:
        from jrl.device.watchdog import leave

        leave(code)
    return code


def flush_output() -> None:
    """Flushes standard output. If that fails, raises OSError and discards the rest, which Python would write again on
    exit.
    """
    if sys.stdout is None:  # closed at the start
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output()
        raise OSError(error.errno, f"standard output could not be written: {error.strerror}") from error


def discard_output() -> None:
    """Redirects standard output to the null device, which discards buffered output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
