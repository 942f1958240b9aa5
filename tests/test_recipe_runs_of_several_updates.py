"""The recipes with several updates of a batch (tests/recipe_runs.py)."""

from __future__ import annotations

import pytest
from recipe_runs import SEVERAL_UPDATES, check_that_it_learns_and_writes_its_summary

pytestmark = pytest.mark.usefixtures("programs_of_many_runs", "mesh_of_the_runs")


@pytest.mark.parametrize("name", SEVERAL_UPDATES)
def test_a_recipe_learns_and_writes_its_summary(name, tmp_path):
    check_that_it_learns_and_writes_its_summary(name, tmp_path / "run")
