"""Benchmarks: not part of the package, run by hand from a checkout; see README.md."""
