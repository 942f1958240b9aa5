"""What `benchmarks.combinations` draws is the same for a seed, and every option of it is one."""

from __future__ import annotations

import pytest

from benchmarks.combinations import OPTIONS, SMALL, compare, draw
from jrl import config as gin
from jrl.experiment import TABLES, Config, config_classes
from jrl.resolve import find_config


def test_a_seed_draws_one_configuration():
    assert draw(7) == draw(7)
    assert len({repr(draw(seed)) for seed in range(50)}) == 50
    assert {draw(seed)[1] for seed in range(50)} == {1, 2}


@pytest.mark.parametrize("bindings", [option for _, options in OPTIONS for option in options], ids=" ".join)
def test_every_option_is_one(bindings):
    gin.load(find_config("tiny"), [*SMALL, *bindings], Config, config_classes(TABLES))


def test_a_refusal_is_told_with_its_reason(tmp_path):
    refused = compare(["Online.objective=@GRPO()", "Online.critic='policy'"], 1, tmp_path)
    assert refused.startswith("refused: ") and "GRPO reads no values" in refused
