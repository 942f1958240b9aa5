"""Verifiers: what a completion is worth. One file and one row each; imports no JAX."""

from __future__ import annotations

from jrl.verifiers import exact, length, math_equal, numeric, reasoning_gym, regex, tags
from jrl.verifiers.contract import Row, Verifier, as_verifier, config_of, look_up, merge, row_of
from jrl.verifiers.exact import Exact
from jrl.verifiers.length import Length
from jrl.verifiers.math_equal import MathEqual
from jrl.verifiers.numeric import Numeric
from jrl.verifiers.reasoning_gym import ReasoningGymScore
from jrl.verifiers.regex import Regex
from jrl.verifiers.tags import FormatTags

VERIFIERS = {
    "Exact": Verifier(Exact, exact.score),
    "Numeric": Verifier(Numeric, numeric.score),
    "MathEqual": Verifier(MathEqual, math_equal.score, math_equal.preload),
    "Regex": Verifier(Regex, regex.score),
    "FormatTags": Verifier(FormatTags, tags.score),
    "Length": Verifier(Length, length.score),
    "ReasoningGymScore": Verifier(ReasoningGymScore, reasoning_gym.score, reasoning_gym.preload),
}

__all__ = ["VERIFIERS", "Row", "Verifier", "as_verifier", "config_of", "look_up", "merge", "row_of"]
