"""The objectives: one file each, one row here. The name is the config class's name, `Online.objective = @GRPO()` in
gin."""

from __future__ import annotations

from jrl.algos import (
    adaptive_kl_grpo,
    bradley_terry,
    dapo,
    dpo,
    dr_grpo,
    gdpo,
    grpo,
    lite_ppo,
    macro_ppo,
    maxrl,
    online_dpo,
    opo,
    pass_at_k,
    ppo,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    sft,
    vapo,
    vtrace_ppo,
)
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
    "OnlineDPO": online_dpo.OBJECTIVE,
    "AdaptiveKLGRPO": adaptive_kl_grpo.OBJECTIVE,
    "RLOO": rloo.OBJECTIVE,
    "ReinforcePlusPlus": reinforce_plus_plus.OBJECTIVE,
    "ReinforcePlusPlusBaseline": reinforce_plus_plus_baseline.OBJECTIVE,
    "LitePPO": lite_ppo.OBJECTIVE,
    "OPO": opo.OBJECTIVE,
    "PassAtK": pass_at_k.OBJECTIVE,
    "MaxRL": maxrl.OBJECTIVE,
    "GDPO": gdpo.OBJECTIVE,
    "VAPO": vapo.OBJECTIVE,
    "MacroPPO": macro_ppo.OBJECTIVE,
    "VTracePPO": vtrace_ppo.OBJECTIVE,
}
