"""Mooncake's settings, without its package: RDMA that was asked for is there or refused, never
replaced by tcp."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import Invalid
from stretto.transport import mooncake
from stretto.transport.contract import LinkOptions
from stretto.transport.mooncake import EngineOptions, check_devices
from tests.transport.contract.links import SECRET


def test_rdma_needs_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "DEVICES", tmp_path)
    check_devices(EngineOptions("10.0.0.1", "tcp", ""))
    for device, missing in (("", "device"), ("mlx5_0", "device 'mlx5_0'")):
        with pytest.raises(Invalid, match=rf"has no RDMA {missing} \(found: none\)"):
            check_devices(EngineOptions("10.0.0.1", "rdma", device))
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "mlx5_1").mkdir()
    check_devices(EngineOptions("10.0.0.1", "rdma", ""))
    check_devices(EngineOptions("10.0.0.1", "rdma", "mlx5_1"))
    with pytest.raises(Invalid, match=r"no RDMA device 'mlx5_2' \(found: mlx5_0, mlx5_1\)"):
        check_devices(EngineOptions("10.0.0.1", "rdma", "mlx5_2"))


def test_an_engine_is_not_made_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "DEVICES", tmp_path)
    monkeypatch.setattr(
        mooncake, "_import_engine", lambda: lambda: pytest.fail("no engine is made")
    )
    options = LinkOptions(secret=SECRET, details={"protocol": "rdma"})
    with pytest.raises(Invalid, match="no RDMA device"):
        mooncake.MooncakeConnector().listen("a-b", options)
