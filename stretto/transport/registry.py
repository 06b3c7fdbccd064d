"""The connectors by name. Used by the ends of links in a host (`stage.ends`), whose configuration
names one.

Links inside a host need none. A package adds a connector by an entry point in the group
`stretto.connectors`, whose object makes it; a family that runs in the host process may call
`register` instead, where the engine is started from Python (`stretto serve` takes names that it can
check before it starts anything)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from stretto.config.engine import (
    CONNECTOR_ENTRY_POINTS,
    CONNECTORS,
    connector_names,
    unknown_connector,
)
from stretto.errors import Invalid
from stretto.transport.contract import Connector

Factory = Callable[[], Connector]


def _lazily(module: str, attribute: str) -> Factory:
    """A factory that imports on first use: tcp needs zmq and mooncake an optional wheel, shm
    neither."""

    def make() -> Connector:
        try:
            found = vars(import_module(module))[attribute]
        except ImportError as error:
            raise Invalid(
                f"connector {module.rpartition('.')[2]!r} is not installed: {error}"
            ) from error
        return cast(Factory, found)()

    return make


class Registry:
    """Names to connectors; each is made once, on first use."""

    def __init__(self) -> None:
        self._factories: dict[str, Factory] = {
            name: _lazily(*where) for name, where in CONNECTORS.items()
        }
        self._made: dict[str, Connector] = {}

    def register(self, name: str, factory: Factory) -> None:
        """Add a connector. A name cannot be registered twice: a running link may use the first."""
        if name in self._factories:
            raise Invalid(f"connector {name!r} is already registered", param="connector")
        self._factories[name] = factory

    def get(self, name: str) -> Connector:
        if name not in self._made:
            self._made[name] = self._factory(name)()
        return self._made[name]

    def names(self) -> list[str]:
        return connector_names(self._factories)

    def _factory(self, name: str) -> Factory:
        if name in self._factories:
            return self._factories[name]
        for entry in entry_points(group=CONNECTOR_ENTRY_POINTS, name=name):
            return cast(Factory, entry.load())
        raise unknown_connector(name, self.names())


connectors = Registry()
"""The process's registry."""
register = connectors.register
