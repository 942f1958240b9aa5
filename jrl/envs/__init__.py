"""Environments: where examples come from. `ENVS` is the table; jrl.envs.contract says what an environment is."""

from __future__ import annotations

from jrl.envs.addition import Addition, open_addition
from jrl.envs.contract import Environment, Generated, Source, digest_of
from jrl.envs.jsonl import Jsonl, open_jsonl
from jrl.envs.mixture import Mixture, open_source
from jrl.envs.reasoning_gym import ReasoningGym, open_reasoning_gym

ENVS: dict[str, Environment] = {
    "Addition": Environment(Addition, open_addition),
    "Jsonl": Environment(Jsonl, open_jsonl),
    "Mixture": Environment(Mixture, lambda config: open_source(config, ENVS)),
    "ReasoningGym": Environment(ReasoningGym, open_reasoning_gym),
}

__all__ = ["ENVS", "Environment", "Generated", "Source", "digest_of", "open_source"]
