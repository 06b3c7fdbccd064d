from __future__ import annotations

from dataclasses import fields

import pytest

from stretto.config.overlaps import OverlapSwitches
from stretto.errors import Invalid

NAMES = [field.name for field in fields(OverlapSwitches)]


def test_all_are_on() -> None:
    assert OverlapSwitches.read({}, {}) == OverlapSwitches(True, True, True, True, True, True)


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_switched_on_its_own(name: str) -> None:
    off = OverlapSwitches(**{name: False})
    assert OverlapSwitches.read({name: False}, {}) == off
    assert OverlapSwitches.read({}, {f"STRETTO_{name.upper()}": "0"}) == off
    assert OverlapSwitches.read({name: False}, {f"STRETTO_{name.upper()}": "on"}) == off, (
        "what is configured wins"
    )


def test_nonsense_is_refused() -> None:
    with pytest.raises(Invalid, match="STRETTO_ASYNC_D2H"):
        OverlapSwitches.read({}, {"STRETTO_ASYNC_D2H": "perhaps"})
    with pytest.raises(Invalid, match="async_d2d"):
        OverlapSwitches.read({"async_d2d": True}, {})
