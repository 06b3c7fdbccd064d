"""Uploads of chunks that came from another host, and how a stage takes them over.
(`connector.wire.DeviceCopies` copies device rows to the link's slots.)

`HostToDevice` is called by the incoming courier and starts a chunk's upload when it arrives, on a
stream of its own. The chunk carries an event; the stage makes its stream wait for that (`adopt`).
On a CPU device the same calls copy at once. Only methods with `wait` in the name wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from stretto.config.engine import OverlapSwitches
from stretto.observe.recorder import Histogram
from stretto.transport.contract import Chunk, CopyEvent


@dataclass(slots=True)
class HostToDevice:
    """Uploads chunks as they arrive. One per link and receiving host; for the incoming courier's
    thread only.

    `keep` names the tensors that stay on the host (`Payload.HOST`); they are cloned, since their
    slot is returned to the sender."""

    device: torch.device
    switches: OverlapSwitches = field(default_factory=OverlapSwitches)
    keep: frozenset[str] = frozenset()
    # None: a new one, if there is a GPU
    stream: torch.cuda.Stream | None = None
    # each upload, until it was found to be done
    took: Histogram = field(default_factory=Histogram)
    _running: deque[tuple[CopyEvent, Chunk, float]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def upload(self, chunk: Chunk) -> Chunk:
        """The chunk with its tensors on the device, complete once its `event` has fired. Takes over
        `chunk` and releases it when the copy no longer reads it."""
        stream = self.stream
        if stream is None or self.keep >= chunk.tensors.keys():
            cloned = Chunk(chunk.header, {name: t.clone() for name, t in chunk.tensors.items()})
            chunk.release()
            return cloned
        current = torch.cuda.current_stream(self.device)
        # not `with torch.cuda.stream`, which costs as much as two copies
        torch.cuda.set_stream(stream)
        try:
            tensors = {
                name: t.clone() if name in self.keep else t.to(self.device, non_blocking=True)
                for name, t in chunk.tensors.items()
            }
        except RuntimeError:
            # copies that were started must not read a slot that is returned or unmapped
            stream.synchronize()
            raise
        finally:
            torch.cuda.set_stream(current)
        # Blocking: a courier that waits for it sleeps instead of spinning, since the loop thread
        # needs the core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        self._running.append((event, chunk, time.perf_counter()))
        if not self.switches.async_h2d:
            self.wait()
        return Chunk(chunk.header, tensors, event=event)

    def reap(self) -> int:
        """Release the sources of finished uploads, in order. Returns how many are running."""
        while self._running and self._running[0][0].query():
            self._release()
        return len(self._running)

    def wait_one(self) -> None:
        """Until the oldest upload is done and its source released."""
        if self._running:
            self._running[0][0].synchronize()
            self._release()

    def _release(self) -> None:
        _, chunk, since = self._running.popleft()
        self.took.observe(time.perf_counter() - since)
        chunk.release()

    def wait(self) -> None:
        """Until all uploads are done and their sources released."""
        while self._running:
            self.wait_one()


def adopt(tensors: Iterable[torch.Tensor], event: torch.cuda.Event) -> None:
    """Make the current stream wait for device tensors, and keep their memory until its work is
    done.

    Called by the stage loop before it launches kernels that read them. `record_stream` is needed
    because the memory belongs to the stream that allocated it, whose next allocation would not wait
    for these kernels."""
    stream: torch.cuda.Stream | None = None
    for tensor in tensors:
        if tensor.is_cuda:
            if stream is None:
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(event)
            tensor.record_stream(stream)
