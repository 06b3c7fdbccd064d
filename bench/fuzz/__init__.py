"""Damaged and nonsensical input: everything that crosses a process, and events over
/v1/realtime."""
