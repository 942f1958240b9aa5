"""Checks memory at the start of a run: a run that cannot fit is refused before anything is compiled or written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jrl.device.chips import GIB
from jrl.experiment import Config
from jrl.models.pretrained.published import Published
from jrl.models.shape import Decoder
from jrl.plugins import Parts
from jrl.tools.plan import budget, cheaper
from jrl.tools.plan.case import make_case, shown_name, uncounted, vocab_size_of

# The arithmetic is accurate to about 10 %, and a run that fits must not be refused.
MARGIN = 1.1

_log = logging.getLogger(__name__)


def refuse_overflow(config: Config, parts: Parts, devices: Sequence[Any], count: int | None = None) -> None:
    """Raises ValueError, with the three cheapest changes, if a run's programs cannot fit on its TPUs.

    The arithmetic models the TPU compiler; on other devices an overflow is a warning. There is no check if the device
    does not report its memory (as on CPU), if the model is a custom one, or if the configuration does not set the
    vocabulary size.

    Args:
      devices: of this process. count: devices of all processes; None: there is one process.
    """
    count = len(devices) if count is None else count
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return
    if not isinstance(config.model, Decoder | Published):
        _log.warning("memory is not predicted: %s is a custom model", type(config.model).__name__)
        return
    if vocab_size_of(config) is None:
        _log.warning("memory is not predicted: the configuration does not set Decoder.vocab_size")
        return
    if (note := uncounted(config)) is not None:
        _log.warning("%s", note)
    case = make_case(config, parts, count)
    name, size = budget.peak(case)
    if size <= limit * MARGIN:
        return
    changes = cheaper.cheapest(case, parts, limit, count, chip=None)
    lines = "\n".join(f"  {cheaper.sentence(change)}" for change in changes)
    message = (
        f"{shown_name(case, name)} would take about {size / GIB:.2f} of {limit / GIB:.2f} GiB a device. "
        f"The cheapest changes:\n{lines or '  no single binding helps'}"
    )
    if devices[0].platform != "tpu":
        _log.warning("the run may not fit: %s", message)
        return
    raise ValueError(f"the run does not fit: {message}")
