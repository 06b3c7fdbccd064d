"""Which connectors there are, by name, and what they need. Imports nothing heavy: settings are
checked with it, minutes before the first link is made."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from importlib.util import find_spec

from stretto.errors import Invalid

ENTRY_POINTS = "stretto.connectors"
OURS = {
    "shm": ("stretto.transport.shm", "ShmConnector"),
    "tcp": ("stretto.transport.tcp", "TcpConnector"),
    "mooncake": ("stretto.transport.mooncake", "MooncakeConnector"),
}
"""Modules and what makes the connector in them."""
PACKAGES = {"mooncake": "mooncake"}
"""Of those that need a package which does not come with Stretto: its name, as it is imported."""


def check_connector(name: str) -> None:
    """Refuse a name that no link could use. Imports nothing of what a connector needs."""
    if name not in OURS and not entry_points(group=ENTRY_POINTS, name=name):
        raise unknown(name, names(OURS))
    package = PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        raise Invalid(
            f"connector {name!r} needs the package {package}: pip install 'stretto[{name}]'",
            "connector",
        )


def names(own: Iterable[str]) -> list[str]:
    """These, and those that other packages add."""
    return sorted({*own, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def unknown(name: str, known: Iterable[str]) -> Invalid:
    return Invalid(f"there is no connector {name!r}; there are {', '.join(known)}", "connector")
