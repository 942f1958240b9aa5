"""The recipes with several updates of a batch (tests/recipe_runs.py)."""

from __future__ import annotations

import jax
import pytest
from recipe_runs import SEVERAL_UPDATES, check_that_it_learns_and_writes_its_summary

from jrl.device.sharding import MeshShape, make_mesh

pytestmark = pytest.mark.usefixtures("programs_of_many_runs")


@pytest.fixture(scope="module", autouse=True)
def mesh_of_the_runs():
    """A run sets its mesh for the process; the tests after these must not find it."""
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        yield


@pytest.mark.parametrize("name", SEVERAL_UPDATES)
def test_a_recipe_learns_and_writes_its_summary(name, tmp_path):
    check_that_it_learns_and_writes_its_summary(name, tmp_path / "run")
