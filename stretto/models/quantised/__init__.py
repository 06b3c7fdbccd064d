"""Checkpoints whose weights come quantised."""
