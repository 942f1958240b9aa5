"""The evaluation prompts: distinct prompts of the held-out split, the same ones every time."""

from __future__ import annotations

from typing import Any

from jrl.tasks.data.order import open_order, read_in_order
from jrl.tasks.data.prompts import Data, Visit, encode_prompt, is_held_out, refusal
from jrl.tasks.envs.contract import Source
from jrl.tasks.example import visit_uid
from jrl.tasks.stopping import Stop, never


def held_out(source: Source, tokenizer: Any, config: Data, n: int, seed: int, stop: Stop = never) -> list[Visit]:
    """Returns `n` visits of held-out examples with distinct prompts, in an order given by `seed`.

    Raises: ValueError if the source has fewer than `n` distinct usable held-out prompts, or a prompt cannot be used and
        Data.on_bad_prompt is "refuse"; StopRequested if `stop` returns True.
    """
    order = open_order(len(source), seed)
    visits: list[Visit] = []
    seen: set[bytes] = set()
    bad = read = 0
    while len(visits) < n and read < len(source):
        # As many as probably are enough; where few can be used, as many as before.
        count = max((n - len(visits)) * (config.held_out_every or 1), read)
        positions = range(read, min(read + count, len(source)))
        read = positions.stop
        indices = [order(position) for position in positions]
        rows = read_in_order(source, indices, stop, "looking for held-out prompts")
        examples = {index: example for index, example in rows if is_held_out(example, config)}
        for example in (examples[index] for index in indices if index in examples):
            if len(visits) == n:
                break
            digest = example.prompt_digest()
            if digest in seen:
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
            f"{n} held-out prompts requested, {len(visits)} distinct usable ones found among {len(source)} examples "
            f"({bad} dropped; Data.held_out_every = {config.held_out_every}); set Eval.prompts to at most "
            f"{len(visits)}, or hold out more by a smaller Data.held_out_every"
        )
    return visits
