"""The pages that are generated are what docs/generate.py writes now, and what is written by hand is complete."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import pytest

from jrl.algos import ALGOS
from jrl.resolve import load_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = ["data-layouts", "methods", "papers", "recipes", "reliability"]


@pytest.mark.parametrize("page", [f"docs/{name}.md" for name in PAGES])
def test_a_generated_page_is_up_to_date(generate, page):
    assert (ROOT / page).read_text(encoding="utf-8") == generate.PAGES[page](), "run python docs/generate.py"


def test_every_objective_names_the_parts_that_it_is_made_of(generate):
    assert all(generate.parts_of_objectives().values())


def test_the_name_of_a_model_is_no_part(generate):
    assert generate.ids_of("L10, as in DeepSeek-V3.2 and MiniMax-M1 (A3)") == {"L10", "A3"}


def test_every_paper_has_a_row(generate):
    rows = (ROOT / "docs" / "papers.tsv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 131 and all(row.count("\t") == 2 for row in rows)


def test_every_objective_is_in_the_table_of_parts_and_rules():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text[text.index("## Objectives") : text.index("## Evaluation")].splitlines()
    names = [row.removeprefix("| ").split(" | ")[0] for row in table if row.startswith("| ")]
    assert {name for listed in names for name in listed.split(", ")} - {"name", "---"} == set(ALGOS)


def test_the_example_for_users_of_other_systems_is_a_configuration():
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    config, _ = load_config("gsm8k", lines.splitlines())
    assert config.eval.every == 20 and [verifier.weight for verifier in config.scoring.verifiers] == [1.0, 0.1]


def test_the_stages_of_the_readme_are_those_of_the_configuration():
    bare = lambda text: [line for each in text.splitlines() if (line := each.split("  #")[0].rstrip())]
    (shown,) = re.findall(r"^```\n(Config\.stages.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    config = (ROOT / "configs" / "rlhf-tiny.gin").read_text(encoding="utf-8")
    assert bare(shown) == bare(config[config.index("Config.stages") : config.index("Checkpoint")])


def test_the_judges_of_the_page_and_their_stages_are_a_configuration(tmp_path):
    text = (ROOT / "docs" / "judges.md").read_text(encoding="utf-8")
    judges, stages = re.findall(r"^```\n(Config\..*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "page.gin").write_text(f"include 'tiny.gin'\n{judges}{stages}", encoding="utf-8")
    config, _ = load_config(str(tmp_path / "page.gin"))
    assert [stage.judges for stage in config.stages] == [("helpful",), ()]
    assert [stage.rewards for stage in config.stages] == [{}, {"reward": 1.0}]


def test_the_methods_to_start_with_are_recipes():
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "which-method.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for row in rows[2:] for name in re.findall(r"`([a-z0-9_]+)`", row.split(" | ")[1])} - {"clip_high"}
    assert len(names) > 40
    assert not [name for name in names if not (ROOT / "configs" / "algos" / f"{name}.gin").exists()]
