"""Benchmarks of this project's performance claims, one file for each claim: `python -m benchmarks NAME [--quick]`."""
