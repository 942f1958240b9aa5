"""The recipes for published models: one of each for each data set, of the shape that is published, and it fits."""

from __future__ import annotations

import json
import math
import pathlib
import re

import pytest
from published_shapes import BILLIONS, SHAPES

import jrl
from jrl.models import decoder
from jrl.models.contract import num_params
from jrl.models.pretrained.published import Published, decoder_of
from jrl.tools.plan import budget
from jrl.tools.plan.case import make_case
from jrl.tools.plan.chips import parse_topology

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = [f"configs/{data}/{name}.gin" for data in ("gsm8k", "math") for name in SHAPES]


def test_every_model_has_a_recipe_for_each_data_set_and_no_recipe_is_left_over():
    actual = {str(path.relative_to(ROOT)) for data in ("gsm8k", "math") for path in (ROOT / "configs" / data).glob("*")}
    assert actual == {*RECIPES, "configs/gsm8k/try.gin", "configs/gsm8k/try-lora.gin"}


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_shape_has_as_many_parameters_as_is_said_of_it(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    spec = decoder.spec(decoder_of(Published(path=str(tmp_path)))[1])
    assert round(num_params(spec) / 1e9, 3) == BILLIONS[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_topology_that_it_names(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[pathlib.Path(name).stem]))
    config, parts = jrl.load_config(str(ROOT / name), [f"MODEL={str(tmp_path)!r}"])
    head = (ROOT / name).read_text(encoding="utf-8").split("\n\n")[0]
    topology = parse_topology(re.search(r"^# Topology: (\S+)$", head, re.MULTILINE)[1])
    case = make_case(config, parts, topology.num_devices)
    assert math.prod(case.sizes.values()) == topology.num_devices
    assert budget.peak(case)[1] <= topology.chip.limit_bytes
    assert "unproven: not run" in head
