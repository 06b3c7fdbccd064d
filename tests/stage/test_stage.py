"""What stages around a core share: outputs are taken once, and messages that a stage has no use
for are refused."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from stretto.errors import Bug
from stretto.messages.requests import Admit
from stretto.preprocess.prompt import Prompt
from stretto.stage.stage import CoreStage, Transfer
from stretto.types import RequestId


class ListCore:
    """A core whose steps have made these lists of values."""

    stream = None

    def __init__(self, *steps: list[str]) -> None:
        self.steps = deque(steps)
        self.throttled: list[tuple[RequestId, bool]] = []

    def poll(self) -> list[str]:
        return self.steps.popleft() if self.steps else []

    def launch(self) -> bool:
        return False

    def throttle(self, id: RequestId, on: bool) -> None:
        self.throttled.append((id, on))


class UpperStage(CoreStage[Any]):
    name = "upper"

    def admit(self, a: Admit, params: Any, prompt: Prompt) -> None:
        self.outputs.append("admitted")

    def cancel(self, id: RequestId) -> None: ...

    def take(self, confirmed: Any) -> None:
        self.outputs.append(confirmed.upper())


def test_each_output_of_the_core_is_returned_once_and_in_order() -> None:
    stage = UpperStage(ListCore(["a", "b"], ["c"]))
    assert stage.poll() == ["A", "B"]
    assert stage.poll() == ["C"]
    assert stage.poll() == []


def test_outputs_that_wait_count_as_work() -> None:
    """Else the loop would sleep, and nobody would take them."""
    stage = UpperStage(ListCore())
    assert not stage.launch()
    stage.outputs.append("made at admission")
    assert stage.launch()
    assert stage.poll() == ["made at admission"]
    assert not stage.launch()


def test_a_stage_without_links_refuses_payloads() -> None:
    with pytest.raises(Bug, match="no link ends at upper"):
        UpperStage(ListCore()).accept(Transfer("rows", RequestId("r"), None))


def test_a_throttle_reaches_the_core() -> None:
    core = ListCore()
    UpperStage(core).throttle(RequestId("r"), True)
    assert core.throttled == [(RequestId("r"), True)]
