"""Data: from a source of examples to prompts, training rows and held-out sets."""
