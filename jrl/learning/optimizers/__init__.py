"""Optimizers, selected by their configuration class. Each row turns gradients into directions."""

from __future__ import annotations

from jrl.learning.optimizers import adafactor, adamw, muon
from jrl.learning.optimizers.contract import Optimizer

OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": adamw.OPTIMIZER,
    "Muon": muon.OPTIMIZER,
    "Adafactor": adafactor.OPTIMIZER,
}
