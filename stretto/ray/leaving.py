"""A replica that shuts down closes its WebSockets first: they would last until Serve kills it, and
end without a word.

Serve has no public hook for the beginning of a replica's shutdown; its end comes when all requests
are over, which a WebSocket never is. The replica's own flag is looked at instead, here and nowhere
else. Runs on the replica's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from stretto.server.service import Service

log = logging.getLogger(__name__)

POLL_S = 0.2
MISSING = (
    "this Ray does not show when a replica is told to go: open WebSockets will be cut at the end "
    "of --drain-timeout"
)


def own_replica() -> Any | None:
    """Serve's object for the replica in this process. None where it has none, or this Ray does not
    show it."""
    from ray._private.worker import global_worker

    actors = getattr(global_worker, "actors", {}).values()
    return next(
        (replica for a in actors if (replica := getattr(a, "_replica_impl", None)) is not None),
        None,
    )


def shutdown_flag() -> Callable[[], bool] | None:
    """Whether Serve is shutting down the replica of this process. None where no replica or no
    such flag is found."""
    replica: Any = own_replica()
    if not isinstance(getattr(replica, "_shutting_down", None), bool):
        return None
    return lambda: bool(replica._shutting_down)


async def close_websockets_on_exit(service: Service, going: Callable[[], bool] | None) -> None:
    """Wait until the replica shuts down; then close each WebSocket after its answer. Requests are
    still accepted: the ingress sends some until it knows. What runs after the drain timeout gets
    an error and is cut."""
    if going is None:
        log.warning(MISSING)
        return
    while not going():
        await asyncio.sleep(POLL_S)
    log.info("this replica shuts down: closing %d realtime sessions", service.sessions.running)
    service.sessions.drain()
    await asyncio.sleep(service.config.drain_timeout)
    service.cut_off()
