"""Benchmarks: penstock beside others, measured in one run; `python -m benchmarks` runs all of them."""
