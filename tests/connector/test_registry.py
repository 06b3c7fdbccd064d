from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.connector.registry import ENTRY_POINTS, Registry, connectors
from stretto.connector.shm import ShmConnector
from stretto.control.settings import EngineConfig, check_model
from stretto.errors import Invalid


class Pigeon(ShmConnector):
    name = "pigeon"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that brings a connector by the entry-point group."""
    (tmp_path / "dovecote.py").write_text("from stretto.connector.shm import ShmConnector as Dove\n")
    info = tmp_path / "dovecote-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovecote\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ndove = dovecote:Dove\n")
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


@pytest.mark.usefixtures("installed")
def test_an_entry_point_brings_a_connector() -> None:
    assert type(Registry().get("dove")) is ShmConnector
    with pytest.raises(Invalid, match="there are dove, mooncake, shm, tcp"):
        Registry().get("owl")


@pytest.mark.usefixtures("installed")
def test_the_engine_takes_the_connectors_that_there_are() -> None:
    """Before anything is loaded. Settings of a connector of another package are its own to check."""
    check_model(EngineConfig(connector="dove", link_details={"colour": "white"}), ["a"], 8192)
    with pytest.raises(Invalid, match="there is no connector 'owl'; there are dove, mooncake, shm, tcp"):
        check_model(EngineConfig(connector="owl"), ["a"], 8192)
