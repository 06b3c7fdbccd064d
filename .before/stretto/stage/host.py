"""A host: one process that drives some of the stages on one device, from one loop thread.

Started by the orchestrator with one end of a socket pair. The main thread builds the stages, then reads control
messages and posts them to the loop, which never waits for the orchestrator (see `channel.py`). When the channel
closes, the host is over: it exits, whatever it was doing."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stretto.child import die_with_parent
from stretto.connector.switches import OverlapSwitches
from stretto.errors import Bug, Busy, Gone, StrettoError, WireError
from stretto.orchestrator.messages import (
    Admit,
    Broken,
    Cancel,
    Configure,
    Connect,
    Features,
    LinkDown,
    Listen,
    Ping,
    Quit,
    Ready,
    Stats,
    StopText,
    Throttle,
    ToHost,
    Unlink,
)
from stretto.orchestrator.settings import LINKS, HostSettings
from stretto.prompt.packed import Bytes, unpack_prompt
from stretto.stage.build import Builder
from stretto.stage.channel import Channel
from stretto.stage.ends import LinkEnds
from stretto.stage.loop import Loop
from stretto.stage.nodes.node import Node
from stretto.stage.nodes.report import Report, failed
from stretto.stage.nodes.thinker import ThinkerNode
from stretto.stage.runner.waiter import Waiter
from stretto.stage.stats import host_stats
from stretto.stage.turns import Fresh, in_order
from stretto.types import RequestId

SWITCH_S = 0.001
CONTROL = 2048
"""Of the places for messages, those that new requests leave free: what was taken must be able to end."""


@dataclass(slots=True, eq=False)
class Host:
    """The stages of this process and their links."""

    configure: Configure
    settings: HostSettings
    report: Report  # collects
    push: Callable[[], None] = lambda: None  # sends what was collected
    device: torch.device = field(init=False)
    switches: OverlapSwitches = field(init=False)  # links are laid by what they say then
    nodes: dict[str, Node] = field(init=False, default_factory=dict)
    links: LinkEnds = field(init=False)
    loop: Loop = field(init=False)
    fresh: Fresh | None = field(init=False, default=None)
    waiters: list[Waiter] = field(init=False, default_factory=list)
    memory: dict[str, int] = field(init=False, default_factory=dict)  # bytes by stage

    def load(self) -> None:
        """Build the stages and give them turns. On the main thread; the loop does not run yet."""
        s = self.settings
        self.device = torch.device(s.device)
        self.switches = OverlapSwitches.read(s.switches, os.environ)
        if self.device.type == "cpu":
            torch.set_num_threads(s.threads)
        self.loop = Loop([])
        model, stages = self.configure.model, self.configure.stages
        builder = Builder(model, stages, s, self.device, self.switches, self.loop, self.report, self.push)
        self.nodes = builder.build()
        self.settings, self.memory, self.waiters = builder.settings, builder.memory, builder.waiters
        ring = self.loop.bell.ring
        self.links = LinkEnds(self.nodes, self.settings, self.device, ring, self.report, self._fail)
        self.fresh = Fresh(self.nodes["thinker"]) if "thinker" in self.nodes else None
        self.loop.stages = in_order(self.nodes, self.fresh, self.push, self.links)

    # -- messages, on the loop thread

    def handle(self, message: ToHost, blob: Bytes) -> None:
        match message:
            case Admit():
                self._admit(message, blob)
            case Cancel(request=id):
                self._cancel(id)
            case StopText(request=id):
                thinker = self.nodes.get("thinker")
                if isinstance(thinker, ThinkerNode):
                    thinker.stop_text(id)
            case Throttle(request=id, on=on):
                for node in self.nodes.values():
                    node.throttle(id, on)
            case Listen() | Connect() if not self._has_end(message):
                raise WireError(f"link {message.link!r}, generation {message.generation}, has no such end here")
            case Listen():
                self.links.listen(message, self.switches)
            case Connect():
                self.links.connect(message, self.switches)
            case Unlink(link=name):
                self.links.unlink(name)
            case Ping(number=n):
                self.report(Stats(n, self.stats()), b"")
            case _:
                raise Bug(f"a host was sent {type(message).__name__}")

    def _has_end(self, m: Listen | Connect) -> bool:
        sender, receiver = LINKS.get(m.link, ("", ""))
        return (receiver if isinstance(m, Listen) else sender) in self.nodes and m.generation >= 0

    def _admit(self, a: Admit, blob: Bytes) -> None:
        """Announce a request to all stages here, the last one first, so that its inputs find it ready. One that cannot
        be taken, for whatever is wrong with it, fails alone."""
        try:
            prompt = unpack_prompt(a.prompt, blob)
            for node in reversed(self.nodes.values()):
                node.admit(a, prompt)
            if self.fresh is not None:
                self.fresh.came = True
        except StrettoError as e:
            self._fail(a.request, next(iter(self.nodes)), e)
        except torch.AcceleratorError:
            raise  # the device is lost, and this host with it
        except Exception as e:  # noqa: BLE001  what numbers that fit nothing make of the models, numpy and torch
            self._fail(a.request, next(iter(self.nodes)), Bug(f"it cannot be taken: {e!r}"))

    def _cancel(self, id: RequestId) -> None:
        for node in self.nodes.values():
            node.cancel(id)

    def _fail(self, id: RequestId, where: str, error: StrettoError) -> None:
        """End a request in all stages here, and say why."""
        self._cancel(id)
        self.report(failed(id, where, error), b"")

    def stats(self) -> dict[str, float]:
        return host_stats(self.loop, self.nodes, self.links.ends)

    def close(self) -> None:
        self.loop.stop()
        self.links.close()
        for waiter in self.waiters:
            waiter.close()


# -- the process


def serve(sock: socket.socket) -> int:
    channel = Channel(sock)
    first = channel.read()
    if first is None:
        return 0
    configure = first[0]
    assert isinstance(configure, Configure), configure
    host = Host(configure, HostSettings(**configure.settings), channel.post, channel.push)
    start = time.perf_counter()
    try:
        host.load()
    except (StrettoError, RuntimeError, OSError) as e:
        channel.send(Broken(type(e).__name__, str(e)))
        channel.flush()
        return 1
    if host.device.type == "cuda":
        host.memory["allocated"] = torch.cuda.memory_allocated(host.device)
    settle_down()
    channel.send(Ready(configure.stages, time.perf_counter() - start, host.memory))
    # Wakes the reader below, so that the orchestrator learns of it now and not with its next message.
    host.loop.on_failure = lambda: sock.shutdown(socket.SHUT_RD)
    host.loop.start()
    while (item := channel.read()) is not None:
        message, blob = item
        if isinstance(message, Features):
            continue  # gathered by the channel until its request is announced
        if isinstance(message, Quit) or host.loop.failure is not None:
            break
        try:
            _post(host, channel, message, blob)
        except Busy as e:
            channel.send(Broken("StageDead", f"the stage loop takes no messages: {e}"))
            channel.flush()
            return 1  # without `close`, which would wait for the loop
    code = 0
    if host.loop.failure is not None:
        channel.send(Broken("StageDead", f"the stage loop died: {host.loop.failure!r}"))
        code = 1
    host.close()
    channel.flush()
    return code


def settle_down() -> None:
    """What was made so far stays for good: without this, each full garbage collection would look through all of it, in
    the middle of a step. And threads that wait for the interpreter get it soon: they bring messages."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def _post(host: Host, channel: Channel, message: ToHost, blob: Bytes) -> None:
    """Hand a message to the loop. A request that it has no room for is refused; `Busy` for any other message: one that
    is lost would leave a request or a link behind for good, so the host cannot go on."""

    def run() -> None:
        try:
            host.handle(message, blob)
        except StrettoError as e:
            if isinstance(message, Listen | Connect):
                channel.send(LinkDown(message.link, message.generation, str(e)))
            else:
                raise

    try:
        host.loop.post(run, CONTROL if isinstance(message, Admit) else 0)
    except Gone:
        pass  # it died just now, and all its requests with it: the next read says so
    except Busy as e:
        if not isinstance(message, Admit):
            raise
        channel.send(failed(message.request, "host", e))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--fd", type=int, required=True)
    args = p.parse_args()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the orchestrator's to handle
    logging.basicConfig(level=os.environ.get("STRETTO_LOG", "WARNING"))
    sock = socket.socket(fileno=args.fd)
    code = serve(sock)
    sys.stdout.flush()
    os._exit(code)  # threads in driver calls must not hold us up


if __name__ == "__main__":
    main()
