"""English text as words: what is written out, and what never comes out."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.nano import grammar
from recipes.nano.sentences import FIXED
from stretto.preprocess.english import as_words, cardinal, ordinal, year

SPOKEN = {
    "Dr. Smith paid $1,234.56 on Jan. 5, 2024.": "Doctor Smith paid one thousand two hundred and "
    "thirty four dollars and fifty six cents on January fifth, twenty twenty four.",
    "At 3:45 p.m. He left at 15:30.": "At three forty five pee em. He left at fifteen thirty.",
    "It's 9:00, or 3pm.": "It's nine o'clock, or three pee em.",
    "See https://www.example.com/foo-bar?x=1.": "See example dot com slash foo dash bar question "
    "mark x equals one.",
    "Mail john.doe@example.co.uk!": "Mail john dot doe at example dot co dot you kay!",
    "£5, €3.50, $0.99, $3 million, 20 EUR": "five pounds, three euros and fifty cents, ninety nine "
    "cents, three million dollars, twenty euros",
    "$1 and 1 km": "one dollar and one kilometer",
    "3 km, 20°C, 60 mph, 16 GB and 5.5%": "three kilometers, twenty degrees Celsius, sixty miles "
    "per hour, sixteen gigabytes and five point five percent",
    "In 1999, the 1990s, the '90s, 2005.": "In nineteen ninety nine, the nineteen nineties, the "
    "nineties, two thousand and five.",
    "the 21st, the 2nd, No. 5, #1": "the twenty first, the second, number five, number one",
    "2024-01-31, 12/25/2024, 31.12.2023": "January thirty first, twenty twenty four, December "
    "twenty fifth, twenty twenty four, December thirty first, twenty twenty three",
    "5 May 2020 and March 3rd": "May fifth, twenty twenty and March third",
    "1/2, 2 1/2, ¾, 24/7": "one half, two and one half, three quarters, twenty four seven",
    "-5 degrees, 10-20 people, v1.2.3": "minus five degrees, ten to twenty people, v one point two "
    "point three",
    "555-1234": "five five five, one two three four",
    "007 and 3.14": "zero zero seven and three point one four",
    "5 + 3 = 8 & 4 × 2": "five plus three equals eight and four times two",
    "The USA, the UK and NASA. OK?": "The you ess ay, the you kay and nasa. okay?",
    "THE END OF THE WORLD": "the end of the world",
    "Mr. and Mrs. Jones live in Main St. They paint.": "Mister and Missus Jones live in Main "
    "Street. They paint.",
    "e.g. apples, etc. Then more etc.": "for example apples, and so on. Then more and so on.",
    "No. I don't.": "No. I don't.",
    "Café “résumé” — naïve…": "Cafe resume, naive.",
    "Wait... what?!": "Wait, what?",
    "# Title": "Title",
    "- **bold** item (really)": "bold item, really",
    "he/she": "he or she",
    "😀 你好": "",
}


@pytest.mark.parametrize("text", SPOKEN)
def test_what_is_written_out(text: str) -> None:
    assert as_words(text) == SPOKEN[text]
    assert as_words(SPOKEN[text]) == SPOKEN[text]


def test_plain_sentences_stay_as_they_are() -> None:
    for text in (*FIXED, *grammar.held_out_sentences(), "It's Tom's, isn't it? I don't know!"):
        assert as_words(text) == text


@given(st.text(max_size=200) | st.text("0123456789.,:/-$%@# aAmMx'", max_size=60))
def test_nothing_but_words_comes_out(text: str) -> None:
    assert re.fullmatch(r"([A-Za-z'][A-Za-z .,?!']*)?", as_words(text))


def test_numbers() -> None:
    assert cardinal(0) == "zero"
    assert cardinal(1_000_005) == "one million and five"
    assert cardinal(12_345) == "twelve thousand three hundred and forty five"
    assert cardinal(10**15).startswith("one zero zero")
    assert [ordinal(n) for n in (1, 12, 20, 40, 100)] == [
        "first", "twelfth", "twentieth", "fortieth", "one hundredth",
    ]  # fmt: skip
    assert [year(n) for n in (1066, 1500, 1905, 2000, 2009, 2024)] == [
        "one thousand and sixty six", "fifteen hundred", "nineteen oh five", "two thousand",
        "two thousand and nine", "twenty twenty four",
    ]  # fmt: skip
    assert all(cardinal(n) == grammar.number(n) for n in range(200))
