"""Benchmarks of penstock, with what each is compared with measured in the same run; see `python -m benchmarks -h`."""
