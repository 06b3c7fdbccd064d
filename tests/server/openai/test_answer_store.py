"""What is kept of spoken answers is bounded, and is forgotten."""

from __future__ import annotations

from stretto.server.openai.answer_store import AudioMemory


def test_memory_is_bounded_and_forgets() -> None:
    now = [100.0]
    memory = AudioMemory(3, 10.0, clock=lambda: now[0])
    assert [memory.keep(f"a{i}", "me", f"words {i}") for i in range(4)] == [110] * 4

    # The fourth pushed the first out.
    assert memory.recall(["a0", "a1", "a3", "a9"], "me") == {"a1": "words 1", "a3": "words 3"}
    assert memory.recall(["a1"], "someone else") == {}
    now[0] = 110.0
    assert memory.recall(["a1", "a2", "a3"], "me") == {}
