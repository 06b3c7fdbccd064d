"""Payload copies on a real device: behind the step that makes the rows, beside the one that follows, never waited for
by the loop; and the page-locked mapping that lets them run at full speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from stretto.connector import wire
from stretto.connector.pinned import map_shared
from stretto.connector.switches import OverlapSwitches
from stretto.models.qwen3_omni.payloads import CodecFrames, ThinkerRows
from stretto.stage.outbox import Outbox
from stretto.stage.payload.chunker import ChunkPolicy, Confirmed
from stretto.stage.payload.copies import DIRECT_BYTES, DeviceToHost, HostToDevice, adopt
from stretto.stage.payload.ring import Ring
from stretto.types import Mark, RequestId, Span

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # what else runs there must not make the host late

R = RequestId("r-1")
LONG = 200_000_000  # cycles, some 100 ms: a step that is still running when we look


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def cuda() -> torch.device:
    torch.cuda.init()
    return torch.device("cuda")


def test_a_copy_runs_behind_its_step(cuda: torch.device) -> None:
    down = DeviceToHost(Ring(2, 4096, pin=True), cuda, OverlapSwitches())
    rows = torch.zeros(8, 16, dtype=torch.int32, device=cuda)
    torch.cuda.synchronize()
    with no_host_sync():
        torch.cuda._sleep(LONG)
        rows.fill_(7)
        lease = down.copy({"rows": rows})
        assert lease is not None
        assert not lease.filled, "the loop is back before the step has even run"
    lease.wait()
    assert lease.filled
    assert lease.tensors["rows"].eq(7).all()
    lease.release()


def test_a_source_lives_until_it_is_copied(cuda: torch.device) -> None:
    down = DeviceToHost(Ring(2, 1 << 20, pin=True), cuda, OverlapSwitches())
    for value in range(20):
        rows = torch.full((1 << 16,), value, dtype=torch.int32, device=cuda)
        lease = down.copy({"rows": rows})
        assert lease is not None
        del rows
        torch.full((1 << 16,), -1, dtype=torch.int32, device=cuda)  # would land in the freed memory
        lease.wait()
        assert lease.tensors["rows"].eq(value).all()
        lease.release()


def test_a_dropped_slot_cools_until_its_copy_is_done(cuda: torch.device) -> None:
    ring = Ring(1, 4096, pin=True)
    down = DeviceToHost(ring, cuda, OverlapSwitches())
    x = torch.ones(4, device=cuda)
    first = down.copy({"x": x})  # what is used for the first time may wait for the whole device
    assert first is not None
    torch.cuda.synchronize()
    first.release()
    torch.cuda._sleep(LONG)
    lease = down.copy({"x": x})
    assert lease is not None
    lease.release()
    assert ring.free == 0
    torch.cuda.synchronize()
    assert ring.free == 1


@pytest.mark.parametrize("switches", [OverlapSwitches(), OverlapSwitches(async_h2d=False)], ids=str)
def test_an_upload_is_waited_for_on_the_device(cuda: torch.device, switches: OverlapSwitches) -> None:
    up = HostToDevice(cuda, switches, keep=frozenset({"media"}))
    source = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    chunk = wire.chunk(R, Span(0, 1), Mark.MORE, {"x": source, "media": torch.tensor([[1, 2]])})
    assert up.stream is not None
    with torch.cuda.stream(up.stream):
        torch.cuda._sleep(LONG)
    landed = up.upload(chunk)
    assert up.reap() == switches.async_h2d, "still running, unless it was waited for"
    adopt(landed)
    doubled = landed.tensors["x"] * 2
    assert torch.equal(doubled.cpu(), source * 2)
    assert not landed.tensors["media"].is_cuda
    up.wait()
    assert not chunk.tensors, "released"


def test_uploads_do_not_wait_on_the_host(cuda: torch.device) -> None:
    up = HostToDevice(cuda, OverlapSwitches())
    chunk = wire.chunk(R, Span(0, 1), Mark.MORE, {"x": torch.ones(1024).pin_memory()})
    torch.empty(1024, device=cuda)
    with no_host_sync():
        adopt(up.upload(chunk))
    up.wait()


def test_an_adopted_upload_is_not_overwritten_by_the_next(cuda: torch.device) -> None:
    """The upload's memory belongs to its stream: freed while our kernel reads it, it must not be handed out yet."""
    up = HostToDevice(cuda, OverlapSwitches())
    results = []
    for value in range(8):
        landed = up.upload(wire.chunk(R, Span(0, 1), Mark.MORE, {"x": torch.full((1 << 18,), value).pin_memory()}))
        adopt(landed)
        torch.cuda._sleep(LONG // 20)
        results.append(landed.tensors["x"] + 0)
        landed.release()
    up.wait()
    for value, result in enumerate(results):
        assert result.eq(value).all()


def test_the_mapping_is_page_locked(cuda: torch.device) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 22)
    mapping = map_shared(fd, 1 << 22)
    os.close(fd)
    view = torch.frombuffer(mapping, dtype=torch.float32, count=1024, offset=4096)
    assert view.is_pinned()
    del mapping
    assert view.is_pinned(), "as long as there is a view"


