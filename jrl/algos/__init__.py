"""The objectives: one file each, one row here. The name is the config class's name, `Online.objective = @GRPO()` in
gin."""

from __future__ import annotations

from jrl.algos import (
    adaptive_entropy_grpo,
    adaptive_kl_grpo,
    bradley_terry,
    cispo,
    dapo,
    decoupled_ppo,
    dpo,
    dppo,
    dr_grpo,
    expert_iteration,
    gmpo,
    grpo,
    gspo,
    gspo_token,
    icepop,
    kimi_mirror_descent,
    m2po,
    masked_grpo,
    ppo,
    raft,
    reinforce,
    sapo,
    sft,
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
    "AdaptiveKLGRPO": adaptive_kl_grpo.OBJECTIVE,
    "AdaptiveEntropyGRPO": adaptive_entropy_grpo.OBJECTIVE,
    "GSPO": gspo.OBJECTIVE,
    "GSPOToken": gspo_token.OBJECTIVE,
    "GMPO": gmpo.OBJECTIVE,
    "CISPO": cispo.OBJECTIVE,
    "SAPO": sapo.OBJECTIVE,
    "DPPO": dppo.OBJECTIVE,
    "M2PO": m2po.OBJECTIVE,
    "DecoupledPPO": decoupled_ppo.OBJECTIVE,
    "IcePop": icepop.OBJECTIVE,
    "MaskedGRPO": masked_grpo.OBJECTIVE,
    "KimiMirrorDescent": kimi_mirror_descent.OBJECTIVE,
    "RAFT": raft.OBJECTIVE,
    "ExpertIteration": expert_iteration.OBJECTIVE,
}
