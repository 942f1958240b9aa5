"""Rewards that are functions of text or of a judge's numbers: plain Python on the host. No JAX, no numpy."""
