"""Benchmarks: `python -m bench` from a checkout."""
