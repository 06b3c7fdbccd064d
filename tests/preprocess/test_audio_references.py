"""References to earlier answers become their words."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import Invalid
from stretto.preprocess.audio_references import recall


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
