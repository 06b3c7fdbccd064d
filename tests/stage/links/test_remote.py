"""A link from end to end: outlet, outbox, courier, connector, courier, upload, inbox, inlet.

The same rows come out whatever the connector, the slot size and the overlaps."""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.config.engine import OverlapSwitches
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.speech.payloads import CodecFrames
from stretto.stage.links.copies import HostToDevice
from stretto.stage.links.inbox import Inlet
from stretto.stage.links.outbox import Outlet
from stretto.stage.stage import Transfer
from stretto.transport.contract import LinkOptions
from stretto.transport.courier import Incoming, Outgoing
from stretto.transport.registry import Registry
from stretto.types import SECRET_BYTES, Mark, RequestId, Span

DEVICE = torch.device(os.environ.get("STRETTO_TEST_DEVICE", "cpu"))
SWITCHES = [
    pytest.param(OverlapSwitches(), id="all on"),
    *(
        pytest.param(OverlapSwitches(**{field.name: False}), id=f"{field.name} off")
        for field in fields(OverlapSwitches)
    ),
]
REQUESTS = [RequestId(f"r-{i}") for i in range(5)]
STEPS = 40
CODEBOOKS = 16


class Link:
    """Both ends of a link, with everything between two nodes; the test plays the nodes and their
    loops."""

    def __init__(
        self, connector: str, switches: OverlapSwitches, kind: type[Any], slot_bytes: int = 1 << 16
    ) -> None:
        made = Registry().get(connector)
        options = LinkOptions(
            slots=4,
            slot_bytes=slot_bytes,
            zero_copy=switches.zero_copy_encode,
            secret=bytes(SECRET_BYTES),
        )
        receiver = made.listen("a-b", options)
        self.woken = threading.Semaphore(0)
        stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
        sender = made.connect(receiver.endpoint, options)
        wake = self.woken.release
        self.out = Outgoing(
            sender, "a-b", wake, capacity=4, stream=stream, async_d2h=switches.async_d2h
        )
        up = HostToDevice(DEVICE, switches, kind.HOST)
        self.into = Incoming(receiver, "a-b", wake, uploader=up, capacity=4)
        sides: Any = SimpleNamespace(receives={"a>b": kind})
        self.outlet, self.inlet = Outlet("a>b", sides), Inlet("a>b", sides)
        self.sent: dict[RequestId, int] = defaultdict(int)
        self.got: dict[RequestId, list[Any]] = defaultdict(list)
        self.ended: dict[RequestId, Mark] = {}
        self.out.start()
        self.into.start()
        self.outlet.attach(self.out)
        self.inlet.attach(self.into)

    def send(self, id: RequestId, payload: Any, mark: Mark = Mark.MORE, event: Any = None) -> None:
        self.sent[id] = payload.span.stop
        self.outlet.send(Transfer("a>b", id, payload, mark, event))

    def _read(self, transfer: Transfer) -> None:
        id = transfer.request
        transfer.adopt()
        if transfer.payload is not None:
            self.got[id].append(transfer.payload)
        if transfer.mark is not Mark.MORE:
            self.ended[id] = transfer.mark

    def run(self, requests: list[RequestId]) -> None:
        """Rounds of both loops until all of these have ended: sleep until woken, then take and send
        what there is."""
        while True:
            for came in self.inlet.receive():
                if not isinstance(came, Transfer):
                    raise came[1]
                self._read(came)
            self.outlet.flush()
            assert not self.out.faults()
            if all(id in self.ended for id in requests):
                return
            assert self.woken.acquire(timeout=60), "nothing ever came"

    def close(self) -> None:
        self.out.close()
        self.into.close()
        assert not self.outlet.num_sending
        assert not self.inlet.num_receiving
        assert self.out.metrics.bytes == self.into.metrics.bytes


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_codec_frames(connector: str, switches: OverlapSwitches) -> None:
    """A talker's steps: one frame per request and step. One request is announced late, so its
    chunks come early."""
    rng = random.Random(5)
    seed = torch.Generator().manual_seed(5)
    codes = torch.randint(
        0, 2048, (STEPS, len(REQUESTS), CODEBOOKS), generator=seed, dtype=torch.int32
    )
    lengths = [rng.randrange(1, STEPS + 1) for _ in REQUESTS]
    link = Link(connector, switches, CodecFrames)
    for request in REQUESTS:
        link.outlet.start_sending(request)
    for request in REQUESTS[1:]:
        link.inlet.start_receiving(request)
    for step in range(STEPS):
        for i, length in enumerate(lengths):
            if step < length:
                frame = CodecFrames(Span(step, step + 1), codes[step, i : i + 1])
                link.send(REQUESTS[i], frame, Mark.REQUEST_END if step + 1 == length else Mark.MORE)
    link.run(REQUESTS[1:])
    link.inlet.start_receiving(REQUESTS[0])
    link.run(REQUESTS)
    for i, request in enumerate(REQUESTS):
        assert [frame.span.start for frame in link.got[request]] == list(range(lengths[i]))
        assert torch.equal(
            torch.cat([frame.codes for frame in link.got[request]]), codes[: lengths[i], i]
        )
    link.close()


