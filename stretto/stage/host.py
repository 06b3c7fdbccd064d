"""A host: one process that drives some of the stages on one device, from one loop thread.

The process (`process.py`) builds the stages on its main thread, then reads control messages there and posts them to the
loop, which never waits for the orchestrator (see `channel.py`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import msgspec
import torch

from stretto.connector.switches import OverlapSwitches
from stretto.control.life import Configure, Connect, LinkDown, Listen, Ping, Quit, Stats, Unlink
from stretto.control.messages import Admit, Cancel, Features, Finish, Say, Supply, Throttle, ToHost
from stretto.control.settings import HostSettings
from stretto.errors import Bug, Busy, Gone, StrettoError, WireError
from stretto.named import load
from stretto.observe.recorder import Recorder
from stretto.prompt.packed import Bytes, unpack_pieces, unpack_prompt
from stretto.stage.channel import Channel
from stretto.stage.context import BuildNodes, StageContext, check_built
from stretto.stage.ends import LinkEnds
from stretto.stage.loop import Bell, Loop
from stretto.stage.node import Asking, Node, TakesText
from stretto.stage.report import Report, failed
from stretto.stage.stats import record_host
from stretto.stage.turns import Fresh, in_order
from stretto.types import RequestId

log = logging.getLogger(__name__)

SPANS = 20_000  # at most in one answer to a ping
CONTROL = 2048
"""Of the places for messages, those that new requests leave free: what was taken must be able to end."""


class Host:
    """The stages of this process and their links. `load` makes them; `report` collects what they say and `push` sends
    what was collected."""

    def __init__(
        self, configure: Configure, settings: HostSettings, report: Report, push: Callable[[], None] = lambda: None
    ) -> None:
        self.configure, self.report, self.push = configure, report, push
        self.device = torch.device(settings.device)
        self.switches = OverlapSwitches.read(settings.switches, os.environ)
        if self.device.type == "cpu":
            torch.set_num_threads(settings.threads)
        self.bell = Bell()
        self.recorder = Recorder(settings.trace)
        self.context = StageContext(
            configure.model,
            settings,
            self.device,
            self.switches,
            self.bell.ring,
            report,
            push,
            self.num_requests,
            recorder=self.recorder,
            configure=configure,
        )
        self.nodes: dict[str, Node] = {}

    def load(self) -> None:
        """Build the stages and give them turns. On the main thread; the loop does not run yet."""
        c = self.configure
        build: BuildNodes = load(c.build)
        self.nodes = build(c.stages, self.context)
        check_built(self.nodes, c)
        nodes = list(self.nodes.values())
        inlets = {i.link: (node, i) for node in nodes for i in node.inlets}
        outlets = {o.link: (node, o) for node in nodes for o in node.outlets}
        for name in inlets.keys() & outlets.keys():
            outlets.pop(name)[1].join(inlets.pop(name)[1])
        s, ring = self.context.settings, self.bell.ring
        self.links = LinkEnds(inlets, outlets, s, self.device, ring, self.report, self._fail, recorder=self.recorder)
        self.fresh = Fresh(nodes[0]) if not nodes[0].inlets else None  # it takes prompts
        self.loop = Loop(in_order(nodes, self.fresh, self.push, self.links), self.bell)
        record_host(self.recorder, self.loop, nodes)

    def num_requests(self) -> int:
        """That any stage here holds something for."""
        return max((len(node) for node in self.nodes.values()), default=0)

    # -- messages, on the loop thread

    def handle(self, message: ToHost, blob: Bytes) -> None:
        match message:
            case Admit():
                start = time.perf_counter_ns()
                self._admit(message, blob)
                self.recorder.span("loop", "admit", start, time.perf_counter_ns())
            case Supply():
                self._supply(message, blob)
            case Cancel(request=id):
                self._cancel(id)
            case Say(request=id, stage=stage, ids=ids, last=last):
                reader: object = self.nodes.get(stage)
                if not isinstance(reader, TakesText):
                    raise WireError(f"{stage!r} takes no text here")
                reader.take_text(id, ids, last)
            case Finish(request=id, stage=stage):
                if stage in self.nodes:
                    self.nodes[stage].finish(id)
            case Throttle(request=id, on=on):
                for node in self.nodes.values():
                    node.throttle(id, on)
            case Listen() | Connect() | Unlink():
                self.links.handle(message, self.switches)
            case Ping(number=n):
                spans = tuple(self.recorder.take_spans(SPANS))
                self.report(Stats(n, self.recorder.values(), time.monotonic(), spans), b"")
            case _:
                raise Bug(f"a host was sent {type(message).__name__}")

    def _admit(self, a: Admit, blob: Bytes) -> None:
        """Announce a request to its stages here, the last one first, so that its inputs find it ready. One that cannot
        be taken, for whatever is wrong with it, fails alone."""
        first = next(iter(self.nodes))
        try:
            prompt = unpack_prompt(a.prompt, blob)
            for name, node in reversed(self.nodes.items()):
                if name in a.stages:
                    node.admit(a, _decoded(a.stages[name], node), prompt)
            if self.fresh is not None:
                self.fresh.came = True
        except StrettoError as e:
            self._fail(a.request, first, e)
        except torch.AcceleratorError:
            raise  # the device is lost, and this host with it
        except Exception as e:  # noqa: BLE001  what numbers that fit nothing make of the models, numpy and torch
            self._fail(a.request, first, Bug(f"it cannot be taken: {e!r}"))

    def _supply(self, m: Supply, blob: Bytes) -> None:
        node: object = self.nodes.get(m.stage)
        try:
            if not isinstance(node, Asking):
                raise WireError(f"features for {m.stage!r}, which asks for none")
            node.supply(m.request, unpack_pieces(m.pieces, blob))
        except StrettoError as e:
            self._fail(m.request, m.stage, e)

    def _cancel(self, id: RequestId) -> None:
        for node in self.nodes.values():
            node.cancel(id)

    def _fail(self, id: RequestId, where: str, error: StrettoError) -> None:
        """End a request in all stages here, and say why."""
        self._cancel(id)
        self.report(failed(id, where, error), b"")

    def close(self) -> None:
        self.loop.stop()
        self.links.close()
        for waiter in self.context.waiters:
            waiter.close()


def _decoded(params: msgspec.Raw, node: Node) -> msgspec.Struct:
    try:
        return msgspec.msgpack.decode(params, type=node.params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise WireError(f"{node.name}: not what a request tells it: {e}") from None


def take_messages(host: Host, channel: Channel) -> None:
    """Hand what the orchestrator says to the loop: until it goes, or says so, or the loop has died. On the main thread.
    `Busy`: the loop takes no more, so the host cannot go on."""
    while (item := channel.read()) is not None and host.loop.failure is None:
        message, blob = item
        if isinstance(message, Quit):
            return
        if not isinstance(message, Features):  # those are gathered by the channel until their request is announced
            _post(host, channel, message, blob)


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
