"""Versions that pyproject.toml allows are versions that somebody tests."""

from __future__ import annotations

import pathlib
import tomllib

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What `.ci/run` installs.
INSTALLED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in ("test", "log")))
    for line in lines
]


def pins(name):
    lines = (line for line in (ROOT / "constraints" / name).read_text().splitlines() if not line.startswith("#"))
    return dict(line.lower().replace("_", "-").split("==") for line in lines)


def test_the_lowest_set_is_what_pyproject_allows_at_least():
    least = {r.name.lower(): s.version for r in INSTALLED for s in r.specifier if s.operator in (">=", "==")}
    lowest = pins("lowest.txt")
    assert lowest.pop("jaxlib") == least["jax"]
    assert lowest == least


@pytest.mark.parametrize("name", ["python311.txt", "python313.txt"])
def test_the_tested_sets_are_allowed(name):
    tested = pins(name)
    for requirement in INSTALLED:
        assert requirement.specifier.contains(tested[requirement.name.lower()]), requirement
