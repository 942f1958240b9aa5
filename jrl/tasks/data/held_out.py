"""The prompts that evaluation asks: distinct texts of the held-out split, always the same ones."""

from __future__ import annotations

from typing import Any

from jrl.tasks.data.order import open_order
from jrl.tasks.data.prompts import Data, Visit, encode_prompt, is_held_out, refusal
from jrl.tasks.envs.contract import Source
from jrl.tasks.example import visit_uid
from jrl.tasks.stopping import Stop, check_stop, never


def held_out(source: Source, tokenizer: Any, config: Data, n: int, seed: int, stop: Stop = never) -> list[Visit]:
    """Returns `n` visits of held-out examples whose prompts all differ, in an order that `seed` decides.

    Raises: ValueError where the source holds fewer than `n` distinct usable held-out prompts, or one is refused;
        StopRequested where `stop` says so.
    """
    order = open_order(len(source), seed)
    visits: list[Visit] = []
    seen: set[bytes] = set()
    bad = 0
    for position in range(len(source)):
        if len(visits) == n:
            break
        check_stop(stop, "looking for held-out prompts")
        example = source[order(position)]
        digest = example.prompt_digest()
        if not is_held_out(example, config) or digest in seen:
            continue
        seen.add(digest)
        prompt, cause = encode_prompt(example, tokenizer, config)
        if cause is None:
            visits.append(Visit(example, visit_uid(example.id, 0), prompt))
        elif config.on_bad_prompt == "refuse":
            raise refusal(example, cause, len(prompt), config)
        else:
            bad += 1
    if len(visits) < n:
        raise ValueError(
            f"{n} held-out prompts asked for, {len(visits)} distinct usable ones found among {len(source)} examples "
            f"({bad} dropped; Data.held_out_every = {config.held_out_every}); set Eval.prompts to at most "
            f"{len(visits)}, or hold out more by a smaller Data.held_out_every"
        )
    return visits
