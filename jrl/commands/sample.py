"""`jrl sample`: chats with a policy, or has it answer a file of prompts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.commands.weights import reading_bar, weights_of
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model")
    options.add_bindings(parser, "the run's configuration")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help='one prompt a line: plain text (not in a .jsonl), a JSON string, {"prompt": "..."} or '
        '{"messages": [{"role": "user", "content": "..."}]}',
    )
    parser.add_argument(
        "--out", metavar="FILE.jsonl", type=options.out_file, help="write the completions of --prompts here"
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions per prompt (default: 1)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0: greedy (default: that of the run, or of generation_config.json)",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of a completion (default: that of the run)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="the same seed and prompts give the same answers (default: Run.seed)"
    )
    options.add_weights(parser)
    options.add_devices(parser)


def sample(args: argparse.Namespace) -> int:
    start.prepare_jax(args)
    from jrl.run.bucket_run import readable
    from jrl.run.report.text import counted
    from jrl.run.trained import open_trained
    from jrl.tools import chat

    if args.out is not None and args.prompts is None:
        raise ValueError("--out needs --prompts")
    options.check_not_overwriting(args.out, args.prompts)
    args.source = readable(args.source)
    prompts = chat.read_prompts(args.prompts) if args.prompts else None
    trained = open_trained(
        args.source, args.bindings, args.step, announce=reading_bar(), stage=args.stage, role=args.role
    )
    asked = chat.open_chat(
        trained, samples=args.n, temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
    )
    if prompts is not None:
        answers = chat.ask(asked, prompts)
        if args.out is not None:
            chat.write_completions(args.out, prompts, answers)
            print(f"{counted(len(prompts), 'prompt')} answered; completions are in {args.out}")
        else:
            for prompt, completions in zip(prompts, answers):
                chat.show(prompt, completions, sys.stdout)
        return DONE
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{weights_of(args.source, trained.step)}; each line is a new prompt, /quit or Ctrl-D ends")
    chat.converse(asked, lambda: input("> " if interactive else ""), sys.stdout)
    return DONE


COMMAND = Command(
    "Chat with a trained policy, or have it answer a file of prompts.",
    "jrl sample runs/tiny --prompts prompts.txt --n 4",
    add_arguments,
    sample,
)
