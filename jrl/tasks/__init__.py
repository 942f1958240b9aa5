"""Tasks and their scoring: examples, environments, verifiers, judges, rewards, tokenizers and data. No JAX."""
