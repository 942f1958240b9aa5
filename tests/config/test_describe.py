from __future__ import annotations

import dataclasses

import pytest
from reader_tree import TABLES, AdamW, Config, Loop

from jrl.config import ConfigError, all_fields, describe, describe_section, field_docs


def test_help_lists_type_default_and_the_comment_of_every_field():
    lines = describe(Config, TABLES).splitlines()
    assert "Loop  How long the run is." in lines
    assert any(line.split() == "steps: int updates".split() for line in lines)
    assert any(line.split() == "lag: int = 0 0 or 1".split() for line in lines)
    assert any(line.strip() == "stop_at: float or None = None" for line in lines)
    assert any("kind: one of 'constant', 'cosine' = 'constant'" in line for line in lines)
    assert "# algos: @GRPO(), @DAPO()" in lines
    for cls, field in all_fields(Config, TABLES):
        section = lines[next(i for i, line in enumerate(lines) if line.split("  ")[0] == cls.__name__) :]
        assert any(line.startswith(f"  {field}: ") for line in section[: [*section, ""].index("")])


def test_comment_beside_a_field_is_its_doc():
    assert field_docs(AdamW) == {"learning_rate": "step size", "schedule": "how the step size changes"}


def test_class_without_source_has_no_docs():
    cls = dataclasses.make_dataclass("Made", [("x", int, 0)])
    assert field_docs(cls) == {}
    assert describe(cls, {}) == "Made\n  x: int = 0\n"


def test_every_reachable_field_is_listed_once():
    pairs = [(cls.__name__, field) for cls, field in all_fields(Config, TABLES)]
    assert len(pairs) == len(set(pairs))
    assert {("Config", "algo"), ("Schedule", "warmup"), ("DAPO", "clip_high"), ("Mixture", "parts")} <= set(pairs)
    assert all_fields(Loop, {}) == [(Loop, name) for name in ("steps", "lag", "eval_every", "stop_at")]


def test_one_section_or_one_table_is_described():
    assert describe_section(Config, TABLES, "Loop").startswith("Loop  How long the run is.\n  steps: int")
    algos = describe_section(Config, TABLES, "algos")
    assert algos.startswith("# algos: @GRPO(), @DAPO()\n\nGRPO") and "\nDAPO" in algos and "Loop" not in algos


def test_a_mistyped_section_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"there is no section 'Lopo'; did you mean Loop\? `jrl help config` prints"):
        describe_section(Config, TABLES, "Lopo")
    with pytest.raises(ConfigError, match=r"there is no section 'Q'\. `jrl help config` prints"):
        describe_section(Config, TABLES, "Q")


@dataclasses.dataclass
class Commented:
    """Comments in every place."""

    # Not beside a field.

    # Two lines that
    # belong together.
    above: int = 0
    none: int = 0
    both: int = 0  # the one beside it
    # The block above loses to
    other: int = 0  # the trailing one
    long: tuple[int, ...] = (
        0,  # inside
    )  # after the bracket


def test_the_comment_block_above_a_field_is_its_doc_where_none_trails_it():
    assert field_docs(Commented) == {
        "above": "Two lines that belong together.",
        "both": "the one beside it",
        "other": "the trailing one",
        "long": "after the bracket",
    }
