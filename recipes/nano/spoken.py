"""What people say to a microphone besides the domain's questions: sentences, the domain's own
answers, two things in one breath, and what somebody says who tries a voice assistant.

All of it is to be written down only: a pair without an answer. Called by `voices.py`."""

from __future__ import annotations

import re
from functools import cache
from random import Random

from recipes.nano import grammar
from recipes.nano.grammar import Pair

LONGEST = 14  # words
TRIED = """What's the weather like today?|What is the weather in {c}?|Will it rain {w}?|Is it cold outside {w}?
Is it going to be sunny in {c} {w}?|How warm is it in {c}?|Do I need an umbrella {w}?|What time is it in {c}?
Set a timer for {n} minutes.|Set an alarm for {n} in the morning.|Wake me up at {n}.|Play some music.|Play a song for me.
Turn on the light in the {l}.|Turn off the light.|Open the {t}, please.|Call my {p}.|Send a message to my {p}.
Remind me to call my {p} {w}.|Remind me to buy {f} and {f}.|What is the news today?|Tell me the news.
Who is the president of {k}?|How many people live in {c}?|Where is {c}?|How far is it from {c} to {c}?
What language do they speak in {k}?|Do you speak French?|Testing, one, two, three.|One, two, three, four, five.
Hello, can you hear me?|Hello, is anybody there?|Hey, are you there?|What do you think?|I have a question.
Can I ask you something?|I would like to ask you a question.|Can you help me with something?|Please repeat that.
Can you say that again?|I did not understand that.|Speak more slowly, please.|Wait a moment, please.|Stop.|Stop talking.
Go on.|Continue, please.|That is not what I asked.|That's right.|Really?|Why?|Why not?|I don't know.|I do not think so.
I like your voice.|You have a nice voice.|My name is {g}.|Hello, my name is {g}.|I am {g}, and I live in {c}.|I live in {c}.
My favorite color is {o}.|Do you like {f}?|I like {f} and {f}.|What should I eat for dinner?|What should I wear today?
Tell me something about {k}.|Tell me something about {c}.|Tell me a story about a {a} {p}.|Write a poem about the {t}.
Let's talk about {k}.|I want to learn English.|How do you spell {t}?|Can you count to {n}?|What is {n} times {n} plus {n}?
The quick brown fox jumps over the lazy dog.|This is a test.|This is only a test of the microphone.
I am testing the microphone.|What did I say?|What did you say?|Can you write down what I say?|Write this down, please.
How long does it take to get to {c}?|When does the train leave?|Book a table for {n} people.|I need a {t} for {w}.
Add {f} to my shopping list.|What's on my calendar {w}?|Good morning, Nano.|Hello, Nano.|Okay, Nano, tell me a joke.
Thanks, that is all for now.|See you {w}.|Have a nice day.|What's up?|What's your name?|Who's there?|Where's my {t}?
What's seven plus eight?|What's the capital of {k}?|What's the opposite of {a}?|How old is the {p}?"""
NAMES = """Anna Ben Carla David Emma Frank George Hannah Jack Julia Kate Laura Mary Martin Nora Oliver Paul Peter Robert
Sarah Sophie Susan Thomas Tom William""".split()
COLORS = "red blue green yellow white black brown orange purple gray pink".split()
WHEN = "today|tomorrow|tonight|this evening|this afternoon|on Monday|on Friday|next week".split("|")
FIRST = (
    "Hello.",
    "Hi.",
    "Okay.",
    "Thank you.",
    "Please tell me.",
    "Hello, Nano.",
    "And now:",
    "No.",
    "Yes.",
)
ANSWERED = ("sum", "count", "calendar", "opposite", "capital", "talk", "fact")  # of the domain
KINDS = {"sentence": 12, "reply": 8, "tried": 12, "both": 8}


@cache
def _places() -> tuple[list[str], list[str]]:
    """Countries and their capitals."""
    known = [(p.question, p.answer) for p in grammar.domain_kinds()["capital"]]
    found = [re.match(r"The capital of (.+) is (.+)\.", answer) for _, answer in known]
    pairs = sorted({m.groups() for m in found if m is not None})
    return [a for a, _ in pairs], [b for _, b in pairs]


def tried(rng: Random) -> str:
    countries, cities = _places()
    lists = {
        "a": grammar.ADJECTIVES, "c": cities, "f": grammar.STUFF, "g": NAMES, "k": countries,
        "l": grammar.PLACES, "n": grammar.ONES[2:], "o": COLORS, "p": grammar.PEOPLE,
        "t": grammar.THINGS, "w": WHEN,
    }  # fmt: skip
    template = rng.choice(TRIED.replace("\n", "|").split("|"))
    text = re.sub(r"\{(\w)\}", lambda m: rng.choice(lists[m.group(1)]), template)
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def _either(rng: Random) -> Pair:
    """A question or answer of the domain that training may hear."""
    while True:
        found = rng.choice(grammar.domain_kinds()[rng.choice(ANSWERED)])
        if not found.held_out:
            return found


def _both(rng: Random) -> str:
    """Two things in one breath."""
    first = rng.choice(FIRST) if rng.random() < 0.5 else _either(rng).question
    first = first if first[-1] in ".?!:" else f"{first}."
    return f"{first} {_either(rng).question}"


def remark(rng: Random) -> Pair:
    """Something to be written down."""
    while True:
        kind = rng.choices([*KINDS], [*KINDS.values()])[0]
        if kind == "sentence":
            text = grammar.reading(rng, (60, 25, 15))
        elif kind == "reply":
            text = _either(rng).answer
        else:
            text = tried(rng) if kind == "tried" else _both(rng)
        if len(text.split()) <= LONGEST:
            return Pair(kind, text, "")
