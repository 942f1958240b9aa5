"""jrl: fine-tune language models with reinforcement learning, in JAX.

    jrl.train("tiny", run="runs/tiny")
    for step in jrl.steps("tiny", run="runs/tiny"):
        print(step.step, step.metrics["reward/mean"])

Importing jrl imports no JAX: verifier workers import it too.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["load_config", "steps", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jrl import api

        return getattr(api, name)
    raise AttributeError(f"module 'jrl' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
