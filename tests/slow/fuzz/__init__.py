"""Damaged and invalid input: all that crosses a process, and events over /v1/realtime."""
