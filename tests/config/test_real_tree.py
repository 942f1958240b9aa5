"""The reader over the configuration that jrl really has."""

from __future__ import annotations

import random

import pytest

from jrl.algos import ALGOS
from jrl.config import ConfigError, all_fields, describe, from_json, identity, load, to_gin, to_json
from jrl.config.schema import fields_of, schema_of
from jrl.experiment import FREE, TABLES, Config, config_classes

CLASSES = config_classes(TABLES)
BASE = ["Config.task = @Addition()", "Config.stages = [@warm/Offline(), @Online()]",
        "warm/Offline.source = @Demonstrations()", "warm/Offline.objective = @SFT()", "Online.objective = @GRPO()",
        "Data.prompt_length = 8", "Sampler.completion_length = 8"]  # fmt: skip


def required(cls: type) -> list[str]:
    """Bindings that give every plain field without a default some value."""
    values = {int: "1", float: "0.5", str: "'x'", bool: "True"}
    fields = fields_of(cls).values()
    return [f"{cls.__name__}.{f.name} = {values[f.hint]}" for f in fields if f.default is None and f.hint in values]


def chosen(table: str, name: str) -> list[str]:
    """Bindings of a whole run that picks one row."""
    field = {"envs": "Config.task", "sources": "warm/Offline.source", "tokenizers": "Config.tokenizer",
             "optimizers": "Online.optimizer", "curricula": "Online.curriculum",
             "strategies": "Online.strategy"}.get(table)  # fmt: skip
    if table == "algos":
        field = "Online.objective" if ALGOS[name].advantages else "warm/Offline.objective"
    pick = f"{field} = @{name}()" if field else f"Scoring.verifiers = [@{name}(), @other/{name}()]"
    remaining = [binding for binding in BASE if not (field and binding.startswith(f"{field} "))]
    inner = {
        "Mixture": ["Mixture.tasks = [@Addition(), @other/Addition()]", "other/Addition.digits = 5"],
        "Dataset": ["Dataset.layout = 'alpaca'"],
        "Filtered": ["Filtered.task = @Addition()"],
        "Cleaned": ["Cleaned.task = @Addition()", "Cleaned.evaluation = [@other/Addition()]"],
    }
    fields = [binding for binding in required(CLASSES[table][name]) if binding != "Dataset.layout = 'x'"]
    return [*remaining, pick, *fields, *inner.get(name, [])]


ROWS = [(table, name) for table, rows in CLASSES.items() for name in rows]


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_every_row_can_be_chosen_and_reads_back_equal(table, name, tmp_path):
    config = load(None, chosen(table, name), Config, CLASSES)
    (tmp_path / "resolved.gin").write_text(to_gin(config, CLASSES), encoding="utf-8")
    again = load(str(tmp_path / "resolved.gin"), [], Config, CLASSES)
    assert again == config == from_json(to_json(config), Config, CLASSES)
    assert identity(again, FREE) == identity(config, FREE)


def test_every_field_that_may_differ_on_resume_exists():
    sections = schema_of(Config, CLASSES).sections
    for name in FREE:
        section, _, field = name.partition(".")
        assert section in sections and (field == "*" or field in fields_of(sections[section])), name


def test_an_unused_part_names_every_field_of_the_run_that_selects_it():
    named = r"no PPO is part of .* To select PPO, bind warm/Offline\.objective or Online\.objective = @PPO\(\)"
    with pytest.raises(ConfigError, match=named):
        load(None, [*BASE, "PPO.gae_lambda = 1.0"], Config, CLASSES)


def test_help_has_a_section_for_every_class():
    text = describe(Config, CLASSES)
    for cls, field in all_fields(Config, CLASSES):
        assert f"\n  {field}: " in text and (f"\n{cls.__name__}" in text or text.startswith(cls.__name__))


def test_values_of_another_type_are_refused_by_their_field(trials):
    wrong = {
        int: ("'x'", "1.5", "[1]", "None.5"),
        float: ("'x'", "[0.5]", "{}"),
        str: ("3", "['x']"),
        bool: ("'yes'", "2"),
    }
    written = to_gin(load(None, BASE, Config, CLASSES), CLASSES)
    names = [line.partition(" = ")[0] for line in written.splitlines() if " = " in line and not line.startswith("#")]
    hints = {
        f"{cls.__name__}.{f.name}": f.hint for cls, _ in all_fields(Config, CLASSES) for f in fields_of(cls).values()
    }
    cases = [(name, value) for name in names for value in wrong.get(hints.get(name.rpartition("/")[2]), ())]
    assert len(cases) > 100
    for name, value in cases[: trials(len(cases))]:
        with pytest.raises(ConfigError) as caught:
            load(None, [*BASE, f"{name} = {value}"], Config, CLASSES)
        assert name.rpartition(".")[2] in str(caught.value), (name, value, str(caught.value))


def test_one_edit_typos_of_real_keys_are_refused_and_the_meant_name_is_suggested(trials):
    draw = random.Random(1)
    fields = [(cls.__name__, field) for cls, field in all_fields(Config, CLASSES)]
    real = {f"{section}.{field}" for section, field in fields}
    tried, right, number = 0, 0, trials(200, 1_000, seed=1)
    while tried < number:
        section, field = draw.choice(fields)
        word = section if (in_section := draw.random() < 0.3) else field
        i = draw.randrange(len(word))
        letter = draw.choice("abcdefghijklmnopqrstuvwxyz_")
        typo = draw.choice([word[:i] + word[i + 1 :], word[:i] + letter + word[i:], word[:i] + letter + word[i + 1 :],
                            word[:i] + word[i : i + 2][::-1] + word[i + 2 :]])  # fmt: skip
        key = f"{typo}.{field}" if in_section else f"{section}.{typo}"
        if key in real or not typo.isidentifier():
            continue
        tried += 1
        with pytest.raises(ConfigError) as caught:
            load(None, [*BASE, f"{key} = 1"], Config, CLASSES)
        right += f"did you mean {f'{section}.{field}' if in_section else field}?" in caught.value.reason
    assert right / tried >= 0.95, right / tried
