"""Payload copies on a real device: behind the step that makes the rows, beside the one that
follows, never waited for by the loop; and the page-locked mapping that lets them run at full
speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from stretto.config.engine import OverlapSwitches
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.stage.links.copies import HostToDevice, adopt
from stretto.stage.links.outbox import Outbox
from stretto.stage.payload import unpack
from stretto.transport import wire
from stretto.transport.contract import Chunk, LinkOptions
from stretto.transport.shm import ShmConnector, map_shared
from stretto.transport.slots import SlotReceiver, SlotSender
from stretto.types import SECRET_BYTES, Mark, RequestId, Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
]  # what else runs there must not make the host late

R = RequestId("r-1")
LONG = 200_000_000  # cycles, some 100 ms: a step that is still running when we look
PATIENCE_S = 20.0


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


@pytest.fixture
def ends(cuda: torch.device) -> Iterator[tuple[SlotSender, SlotReceiver]]:
    options = LinkOptions(slots=4, slot_bytes=1 << 20, secret=bytes(SECRET_BYTES))
    receiver = ShmConnector().listen("a-b", options)
    sender = ShmConnector().connect(receiver.endpoint, options)
    assert receiver.take(0.0) is None
    yield sender, receiver
    sender.close()
    receiver.close()


class Chunks(list[Chunk]):
    """Takes all chunks."""

    def offer(self, chunk: Chunk) -> bool:
        self.append(chunk)
        return True


def device_rows(rows: torch.Tensor, seq: int = 0) -> Chunk:
    """A chunk of device rows, as an outbox makes it: with the event after which they are
    complete."""
    event = torch.cuda.current_stream().record_event()
    return wire.chunk(R, Span(seq, seq + 1), Mark.MORE, {"x": rows}, seq=seq, event=event)


def taken(receiver: SlotReceiver) -> torch.Tensor:
    chunk = receiver.take(PATIENCE_S)
    assert chunk is not None
    rows = chunk.tensors["x"].clone()
    chunk.release()
    return rows


def test_a_copy_to_a_slot_runs_behind_its_step(
    cuda: torch.device, ends: tuple[SlotSender, SlotReceiver]
) -> None:
    sender, receiver = ends
    rows = torch.zeros(8, 16, dtype=torch.int32, device=cuda)
    copies = torch.cuda.Stream()
    with torch.cuda.stream(copies):  # what is used for the first time may wait for the whole device
        assert sender.put(device_rows(rows.fill_(1)), 0.0)
    assert sender.progress(wait=True) == 0
    assert taken(receiver).eq(1).all()
    torch.cuda.synchronize()
    with no_host_sync():
        torch.cuda._sleep(LONG)
        rows.fill_(7)
        chunk = device_rows(rows, 1)
        with torch.cuda.stream(copies):
            assert sender.put(chunk, 0.0)
            assert sender.progress(wait=False) == 1, "put is back before the step has even run"
    assert receiver.take(0.0) is None
    assert sender.progress(wait=True) == 0
    assert taken(receiver).eq(7).all()


def test_a_source_lives_until_it_is_copied(
    cuda: torch.device, ends: tuple[SlotSender, SlotReceiver]
) -> None:
    sender, receiver = ends
    for value in range(20):
        rows = torch.full((1 << 16,), value, dtype=torch.int32, device=cuda)
        chunk = device_rows(rows, value)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert sender.put(chunk, PATIENCE_S)
        del rows, chunk
        torch.full(
            (1 << 16,), -1, dtype=torch.int32, device=cuda
        )  # would be allocated in freed memory
        assert sender.progress(wait=True) == 0
        assert taken(receiver).eq(value).all()


@pytest.mark.parametrize("switches", [OverlapSwitches(), OverlapSwitches(async_h2d=False)], ids=str)
def test_an_upload_is_waited_for_on_the_device(
    cuda: torch.device, switches: OverlapSwitches
) -> None:
    up = HostToDevice(cuda, switches, keep=frozenset({"media"}))
    source = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    chunk = wire.chunk(R, Span(0, 1), Mark.MORE, {"x": source, "media": torch.tensor([[1, 2]])})
    assert up.stream is not None
    with torch.cuda.stream(up.stream):
        torch.cuda._sleep(LONG)
    uploaded = up.upload(chunk)
    assert up.reap() == switches.async_h2d, "still running, unless it was waited for"
    assert uploaded.event is not None
    adopt(uploaded.tensors.values(), uploaded.event)
    doubled = uploaded.tensors["x"] * 2
    assert torch.equal(doubled.cpu(), source * 2)
    assert not uploaded.tensors["media"].is_cuda
    up.wait()
    assert not chunk.tensors, "released"


def test_uploads_do_not_wait_on_the_host(cuda: torch.device) -> None:
    up = HostToDevice(cuda, OverlapSwitches())
    chunk = wire.chunk(R, Span(0, 1), Mark.MORE, {"x": torch.ones(1024).pin_memory()})
    torch.empty(1024, device=cuda)
    with no_host_sync():
        uploaded = up.upload(chunk)
        assert uploaded.event is not None
        adopt(uploaded.tensors.values(), uploaded.event)
    up.wait()


def test_an_adopted_upload_is_not_overwritten_by_the_next(cuda: torch.device) -> None:
    """The upload's memory belongs to its stream: freed while our kernel reads it, it must not be
    handed out yet."""
    up = HostToDevice(cuda, OverlapSwitches())
    results = []
    for value in range(8):
        uploaded = up.upload(
            wire.chunk(R, Span(0, 1), Mark.MORE, {"x": torch.full((1 << 18,), value).pin_memory()})
        )
        assert uploaded.event is not None
        adopt(uploaded.tensors.values(), uploaded.event)
        torch.cuda._sleep(LONG // 20)
        results.append(uploaded.tensors["x"] + 0)
        uploaded.release()
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


def test_media_rows_go_from_the_device_to_the_slots_in_parts(cuda: torch.device) -> None:
    """Ids stay on the host. Rows that exceed a slot are cut on the loop's thread, without a wait
    for the device."""
    ids = torch.arange(600, dtype=torch.int32)
    hidden = torch.zeros(600, 1024, dtype=torch.bfloat16, device=cuda)
    outbox = Outbox(R)
    slot_bytes = 1 << 18
    torch.cuda.synchronize()
    with no_host_sync():
        torch.cuda._sleep(LONG)
        hidden.copy_(torch.arange(600, device=cuda)[:, None].expand(600, 1024))
        rows = ThinkerRows(Span(0, 600), ids, (Span(0, 600),), hidden)
        event = torch.cuda.current_stream().record_event()
        outbox.add(rows, slot_bytes, Mark.REQUEST_END, event)
    chunks = Chunks()
    assert outbox.flush(chunks)
    assert len(chunks) == 8
    got = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for chunk in chunks:
            assert chunk.tensors["hidden"].is_cuda
            assert not chunk.tensors["ids"].is_cuda
            slot = torch.empty(slot_bytes, dtype=torch.uint8).pin_memory().numpy().data
            size = wire.encode_into(slot, chunk, checksum=True)
            part = unpack(ThinkerRows, wire.decode(slot[:size]))
            assert part is not None
            got.append(part)
    assert torch.equal(torch.cat([part.ids for part in got]), ids)
    assert torch.equal(torch.cat([part.hidden for part in got]), hidden.cpu())
