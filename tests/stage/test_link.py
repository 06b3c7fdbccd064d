"""A link from end to end: rows on a device, ring, outbox, courier, connector, courier, upload, inbox, rows again.

The same rows come out whatever the connector, the chunking and the overlaps."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch

from stretto.connector.contract import LinkOptions
from stretto.connector.courier import Incoming, Outgoing
from stretto.connector.registry import Registry
from stretto.connector.switches import OverlapSwitches
from stretto.models.qwen3_omni.payloads import CodecFrames, ThinkerRows
from stretto.stage.inbox import Inboxes
from stretto.stage.outbox import Outboxes
from stretto.stage.payload.chunker import ChunkPolicy, Confirmed
from stretto.stage.payload.copies import DeviceToHost, HostToDevice, Placed, adopt
from stretto.stage.payload.ring import Ring
from stretto.stage.payload.schema import unpack
from stretto.types import SECRET_BYTES, Mark, RequestId, Span

DEVICE = torch.device(os.environ.get("STRETTO_TEST_DEVICE", "cpu"))
SWITCHES = [OverlapSwitches()] + [OverlapSwitches(**{field.name: False}) for field in fields(OverlapSwitches)]
REQUESTS = [RequestId(f"r-{i}") for i in range(5)]
STEPS = 40
CODEBOOKS = 16


class Link:
    """Both ends of a link, with everything between two stage loops; the test plays the loops."""

    def __init__(self, connector: str, switches: OverlapSwitches, keep: frozenset[str] = frozenset()) -> None:
        made = Registry().get(connector)
        options = LinkOptions(
            slots=4, slot_bytes=1 << 16, zero_copy=switches.zero_copy_encode, secret=bytes(SECRET_BYTES)
        )
        receiver = made.listen("a-b", options)
        self.woken = threading.Semaphore(0)
        self.ring = Ring(6, 1 << 16, pin=DEVICE.type == "cuda")
        self.down = DeviceToHost(self.ring, DEVICE, switches)
        sender = made.connect(receiver.endpoint, options)
        stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
        self.out = Outgoing(sender, "a-b", self.woken.release, capacity=4, stream=stream)
        up = HostToDevice(DEVICE, switches, keep)
        self.into = Incoming(receiver, "a-b", self.woken.release, uploader=up, capacity=4)
        self.inboxes = Inboxes()
        self.out.start()
        self.into.start()

    def placed(self, tensors: Mapping[str, torch.Tensor], boxes: Outboxes[Any]) -> Placed:
        """The batch on its way to the host; without a slot, what a stage loop does about it."""
        while (placed := self.down.place(tensors)) is None:
            boxes.flush()
            boxes.settle()
            self.out.wake_when_sent()
            if self.ring.free == 0:
                self.pump()
        return placed

    def pump(self) -> None:
        """A pass of the receiving loop that has nothing else to do: sleep until woken, then take what is there."""
        assert self.woken.acquire(timeout=20), "nothing ever came"
        while (chunk := self.into.poll()) is not None:
            self.inboxes.push(chunk)
        assert not self.out.faults()

    def close(self) -> None:
        self.out.close()
        self.into.close()
        assert self.ring.free == 6
        assert self.out.metrics.bytes == self.into.metrics.bytes


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("connector", ["local", "shm"])
def test_codec_frames(connector: str, switches: OverlapSwitches) -> None:
    """A talker's batch: one frame per request and step, all copied at once, each request's slice sent on its own."""
    rng = random.Random(5)
    seed = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 2048, (STEPS, len(REQUESTS), CODEBOOKS), generator=seed, dtype=torch.int32).to(DEVICE)
    lengths = [rng.randrange(1, STEPS + 1) for _ in REQUESTS]
    link = Link(connector, switches)
    boxes = Outboxes(CodecFrames, ChunkPolicy(1, 8, 2), link.out.offer)
    for request in REQUESTS:
        boxes.open(request)
    for request in REQUESTS[1:]:
        link.inboxes.announce(request)  # the first one is announced late
    for step in range(STEPS):
        alive = [i for i, length in enumerate(lengths) if step < length]
        if not alive:
            break
        batch = link.placed({"codes": codes[step, alive]}, boxes)
        for row, i in enumerate(alive):
            frame = CodecFrames(Span(step, step + 1), batch.tensors["codes"][row : row + 1])
            boxes[REQUESTS[i]].add(frame, lease=batch.share(), event=batch.event)
            boxes[REQUESTS[i]].send(Confirmed(step + 1), Mark.REQUEST_END if step + 1 == lengths[i] else Mark.MORE)
        batch.release()
    link.inboxes.announce(REQUESTS[0])
    while not boxes.flush() or not all(inbox.ended for inbox in link.inboxes):
        link.pump()
    for i, request in enumerate(REQUESTS):
        parts = []
        while (chunk := link.inboxes[request].pop()) is not None:
            adopt(chunk)
            part = unpack(CodecFrames, chunk)
            parts += [part] if part is not None else []
        whole = CodecFrames.join(parts)
        assert whole.span == Span(0, lengths[i])
        assert whole.codes.device.type == DEVICE.type
        assert torch.equal(whole.codes, codes[: lengths[i], i])
    link.close()


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("connector", ["local", "shm"])
def test_thinker_rows(connector: str, switches: OverlapSwitches) -> None:
    """A prompt with media, prefilled in pieces, then decoded token by token."""
    seed = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 1000, (60,), generator=seed, dtype=torch.int32).to(DEVICE)
    media = (Span(3, 20), Span(25, 40))
    hidden = torch.randn(32, 64, generator=seed).to(torch.bfloat16).to(DEVICE)
    whole = ThinkerRows(Span(0, 60), ids, media, hidden)
    link = Link(connector, switches, keep=ThinkerRows.HOST)
    boxes = Outboxes(ThinkerRows, ChunkPolicy(1, 1, limit=32), link.out.offer)
    box = boxes.open(REQUESTS[0])
    link.inboxes.announce(REQUESTS[0])
    for stop in (17, 34, 45, *range(46, 61)):  # prefill chunks, then tokens
        part = whole.part(Span(box.added, stop))
        place = link.placed({"ids": part.ids, "hidden": part.hidden}, boxes)
        rows = ThinkerRows(part.span, place.tensors["ids"], part.media, place.tensors["hidden"])
        box.add(rows, lease=place.lease, event=place.event)
        box.send(Confirmed(stop), Mark.SEGMENT_END if stop == 60 else Mark.MORE)
    inbox = link.inboxes[REQUESTS[0]]
    while not box.flush() or inbox.mark is Mark.MORE:
        link.pump()
    parts = []
    while (chunk := inbox.pop()) is not None:
        adopt(chunk)
        part = unpack(ThinkerRows, chunk)
        assert part is not None
        parts.append(part)
    got = ThinkerRows.join(parts)
    assert (got.span, got.media) == (whole.span, whole.media)
    assert torch.equal(got.ids, ids.cpu())
    assert torch.equal(got.hidden, hidden)
    link.close()