@pytest.mark.parametrize("slot_bytes", [1 << 16, 1 << 12], ids=["one chunk each", "cut"])
@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_thinker_rows(connector: str, switches: OverlapSwitches, slot_bytes: int) -> None:
    """A prompt with media, prefilled in pieces, then decoded token by token; also with slots that
    no prefill fits."""
    seed = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 1000, (120,), generator=seed, dtype=torch.int32)
    media = (Span(3, 50), Span(55, 70))
    hidden = torch.randn(62, 64, generator=seed).to(torch.bfloat16).to(DEVICE)
    whole = ThinkerRows(Span(0, 120), ids, media, hidden)
    link = Link(connector, switches, ThinkerRows, slot_bytes)
    id = REQUESTS[0]
    link.outlet.start_sending(id)
    link.inlet.start_receiving(id)
    for stop in (60, 100, *range(101, 121)):  # prefill chunks, then tokens
        rows = whole.part(Span(link.sent[id], stop))
        event = (
            torch.cuda.current_stream().record_event()
            if DEVICE.type == "cuda" and rows.media
            else None
        )
        link.send(id, rows, Mark.REQUEST_END if stop == 120 else Mark.MORE, event)
    link.run([id])
    got = link.got[id]
    assert (len(got) > 22) == (slot_bytes == 1 << 12), "cut where a slot is too small"
    assert torch.equal(torch.cat([part.ids for part in got]), ids)
    assert all(
        part.ids.is_cpu and part.hidden.device.type == DEVICE.type for part in got if part.media
    )
    positions = [p for part in got for run in part.media for p in range(run.start, run.stop)]
    assert positions == [p for run in media for p in range(run.start, run.stop)]
    assert torch.equal(torch.cat([part.hidden for part in got if part.media]), hidden)
    link.close()


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_a_request_that_ends_while_its_link_is_full_loses_nothing(connector: str) -> None:
    """Its stage is done with it and says so; its last frames, and its end, leave when there is
    room."""
    codes = torch.arange(100 * CODEBOOKS, dtype=torch.int32).view(100, CODEBOOKS)
    link = Link(connector, OverlapSwitches(), CodecFrames)
    full, other = REQUESTS[:2]
    for request in (full, other):
        link.outlet.start_sending(request)
        link.inlet.start_receiving(request)
    assert link.outlet.send(
        Transfer("a>b", other, CodecFrames(Span(0, 1), codes[:1]), Mark.REQUEST_END)
    )
    link.outlet.stop_sending(other, purge=False)
    assert link.outlet.num_sending == 1, "one that has left is forgotten"
    for at in range(100):  # nobody takes any
        frame = CodecFrames(Span(at, at + 1), codes[at : at + 1])
        sent = link.outlet.send(
            Transfer("a>b", full, frame, Mark.REQUEST_END if at == 99 else Mark.MORE)
        )
    assert not sent
    link.outlet.stop_sending(full, purge=False)
    assert link.outlet.num_sending == 1, "it still has something to send"
    link.run([full, other])
    assert torch.equal(torch.cat([frame.codes for frame in link.got[full]]), codes)
    link.close()


def test_a_request_that_is_cancelled_while_its_link_is_full_leaves_nothing() -> None:
    link = Link("shm", OverlapSwitches(), CodecFrames)
    full = REQUESTS[0]
    link.outlet.start_sending(full)
    for at in range(100):
        frame = CodecFrames(Span(at, at + 1), torch.zeros(1, CODEBOOKS, dtype=torch.int32))
        sent = link.outlet.send(Transfer("a>b", full, frame))
    assert not sent
    link.outlet.stop_sending(full, purge=True)
    assert not link.outlet.num_sending
    assert not link.outlet.blocked(full)
    link.out.close(drain=False)
    link.into.close()
