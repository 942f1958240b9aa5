"""From prompts to scored completions: the sampler, stop strings, scoring, evaluation."""
