"""Uploads: on a CPU device, and what is asked of a device that is not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from stretto.config.engine import OverlapSwitches
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.speech.payloads import CodecFrames
from stretto.stage.links.copies import HostToDevice
from stretto.stage.payload import Payload, unpack
from stretto.transport import wire
from stretto.transport.contract import Chunk
from stretto.types import Mark, RequestId, Span

CPU = torch.device("cpu")
SWITCHES = [
    OverlapSwitches(),
    *(OverlapSwitches(**{n: False}) for n in ("async_d2h", "async_h2d", "payload_stream")),
]


class Credit:
    released = False

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_an_upload_to_a_cpu_is_a_copy_and_returns_the_slot_at_once(
    switches: OverlapSwitches,
) -> None:
    up = HostToDevice(CPU, switches, keep=frozenset({"media"}))
    slot = {
        "rows": torch.randn(3, 8, generator=torch.Generator().manual_seed(0)),
        "media": torch.tensor([[0, 2]]),
    }
    expected = {name: tensor.clone() for name, tensor in slot.items()}
    credit = Credit()
    uploaded = up.upload(
        wire.chunk(RequestId("r"), Span(0, 3), Mark.MORE, dict(slot), lease=credit)
    )
    assert credit.released
    assert not up.reap()
    assert uploaded.event is None
    slot["rows"].zero_()
    slot["media"].zero_()
    assert all(torch.equal(uploaded.tensors[name], tensor) for name, tensor in expected.items())


# ---- uploads to a device that is not there: what is asked of it, and in which order


@dataclass(eq=False)
class Stream:
    """A device stream that keeps all it was given until it is waited for."""

    waiting: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        self.waiting.clear()


class Event:
    """Recorded behind what its stream was given."""

    def __init__(self, blocking: bool) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream is not None and not self.stream.waiting

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.synchronize()


class Cuda:
    """Stands for `torch.cuda`: one thread's current stream."""

    Event = Event

    def __init__(self) -> None:
        self.current = Stream()

    def Stream(self, device: torch.device) -> Stream:
        return Stream()

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream


class Source:
    """A tensor in a slot. On the device nobody can look at it without waiting, so that there is
    nothing to look at."""

    def __init__(self, tensor: torch.Tensor, name: str, cuda: Cuda, fails: bool = False) -> None:
        self.tensor, self.name, self.cuda, self.fails = tensor, name, cuda, fails

    def clone(self) -> torch.Tensor:
        return self.tensor.clone()

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert device.type == "cuda"
        assert non_blocking
        if self.fails:
            raise RuntimeError("out of memory")
        self.cuda.current.waiting.append(self.name)
        return self.tensor.to("meta")


ROWS = ThinkerRows(Span(0, 4), torch.arange(4, dtype=torch.int32), (Span(1, 3),), torch.ones(2, 8))
TEXT = ThinkerRows(Span(4, 6), torch.arange(2, dtype=torch.int32), (), torch.empty(0, 8))
FRAMES = CodecFrames(Span(0, 2), torch.zeros(2, 16, dtype=torch.int32))


class Upload:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, payload: Payload, own: bool, fails: str = ""
    ) -> None:
        self.cuda, self.credit, self.compute = Cuda(), Credit(), Stream(["a step"])
        monkeypatch.setattr("stretto.stage.links.copies.torch.cuda", self.cuda)
        stream: Any = None if own else self.compute
        self.up = HostToDevice(torch.device("cuda"), OverlapSwitches(), payload.HOST, stream)
        made = wire.chunk(
            RequestId("r"), payload.span, Mark.MORE, payload.tensors(), lease=self.credit
        )
        sources: Any = {
            name: Source(t, name, self.cuda, name == fails) for name, t in made.tensors.items()
        }
        self.chunk = Chunk(made.header, sources, made.lease)


@pytest.mark.parametrize("own", [True, False], ids=["own stream", "compute stream"])
@pytest.mark.parametrize("payload", [ROWS, TEXT, FRAMES], ids=["media", "text", "frames"])
def test_what_the_loop_reads_itself_is_there_before_any_upload_is(
    monkeypatch: pytest.MonkeyPatch, payload: Payload, own: bool
) -> None:
    """Behind the steps of a compute stream an upload takes its time. A loop that looked at ids
    there would have to wait for it, or read what was in that memory before."""
    upload = Upload(monkeypatch, payload, own)
    before = upload.cuda.current
    landed = upload.up.upload(upload.chunk)
    assert upload.cuda.current is before
    got = unpack(type(payload), landed)
    if isinstance(got, ThinkerRows):
        assert got.ids.tolist() == payload.tensors()["ids"].tolist()
    else:
        assert isinstance(got, CodecFrames)
        assert torch.equal(got.codes, FRAMES.codes)
    far = payload is ROWS
    assert [name for name, t in landed.tensors.items() if t.is_meta] == ["hidden"] * far
    assert (landed.event is not None) == far
    assert upload.credit.released != far, "a slot goes back at once if no copy reads it"
    assert upload.up.reap() == far
    upload.up.wait()
    assert upload.credit.released


def test_a_failed_upload_leaves_no_copy_that_reads_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload = Upload(monkeypatch, ROWS, own=False, fails="hidden")
    upload.up.keep = frozenset({"media"})
    before = upload.cuda.current
    with pytest.raises(RuntimeError, match="memory"):
        upload.up.upload(upload.chunk)
    assert upload.compute.waiting == [], "ids were on their way"
    assert upload.cuda.current is before
