"""Where kernels are used: by type and device. (That they are right is for tests/kernels/triton.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stretto.kernels import triton as fast


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What was found out about devices and types must not outlast a test that made it up."""
    fast.able.cache_clear()
    fast.dtypes.cache_clear()
    yield
    fast.able.cache_clear()
    fast.dtypes.cache_clear()


@pytest.mark.parametrize(
    ("capability", "there"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)]
)
def test_old_gpus_go_the_plain_way(
    capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fast.able(torch.device("cuda", 0)) == there


def test_a_cpu_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    assert not fast.usable(torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.parametrize(("mode", "types"), [("off", ()), ("on", (torch.bfloat16,))])
def test_modes(mode: str, types: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("STRETTO_KERNELS", mode)
    assert fast.dtypes() == types


def test_forced_for_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("STRETTO_KERNELS", "force")
    assert torch.float32 in fast.dtypes()
