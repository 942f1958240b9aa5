"""Trials and measurements, each a command: `python -m benchmarks.NAME`."""
