"""Writes a small task to start from, for `jrl new`. No JAX."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from jrl import paths

GIN = """\
# Sums of two digits, trained from random weights: a starting point to change. Written by `jrl new {name}`.
#
#   jrl train {folder}/{name}.gin --run runs/{name}
#
# Hardware: any CPU. Time: under a minute on 2 cores.
# Expected: mean reward rises from about 0.5 to above 0.9.
#
# `jrl help config` describes every section, `jrl help config Sampler` one of them. Relative paths are looked for in the
# current directory, then beside this file.

parts = ['{name}.py']  # your Python: it adds verifiers (and environments, models, ...) to those of jrl

Config.task = @Jsonl()
Jsonl.path = '{name}.jsonl'  # one example a line: a prompt and its answer
Scoring.verifiers = [@Close()]  # out of {name}.py

Data.prompt_length = 8  # tokens; the default tokenizer has one for each byte, and four around a prompt
Data.held_out_every = None  # ten rows are too few to hold some out for evaluation

# A tiny model from random weights. To fine-tune a published one (config.json and safetensors in a folder):
#   Config.model = @Published()
#   Published.path = 'models/mine'
#   Config.tokenizer = @HuggingFace()
#   HuggingFace.path = 'models/mine'
Decoder:
  layers = 2
  width = 64
  heads = 4
  kv_heads = 2
  head_dim = 16
  mlp_width = 128

Sampler.completion_length = 2

# First a few supervised steps on the answers, so that some samples are right; then reinforcement learning.
Config.stages = [@warm/Offline(), @Online()]
warm/Offline:
  source = @Demonstrations()
  objective = @SFT()
  steps = 8
  batch_size = 10
warm/AdamW.learning_rate = 3e-3
Online:
  objective = @GRPO()
  steps = 60
  prompts = 10
  samples = 16
AdamW.learning_rate = 1e-3

Checkpoint.every = 20
"""

PYTHON = '''\
"""The verifier of {name}.gin. `jrl check {folder}/{name}.py` runs jrl's contract tests on it."""


def Close(completion, example):
    """Returns 1 for the right number, less for a near one, 0 for anything else.

    Evaluations count every number above 0 as correct. To reward an answer that they should count as wrong, return
    Verdict(Status.WRONG, reward), with both names from jrl.tasks.verdict.

    Args:
      completion: what the model wrote.
      example: a row of {name}.jsonl. example.answer is its `answer`, example.info holds its other columns, and
        example.messages its prompt, as messages with a role and a content.
    """
    text = completion.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        return 0.0
    return max(0.0, 1 - abs(int(text) - int(example.answer)) / 4)


VERIFIERS = {{"Close": Close}}
'''

SUMS = ((1, 2), (2, 2), (4, 1), (3, 3), (5, 2), (4, 4), (6, 3), (1, 1), (0, 1), (0, 0))


def template(name: str, folder: str | None = None) -> dict[str, str]:
    """Returns {file name: text} of a task called `name`: a gin file, a parts file with a verifier, ten rows of data.

    Args:
      folder: the task's folder in the commands that the comments show; None: `name`.
    """
    rows = "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in SUMS)
    places = {"name": name, "folder": folder or name}
    return {f"{name}.gin": GIN.format(**places), f"{name}.py": PYTHON.format(**places), f"{name}.jsonl": rows}


def create(folder: Path) -> list[str]:
    """Writes the template into a new folder, whose last part names the task. Returns three commands to try.

    Raises: ValueError for a name that is not a plain word, or a folder that exists.
    """
    name = folder.name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ValueError(
            f"{name or str(folder)!r} cannot name a task; use letters, digits, - and _, beginning with a letter"
        )
    if paths.exists(folder):
        raise ValueError(f"{folder} exists already; choose another name")
    paths.make_dir(folder)
    try:
        for file, text in template(name, folder.as_posix()).items():
            paths.write_bytes_atomic(folder / file, text.encode())
    except OSError:  # such as a full disk: leave the name free
        paths.remove_tree(folder)
        raise
    place = shlex.quote(folder.as_posix())
    return [
        f"jrl check {place}/{name}.py",
        f"jrl train {place}/{name}.gin --run runs/{name}",
        f"jrl sample runs/{name}",
    ]
