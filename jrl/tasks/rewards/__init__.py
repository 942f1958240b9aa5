"""Rewards computed on the host from text, tokens or a judge's numbers. No JAX."""
