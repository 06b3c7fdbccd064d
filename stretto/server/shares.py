"""How clients share a bounded resource: bytes of bodies, memory of realtime sessions, their number.
Used on the event loop.

A client is an API key or, without keys, an address: of IPv6 its network of 64 bits, since it may
use any address of that. A client may take more as long as what it then holds is at most
what is then still free. So one client alone gets half of the resource, `n` clients get an `n + 1`th
each, and a new client always finds room."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, ip_network

RESERVE = 16
"""The part of the whole that floors leave free, for those who need little."""


@lru_cache(4096)
def client_of_address(address: str) -> str:
    """What is no IPv6 address stands for itself; an IPv4 address may be written as one."""
    try:
        ipv6 = IPv6Address(address)
    except ValueError:
        return address
    if ipv6.ipv4_mapped is not None:
        return str(ipv6.ipv4_mapped)
    return str(ip_network((ipv6, 64), strict=False))


@dataclass(slots=True)
class Shares:
    """`floor`: a client may hold this much beyond the rule above, if it is free. It is the size of
    the largest thing that one request may need, which would otherwise be refused on a busy server
    however long it waits."""

    limit: int
    floor: int = 0
    held: int = 0
    returned: int = 0  # of all that was ever held
    _by_client: dict[str, int] = field(default_factory=dict)

    def of(self, client: str) -> int:
        return self._by_client.get(client, 0)

    @property
    def free(self) -> int:
        return self.limit - self.held

    def fits(self, client: str, size: int) -> bool:
        """Whether the client may take so much more now."""
        mine = self.of(client) + size
        free = self.free - size
        reserve = min(self.limit // RESERVE, self.limit - self.floor)
        return size <= 0 or mine <= free or (mine <= self.floor and free >= reserve)

    def take(self, client: str, size: int) -> bool:
        """Take so much more, if the client may."""
        if not self.fits(client, size):
            return False
        self.add(client, size)
        return True

    def add(self, client: str, size: int) -> None:
        """Count what is held already, whether it fits or not."""
        self.held += size
        self.returned -= min(0, size)
        self._by_client[client] = self.of(client) + size
        if not self._by_client[client]:
            del self._by_client[client]

    def give_back(self, client: str, size: int) -> None:
        self.add(client, -size)


@dataclass(slots=True, eq=False)
class Holding:
    """What one connection or session holds of a whole; `client` can change while it does."""

    shares: Shares
    client: str
    size: int = 0

    def fits(self, size: int) -> bool:
        """Whether it may grow to this size."""
        return self.shares.fits(self.client, size - self.size)

    def resize(self, size: int) -> None:
        """It has this size now, whether that fits or not."""
        if size != self.size:
            self.shares.add(self.client, size - self.size)
            self.size = size

    def belong_to(self, client: str) -> None:
        size = self.size
        self.resize(0)
        self.client = client
        self.resize(size)

    def close(self) -> None:
        self.resize(0)
