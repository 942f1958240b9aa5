"""Environments: where examples come from. `ENVS` is the table; jrl.tasks.envs.contract defines an environment."""

from __future__ import annotations

from jrl.tasks.envs.addition import Addition, open_addition
from jrl.tasks.envs.cleaned import Cleaned
from jrl.tasks.envs.contract import Environment, Generated, Source, digest_of
from jrl.tasks.envs.dataset import Dataset, open_dataset
from jrl.tasks.envs.filtered import Filtered
from jrl.tasks.envs.jsonl import Jsonl, open_jsonl
from jrl.tasks.envs.mixture import Mixture, open_source
from jrl.tasks.envs.reasoning_gym import ReasoningGym, open_reasoning_gym
from jrl.tasks.stopping import never

ENVS: dict[str, Environment] = {
    "Addition": Environment(Addition, open_addition),
    "Cleaned": Environment(Cleaned, lambda config, stop=never: open_source(config, ENVS, stop), takes_stop=True),
    "Dataset": Environment(Dataset, open_dataset, takes_stop=True),
    "Filtered": Environment(Filtered, lambda config, stop=never: open_source(config, ENVS, stop), takes_stop=True),
    "Jsonl": Environment(Jsonl, open_jsonl, takes_stop=True),
    "Mixture": Environment(Mixture, lambda config, stop=never: open_source(config, ENVS, stop), takes_stop=True),
    "ReasoningGym": Environment(ReasoningGym, open_reasoning_gym),
}

__all__ = ["ENVS", "Environment", "Generated", "Source", "digest_of", "open_source"]
