"""Settings that depend on the cards of a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.config import devices
from stretto.config.devices import fit_card, rows_for
from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.server import ServerConfig

GIB = 1 << 30


@pytest.mark.parametrize(("spare", "rows"), [(74, 128), (43, 64), (13, 32), (5, 16), (-3, 16)])
def test_rows_follow_from_the_memory_beside_the_weights(spare: int, rows: int) -> None:
    assert rows_for(spare * GIB) == rows


def test_defaults_follow_from_the_card(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, server = EngineConfig(host=HostSettings(device="cuda")), ServerConfig()
    monkeypatch.setattr(devices, "card_memory", lambda device: 140 * GIB)
    sized, front = fit_card(engine, server, tiny_dir, {"device"})
    assert (sized.host.max_rows, front.max_concurrent, front.max_live) == (128, 256, 128)
    assert sized.max_requests == front.engine_requests >= 256 + 128
    explicit = replace(engine, host=replace(engine.host, max_rows=40))
    sized, front = fit_card(
        explicit,
        replace(server, max_concurrent=7, max_live=9),
        tiny_dir,
        {"max_rows", "max_concurrent", "max_live"},
    )
    assert (sized.host.max_rows, front.max_concurrent, front.max_live) == (40, 7, 9)
