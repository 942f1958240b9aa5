"""Resumed runs of configurations that are drawn at random: does each have the bits of a run that was not stopped?

    python -m benchmarks.combinations [--count 20] [--seed 0]

A configuration is `tiny` with one of the objectives for samples and some of OPTIONS, so that pairs of options meet that
no test combines. It trains for three steps; a second run of it is left after one or two steps and resumed. What jrl
refuses is counted apart, since it must refuse in words. Two runs that differ, or an error, end with exit code 1 and the
bindings that repeat it. Hardware: any CPU, which shows four devices. Time: about 15 s a configuration on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import sys
import tempfile

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
    (0.3, (("Learner.prefix_sharing='in_row'",), ("Learner.prefix_sharing='cross_row'",))),
    (0.4, tuple((f"MeshShape.{axis}=2",) for axis in ("data", "fsdp", "tensor", "sequence"))),
    (0.2, (("Online.critic='policy'",), ("Online.critic='policy'", "Online.critic_warmup=1"))),
    (0.2, (("Online.reset_reference_every=2",),)),
    (0.2, (("Config.eval=@Eval()", "Eval.prompts=4", "Eval.every=1", "Data.held_out_every=4"),)),
    (0.3, (("Sampler.top_p=0.9",), ("Sampler.top_k=4",), ("Sampler.stop_strings=['1']",))),
    (0.3, (("Checkpoint.every=1",), ("Checkpoint.every=2",))),
)  # fmt: skip


def draw(seed: int) -> tuple[list[str], int]:
    """Returns the bindings of a configuration, and the step after which its second run is left."""
    rng = random.Random(seed)
    objective = rng.choice([name for name, row in ALGOS.items() if row.advantages is not None or row.pairs is not None])
    bindings = [f"Online.objective=@{objective}()"]
    for share, alternatives in OPTIONS:
        if rng.random() < share:
            bindings += rng.choice(alternatives)
    return bindings, rng.randint(1, STEPS - 1)


def compare(bindings: list[str], left_after: int, folder: pathlib.Path) -> str:
    """Returns "same", "DIFFERENT" with the hashes that differ, or "refused" with the reason."""
    given = dict(config="tiny", bindings=[*SMALL, *bindings])
    try:
        jrl.train(**given, run=folder / "whole")
    except (ConfigError, ValueError) as refusal:
        if (folder / "whole" / "metrics.jsonl").exists():  # it had begun
            raise
        return f"refused: {refusal}"
    with contextlib.closing(jrl.steps(**given, run=folder / "left")) as steps:
        for _ in range(left_after):
            next(steps)
    jrl.train(**given, run=folder / "left")
    whole, resumed = run_fingerprint(folder / "whole"), run_fingerprint(folder / "left")
    different = [name for name in whole if whole[name] != resumed[name]]
    return f"DIFFERENT: {', '.join(different)}" if different else "same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="configurations that are not refused (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the first configuration (0); the next ones follow")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    counts = dict.fromkeys(("same", "refused", "DIFFERENT"), 0)
    seed = asked.seed
    while counts["same"] + counts["DIFFERENT"] < asked.count:
        bindings, left_after = draw(seed)
        print(f"{seed}: {' '.join(bindings)}", flush=True)
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
            with contextlib.redirect_stdout(silent):
                outcome = compare(bindings, left_after, pathlib.Path(folder))
        counts[outcome.partition(":")[0]] += 1
        print(f"    {outcome}", flush=True)
        seed += 1
    print(
        f"{counts['same']} resumed with the same bits, {counts['DIFFERENT']} did not; {counts['refused']} were refused"
    )
    sys.exit(1 if counts["DIFFERENT"] else 0)


if __name__ == "__main__":
    main()
