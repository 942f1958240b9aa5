"""Short runs of a tiny policy, to the end or left on the way."""

import contextlib

from small_model import BIGRAM, PARTS

import jrl


def run(settings, folder, *bindings, stop_after=None):
    """Trains configs/tiny.gin with settings that bindings may replace, or trains until a step is done and leaves as a
    notebook would; returns the steps seen."""
    seen = []
    named = {binding.partition("=")[0]: binding for binding in [*settings, *bindings]}
    parts = [PARTS] if BIGRAM in named.values() else []
    with contextlib.closing(jrl.steps("configs/tiny.gin", list(named.values()), parts=parts, run=folder)) as steps:
        for step in steps:
            seen.append(step)
            if step.step == stop_after:
                break
    return seen
