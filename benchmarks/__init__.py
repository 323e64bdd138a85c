"""The figures this project claims, each measured by one file here: `python -m benchmarks NAME [--quick]`."""
