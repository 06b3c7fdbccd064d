"""Clients of a running server: `bench.py` measures it, `talk.py` talks with it. Neither imports
torch."""
