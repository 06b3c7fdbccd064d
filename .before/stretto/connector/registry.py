"""Which connectors there are, and which one a link gets. Used at start, by whoever builds the pipeline's links.

Placement decides: the same host passes tensors (`local`), the same machine shares memory (`shm`), other machines
use the network (`tcp`). The configuration may name one instead. Third parties add theirs with `register`, or by
an entry point in the group `stretto.connectors` whose object makes the connector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from stretto.connector.contract import Connector
from stretto.errors import Invalid

ENTRY_POINTS = "stretto.connectors"

Factory = Callable[[], Connector]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a stage runs, as far as a link cares: names that are equal iff the thing is the same."""

    machine: str
    host: str  # the host process, unique across machines


def choose(sender: Seat, receiver: Seat, forced: str | None = None) -> str:
    """The name of the connector for a link from `sender` to `receiver`."""
    if forced is not None:
        if forced == "local" and sender.host != receiver.host:
            raise Invalid(f"connector 'local' cannot join hosts {sender.host} and {receiver.host}", param="connector")
        if forced == "shm" and sender.machine != receiver.machine:
            raise Invalid(
                f"connector 'shm' cannot join machines {sender.machine} and {receiver.machine}", param="connector"
            )
        return forced
    if sender.host == receiver.host:
        return "local"
    return "shm" if sender.machine == receiver.machine else "tcp"


def _lazily(module: str, attribute: str) -> Factory:
    """A factory that imports on first use: tcp needs zmq and mooncake an optional wheel, local and shm neither."""

    def make() -> Connector:
        try:
            found = vars(import_module(module))[attribute]
        except ImportError as error:
            raise Invalid(f"connector {module.rpartition('.')[2]!r} is not installed: {error}") from error
        return cast(Factory, found)()

    return make


class Registry:
    """Names to connectors; each is made once, when first asked for."""

    def __init__(self) -> None:
        self._factories: dict[str, Factory] = {
            "local": _lazily("stretto.connector.local", "LocalConnector"),
            "shm": _lazily("stretto.connector.shm", "ShmConnector"),
            "tcp": _lazily("stretto.connector.tcp", "TcpConnector"),
            "mooncake": _lazily("stretto.connector.mooncake", "MooncakeConnector"),
        }
        self._made: dict[str, Connector] = {}

    def register(self, name: str, factory: Factory) -> None:
        """Add a connector. A name is taken once: replacing one under a running link would be a trap."""
        if name in self._factories:
            raise Invalid(f"connector {name!r} is already registered", param="connector")
        self._factories[name] = factory

    def get(self, name: str) -> Connector:
        if name not in self._made:
            self._made[name] = self._factory(name)()
        return self._made[name]

    def names(self) -> list[str]:
        return sorted(self._factories)

    def _factory(self, name: str) -> Factory:
        if name in self._factories:
            return self._factories[name]
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            return cast(Factory, entry.load())
        raise Invalid(f"no connector {name!r}; there are {', '.join(self.names())}", param="connector")


connectors = Registry()
"""The process's registry."""
register = connectors.register
