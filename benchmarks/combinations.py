"""Two runs of configurations that are drawn at random: does a resumed run have the bits of one that was not stopped,
and does a run in another layout have the same metrics?

    python -m benchmarks.combinations [--what resumed|layouts] [--count 20] [--seed 0]

A configuration is `tiny` with one of the objectives for samples and some of OPTIONS, so that pairs of options meet that
no test combines. It trains for three steps.

    resumed   a second run of it is left after one or two steps and resumed: every bit is the same
    layouts   a second run has two of LAYOUTS, such as another mesh, shared prompts or smaller micro-batches: all
              metrics but times are the same to TOLERANCE, unless rounding decides the token of a later step, or the
              sign of a difference of 0 (pairs/accuracy of a policy that is its own reference)

What jrl refuses is counted apart, since it must refuse in words. Two runs that differ, or an error, end with exit code
1 and the bindings that repeat it. Hardware: any CPU, which shows four devices. Time: about 15 s a configuration on 2
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import jax

import jrl
from jrl.algos import ALGOS
from jrl.config import ConfigError
from jrl.run.run_hash import run_fingerprint

STEPS = 3
SMALL = [
    "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=2", "Decoder.head_dim=8", "Decoder.mlp_width=32",
    f"Online.steps={STEPS}", "Online.prompts=4", "Online.samples=4", "Sampler.slots=8", "Scoring.workers=1",
    "Log.samples=0",
]  # fmt: skip
IMITATION = ("Config.stages=[@warm/Offline(), @Online()]", "warm/Offline.steps=1", "warm/Offline.batch_size=4",
             "warm/Offline.source=@Demonstrations()", "warm/Offline.objective=@SFT()")  # fmt: skip
GUIDE = (*IMITATION, "warm/Offline.trains='guide'")
SHARED_IN_ROW, SHARED_ACROSS_ROWS = ("Learner.prefix_sharing='in_row'",), ("Learner.prefix_sharing='cross_row'",)
MESHES = tuple((f"MeshShape.{axis}=2",) for axis in ("data", "fsdp", "tensor", "sequence"))
# Of these the result does not depend
LAYOUTS = (
    *MESHES, SHARED_IN_ROW, SHARED_ACROSS_ROWS, ("Learner.micro_batch_tokens=64",), ("Learner.row_length=64",),
    ("Learner.sequences_per_row=4",), ("Learner.logprob_chunk=8",), ("Learner.layers='unrolled'",),
    ("Learner.logprobs='vocab_parallel'",), ("Sampler.slots=4",), ("Sampler.kv_layout='head_dim_major'",),
    ("Sampler.prefill_chunk=4",), ("Sampler.max_batch_compactions=1",),
)  # fmt: skip
TOLERANCE = dict(rel_tol=2e-3, abs_tol=2e-5)
CLOCK = ("time/", "host/")
# (share of the configurations that have one of them, the alternatives)
OPTIONS: tuple[tuple[float, tuple[tuple[str, ...], ...]], ...] = (
    (0.4, (
        IMITATION,
        GUIDE,
        (*GUIDE, "Online.strategy=@RollIn()", "RollIn.guide='guide'", "RollIn.tokens=2"),
        (*GUIDE, "Online.strategy=@RollOut()", "RollOut.guide='guide'"),
    )),
    (0.3, (
        ("Online.strategy=@Branching()", "Branching.first=2", "Branching.continuations=1"),
        ("Online.strategy=@Partial()", "Partial.tokens=2"),
        ("Online.strategy=@Reset()",),
        ("Online.strategy=@SelfCorrection()",),
    )),
    (0.4, tuple((f"Online.curriculum=@{name}()",) for name in (
        "Prioritized", "DifficultyBand", "HardFocus", "MostVaried", "LearningImpact"))),
    (0.3, (("Online.optimizer=@Muon()",), ("Online.optimizer=@Adafactor()",), ("AdamW.average=0.9",))),
    (0.3, (("Config.adapter=@LoRA()",),)),
    (0.3, (
        ("Online.shaping=@Shaping()", "Shaping.length_penalty=@LengthPenalty()", "LengthPenalty.target=3"),
        ("Online.shaping=@Shaping()", "Shaping.missing_stop=@MissingStop()"),
    )),
    (0.3, (
        ("Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=8"),
        ("Decoder.linear=@Linear()", "Linear.key_heads=2", "Linear.value_heads=2", "Linear.key_dim=8",
         "Linear.value_dim=8", "Linear.layers=(True, False)"),
    )),
    (0.4, (("Online.lag=1",), ("Online.lag=2",))),
    (0.4, (("Learner.minibatches=2",), ("Learner.epochs=2",))),
    (0.3, (SHARED_IN_ROW, SHARED_ACROSS_ROWS)),
    (0.4, MESHES),
    (0.2, (("Online.critic='policy'",), ("Online.critic='policy'", "Online.critic_warmup=1"))),
    (0.2, (("Online.reset_reference_every=2",),)),
    (0.2, (("Config.eval=@Eval()", "Eval.prompts=4", "Eval.every=1", "Data.held_out_every=4"),)),
    (0.3, (("Sampler.top_p=0.9",), ("Sampler.top_k=4",), ("Sampler.stop_strings=['1']",))),
    (0.3, (("Checkpoint.every=1",), ("Checkpoint.every=2",))),
)  # fmt: skip


def draw(seed: int, options: tuple[tuple[float, tuple[tuple[str, ...], ...]], ...] = OPTIONS) -> list[str]:
    """Returns the bindings of a configuration."""
    rng = random.Random(seed)
    objective = rng.choice([name for name, row in ALGOS.items() if row.advantages is not None or row.pairs is not None])
    bindings = [f"Online.objective=@{objective}()"]
    for share, alternatives in options:
        if rng.random() < share:
            bindings += rng.choice(alternatives)
    return last_of_each(bindings)


def last_of_each(bindings: Iterable[str]) -> list[str]:
    """Returns the bindings without those of a field that a later one binds too."""
    return list({binding.partition("=")[0]: binding for binding in bindings}.values())


class Refused(Exception):
    """jrl refuses a configuration, in words."""


def train(bindings: list[str], run: pathlib.Path) -> None:
    """Raises Refused before the run begins."""
    try:
        jrl.train("tiny", bindings, run=run)
    except (ConfigError, ValueError) as refusal:
        if (run / "metrics.jsonl").exists():  # it had begun
            raise
        raise Refused(str(refusal)) from None


def resumed(seed: int, folder: pathlib.Path) -> Iterator[str]:
    """Yields the bindings, then the hashes that differ."""
    bindings = [*SMALL, *draw(seed)]
    left_after = random.Random(seed).randint(1, STEPS - 1)
    yield f"{' '.join(bindings[len(SMALL) :])}, left after {left_after}"
    train(bindings, folder / "whole")
    with contextlib.closing(jrl.steps("tiny", bindings, run=folder / "left")) as steps:
        for _ in range(left_after):
            next(steps)
    jrl.train("tiny", bindings, run=folder / "left")
    whole, left = run_fingerprint(folder / "whole"), run_fingerprint(folder / "left")
    yield ", ".join(name for name in whole if whole[name] != left[name])


def layouts(seed: int, folder: pathlib.Path) -> Iterator[str]:
    """Yields the bindings and those of the other layout, then the metrics that differ, by step."""
    of_layouts = (MESHES, (SHARED_IN_ROW, SHARED_ACROSS_ROWS))
    bindings = draw(seed, tuple(option for option in OPTIONS if option[1] not in of_layouts))
    first, second = random.Random(seed).sample(LAYOUTS, 2)
    yield f"{' '.join(bindings)}, and with {' '.join(first + second)}"
    train(last_of_each([*SMALL, *bindings, *first, *second]), folder / "other")
    train([*SMALL, *bindings], folder / "one")
    one, other = ([json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
                  for name in ("one", "other"))  # fmt: skip
    yield ", ".join(
        f"{name} of line {i}: {x.get(name)} and {y.get(name)}"
        for i, (x, y) in enumerate(zip(one, other, strict=True), start=1)
        for name in sorted(x.keys() | y.keys())
        if not name.startswith(CLOCK) and not same(x.get(name, "nothing"), y.get(name, "nothing"))
    )


def same(x: Any, y: Any) -> bool:
    numbers = isinstance(x, int | float) and isinstance(y, int | float)
    return math.isclose(x, y, **TOLERANCE) if numbers else x == y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("resumed", "layouts"), default="resumed", help="the second run (resumed)")
    parser.add_argument("--count", type=int, default=20, help="configurations that are not refused (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the first configuration (0); the next ones follow")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    compared, refused, different, seed = 0, 0, 0, asked.seed
    while compared < asked.count:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
            outcomes = {"resumed": resumed, "layouts": layouts}[asked.what](seed, pathlib.Path(folder))
            print(f"{seed}: {next(outcomes)}", flush=True)
            try:
                with contextlib.redirect_stdout(silent):
                    difference = next(outcomes)
                compared += 1
                different += bool(difference)
                print(f"    {f'DIFFERENT: {difference}' if difference else 'same'}", flush=True)
            except Refused as refusal:
                refused += 1
                print(f"    refused: {refusal}", flush=True)
        seed += 1
    print(f"{compared - different} the same, {different} different; {refused} were refused")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
