"""The objectives: one file each, one row here. The name is the config class's name, `Online.objective = @GRPO()` in
gin."""

from __future__ import annotations

from jrl.algos import adaptive_kl_grpo, bradley_terry, dapo, dpo, dr_grpo, grpo, ppo, reinforce, sft
from jrl.algos.contract import Objective

ALGOS: dict[str, Objective] = {
    "Reinforce": reinforce.OBJECTIVE,
    "GRPO": grpo.OBJECTIVE,
    "DrGRPO": dr_grpo.OBJECTIVE,
    "DAPO": dapo.OBJECTIVE,
    "PPO": ppo.OBJECTIVE,
    "SFT": sft.OBJECTIVE,
    "BradleyTerry": bradley_terry.OBJECTIVE,
    "DPO": dpo.OBJECTIVE,
    "AdaptiveKLGRPO": adaptive_kl_grpo.OBJECTIVE,
}
