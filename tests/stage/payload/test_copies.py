"""The copy controllers on a CPU device: the same calls, done at once."""

from __future__ import annotations

import pytest
import torch

from stretto.connector import wire
from stretto.connector.switches import OverlapSwitches
from stretto.stage.payload.copies import DeviceToHost, HostToDevice, adopt
from stretto.stage.payload.ring import Ring
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
def test_there_and_back(switches: OverlapSwitches) -> None:
    ring = Ring(1, 4096)
    down, up = DeviceToHost(ring, CPU, switches), HostToDevice(CPU, switches, keep=frozenset({"media"}))
    batch = {"rows": torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), "media": torch.tensor([[0, 2]])}
    lease = down.copy({"rows": batch["rows"][::2], "media": batch["media"]})  # a strided source, as a batch's slice is
    assert lease is not None
    assert down.copy(batch) is None, "one slot, and it is taken"
    lease.wait()
    credit = Credit()
    landed = up.upload(wire.chunk(RequestId("r"), Span(0, 3), Mark.MORE, dict(lease.tensors), lease=credit))
    assert not up.reap()
    up.wait()
    assert credit.released
    adopt(landed)
    lease.release()
    overwrite = down.copy({"rows": torch.zeros(3, 8)})
    assert overwrite is not None
    assert torch.equal(landed.tensors["rows"], batch["rows"][::2]), "the upload is a copy of its own"
    assert torch.equal(landed.tensors["media"], batch["media"])
    overwrite.release()
