"""What a policy is asked and how answers are judged: examples, environments, verifiers, tokenizers, data. No JAX."""
