"""The budget at the start of a run: what cannot fit is refused before anything is compiled or a folder is written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jrl.experiment import Config
from jrl.models.pretrained.published import Published
from jrl.models.shape import Decoder
from jrl.plugins import Parts
from jrl.tools.plan import budget, cheaper
from jrl.tools.plan.case import make_case, uncounted, vocab_size_of
from jrl.tools.plan.chips import GIB

# The arithmetic is good to about a tenth, and a run that would have fitted must not be refused.
MARGIN = 1.1

_log = logging.getLogger(__name__)


def refuse_overflow(config: Config, parts: Parts, devices: Sequence[Any]) -> None:
    """Raises ValueError, with the three cheapest changes, where a run's programs cannot fit its TPUs.

    The arithmetic counts what the TPU compiler holds; on another kind of device the same is a warning. Nothing is said
    where a device does not know its memory, as a CPU, or the configuration does not say how large the vocabulary is.
    """
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return
    if not isinstance(config.model, Decoder | Published):
        _log.warning("memory is not predicted: %s is a model of your own", type(config.model).__name__)
        return
    if vocab_size_of(config) is None:
        _log.warning("memory is not predicted: the configuration does not say Decoder.vocab_size")
        return
    if (told := uncounted(config)) is not None:
        _log.warning("%s", told)
    case = make_case(config, parts, len(devices))
    name, size = budget.peak(case)
    if size <= limit * MARGIN:
        return
    changes = cheaper.cheapest(case, parts, limit, len(devices), chip=None)
    lines = "\n".join(f"  {cheaper.sentence(change)}" for change in changes)
    said = (
        f"{name} would take about {size / GIB:.2f} of {limit / GIB:.2f} GiB a device. "
        f"The cheapest changes:\n{lines or '  none of one binding was found'}"
    )
    if devices[0].platform != "tpu":
        _log.warning("the run may not fit: %s", said)
        return
    raise ValueError(f"the run does not fit: {said}")
