"""The links between the hosts of a pipeline: made when they are up, made anew when one breaks.
Asyncio, used by `supervisor.py`; imports no torch.

A link is made by asking the receiving host to listen and handing what it answers to the sending
host, both with a secret that is new each time, by which the ends know each other. One that is made
anew has a higher generation."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence

from stretto.config.engine import EngineConfig
from stretto.engine.host_handle import HostHandle, StagesLost, StateChanges
from stretto.errors import StageDead, WireError
from stretto.family import LinkSpec
from stretto.messages.hosts import Connect, LinkDown, Linked, Listen, Listening, Unlink
from stretto.types import SECRET_BYTES

log = logging.getLogger(__name__)

LINK_DELAYS = (0.05, 0.2, 0.5, 1.0)
"""Pauses between tries to make a link."""


class LinkRefused(StageDead):
    """All tries to make a link failed, though both its hosts live."""

    def __init__(self, link: LinkSpec, reason: str | None) -> None:
        super().__init__(f"link {link.name} cannot be made: {reason}")
        self.link = link


class LinkSetup:
    def __init__(
        self,
        specs: Sequence[LinkSpec],
        config: EngineConfig,
        hosts: Mapping[str, HostHandle],
        changes: StateChanges,
    ) -> None:
        """`specs` of the links between hosts, in data-flow order; `hosts` by stage, those that run
        now."""
        self.between = {k.name: k for k in specs}
        self.up: dict[str, bool] = dict.fromkeys(self.between, False)
        self.generations: dict[str, int] = dict.fromkeys(
            self.between, 0
        )  # of the latest try to make each
        self._config = config
        self._hosts = hosts
        self._changes = changes
        self._secrets: dict[
            str, bytes
        ] = {}  # by which its two ends know each other; of the latest try too
        self._joining = asyncio.Lock()
        self._making: str | None = None  # the link that is being made
        self._refused: str | None = None  # why it could not be

    def lose(self, stages: Sequence[str]) -> set[str]:
        """The host of these stages died. Which other stages will not get what was on its way to
        them?"""
        touched = [k for k in self.between.values() if k.sender in stages or k.receiver in stages]
        for link in touched:
            self.up[link.name] = False
        return {link.receiver for link in touched if link.sender in stages}

    def apply(self, message: Listening | Linked | LinkDown) -> StagesLost | None:
        """A host's report of its end of a link. Returns the stage that a broken link fed."""
        link = message.link
        if link not in self.between:
            raise WireError(f"it speaks of a link {link!r}")
        if message.generation != self.generations[link]:
            # both ends tell of a link's end, one of them maybe late: its successor has nothing to
            # do with it
            return None
        match message:
            case Listening(generation=generation, endpoint=endpoint):
                sender = self._hosts[self.between[link].sender]
                secret, details = self._secrets[link], self._details(sender)
                kind = self._config.connector
                sender.send(
                    Connect(link, kind, endpoint, generation, secret, sender.address, details)
                )
            case Linked():
                if link == self._making:
                    self.up[link] = True
                    self._changes.notify()
            case LinkDown(message=text):
                return self._down(link, text)
        return None

    async def join(self) -> None:
        """Make the links that are down and whose hosts are up, the last first, so that a stage has
        somewhere to send before it is sent anything. One at a time: two restarts that made the same
        link would undo each other's. Raises `LinkRefused`."""
        async with self._joining:
            for link in reversed(self.between.values()):
                for delay in LINK_DELAYS:
                    if self.up[link.name] or not self._hosts_up(link) or await self._make(link):
                        break
                    log.warning("link %s: %s", link.name, self._refused)
                    await asyncio.sleep(delay)
                else:
                    raise LinkRefused(link, self._refused)

    async def mend(self) -> None:
        """A link broke though both ends may live. If one died, its restart makes the link; else we
        do."""
        await asyncio.sleep(LINK_DELAYS[0])
        await self.join()

    async def _make(self, link: LinkSpec) -> bool:
        """One try. True: the link is up, or one of its hosts has died, whose restart makes it."""
        name = link.name
        self.generations[name] += 1
        self._making = name
        self._refused = None
        for stage in (link.sender, link.receiver):
            self._hosts[stage].send(Unlink(name))
        secret = self._secrets[name] = secrets.token_bytes(SECRET_BYTES)
        receiver = self._hosts[link.receiver]
        generation, details = self.generations[name], self._details(receiver)
        receiver.send(
            Listen(name, self._config.connector, generation, secret, receiver.address, details)
        )
        try:
            await self._changes.wait(
                lambda: self.up[name] or self._refused is not None or not self._hosts_up(link)
            )
        finally:
            self._making = None
        return self._refused is None

    def _details(self, host: HostHandle) -> dict[str, str]:
        """Options of a connector: at which address the others find a host's end
        of a link."""
        return {**self._config.link_details, "advertise": host.address}

    def _hosts_up(self, link: LinkSpec) -> bool:
        return all(self._hosts[s].state == "ready" for s in (link.sender, link.receiver))

    def _down(self, link: str, text: str) -> StagesLost | None:
        if self.up[link]:
            self.up[link] = False
            receiver = self.between[link].receiver
            return StagesLost(frozenset({receiver}), StageDead(f"link {link} is down: {text}"))
        if link == self._making:  # else it is known already
            self._refused = text
            self._changes.notify()
        return None
