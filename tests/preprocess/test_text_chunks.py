"""Texts cut into passages: whether they are there or come, by sentence, and into what is read at
once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.preprocess.template import Tokenizer
from stretto.preprocess.text_chunks import (
    IncrementalEncoder,
    Passages,
    UnfinishedText,
    divide,
    passages,
)
from stretto.testing.qwen3_tts import write_tiny

TEXT = (
    "The rain in the garden is quiet this morning, isn't it? 12 people said: yes.\nOthers did not."
)
SENTENCES = Passages.by_sentence(90, "en")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tts") / "base"
    write_tiny(folder, 0, "base")
    return folder


def test_tokens_of_a_text_do_not_depend_on_how_it_is_written(base: Path) -> None:
    tokenizer = Tokenizer.open(base)
    for text in (
        TEXT,
        "a",
        "  two  spaces ",
        "Tëst  ñ! 3.14 don't\n\n\nstop",
        "\n\nafter breaks",
        "e\u0301 e\u0301",
    ):
        wanted = tokenizer.encode(text.lstrip("\r\n"))
        for size in (1, 2, 3, 7, 100):
            writing = IncrementalEncoder(tokenizer.encode)
            got = [t for i in range(0, len(text), size) for t in writing.push(text[i : i + size])]
            assert got + writing.finish() == wanted, (text, size)


async def in_pieces(text: str, size: int, turns: int = 0) -> AsyncIterator[str]:
    for i in range(0, len(text), size):
        for _ in range(turns):
            await asyncio.sleep(0)
        yield text[i : i + size]


LONG = """ One two. Three "four!" Five, six: 3.14 and so on… (Really?) Yes - or no; abcdefghijklmnopqrstuvwxyz.
你好。今天天气很好！」再见，and the end.

"""  # noqa: E501


def rules(most: int) -> Passages:
    """Sentences end a passage in its last third."""
    return Passages(most, -(-2 * most // 3))


@pytest.mark.parametrize("most", [6, 12, 24, 50, 1000])
def test_a_text_that_comes_is_cut_into_the_same_passages(most: int) -> None:
    async def cut(size: int) -> list[str]:
        found = UnfinishedText(in_pieces(LONG, size), rules(most)).passages()
        return ["".join([piece async for piece in pieces()]) async for pieces in found]

    async def nothing() -> list[str]:
        found = UnfinishedText(in_pieces("", 1), rules(most)).passages()
        return ["".join([piece async for piece in pieces()]) async for pieces in found]

    for size in (1, 2, 3, 7, 40, len(LONG)):
        assert asyncio.run(cut(size)) == [*passages(LONG, rules(most))]
    assert asyncio.run(nothing()) == [""]


def test_who_leaves_a_passage_in_its_middle_loses_nothing() -> None:
    """Its reader is cancelled at any moment, as when a request ends early, or begins again, as when
    it was refused."""

    async def cut(leave: int) -> list[str]:
        heard: list[str] = []
        async for pieces in UnfinishedText(in_pieces(LONG, 3, turns=2), rules(24)).passages():
            task = asyncio.ensure_future(anext(pieces()))
            for _ in range(leave):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            heard.append("".join([piece async for piece in pieces()]))
        return heard

    async def skip() -> int:
        return len(
            [pieces async for pieces in UnfinishedText(in_pieces(LONG, 3), rules(24)).passages()]
        )

    for leave in range(8):
        assert asyncio.run(cut(leave)) == [*passages(LONG, rules(24))]
    assert asyncio.run(skip()) == len([*passages(LONG, rules(24))])


def test_passages_end_where_sentences_do() -> None:
    assert [*passages("One two. Three four! Five", rules(12))] == [
        "One two.",
        "Three four!",
        "Five",
    ]
    assert [*passages("It is 3.14 now. And then", rules(16))] == ["It is 3.14 now.", "And then"]
    assert [*passages("你好。今天天气很好！再见", rules(12))] == ["你好。今天天气很好！", "再见"]
    assert [*passages("A b c d e f, g h i and so on", rules(12))] == [
        "A b c d e f,",
        "g h i and so",
        "on",
    ]
    assert [*passages("abcdefghij", rules(4))] == ["abcd", "efgh", "ij"]
    assert [*passages("  ", rules(4))] == []
    text = "word " * 1000
    assert " ".join([*passages(text, rules(99))]) == text.strip()
    assert max(map(len, [*passages(text, rules(99))])) <= 99


def test_a_text_is_cut_sentence_by_sentence() -> None:
    text = (
        "The old farmer carried a basket. Dr. J. Smith, e.g., saw him! It was late. Yes. I was I."
    )
    found = [
        "The old farmer carried a basket.",
        "Dr. J. Smith, e.g., saw him!",
        "It was late.",
        "Yes. I was I.",
    ]
    assert [*passages(text, SENTENCES)] == found
    assert next(passages("What has gone was I. It was late.", Passages(90, 9))).endswith(" I.")
    assert [*passages("Vitamin C. " + "Then it ends here, I think.", SENTENCES)] == [
        "Vitamin C. Then it ends here, I think."
    ]

    async def come() -> list[str]:
        return [p async for p in UnfinishedText(in_pieces(text, 7), SENTENCES).whole_passages()]

    assert asyncio.run(come()) == found


def test_a_long_sentence_is_cut_near_its_middle_at_the_best_place() -> None:
    long = (
        "When the old farmer came back from the market, he saw that his brother had left the house."
    )
    assert divide(long, 60, None) == [
        "When the old farmer came back from the market,",
        "he saw that his brother had left the house.",
    ]
    words = "one two three four five six seven eight nine ten"
    assert divide(words, 30, None) == ["one two three four five", "six seven eight nine ten"]
    assert divide("a" * 20, 6, None) == ["a" * 5] * 4
    assert divide("$1,234,567", 60, "en") == [
        "one million two hundred and thirty four",
        "thousand five hundred and sixty seven dollars",
    ]


def test_of_a_text_without_words_nothing_is_left() -> None:
    assert divide("... !", 90, None) == []
    assert divide("😀 你好", 90, "en") == []
    assert divide("你好", 90, None) == ["你好"]


@given(st.text("ab .,;!?\n1$", max_size=400), st.integers(1, 80))
def test_what_is_divided_is_short_enough_and_complete(text: str, most: int) -> None:
    parts = divide(text, most, None)
    assert all(0 < len(part) <= most for part in parts)
    assert [c for c in "".join(parts) if c.isalnum()] == [c for c in text if c.isalnum()]
