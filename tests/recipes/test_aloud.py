"""Word error rates of texts that are read aloud: what is compared, and that nothing of it was
learned."""

from __future__ import annotations

import numpy as np

from recipes.nano import aloud, grammar
from recipes.nano.audio import RATE, Floats
from recipes.nano.sentences import FIXED


class Parrot:
    """Hears the texts in turn, as a recogniser may write them."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = iter(texts)
        self.lengths: list[float] = []

    def hear(self, samples: Floats) -> str:
        self.lengths.append(len(samples) / RATE)
        return next(self.texts)


def test_texts_of_all_sizes_of_sentences_that_are_held_out() -> None:
    texts = aloud.texts()
    sizes = {part: [t for t in texts if t.part == part] for part in {t.part for t in texts}}
    assert {p: len(found) for p, found in sizes.items()} == {
        "1": 120, "2": 20, "3": 13, "4": 10, "6": 6, "long": 1, "written": len(aloud.WRITTEN),
    }  # fmt: skip
    held_out = {*grammar.held_out_sentences()}
    assert {t.text for t in sizes["1"]} == held_out
    assert sizes["long"][0].text == " ".join(FIXED)
    for size in aloud.SIZES[1:]:
        assert sizes[str(size)][0].text == " ".join(grammar.held_out_sentences()[:size])


def test_words_are_compared_as_they_are_spoken() -> None:
    texts = [aloud.Text("written", "It costs $5.", 0), aloud.Text("1", "It was Dr. Brown.", 0)]
    waves = [np.zeros(RATE, np.float32)] * 2
    heard = Parrot(["It costs five dollars.", "It was Doctor Green."])
    assert aloud.rates(texts, waves, heard) == {"written": 0.0, "1": 0.25}


def test_long_speech_is_heard_in_windows() -> None:
    parrot = Parrot(["one two", "three", "four"])
    silence = np.zeros(int(2.5 * aloud.WINDOW_S * RATE), np.float32)
    assert aloud.hear(parrot, silence) == "one two three four"
    assert max(parrot.lengths) <= aloud.WINDOW_S
    assert sum(parrot.lengths) == 2.5 * aloud.WINDOW_S
