"""`jrl export`: writes a policy or a reward model as a folder that other tools load."""

from __future__ import annotations

import argparse
from pathlib import Path

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.commands.weights import reading_bar, weights_of
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the tensors (default: float32)"
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help="write the run's adapters in PEFT's format (default: merge them into the weights)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="largest size of one file of tensors (default: 5GB)"
    )
    options.add_weights(parser)
    options.add_devices(parser)


def export(args: argparse.Namespace) -> int:
    start.prepare_jax(args)
    from jrl.run.bucket_run import readable
    from jrl.tools.export import export_adapter, export_policy

    args.source = readable(args.source)
    if args.adapter_only:
        step, files = export_adapter(
            args.source, args.to, args.step, dtype=args.dtype, stage=args.stage, role=args.role
        )
        print(f"the adapter of step {step} is in {args.to}: {', '.join(files)}")
        return DONE
    step, files = export_policy(args.source, args.to, args.step, dtype=args.dtype, max_shard=args.max_shard_size,
                                stage=args.stage, role=args.role,
                                announce=reading_bar())  # fmt: skip
    print(f"{weights_of(args.source, step)} are in {args.to}: {', '.join(files)}")
    return DONE


COMMAND = Command(
    "Write a trained policy or reward model as a folder that other tools load: config.json and safetensors.",
    "jrl export runs/tiny --to tiny-model --dtype bfloat16",
    add_arguments,
    export,
)
