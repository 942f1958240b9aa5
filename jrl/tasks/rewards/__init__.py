"""Rewards computed from text or from a judge's numbers, in plain Python on the host. No JAX, no numpy."""
