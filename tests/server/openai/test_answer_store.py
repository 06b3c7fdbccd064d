"""The store of answers is bounded, and forgets them in time."""

from __future__ import annotations

from stretto.server.openai.answer_store import AnswerStore


def test_it_is_bounded_and_forgets() -> None:
    now = [100.0]
    store = AnswerStore(3, 10.0, clock=lambda: now[0])
    assert [store.add(f"a{i}", "me", f"words {i}") for i in range(4)] == [110] * 4

    # The fourth pushed the first out.
    assert store.find(["a0", "a1", "a3", "a9"], "me") == {"a1": "words 1", "a3": "words 3"}
    assert store.find(["a1"], "someone else") == {}
    now[0] = 110.0
    assert store.find(["a1", "a2", "a3"], "me") == {}
