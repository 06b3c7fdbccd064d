"""Mooncake's settings, without its package: RDMA that was asked for is there or refused, never
replaced by tcp."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import Invalid
from stretto.transport import mooncake
from stretto.transport.mooncake import _check_devices, _Wanted


def test_rdma_needs_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "DEVICES", tmp_path)
    _check_devices(_Wanted("10.0.0.1", "tcp", ""))
    for device in ("", "mlx5_0"):
        with pytest.raises(Invalid, match=r"has no RDMA device \(found: none\)"):
            _check_devices(_Wanted("10.0.0.1", "rdma", device))
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "mlx5_1").mkdir()
    _check_devices(_Wanted("10.0.0.1", "rdma", ""))
    _check_devices(_Wanted("10.0.0.1", "rdma", "mlx5_1"))
    with pytest.raises(Invalid, match=r"no RDMA device 'mlx5_2' \(found: mlx5_0, mlx5_1\)"):
        _check_devices(_Wanted("10.0.0.1", "rdma", "mlx5_2"))


def test_an_engine_is_not_made_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "DEVICES", tmp_path)
    monkeypatch.setattr(mooncake, "_import_engine", lambda: pytest.fail("no engine is made"))
    with pytest.raises(Invalid, match="no RDMA device"):
        mooncake._Engines().acquire(_Wanted("10.0.0.1", "rdma", ""))
