"""Benchmarks beside Docker and bare runsc, all in one run. See README.md in this directory."""
