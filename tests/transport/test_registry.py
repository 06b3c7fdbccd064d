from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.config import engine as known
from stretto.config.engine import CONNECTOR_ENTRY_POINTS, EngineConfig, check_connector
from stretto.errors import Invalid
from stretto.transport.registry import Registry, connectors
from stretto.transport.shm import ShmConnector


class Pigeon(ShmConnector):
    name = "pigeon"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that brings a connector by the entry-point group."""
    (tmp_path / "dovecote.py").write_text(
        "from stretto.transport.shm import ShmConnector as Dove\n"
    )
    info = tmp_path / "dovecote-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovecote\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{CONNECTOR_ENTRY_POINTS}]\ndove = dovecote:Dove\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("dovecote", None)


def test_connectors_are_made_once() -> None:
    registry = Registry()
    shm = registry.get("shm")
    assert isinstance(shm, ShmConnector)
    assert shm is registry.get("shm")
    assert registry.names() == ["mooncake", "shm", "tcp"]
    assert connectors.get("shm") is not shm


def test_others_may_register() -> None:
    registry = Registry()
    registry.register("pigeon", Pigeon)
    assert isinstance(registry.get("pigeon"), Pigeon)
    with pytest.raises(Invalid, match="already"):
        registry.register("pigeon", Pigeon)
    with pytest.raises(Invalid, match="no connector 'dove'"):
        registry.get("dove")


def test_names_are_checked_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("shm", "tcp"):
        check_connector(name)
    monkeypatch.setattr(known, "find_spec", lambda name: None)
    with pytest.raises(
        Invalid, match=r"needs the package mooncake: pip install 'stretto\[mooncake\]'"
    ):
        check_connector("mooncake")
    monkeypatch.setattr(known, "find_spec", lambda name: object())
    check_connector("mooncake")
    assert main(["serve", "/nowhere", "--connector", "dove"]) == 2
    assert "no connector 'dove'; there are mooncake, shm, tcp" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_an_entry_point_brings_a_connector() -> None:
    check_connector("dove")
    assert type(Registry().get("dove")) is ShmConnector
    with pytest.raises(Invalid, match="there are dove, mooncake, shm, tcp"):
        Registry().get("owl")


@pytest.mark.usefixtures("installed")
def test_an_outside_connector_checks_its_own_settings() -> None:
    assert EngineConfig(connector="dove", link_details={"colour": "white"}).link_details
    with pytest.raises(
        Invalid, match="there is no connector 'owl'; there are dove, mooncake, shm, tcp"
    ):
        check_connector("owl")
