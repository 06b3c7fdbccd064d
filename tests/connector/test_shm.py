"""What only the shm connector's carrier promises: how long its one system call waits."""

from __future__ import annotations

import pytest
import torch

from stretto.connector import doorbell, shm, wire
from stretto.connector.contract import LinkOptions
from stretto.types import Mark, RequestId, Span


@pytest.mark.parametrize("spin_us", ["0", "5"])
def test_a_wait_is_as_long_as_asked_whatever_was_asked_before(monkeypatch: pytest.MonkeyPatch, spin_us: str) -> None:
    """The socket's own timeout is set only when it changes: it must be the one of this call, also after a wait of
    another length that brought nothing."""
    bounds: list[float] = []
    bound_waits = doorbell.bound_waits

    def record(sock: object, timeout: float) -> None:
        bounds.append(timeout)
        bound_waits(sock, timeout)  # type: ignore[arg-type]

    options = LinkOptions(slots=2, slot_bytes=4096, details={"look_us": spin_us})
    connector = shm.ShmConnector()
    receiver = connector.listen("a-b", options)
    sender = connector.connect(receiver.endpoint, options)
    monkeypatch.setattr(doorbell, "bound_waits", record)
    chunk = wire.chunk(RequestId("r"), Span(0, 1), Mark.MORE, {"rows": torch.ones(1)})

    def take(timeout: float, sends: bool) -> float:
        """The socket's timeout when the call began to wait first."""
        if sends:
            assert sender.put(wire.chunk(RequestId("r"), Span(0, 1), Mark.MORE, {"rows": torch.ones(1)}), 0.0)
        before, bounds[:] = bounds[-1:], []
        taken = receiver.take(timeout)
        assert (taken is not None) == sends
        if taken is not None:
            taken.release()
        first = (bounds or before)[0]
        bounds[:] = (before + bounds)[-1:]
        return first

    try:
        assert sender.put(chunk, 0.0)
        first = receiver.take(0.02)
        assert first is not None
        first.release()
        for timeout, sends in [(0.02, True), (0.03, False), (0.02, True), (0.02, True), (0.01, False), (0.02, True)]:
            assert take(timeout, sends) == timeout
    finally:
        sender.close()
        receiver.close()
