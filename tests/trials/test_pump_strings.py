"""Texts that are made to slow a pattern or a verifier down: 100,000 characters in at most 50 ms of processor time.

pytest -m slow tests/trials/test_pump_strings.py
"""

import importlib
import pkgutil
import re
import sys
import time

import pytest

from jrl import tasks
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers import chat_template
from jrl.tasks.verifiers import VERIFIERS

pytestmark = pytest.mark.slow

CHARACTERS, SECONDS = 100_000, 0.05
UNITS = [
    *"0-a([{}\\<>=+/eij_^$|,\n\t\"' ", "1,", "1,000", "\\frac", "\\\\", "<answer>", "</answer>", "\\boxed{", "1/", "0.",
    "E+1", ", ", "a b", "xyz", "f(a", "f(a,", "(a,", "AB", "\u0660", "\u00e9", "\ud800", "\x00", "#### ", "**", "\\\"",
]  # fmt: skip
# With what verifiers read of an example.
EXAMPLE = Example(id="e", messages=(Message("user", "2 + 2?"),), answer="4", info={"tests": [[0, 4]], "steps": ["4"]})
REQUIRED = {"Regex": {"pattern": "[0-9]+"}}


def patterns():
    """Returns name -> pattern of the modules that read what a model or a file says."""
    for module in pkgutil.walk_packages(tasks.__path__, f"{tasks.__name__}."):
        importlib.import_module(module.name)
    loaded = [module for name, module in sys.modules.items() if name.startswith("jrl.tasks")]
    return {f"{m.__name__}.{n}": v for m in loaded for n, v in vars(m).items() if isinstance(v, re.Pattern)}


def slow(call, *arguments):
    """Whether a call takes too long twice: the first time may have had something else to do."""
    for _ in range(2):
        start = time.process_time()
        call(*arguments)
        if time.process_time() - start <= SECONDS:
            return False
    return True


def test_no_pattern_is_slow(trials):
    found = patterns()
    assert len(found) >= 5
    texts = [unit * (CHARACTERS // len(unit)) + tail for unit in UNITS for tail in ("", "!", "0", ")")]
    cases = []
    for name, pattern in found.items():
        for text in texts if isinstance(pattern.pattern, str) else [t.encode(errors="surrogatepass") for t in texts]:
            cases += [(name, pattern.search, text), (name, pattern.fullmatch, text)]
    trials(len(cases))
    assert [(name, text[:20]) for name, match, text in cases if slow(match, text)] == []


@pytest.mark.parametrize("name", VERIFIERS)
def test_no_verifier_is_slow(name, trials):
    if name == "ReasoningGymScore":
        EXAMPLE.info.update(dataset="chain_sum", entry={"question": "2 + 2?", "answer": "4", "metadata": {}})
    config = VERIFIERS[name].config(**REQUIRED.get(name, {}))
    places = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}")
    texts = [place.format(unit * (CHARACTERS // len(unit))) for unit in UNITS for place in places]
    trials(len(texts))
    VERIFIERS[name].score(config, "4", EXAMPLE)  # imports what it needs
    assert [text[:20] for text in texts if slow(VERIFIERS[name].score, config, text, EXAMPLE)] == []


def test_literals_of_no_template_are_found_slowly(trials):
    texts = [unit * (CHARACTERS // len(unit)) for unit in (*UNITS, "\\", "'\\", "\\'\\\"")]
    trials(len(texts))
    assert [text[:20] for text in texts if slow(chat_template._literals, text)] == []
