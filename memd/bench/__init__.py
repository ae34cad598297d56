"""Benchmarks that an operator can run: `memd bench`."""
