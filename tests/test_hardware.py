"""GPUs of this machine, as seen without PyTorch."""

from __future__ import annotations

from stretto import hardware as device


def test_a_machine_without_a_card_has_no_card_memory() -> None:
    assert device.card_memory("cpu") is None
    assert device.card_memory("cuda:99") is None
