"""Environments: where examples come from. `ENVS` is the table; jrl.envs.contract says what an environment is."""

from __future__ import annotations

from jrl.envs.addition import Addition, open_addition
from jrl.envs.contract import Environment

ENVS: dict[str, Environment] = {
    "Addition": Environment(Addition, open_addition),
}
