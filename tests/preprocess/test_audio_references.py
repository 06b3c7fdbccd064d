"""References to earlier answers become their words."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import Invalid
from stretto.preprocess.audio_references import MAX_REFERENCES, recall, references


def test_references_become_words() -> None:
    said: dict[str, Any] = {"role": "assistant", "audio": {"id": "a"}}
    assert recall([said], {"a": "words"}) == [{"role": "assistant", "content": "words"}]
    with pytest.raises(Invalid, match="no answer 'a'"):
        recall([said], {})
    for bad in ({}, {"id": 3}, "a1", [1]):
        with pytest.raises(Invalid) as caught:
            recall([{"role": "user"}, {"role": "assistant", "audio": bad}], {"a": "words"})
        assert caught.value.param == "messages[1].audio"
    untouched: list[Any] = [
        {"role": "user", "audio": {"id": "x"}},
        {"role": "assistant", "content": "y", "audio": None},
        7,
    ]
    assert recall(untouched, {"x": "words"}) == untouched


def test_only_so_many_can_be_referred_to() -> None:
    """Of spoken answers that is an error; of items, which have ids where they are sent whole too,
    the last ones count."""

    def ids(kind: str, count: int) -> list[str]:
        return [f"{kind}_{i:032x}" for i in range(count)]

    def found(*names: str) -> tuple[str, ...]:
        return references(" ".join(names).encode())

    items, answers = ids("msg", MAX_REFERENCES + 5), ids("audio", MAX_REFERENCES)
    assert found(*items) == tuple(items[5:])
    assert found(*items[:9], *answers[9:], *items[9:12]) == (*answers[9:], *items[3:12])
    assert found(*items, *answers) == tuple(answers)
    with pytest.raises(Invalid, match=f"over {MAX_REFERENCES} earlier answers"):
        found(*ids("audio", MAX_REFERENCES + 1))
