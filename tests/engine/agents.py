"""Agents that are processes of this machine: what a cluster would start on others."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stretto._process import die_with_parent
from stretto.engine.agent import Agent
from stretto.engine.host_handle import Unusable
from stretto.engine.invitation import SECRET_BYTES, Invitation
from stretto.errors import StageDead

SECRET = secrets.token_bytes(SECRET_BYTES)


@dataclass(slots=True)
class ProcessAgent:
    process: asyncio.subprocess.Process
    waiting: list[asyncio.Task[None]] = field(default_factory=list)

    def on_end(self, tell: Callable[[StageDead], None]) -> None:
        async def wait() -> None:
            assert self.process.stdout is not None
            said = (await self.process.stdout.read()).decode().strip()
            await self.process.wait()
            kind, _, words = said.partition(": ")
            tell(Unusable(words) if kind == "Unusable" else StageDead(words or "its process ended"))

        self.waiting.append(asyncio.create_task(wait()))

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


@dataclass(slots=True)
class ProcessStarter:
    """`failures` befall the first starts. `wrong`: hosts by number whose agent has another secret,
    or version."""

    failures: list[Exception] = field(default_factory=list)
    wrong: Mapping[int, tuple[bytes, str | None]] = field(default_factory=dict)
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()  # of the agents' command
    keeper: int | None = None
    agents: list[ProcessAgent] = field(default_factory=list)

    async def start(self, invitation: Invitation, number: int) -> ProcessAgent:
        if self.failures:
            raise self.failures.pop(0)
        secret, version = self.wrong.get(number, (SECRET, None))
        told = msgspec.json.encode([invitation, secret.hex(), self.address, version, self.keeper])
        process = await asyncio.create_subprocess_exec(
            *self.prefix, sys.executable, "-m", "tests.engine.agents",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, env=dict(os.environ),
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(told + b"\n")
        await process.stdin.drain()
        process.stdin.close()
        self.agents.append(ProcessAgent(process))
        return self.agents[-1]

    async def ended(self) -> None:
        """Until nothing of any agent is left."""
        await asyncio.gather(*(t for a in self.agents for t in a.waiting))


def children(pid: int) -> list[int]:
    """Of a process, as far as they live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


async def gone(*pids: int) -> None:
    """Until none of these processes runs any more."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    while any(lives(pid) for pid in pids):
        await asyncio.sleep(0.02)


def main() -> None:
    invitation, secret, address, version, keeper = msgspec.json.decode(
        sys.stdin.buffer.readline(), type=tuple[Invitation, str, str, str | None, int | None]
    )
    if "AGENT_OUTLIVES" not in os.environ:
        die_with_parent()
    try:
        sys.stdout.write(
            f"over: {Agent(invitation, bytes.fromhex(secret), address, version, keeper).run()}\n"
        )
    except StageDead as e:
        sys.stdout.write(f"{type(e).__name__}: {e}\n")


if __name__ == "__main__":
    main()
