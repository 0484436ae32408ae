"""Measurements, not tests: each module prints its table; `results/` keeps the ones that were published."""
