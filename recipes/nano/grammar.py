"""The recipe's text: questions with their one right answer, sentences to read aloud, and what is
held out of training.

All of it is drawn from our own templates, so that no third-party text is needed. An answer is a
function of the question alone; a model can therefore be scored by equality. What is held out: whole
sentences to repeat, and one in ten combinations of a way to ask and a thing asked for (both parts
are seen, never together). Called by `corpus.py`, `thinker.py` and `score.py`."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from random import Random

from recipes.nano.facts import CAPITALS, FACTS, OPPOSITES, TALK, entries, table
from recipes.nano.sentences import FIXED

HELD_OUT_SHARE = 10  # one in so many combinations


@dataclass(frozen=True, slots=True)
class Pair:
    kind: str
    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        return (
            zlib.crc32(plain(self.question).encode()) % HELD_OUT_SHARE == 0
            and self.kind in COMBINED
        )


COMBINED = frozenset(("sum", "count", "calendar", "opposite", "capital"))
"""Kinds made of a way to ask and a thing asked for; the other questions have no parts to combine
anew."""


def plain(text: str) -> str:
    """Words only, for comparisons."""
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


# ---- numbers, days, months

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
)


def number(n: int) -> str:
    if n < 0:
        return f"minus {number(-n)}"
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f" {ONES[n % 10]}" if n % 10 else "")
    return "one hundred" if n == 100 else f"one hundred and {number(n - 100)}"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


# ---- the closed domain

SUM_WAYS = (
    "What is {}?",
    "How much is {}?",
    "{}?",
    "What is {} equal to?",
    "Tell me what {} is",
    "Calculate {}",
)


def sums() -> list[tuple[int, str, int, int]]:
    """(left, sign, right, result) of everything the model is asked to work out."""
    found = [(a, "plus", b, a + b) for a in range(21) for b in range(21)]
    found += [(a, "minus", b, a - b) for a in range(21) for b in range(a + 1)]
    return found + [(a, "times", b, a * b) for a in range(11) for b in range(11)]


def _sums() -> list[Pair]:
    marks = {"plus": "+", "minus": "-", "times": "*"}
    pairs = []
    for a, sign, b, result in sums():
        answer = capital(f"{number(a)} {sign} {number(b)} is {number(result)}.")
        forms = (f"{number(a)} {sign} {number(b)}", f"{a} {sign} {b}", f"{a} {marks[sign]} {b}")
        for way in SUM_WAYS:
            pairs += [Pair("sum", capital(way.format(form)), answer) for form in forms]
    return pairs


def _counts() -> list[Pair]:
    pairs = []
    for low in range(1, 21):
        for high in range(low + 1, min(low + 10, 31)):
            up = capital(", ".join(number(n) for n in range(low, high + 1))) + "."
            down = capital(", ".join(number(n) for n in range(high, low - 1, -1))) + "."
            for a, b in ((str(low), str(high)), (number(low), number(high))):
                pairs += [
                    Pair("count", w.format(a, b), up)
                    for w in ("Count from {} to {}", "Count {} to {}")
                ]
                pairs.append(Pair("count", f"Count down from {b} to {a}", down))
                if low == 1:
                    pairs += [
                        Pair("count", w.format(b), up) for w in ("Count to {}", "Count up to {}")
                    ]
                    pairs.append(Pair("count", f"Count down from {b}", down))
    for n in range(1, 100):
        for form in (str(n), number(n)):
            after = f"After {number(n)} comes {number(n + 1)}."
            before = f"Before {number(n)} comes {number(n - 1)}."
            pairs += [
                Pair("count", w.format(form), after)
                for w in ("What comes after {}?", "What number follows {}?")
            ]
            pairs.append(Pair("count", f"What comes before {form}?", before))
    return pairs


def _calendar() -> list[Pair]:
    pairs = []
    for names, noun, unit in ((DAYS, "day", "week"), (MONTHS, "month", "year")):
        for i, name in enumerate(names):
            after, before = names[(i + 1) % len(names)], names[i - 1]
            for way in (
                "What {} comes after {}?",
                "Which {} follows {}?",
                "What is the {} after {}?",
            ):
                pairs.append(
                    Pair("calendar", way.format(noun, name), f"After {name} comes {after}.")
                )
            for way in (
                "What {} comes before {}?",
                "Which {} is before {}?",
                "What is the {} before {}?",
            ):
                pairs.append(
                    Pair("calendar", way.format(noun, name), f"Before {name} comes {before}.")
                )
            answer = f"The {ORDINALS[i]} {noun} of the {unit} is {name}."
            for way in (
                "What is the {} {} of the {}?",
                "Which is the {} {} of the {}?",
                "Name the {} {} of the {}",
            ):
                pairs.append(Pair("calendar", way.format(ORDINALS[i], noun, unit), answer))
    for name, days in zip(MONTHS, MONTH_DAYS, strict=True):
        for way in ("How many days are in {}?", "How many days does {} have?", "How long is {}?"):
            pairs.append(Pair("calendar", way.format(name), f"{name} has {number(days)} days."))
    for i, name in enumerate(DAYS):
        tomorrow, yesterday = DAYS[(i + 1) % 7], DAYS[i - 1]
        for way in ("Today is {}. What day is tomorrow?", "If today is {}, what is tomorrow?"):
            pairs.append(Pair("calendar", way.format(name), f"Tomorrow is {tomorrow}."))
        for way in ("Today is {}. What day was yesterday?", "If today is {}, what was yesterday?"):
            pairs.append(Pair("calendar", way.format(name), f"Yesterday was {yesterday}."))
    return pairs


def _opposites() -> list[Pair]:
    known: dict[str, str] = {}
    for a, b in table(OPPOSITES):
        known.setdefault(a, b)
        known.setdefault(b, a)
    ways = (
        "What is the opposite of {}?",
        "Opposite of {}",
        "Tell me the opposite of {}",
        "Give me the opposite of {}",
    )
    ways += ("What is the contrary of {}?", "Name the opposite of {}")
    return [
        Pair("opposite", w.format(a), f"The opposite of {a} is {b}.")
        for a, b in known.items()
        for w in ways
    ]


def _capitals() -> list[Pair]:
    ways = (
        "What is the capital of {}?",
        "Capital of {}",
        "Tell me the capital of {}",
        "Name the capital of {}",
    )
    ways += ("Which city is the capital of {}?",)
    return [
        Pair("capital", w.format(a), f"The capital of {a} is {b}.")
        for a, b in table(CAPITALS)
        for w in ways
    ]


@cache
def domain() -> tuple[Pair, ...]:
    """Every question of the closed domain, each with its answer."""
    pairs = [Pair("talk", q, answer) for asked, answer in entries(TALK) for q in asked]
    pairs += [Pair("fact", q, answer) for asked, answer in entries(FACTS) for q in asked]
    pairs += _sums() + _counts() + _calendar() + _opposites() + _capitals()
    return tuple(
        {plain(p.question) if p.kind != "sum" else p.question: p for p in reversed(pairs)}.values()
    )


@cache
def domain_kinds() -> dict[str, tuple[Pair, ...]]:
    kinds: dict[str, list[Pair]] = {}
    for pair in domain():
        kinds.setdefault(pair.kind, []).append(pair)
    return {kind: tuple(pairs) for kind, pairs in kinds.items()}


# ---- sentences to read


@cache
def words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The common words and the less common ones."""
    text = resources.files(__package__).joinpath("words.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    cut = lines.index("")
    return tuple(lines[:cut]), tuple(lines[cut + 1 :])


PEOPLE = """man woman boy girl child teacher doctor farmer driver writer king queen soldier student artist singer
painter baker judge lawyer nurse sailor captain neighbor friend brother sister mother father uncle aunt cousin baby
grandmother guest stranger visitor player worker engineer scientist cook hunter fisherman shepherd gardener""".split()
THINGS = """book letter table chair window door house garden river bridge mountain road car train boat ship plane basket
bottle cup plate knife spoon box bag coat hat shoe shirt lamp clock mirror picture paper pencil pen key coin ring stone
tree flower leaf apple orange lemon cake loaf egg fish bird dog cat horse cow sheep mouse bell drum piano violin guitar
ball kite rope ladder wheel engine machine computer telephone camera map flag tent blanket pillow candle
bucket""".split()
PLACES = """bridge garden kitchen village city market school station harbor island forest field hill mountain river lake
beach street road corner tower castle church library museum theater hotel office factory farm house room hall yard
desert valley coast shore platform airport hospital park square""".split()
ADJECTIVES = """old young small big little large tall short heavy light dark bright red blue green yellow white black
brown gray golden silver wooden broken empty full clean dirty new fresh cold warm hot soft hard sharp round narrow wide
long quiet loud happy sad angry tired hungry clever brave lazy quick slow strange simple famous beautiful gentle rich
poor strong weak kind honest polite proud curious careful nervous lonely lovely huge tiny""".split()
PAST = """carried found bought sold painted cleaned lost opened closed watched pushed pulled moved broke fixed dropped
threw caught washed showed sent brought gave took saw heard wanted needed loved used made held left kept forgot
remembered borrowed counted covered touched followed""".split()
WENT = """walked ran went came drove traveled hurried returned wandered moved stood waited sat slept played worked
lived stayed""".split()
ADVERBS = """slowly quickly quietly softly carefully suddenly happily gently loudly early late again together alone
yesterday today often always never twice once soon finally""".split()
TIMES = """in the morning|in the evening|at night|at noon|every day|every summer|last winter|on Sunday|before sunrise
|after the storm|for many years|all day long|this afternoon|in the spring|after dinner|before breakfast""".replace(
    "\n", ""
).split("|")
PREPOSITIONS = "across near behind beside in at from to toward around through outside under".split()
ANIMALS = "dogs cats birds horses cows sheep mice children boys girls sailors farmers people students".split()
VERBS = "like love need want see hear find eat watch follow remember know fear".split()
STUFF = """milk bread butter cheese honey rice soup tea coffee water sugar salt fruit meat corn music rain snow sun
wind""".split()

PATTERNS = (
    "The {a} {p} {v} a {a} {t} {r} the {l}.",
    "The {p} {v} the {a} {t}.",
    "{S} {v} a {a} {t} {r} the {a} {l}.",
    "{S} {w} {d} {r} the {l}.",
    "The {p} and the {p} {w} {r} the {l} {m}.",
    "{S} {v} {n} {t}s and a {t}.",
    "The {a} {t} is {r} the {l}.",
    "My {p} {v} the {t} {m}.",
    "We {w} {r} the {l} {m}.",
    "Put the {a} {t} on the {a} {t}.",
    "Please bring me the {a} {t}.",
    "There was a {a} {t} {r} the {l}.",
    "Her {p} was {a} but the {p} was {a}.",
    "The {l} is {a} and {a} {m}.",
    "Can you see the {a} {t} {r} the {l}?",
    "{U} {y} {f} and {f}.",
    "I {y} {f} with a little {f}.",
    "They {v} the {t} and {w} {d} {r} the {l}.",
    "The {f} was {a}, and the {p} {v} it {m}.",
    "Did the {p} {y} the {a} {t}?",
    "His {p} never {v} a {t} {r} the {l}.",
    "When the {p} {w} {r} the {l}, the {f} was {a}.",
    "{N} {a} {t}s were {r} the {l}.",
    "A {a} {p} {w} {r} the {l} {d}.",
    "Do not {y} the {a} {p}.",
    "I think the {p} {v} your {t}.",
)


def sentence(rng: Random) -> str:
    """An ordinary sentence of our own grammar."""
    lists = {
        "p": PEOPLE, "t": THINGS, "l": PLACES, "a": ADJECTIVES, "v": PAST, "w": WENT, "d": ADVERBS,
        "m": TIMES,
        "r": PREPOSITIONS, "y": VERBS, "f": STUFF, "n": ONES[2:13], "S": ("He", "She", "They", "We",
        "I", "Someone"),
        "N": [capital(n) for n in ONES[2:13]], "U": [capital(a) for a in ANIMALS],
    }  # fmt: skip
    text = re.sub(r"\{(\w)\}", lambda m: rng.choice(lists[m.group(1)]), rng.choice(PATTERNS))
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def salad(rng: Random, low: int = 3, high: int = 12) -> str:
    """Common words in no order, so that every word is heard in many places."""
    common, rare = words()
    picked = [
        rng.choice(common if rng.random() < 0.65 else rare) for _ in range(rng.randint(low, high))
    ]
    if len(picked) > 5 and rng.random() < 0.4:
        picked[len(picked) // 2 - 1] += ","
    return capital(" ".join(picked)) + rng.choice("....?!")


def mixture(rng: Random) -> str:
    """A sentence of the grammar with some of its words replaced by any common ones."""
    common, rare = words()
    parts = sentence(rng).split(" ")
    for i, part in enumerate(parts[1:], start=1):
        if part.isalpha() and len(part) > 3 and rng.random() < 0.5:
            parts[i] = rng.choice(common if rng.random() < 0.65 else rare)
    return re.sub(r"\b([Aa])n? (?=[aeiou])", r"\1n ", " ".join(parts))


@cache
def held_out_sentences() -> tuple[str, ...]:
    """40 sentences of the grammar that training never sees."""
    rng = Random("held out")
    found: list[str] = []
    while len(found) < 40:
        text = sentence(rng) if len(found) % 4 else mixture(rng)
        if 5 <= len(text.split()) <= 12 and text not in found:
            found.append(text)
    return tuple(found)


@cache
def _never_spoken() -> frozenset[str]:
    return frozenset(plain(s) for s in (*FIXED, *held_out_sentences()))


def reading(rng: Random, kinds: tuple[int, int, int] = (40, 25, 35)) -> str:
    """A sentence to be read aloud, never a held-out one; how often it is of the grammar, mixed,
    random words."""
    while True:
        text = rng.choices((sentence, mixture, salad), kinds)[0](rng)
        if plain(text) not in _never_spoken():
            return text


# ---- what a user may type

SAY_WAYS = (
    "Say {}", "Say: {}", "Please say {}", "Please say: {}", "Repeat {}", "Repeat: {}",
    "Repeat after me: {}",
    "Please repeat: {}", "Please repeat after me: {}", "Read this aloud: {}", "Read aloud: {}",
    "Read: {}",
    'Say "{}"', 'Repeat "{}"', 'Please read this: "{}"', "Can you say: {}", "Speak: {}",
    "Say the words {}",
    "Say this sentence: {}", "Read this sentence: {}",
)  # fmt: skip
UNKNOWN_WAYS = (
    "What is the {t} of the {l}?", "Why is the {t} {a}?", "Who is the {p} of {x}?",
    "How do I fix a {t}?",
    "Who invented the {t}?", "What do you think about {x}?", "Write a poem about the {t}",
    "Explain {x} to me",
    "Where can I buy a {a} {t}?", "When was the {t} made?", "Why does the {p} {y} the {t}?",
    "Translate {x} into French",
    "Tell me about {x}", "What is {x}?", "How does a {t} work?", "Which {t} is the best?",
    "Is {x} {a}?",
    "Write a program that finds the {t}", "Give me advice about {x} and {x}", "What happened to "
                                                                              "the {p} in the {l}?",
    "How far is the {l}?", "Do you know the {a} {p}?", "Should I {y} the {t}?",
    "What should I do with my {t}?",
    "Summarize the {t} for me", "How can I become a {p}?", "Who won the {x}?", "How much does a "
                                                                               "{t} cost?",
    "{X}", "{X} {x}", "What is the meaning of {x}?", "Send a letter to my {p}",
    "Plan a trip to the {l}",
)  # fmt: skip
REFUSAL = "I am sorry, I am too small to know that."
SYSTEMS = (
    "You are a helpful assistant.", "You are Nano, a small model that speaks.", "Answer briefly.",
    "You are a friendly voice assistant. Keep your answers short.",
)  # fmt: skip


def say(rng: Random, text: str | None = None) -> Pair:
    """To repeat something, word for word as it was written."""
    words_ = text or reading(rng)
    if text is None and rng.random() < 0.4:
        words_ = words_.rstrip(".!?")
        if rng.random() < 0.8:
            words_ = words_ if words_.startswith("I ") else words_[0].lower() + words_[1:]
    if text is None and rng.random() < 0.15:
        words_ = " ".join(words_.split()[: rng.randint(1, 3)]).rstrip(",")
    return Pair("say", rng.choice(SAY_WAYS).format(words_), words_)


@cache
def _known() -> frozenset[str]:
    return frozenset(plain(p.question) for p in domain())


def unknown(rng: Random) -> Pair:
    """A question outside the domain, to be declined."""
    lists = {"t": THINGS, "l": PLACES, "a": ADJECTIVES, "p": PEOPLE, "y": VERBS}
    while True:

        def fill(m: re.Match[str]) -> str:
            if m.group(1) in "xX":
                word = " ".join(
                    rng.choice(words()[rng.random() < 0.4]) for _ in range(rng.randint(1, 3))
                )
                return capital(word) if m.group(1) == "X" else word
            return rng.choice(lists[m.group(1)])

        question = re.sub(r"\{(\w)\}", fill, rng.choice(UNKNOWN_WAYS))
        if plain(question) not in _known():
            return Pair("unknown", question, REFUSAL)


def typed(rng: Random, question: str) -> str:
    """The question as someone may type it: without capitals, marks, or with a please."""
    if rng.random() < 0.25:
        question = question.rstrip("?")
    if rng.random() < 0.25:
        question = question[0].lower() + question[1:] if not question.startswith("I ") else question
    return question


def pair(rng: Random) -> Pair:
    """One training example of the thinker."""
    kind = rng.choices(("say", "unknown", "sum", "count", "calendar", "opposite", "capital", "talk",
        "fact"),
                       (34, 10, 16, 7, 6, 6, 3, 10, 8))[0]  # fmt: skip
    if kind == "say":
        return say(rng)
    if kind == "unknown":
        found = unknown(rng)
    else:
        found = rng.choice(domain_kinds()[kind])
        while found.held_out:
            found = rng.choice(domain_kinds()[kind])
    return Pair(found.kind, typed(rng, found.question), found.answer)
