"""Whose turn it is in a round, whichever stages a host has."""

from typing import Any

import pytest

from stretto.stage.host.loop import Loop
from stretto.stage.host.polling import PrefillFirst, poll_order
from tests.pipeline import STAGES


class Named:
    due_ns: int | None = None

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen, self.cheap = name, seen, name == "code2wav"

    def poll(self) -> bool:
        self.seen.append(self.name)
        return False


def rounds(stages: tuple[str, ...]) -> tuple[Loop, PrefillFirst | None, list[str]]:
    seen: list[str] = []
    nodes: Any = [Named(name, seen) for name in stages]
    prefill_first = PrefillFirst(nodes[0]) if stages[0] == "thinker" else None
    return (
        Loop(poll_order(nodes, prefill_first, lambda: seen.append("push"), Named("links", seen))),
        prefill_first,
        seen,
    )


@pytest.mark.parametrize(
    ("stages", "order"),
    [
        (STAGES, "links code2wav push talker code2wav push thinker push"),
        (("thinker",), "links push push thinker push"),
        (("talker", "code2wav"), "links code2wav push talker code2wav push"),
        (("code2wav",), "links push code2wav push"),
    ],
    ids=["all", "thinker", "talker and vocoder", "vocoder"],
)
def test_what_is_heard_sooner_goes_first(stages: tuple[str, ...], order: str) -> None:
    loop, _, seen = rounds(stages)
    assert not loop.round()
    assert seen == order.split()


def test_a_new_prompt_goes_before_speech_once() -> None:
    loop, prefill_first, seen = rounds(STAGES)
    assert prefill_first is not None
    prefill_first.admitted = True
    loop.round()
    assert seen.index("thinker") < seen.index("talker")
    assert seen.count("thinker") == 2
    seen.clear()
    loop.round()
    assert seen.count("thinker") == 1
