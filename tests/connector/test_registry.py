from __future__ import annotations

import pytest

from stretto.connector.local import LocalConnector
from stretto.connector.registry import Registry, Seat, choose, connectors
from stretto.errors import Invalid

HERE, BESIDE, AWAY = Seat("m1", "m1/h1"), Seat("m1", "m1/h2"), Seat("m2", "m2/h1")


def test_placement_chooses() -> None:
    assert choose(HERE, HERE) == "local"
    assert choose(HERE, BESIDE) == "shm"
    assert choose(HERE, AWAY) == "tcp"


def test_the_configuration_may_force_one() -> None:
    assert choose(HERE, HERE, forced="tcp") == "tcp"
    assert choose(HERE, AWAY, forced="mooncake") == "mooncake"
    with pytest.raises(Invalid, match="hosts"):
        choose(HERE, BESIDE, forced="local")
    with pytest.raises(Invalid, match="machines"):
        choose(HERE, AWAY, forced="shm")


def test_connectors_are_made_once() -> None:
    registry = Registry()
    local = registry.get("local")
    assert isinstance(local, LocalConnector)
    assert local is registry.get("local"), "ends find each other through one object"
    assert set(registry.names()) >= {"local", "shm", "tcp", "mooncake"}
    assert connectors.get("local") is not local


def test_others_may_register() -> None:
    class Pigeon(LocalConnector):
        name = "pigeon"

    registry = Registry()
    registry.register("pigeon", Pigeon)
    assert isinstance(registry.get("pigeon"), Pigeon)
    with pytest.raises(Invalid, match="already"):
        registry.register("pigeon", Pigeon)
    with pytest.raises(Invalid, match="no connector 'dove'"):
        registry.get("dove")
