"""The algorithms: one file each, one row here. The name is the config class's name, `Config.algo = @GRPO()` in gin."""

from __future__ import annotations

from jrl.algos import dapo, dr_grpo, grpo, ppo, reinforce
from jrl.algos.contract import Algorithm

ALGOS: dict[str, Algorithm] = {
    "Reinforce": reinforce.ALGORITHM,
    "GRPO": grpo.ALGORITHM,
    "DrGRPO": dr_grpo.ALGORITHM,
    "DAPO": dapo.ALGORITHM,
    "PPO": ppo.ALGORITHM,
}