def test_large_payloads_go_from_the_device_to_the_slot(cuda: torch.device) -> None:
    down = DeviceToHost(Ring(1, 4096, pin=True), cuda, OverlapSwitches())
    frames = DIRECT_BYTES // 64
    codes = torch.zeros(2 * frames, 16, dtype=torch.int32, device=cuda)
    parcels = []
    box = Outbox(CodecFrames, R, ChunkPolicy(2 * frames, 2 * frames), lambda parcel: parcels.append(parcel) or True)
    torch.cuda.synchronize()
    with no_host_sync():
        torch.cuda._sleep(LONG)
        codes.copy_(torch.arange(2 * frames * 16, dtype=torch.int32, device=cuda).view(-1, 16))
        for half in range(2):  # two steps' rows in one chunk: joined on the courier's stream
            span = Span(half * frames, (half + 1) * frames)
            placed = down.place({"codes": codes[span.start : span.stop]})
            assert placed is not None
            assert placed.lease is None
            box.add(CodecFrames(span, placed.tensors["codes"]), event=placed.event)
        box.send(Confirmed(2 * frames), Mark.REQUEST_END)
    with torch.cuda.stream(torch.cuda.Stream()):
        chunk = parcels[0].pack()
        slot = torch.empty(wire.encoded_size(chunk), dtype=torch.uint8).pin_memory().numpy().data
        wire.encode_into(slot, chunk, checksum=True)
    got = wire.decode(slot).tensors["codes"]
    assert torch.equal(got.flatten(), torch.arange(2 * frames * 16, dtype=torch.int32))


def test_a_large_piece_and_a_small_one_in_one_chunk(cuda: torch.device) -> None:
    ring = Ring(2, 4096, pin=True)
    down = DeviceToHost(ring, cuda, OverlapSwitches())
    frames = DIRECT_BYTES // 64
    codes = torch.arange((frames + 1) * 16, dtype=torch.int32, device=cuda).view(-1, 16)
    parcels = []
    box = Outbox(CodecFrames, R, ChunkPolicy(frames + 1, frames + 1), lambda parcel: parcels.append(parcel) or True)
    for span in (Span(0, frames), Span(frames, frames + 1)):
        placed = down.place({"codes": codes[span.start : span.stop]})
        assert placed is not None
        box.add(CodecFrames(span, placed.tensors["codes"]), lease=placed.lease, event=placed.event)
    box.send(Confirmed(frames + 1))
    with torch.cuda.stream(torch.cuda.Stream()):
        chunk = parcels[0].pack()
    assert torch.equal(chunk.tensors["codes"], codes.cpu())
    assert ring.free == 2


def test_media_rows_stay_on_the_device_next_to_ids_on_the_host(cuda: torch.device) -> None:
    """A prefill piece with media and a decoded token in one chunk, as a link inside a host carries them."""
    parcels = []
    box = Outbox(ThinkerRows, R, ChunkPolicy(4, 4), lambda parcel: parcels.append(parcel) or True)
    hidden = torch.randn(2, 8, device=cuda)
    event = torch.cuda.current_stream().record_event()
    ids = torch.arange(4, dtype=torch.int32)
    box.add(ThinkerRows(Span(0, 3), ids[:3], (Span(1, 3),), hidden), event=event)
    box.add(ThinkerRows(Span(3, 4), ids[3:], (), hidden[:0]), event=event)
    with no_host_sync():
        box.send(Confirmed(4))
        chunk = parcels[0].pack()
    assert chunk.event is not None
    assert chunk.tensors["hidden"].is_cuda
    assert torch.equal(chunk.tensors["hidden"], hidden)
    assert torch.equal(chunk.tensors["ids"], ids)
