"""Attention: the reference, the kernels that may replace it, caches, and linear attention."""
