"""Verifiers: functions that score a completion. One file and one row for each; imports no JAX."""

from __future__ import annotations

from jrl.tasks.verifiers import (
    calibration,
    confidence_span,
    equation_steps,
    exact,
    expression_tests,
    length,
    math_equal,
    numeric,
    reasoning_gym,
    regex,
    repetition,
    similarity,
    step_match,
    tags,
)
from jrl.tasks.verifiers.calibration import Calibration
from jrl.tasks.verifiers.confidence_span import ConfidenceSpan
from jrl.tasks.verifiers.contract import Verifier, VerifierSpec, as_verifier, config_of, look_up, merge, spec_of
from jrl.tasks.verifiers.equation_steps import EquationSteps
from jrl.tasks.verifiers.exact import Exact
from jrl.tasks.verifiers.expression_tests import ExpressionTests
from jrl.tasks.verifiers.length import Length
from jrl.tasks.verifiers.math_equal import MathEqual
from jrl.tasks.verifiers.numeric import Numeric
from jrl.tasks.verifiers.reasoning_gym import ReasoningGymScore
from jrl.tasks.verifiers.regex import Regex
from jrl.tasks.verifiers.repetition import Repetition
from jrl.tasks.verifiers.similarity import Similarity
from jrl.tasks.verifiers.step_match import StepMatch
from jrl.tasks.verifiers.tags import FormatTags

VERIFIERS = {
    "Exact": Verifier(Exact, exact.score, reward_range=(0, 1)),
    "Numeric": Verifier(Numeric, numeric.score, reward_range=(0, 1)),
    "MathEqual": Verifier(MathEqual, math_equal.score, math_equal.preload, reward_range=(0, 1)),
    "Regex": Verifier(Regex, regex.score, reward_range=(0, 1)),
    "FormatTags": Verifier(FormatTags, tags.score, reward_range=(0, 1)),
    "Length": Verifier(Length, length.score, reward_range=(0, 1)),
    "Similarity": Verifier(Similarity, similarity.score, reward_range=similarity.reward_range),
    "Calibration": Verifier(Calibration, calibration.score, reward_range=(-1, 1), read_answer=calibration.read_answer),
    "ConfidenceSpan": Verifier(
        ConfidenceSpan,
        confidence_span.score,
        rewards_spans=True,
        reward_range=(-1, 1),
        read_answer=calibration.read_answer,
    ),
    "ExpressionTests": Verifier(ExpressionTests, expression_tests.score, reward_range=(0, 1)),
    "Repetition": Verifier(Repetition, repetition.score, reward_range=(-1, 0)),
    "EquationSteps": Verifier(EquationSteps, equation_steps.score, rewards_spans=True, reward_range=(0, 1)),
    "StepMatch": Verifier(StepMatch, step_match.score, rewards_spans=True),
    "ReasoningGymScore": Verifier(ReasoningGymScore, reasoning_gym.score, reasoning_gym.preload),
}

__all__ = ["VERIFIERS", "Verifier", "VerifierSpec", "as_verifier", "config_of", "look_up", "merge", "spec_of"]
