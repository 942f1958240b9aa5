"""Details of docs/rlhf-details.md that change results and have no test elsewhere."""

from __future__ import annotations

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from algos.small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.ppo import PPO

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "rlhf-details.md").read_text(encoding="utf-8")


def test_before_the_first_update_the_ratio_is_exactly_one_and_nothing_is_clipped():
    lp = jnp.array([-0.3, -7.1, -1e-3])
    advantages = jnp.array([1.5, -0.5, 2.0])
    loss, metrics, slope = loss_of(ALGOS["PPO"], PPO(), tokens(lp, lp, advantages).replace(values=None))
    for name, expected in {"ratio": 1, "approx_kl_k2": 0, "approx_kl_k3": 0, "clip_fraction_low": 0,
                           "clip_fraction_high": 0, "mismatch_k1": 0}.items():  # fmt: skip
        np.testing.assert_array_equal(metrics[name], np.full(3, expected), err_msg=name)
    np.testing.assert_array_equal(loss, -advantages)  # the policy gradient
    np.testing.assert_array_equal(slope, -advantages)


def test_all_details_are_listed_once():
    numbers = re.findall(r"^\| \**(\d+)\** \|", PAGE, re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, 26))


@pytest.mark.parametrize("place", re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", PAGE))
def test_the_tests_that_it_names_are_there(place):
    file, name = place
    (path,) = (ROOT / "tests").rglob(file)
    assert f"def {name or 'test_'}" in path.read_text(encoding="utf-8")
