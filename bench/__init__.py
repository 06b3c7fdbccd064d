"""Benchmarks: `python -m bench` lists them, `python -m bench NAME --help` explains one. See
docs/bench.md."""
