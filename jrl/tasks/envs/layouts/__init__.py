"""Layouts of published data sets. `LAYOUTS` is the table; jrl.tasks.envs.layouts.contract defines a layout."""

from __future__ import annotations

from jrl.tasks.envs.layouts import conversations, openassistant, pairs, ranked, single
from jrl.tasks.envs.layouts.contract import Layout

LAYOUTS: dict[str, Layout] = {
    "messages": conversations.MESSAGES,
    "conversation": conversations.CONVERSATION,
    "tulu": conversations.TULU,
    "sharegpt": conversations.SHAREGPT,
    "alpaca": single.ALPACA,
    "prompt_completion": single.PROMPT_COMPLETION,
    "rlvr": conversations.RLVR,
    "verl": conversations.VERL,
    "verl_verbatim": conversations.VERL_VERBATIM,
    "unpaired": single.UNPAIRED,
    "preference": pairs.PREFERENCE,
    "implicit_preference": pairs.IMPLICIT_PREFERENCE,
    "scored_preference": pairs.SCORED_PREFERENCE,
    "margin_preference": pairs.MARGIN_PREFERENCE,
    "sharegpt_preference": conversations.SHAREGPT_PREFERENCE,
    "anthropic_hh": conversations.ANTHROPIC_HH,
    "tldr_comparisons": pairs.TLDR_COMPARISONS,
    "shp": pairs.SHP,
    "webgpt_comparisons": pairs.WEBGPT_COMPARISONS,
    "stack_exchange": pairs.STACK_EXCHANGE,
    "safe_rlhf": pairs.SAFE_RLHF,
    "helpsteer2": ranked.HELPSTEER2,
    "helpsteer2_preference": ranked.HELPSTEER2_PREFERENCE,
    "helpsteer3": ranked.HELPSTEER3,
    "ultrafeedback": ranked.ULTRAFEEDBACK,
    "nectar": ranked.NECTAR,
    "rollouts": ranked.ROLLOUTS,
    "openassistant_trees": openassistant.TREES,
    "openassistant_messages": openassistant.MESSAGES,
}
