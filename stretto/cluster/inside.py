"""Finds the Serve replica of this process, for what Serve has no public hook for. `leaving.py` and `shortway.py` look
into what it finds, by names that are not API; nothing else does."""

from __future__ import annotations

from typing import Any


def own_replica() -> Any | None:
    """None where this process has no replica, or this Ray does not show it."""
    from ray._private.worker import global_worker

    actors = getattr(global_worker, "actors", {}).values()
    return next((found for actor in actors if (found := getattr(actor, "_replica_impl", None)) is not None), None)
