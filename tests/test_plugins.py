"""A user's own parts: what is refused when they are loaded, and what of them travels."""

from __future__ import annotations

import pytest

from jrl.plugins import PartError, load_parts


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / f"{next(iter(files))}.py"


def test_a_verifier_that_takes_one_argument_is_refused_when_it_is_loaded(tmp_path):
    path = write(tmp_path, mine="def short(completion):\n    return 1.0\nVERIFIERS = {'short': short}\n")
    with pytest.raises(PartError) as refused:
        load_parts([path])
    assert "'short' is defined as short(completion) (" in str(refused.value)
    assert f"{path}:1" in str(refused.value)
    assert "is called with (completion, example)" in str(refused.value)


def needs_three(completion, example, threshold):
    return 1.0


def keyword_only(completion, example, *, threshold):
    return 1.0


@pytest.mark.parametrize("function", [needs_three, keyword_only])
def test_a_function_with_too_many_arguments_is_refused_by_name(function):
    with pytest.raises(PartError, match=rf"'{function.__name__}' is defined as .*test_plugins.py.*'threshold'"):
        load_parts([function])


def test_a_row_whose_score_lacks_the_config_is_refused(tmp_path):
    text = """
import dataclasses
from jrl.tasks.verifiers import Verifier
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    weight: float = 1.0
VERIFIERS = {"Mine": Verifier(Mine, lambda completion, example: 1.0)}
"""
    with pytest.raises(PartError, match=r"'Mine' is defined .* is called with \(config, completion, example\)"):
        load_parts([write(tmp_path, mine=text)])


def test_defaults_and_star_arguments_are_fine(tmp_path):
    text = """
def with_default(completion, example, threshold=0.5): return 1.0
def any_arguments(*arguments, **options): return True
VERIFIERS = {"with_default": with_default, "any_arguments": any_arguments}
"""
    assert load_parts([write(tmp_path, mine=text)]).added["verifiers"] == ("with_default", "any_arguments")
