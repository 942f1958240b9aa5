"""The start of the template process."""

import subprocess
import sys

import pytest

from jrl.tasks.verifiers import process
from jrl.tasks.verifiers.process import STARTS, TemplateLost, TemplateProcess


@pytest.fixture
def deaths(monkeypatch):
    """Returns a function: n -> a list to which every start adds one; the first n starts die at once."""
    real = subprocess.Popen

    def first(count):
        started = []

        def popen(command, **options):
            started.append(command)
            dies = [sys.executable, "-c", "import sys; sys.exit('killed on purpose')"]
            return real(dies if len(started) <= count else command, **options)

        monkeypatch.setattr(process.subprocess, "Popen", popen)
        return started

    return first


def test_a_template_that_dies_on_its_way_is_started_again(deaths):
    started = deaths(1)
    template = TemplateProcess((), (), memory_mb=512, cpu_seconds=1.0)
    try:
        assert len(started) == 2
        worker, pid = template.fork()
        worker.close()
        template.kill(pid)
    finally:
        template.close()


def test_a_template_that_always_dies_is_lost_with_its_last_words(deaths):
    started = deaths(STARTS)
    with pytest.raises(TemplateLost, match="killed on purpose"):
        TemplateProcess((), (), memory_mb=512, cpu_seconds=1.0)
    assert len(started) == STARTS
