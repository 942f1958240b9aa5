"""The table of sources of stored rows: one file and one entry for each, named after its config class."""

from __future__ import annotations

from jrl.tasks.data import (
    comparisons,
    conditioned,
    contrasts,
    corrections,
    demonstrations,
    labeled,
    preferences,
    rated,
    rationales,
    step_labels,
    step_values,
    user_preferences,
)
from jrl.tasks.data.stored import StoredSource

SOURCES: dict[str, StoredSource] = {
    "Comparisons": comparisons.SOURCE,
    "ConditionedPreferences": conditioned.SOURCE,
    "ContrastedPreferences": contrasts.SOURCE,
    "Corrections": corrections.SOURCE,
    "Demonstrations": demonstrations.SOURCE,
    "Labeled": labeled.SOURCE,
    "Preferences": preferences.SOURCE,
    "Rated": rated.SOURCE,
    "RationalePreferences": rationales.SOURCE,
    "StepLabels": step_labels.SOURCE,
    "StepValues": step_values.SOURCE,
    "UserPreferences": user_preferences.SOURCE,
}
