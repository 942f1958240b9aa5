"""Every field that a configuration can set says what it is: `jrl help config` has no blank descriptions."""

from __future__ import annotations

from jrl.config import all_fields, field_docs
from jrl.experiment import TABLES, Config, config_classes


def test_every_field_has_a_description():
    fields = all_fields(Config, config_classes(TABLES))
    missing = [f"{cls.__name__}.{name}" for cls, name in fields if not field_docs(cls).get(name)]
    assert missing == []
