"""The connector contract, against every connector. What a rule says is in
`stretto/transport/contract.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

from stretto.errors import StrettoError, WireError
from stretto.transport import wire
from stretto.transport.contract import (
    WIRE_VERSION,
    Chunk,
    ChunkHeader,
    Corrupt,
    Endpoint,
    LinkClosed,
    PeerDead,
    PutFailed,
    Receiver,
    Sender,
    VersionMismatch,
)
from stretto.types import Mark, RequestId, Span
from tests.transport.contract.links import (
    LONG_S,
    SECRET,
    Footprint,
    Kit,
    check_numbered,
    eventually,
    numbered,
    pattern,
    take,
)

SHORT_S = 0.02  # for what must not happen


@contextmanager
def link(kit: Kit, **changed: Any) -> Iterator[tuple[Sender, Receiver]]:
    sender, receiver = kit.pair(**changed)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def raised(call: Callable[[], object]) -> type[StrettoError] | None:
    try:
        call()
    except StrettoError as error:
        return type(error)
    return None


@pytest.fixture
def ends(kit: Kit) -> Iterator[tuple[Sender, Receiver]]:
    with link(kit) as pair:
        yield pair


class Counted:
    """A lease that counts its releases."""

    def __init__(self) -> None:
        self.count = 0

    def release(self) -> None:
        self.count += 1


# --- order and content
# -------------------------------------------------------------------------------------------


def test_chunks_arrive_in_order_once_and_whole(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: [sender.put(numbered(i, i * 37), LONG_S) for i in range(300)])
        for i in range(300):
            chunk = take(receiver)
            check_numbered(chunk, i, i * 37)
            chunk.release()
        assert all(done.result())
    assert receiver.take(0.0) is None


def test_chunks_that_are_held_do_not_disturb_later_ones(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    assert sender.put(numbered(0), LONG_S)
    first = take(receiver)
    for i in range(1, 40):
        assert sender.put(numbered(i), LONG_S)
        later = take(receiver)
        check_numbered(later, i)
        later.release()
    check_numbered(first, 0)
    first.release()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0, 5), (2, 3, 5)], ids=str)
def test_every_dtype_and_shape_keeps_its_bits(
    ends: tuple[Sender, Receiver], shape: tuple[int, ...]
) -> None:
    sender, receiver = ends
    generator = torch.Generator().manual_seed(7)
    sent = {}
    for dtype in wire.DTYPES.values():
        if dtype is torch.bool:
            sent["bool"] = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).to(
                torch.bool
            )
            continue
        # Random bits, so that NaNs of all kinds and negative zeros are among them.
        size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
        bits = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        sent[str(dtype).removeprefix("torch.")] = bits.view(dtype).view(shape)
    mine = {name: tensor.clone() for name, tensor in sent.items()}
    assert sender.put(wire.chunk(RequestId("r"), Span(0, 1), Mark.REQUEST_END, mine), LONG_S)
    chunk = take(receiver)
    assert chunk.header.mark is Mark.REQUEST_END
    assert list(chunk.tensors) == list(sent)
    for name, tensor in sent.items():
        got = chunk.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert (
            got.contiguous().view(-1).view(torch.uint8).tolist()
            == tensor.view(-1).view(torch.uint8).tolist()
        )
    chunk.release()


def test_a_strided_tensor_arrives_as_what_it_shows(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    shown = torch.arange(60, dtype=torch.float32).view(6, 10).t()[::2]
    assert sender.put(wire.chunk(RequestId("r"), Span(0, 1), Mark.MORE, {"x": shown}), LONG_S)
    chunk = take(receiver)
    assert torch.equal(chunk.tensors["x"], shown)
    chunk.release()


def test_an_empty_chunk_carries_its_mark(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    assert sender.put(wire.chunk(RequestId("r"), Span(5, 5), Mark.REQUEST_END, {}, seq=3), LONG_S)
    chunk = take(receiver)
    header = chunk.header
    assert (header.span, header.mark, header.seq) == (Span(5, 5), Mark.REQUEST_END, 3)
    assert not chunk.tensors
    chunk.release()


def test_64_mebibytes_pass_through_two_slots(kit: Kit) -> None:
    size = 64 << 20
    # A network's thread beats no heart while it encrypts a message, and this one is 64 times as
    # large as they are.
    details = {**kit.options.details, "heartbeat_s": "20"}
    with link(kit, slots=2, slot_bytes=size + (1 << 16), details=details) as (sender, receiver):
        sent = torch.arange(size // 8, dtype=torch.int64)
        for i in range(3):
            assert sender.put(
                wire.chunk(RequestId("r"), Span(i, i + 1), Mark.MORE, {"x": sent}, seq=i), LONG_S
            )
            chunk = take(receiver)
            assert chunk.header.seq == i
            assert torch.equal(chunk.tensors["x"], sent)
            chunk.release()


def test_the_oracle_without_zero_copy_sends_the_same(kit: Kit) -> None:
    with link(kit, zero_copy=False) as (sender, receiver):
        for i in range(8):
            assert sender.put(numbered(i), LONG_S)
            chunk = take(receiver)
            check_numbered(chunk, i)
            chunk.release()


def test_64_links_at_once(kit: Kit) -> None:
    """Each with its own two threads; no chunk strays from its link."""
    pairs = [kit.pair(slots=2) for _ in range(64)]
    chunks = 12

    def send(index: int) -> None:
        for i in range(chunks):
            assert pairs[index][0].put(numbered(i, 100 + index, request=f"r{index}"), LONG_S)

    def receive(index: int) -> None:
        for i in range(chunks):
            chunk = take(pairs[index][1])
            assert chunk.header.request == f"r{index}"
            check_numbered(chunk, i, 100 + index)
            chunk.release()

    with ThreadPoolExecutor(128) as pool:
        for future in [pool.submit(work, index) for index in range(64) for work in (send, receive)]:
            future.result()
    for sender, receiver in pairs:
        sender.close()
        receiver.close()


# --- ownership and credits
# ---------------------------------------------------------------------------------------


def test_put_takes_over_the_chunk_and_releases_it_once(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    lease = Counted()
    chunk = numbered(0)
    chunk.lease = lease
    assert sender.put(chunk, LONG_S)
    taken = take(receiver)
    taken.release()
    taken.release()
    eventually(lambda: lease.count == 1)
    eventually(lambda: sender.credits() == 4)


def test_a_full_link_pushes_back_without_loss(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for i in range(4):
        assert sender.put(numbered(i), LONG_S)
    assert sender.credits() == 0
    lease = Counted()
    refused = numbered(4)
    refused.lease = lease
    assert not sender.put(refused, 0.0)
    assert not sender.put(refused, SHORT_S)
    assert lease.count == 0
    assert refused.tensors, "a chunk that was not sent stays with the caller"

    held = [take(receiver) for _ in range(4)]
    assert receiver.credits() == 0
    assert not sender.put(refused, SHORT_S), "taking is not releasing"
    held[2].release()  # in any order
    assert sender.put(refused, LONG_S)
    check_numbered(take(receiver), 4)
    for i in (0, 1, 3):
        check_numbered(held[i], i)


def test_a_waiting_put_goes_on_when_a_slot_comes_free(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for i in range(4):
        assert sender.put(numbered(i), LONG_S)
    first = take(receiver)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.put, numbered(4), LONG_S)
        first.release()
        assert waiting.result()
    for i in range(1, 5):
        chunk = take(receiver)
        check_numbered(chunk, i)
        chunk.release()


def test_every_slot_comes_back_after_much_traffic(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    generator = torch.Generator().manual_seed(3)
    held: list[Chunk] = []
    for i in range(400):
        assert sender.put(numbered(i, 50), LONG_S)
        held.append(take(receiver))
        if len(held) == 4 or torch.rand((), generator=generator) < 0.5:
            held.pop(int(torch.randint(len(held), (), generator=generator))).release()
    for chunk in held:
        chunk.release()
    eventually(lambda: sender.credits() == 4)
    assert receiver.credits() == 4


def test_releases_from_other_threads_reach_a_waiting_put(ends: tuple[Sender, Receiver]) -> None:
    """The courier waits in `take` while another thread releases: neither may swallow the other's
    news."""
    sender, receiver = ends
    count = 500

    def receive(release: Callable[[Chunk], object]) -> None:
        for i in range(count):
            chunk = take(receiver)
            assert chunk.header.seq == i
            release(chunk)

    with ThreadPoolExecutor(3) as pool, ThreadPoolExecutor(1) as releaser:
        receiving = pool.submit(receive, lambda chunk: releaser.submit(chunk.release))
        for i in range(count):
            assert sender.put(numbered(i, 10), LONG_S)
        receiving.result()
    eventually(lambda: sender.credits() == 4)


def test_views_stay_valid_after_close_until_release(kit: Kit) -> None:
    with link(kit) as (sender, receiver):
        assert sender.put(numbered(9, 50_000), LONG_S)
        chunk = take(receiver)
    check_numbered(chunk, 9, 50_000)
    chunk.release()
    chunk.release()


def test_both_ends_know_the_endpoint(ends: tuple[Sender, Receiver]) -> None:
    """The sender's outbox cuts its rows by the endpoint's slot size."""
    sender, receiver = ends
    assert sender.endpoint == receiver.endpoint
    assert sender.endpoint.slot_bytes == 1 << 16


def test_a_chunk_larger_than_a_slot_fails_at_once_and_stays(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for i in range(4):
        assert sender.put(numbered(i), LONG_S)  # no credit left: it must not even wait for one
    large = numbered(4, 1 << 16)
    with pytest.raises(PutFailed) as failed:
        sender.put(large, LONG_S)
    assert failed.value.request == "r0"
    assert large.tensors
    for i in range(4):
        check_numbered(take(receiver), i)


def test_a_chunk_that_fills_its_slot_exactly_passes(kit: Kit) -> None:
    chunk = numbered(3, 20_000)
    size = wire.encoded_size(chunk)
    with link(kit, slot_bytes=size) as (sender, receiver):
        assert sender.put(chunk, LONG_S)
        check_numbered(take(receiver), 3, 20_000)
    with link(kit, slot_bytes=size - 1) as (sender, _), pytest.raises(PutFailed):
        sender.put(numbered(3, 20_000), LONG_S)


# --- purge
# -------------------------------------------------------------------------------------------------------  # noqa: E501


def test_purge_at_the_receiver_drops_what_is_on_its_way(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    assert sender.put(numbered(0, request="old"), LONG_S)
    assert sender.put(numbered(1, request="other"), LONG_S)
    assert sender.put(numbered(2, request="third"), LONG_S)
    receiver.purge(RequestId("old"))
    assert sender.put(numbered(3, request="old"), LONG_S)
    for number in (1, 2):
        chunk = take(receiver)
        check_numbered(chunk, number)
        chunk.release()
    eventually(
        lambda: receiver.take(0.0) is None and sender.credits() == 4
    )  # the last may still be on its way


def test_purge_at_the_sender_swallows_even_without_credit(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for i in range(4):
        assert sender.put(numbered(i), LONG_S)
    sender.purge(RequestId("gone"))
    lease = Counted()
    swallowed = numbered(9, request="gone")
    swallowed.lease = lease
    assert sender.put(swallowed, LONG_S)
    assert lease.count == 1
    for i in range(4):
        check_numbered(take(receiver), i)
    assert receiver.take(0.0) is None


# --- closing
# -----------------------------------------------------------------------------------------------------  # noqa: E501


def test_what_was_put_before_close_is_still_taken(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for i in range(4):
        assert sender.put(numbered(i, 30_000), LONG_S)
    sender.close()
    for i in range(4):
        chunk = take(receiver)
        check_numbered(chunk, i, 30_000)
        chunk.release()
    for _ in range(2):
        with pytest.raises(LinkClosed):
            receiver.take(LONG_S)
    with pytest.raises(LinkClosed):
        receiver.check()
    with pytest.raises(LinkClosed):
        sender.put(numbered(5), 0.0)


def test_the_sender_hears_that_the_receiver_closed(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    assert sender.put(numbered(0), LONG_S)
    receiver.close()
    eventually(lambda: raised(sender.check) is LinkClosed)
    for _ in range(2):
        with pytest.raises(LinkClosed):
            sender.put(numbered(1), LONG_S)
    with pytest.raises(LinkClosed):
        receiver.take(0.0)


def test_close_wakes_a_waiting_take(ends: tuple[Sender, Receiver]) -> None:
    _, receiver = ends
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.take, LONG_S)
        receiver.close()
        with pytest.raises(LinkClosed):
            waiting.result()


def test_close_wakes_a_take_that_waits_for_a_sender(kit: Kit) -> None:
    receiver = kit.connector.listen("test-link.0", kit.options)
    assert receiver.take(0.0) is None
    receiver.check()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.take, LONG_S)
        receiver.close()
        with pytest.raises(LinkClosed):
            waiting.result()


def test_close_wakes_a_waiting_put(ends: tuple[Sender, Receiver]) -> None:
    sender, _ = ends
    for i in range(4):
        assert sender.put(numbered(i), LONG_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.put, numbered(4), LONG_S)
        sender.close()
        with pytest.raises(LinkClosed):
            waiting.result()


def test_the_peers_close_wakes_a_waiting_put_and_take(kit: Kit) -> None:
    with link(kit) as (sender, receiver), ThreadPoolExecutor(1) as pool:
        for i in range(4):
            assert sender.put(numbered(i), LONG_S)
        waiting = pool.submit(sender.put, numbered(4), LONG_S)
        receiver.close()
        with pytest.raises(LinkClosed):
            waiting.result()
    with link(kit) as (sender, receiver), ThreadPoolExecutor(1) as pool:
        taking = pool.submit(receiver.take, LONG_S)
        sender.close()
        with pytest.raises(LinkClosed):
            taking.result()


def test_close_twice_and_release_after_close_are_harmless(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    assert sender.put(numbered(0), LONG_S)
    chunk = take(receiver)
    for _ in range(2):
        sender.close()
        receiver.close()
    chunk.release()
    with pytest.raises(LinkClosed):
        receiver.check()
    with pytest.raises(LinkClosed):
        sender.check()


def test_nobody_there_is_a_dead_peer(kit: Kit) -> None:
    receiver = kit.connector.listen("test-link.0", kit.options)
    receiver.close()
    with pytest.raises(PeerDead):
        kit.connector.connect(receiver.endpoint, kit.options)


# --- who may join
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed", [{"generation": 8}, {"nonce": "0" * 32}], ids=["generation", "nonce"]
)
def test_an_endpoint_that_was_changed_is_refused(kit: Kit, changed: dict[str, Any]) -> None:
    receiver = kit.connector.listen("test-link.0", kit.options)
    forged = msgspec.structs.replace(receiver.endpoint, **changed)
    with pytest.raises(WireError):
        kit.connector.connect(forged, kit.options)
    sender = kit.connector.connect(receiver.endpoint, kit.options)  # the listener has not suffered
    assert sender.put(numbered(0), LONG_S)
    check_numbered(take(receiver), 0)
    sender.close()
    receiver.close()


def test_endpoints_travel_as_text_and_carry_no_secret(kit: Kit) -> None:
    receiver = kit.connector.listen("test-link.0", kit.options)
    text = msgspec.json.encode(receiver.endpoint)
    assert SECRET not in text
    sender = kit.connector.connect(msgspec.json.decode(text, type=Endpoint), kit.options)
    assert sender.put(numbered(0), LONG_S)
    check_numbered(take(receiver), 0)
    sender.close()
    receiver.close()


# --- bytes that cannot be trusted
# --------------------------------------------------------------------------------


@contextmanager
def damaged(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[memoryview, int], None]
) -> Iterator[None]:
    """Whatever is encoded meanwhile leaves the sender with `damage` done to it."""
    write_head = wire.write_head

    def write_badly(page: wire.Page, header: ChunkHeader, **flags: bool) -> int:
        size = write_head(page, header, **flags)
        damage(page.memory, size)
        return size

    with monkeypatch.context() as patch:
        patch.setattr(wire, "write_head", write_badly)
        yield


def flip(position: int) -> Callable[[memoryview, int], None]:
    def damage(buffer: memoryview, size: int) -> None:
        buffer[position % size] ^= 0x10

    return damage


@pytest.mark.parametrize(
    "position", [0, 17, 50, 90, -1], ids=["magic", "length", "counter", "header", "blob"]
)
def test_damaged_bytes_are_refused_on_both_sides(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    with link(kit, checksum=True) as (sender, receiver):
        with damaged(monkeypatch, flip(position)):
            assert sender.put(numbered(0, request="hurt"), LONG_S)
        assert sender.put(numbered(1), LONG_S)
        with pytest.raises(Corrupt) as corrupt:
            receiver.take(LONG_S)
        assert corrupt.value.link == "test-link.0"
        check_numbered(take(receiver), 1)  # the link lives on
        refused = []
        eventually(lambda: bool(refused.extend(sender.refusals()) or refused))
        assert [refusal.request for refusal in refused] == ["hurt"]
        assert sender.refusals() == []
        assert sender.credits() == 3


def test_another_version_in_the_header_is_refused_on_both_sides(
    ends: tuple[Sender, Receiver],
) -> None:
    sender, receiver = ends
    newer = numbered(0, request="newer")
    newer.header = msgspec.structs.replace(newer.header, version=WIRE_VERSION + 1)
    assert sender.put(newer, LONG_S)
    with pytest.raises(VersionMismatch):
        receiver.take(LONG_S)
    refused = []
    eventually(lambda: bool(refused.extend(sender.refusals()) or refused))
    assert [refusal.request for refusal in refused] == ["newer"]
    eventually(lambda: sender.credits() == 4)


def test_another_version_in_the_prefix_is_refused(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(buffer: memoryview, _size: int) -> None:
        buffer[4] += 1

    with link(kit) as (sender, receiver):
        with damaged(monkeypatch, newer):
            assert sender.put(numbered(0), LONG_S)
        with pytest.raises(VersionMismatch):
            receiver.take(LONG_S)


def test_networks_check_blobs_unasked(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    if kit.name == "shm":
        pytest.skip("memory of one machine: blob checksums are off unless asked for")
    with link(kit) as (sender, receiver), damaged(monkeypatch, flip(-1)):
        assert sender.put(numbered(0), LONG_S)
        with pytest.raises(Corrupt):
            receiver.take(LONG_S)


def test_a_refused_slot_is_used_again(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    with link(kit, checksum=True) as (sender, receiver):
        for i in range(12):
            if i % 3 == 0:
                with damaged(monkeypatch, flip(-1)):
                    assert sender.put(numbered(i), LONG_S)
                with pytest.raises(Corrupt):
                    receiver.take(LONG_S)
            else:
                assert sender.put(numbered(i), LONG_S)
                chunk = take(receiver)
                check_numbered(chunk, i)
                chunk.release()
        eventually(lambda: sender.credits() == 4)
        assert len(sender.refusals()) == 4


def test_put_copies_the_rows(ends: tuple[Sender, Receiver]) -> None:
    """After `put` the caller may write to its memory again."""
    sender, receiver = ends
    mine = pattern(1, 60_000).clone()
    assert sender.put(
        wire.chunk(RequestId("r"), Span(1, 2), Mark.MORE, {"rows": mine}, seq=1), LONG_S
    )
    mine.zero_()
    check_numbered(take(receiver), 1, 60_000)


def test_links_one_after_the_other_leave_nothing(kit: Kit) -> None:
    """Thirty links, each used and closed: whatever a library keeps for a while must not add up."""
    before = Footprint.now()
    for i in range(30):
        sender, receiver = kit.pair()
        assert sender.put(numbered(i), LONG_S)
        take(receiver).release()
        sender.close()
        receiver.close()
    deadline = time.monotonic() + LONG_S
    while (leaked := Footprint.now().beyond(before, 4)) and time.monotonic() < deadline:
        gc.collect()
    assert not leaked
