"""English text as words: numbers, money, dates, times, units, abbreviations, addresses and signs
are written out, for models that have learned to read words and nothing else. What comes out has
letters, spaces and `. , ? ! '`. Pure functions, called where prompts are built; imports no torch.

`as_words` applies rules in order; a rule is a pattern and what a match becomes. What is ambiguous
is read one way: 1763 as a year, 3/4/2024 with the month first, 0.5 digit by digit."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from re import Match

ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"))
LARGEST = 10**15
"""Numbers from here on are read digit by digit."""
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
            "nine": "ninth", "twelve": "twelfth"}  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
LETTERS = {
    "a": "ay", "b": "bee", "c": "see", "d": "dee", "e": "ee", "f": "ef", "g": "gee", "h": "aitch",
    "i": "eye", "j": "jay", "k": "kay", "l": "el", "m": "em", "n": "en", "o": "oh", "p": "pee",
    "q": "cue", "r": "are", "s": "ess", "t": "tea", "u": "you", "v": "vee", "w": "double you",
    "x": "ex", "y": "why", "z": "zee",
}  # fmt: skip
MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent"),
         "¥": ("yen", ""), "₹": ("rupee", "")}  # fmt: skip
CODES = {"USD": "$", "GBP": "£", "EUR": "€", "JPY": "¥", "INR": "₹"}
FRACTIONS = {"½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3", "⅛": "1/8"}
UNITS = {
    "km": "kilometer", "cm": "centimeter", "mm": "millimeter", "m": "meter", "kg": "kilogram",
    "g": "gram", "mg": "milligram", "lb": "pound", "lbs": "pound", "oz": "ounce", "ft": "foot",
    "mi": "mile", "l": "liter", "L": "liter", "ml": "milliliter", "mL": "milliliter",
    "TB": "terabyte", "GB": "gigabyte", "MB": "megabyte", "KB": "kilobyte", "kB": "kilobyte",
    "GHz": "gigahertz", "MHz": "megahertz", "kHz": "kilohertz", "Hz": "hertz", "kW": "kilowatt",
    "kWh": "kilowatt hour", "W": "watt", "V": "volt", "ms": "millisecond", "s": "second",
    "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "°": "degree",
}  # fmt: skip
RATES = {"mph": "miles per hour", "km/h": "kilometers per hour", "kph": "kilometers per hour",
         "m/s": "meters per second", "°C": "degrees Celsius", "°F": "degrees Fahrenheit",
         "%": "percent", "‰": "per mille"}  # fmt: skip
TITLES = {
    "Mr": "Mister", "Mrs": "Missus", "Ms": "Miss", "Dr": "Doctor", "Prof": "Professor",
    "St": "Saint", "Gen": "General", "Capt": "Captain", "Lt": "Lieutenant", "Col": "Colonel",
    "Sgt": "Sergeant", "Gov": "Governor", "Sen": "Senator", "Rep": "Representative",
    "Rev": "Reverend", "vs": "versus", "e.g": "for example", "i.e": "that is", "approx": "about",
    "Fig": "Figure", "fig": "figure", "vol": "volume", "Vol": "Volume",
}  # fmt: skip
"""Abbreviations that stand before something: their full stop ends no sentence."""
ABBREVIATIONS = TITLES | {
    "Jr": "Junior", "Sr": "Senior", "etc": "and so on", "Inc": "Incorporated", "Ltd": "Limited",
    "Corp": "Corporation", "Co": "Company", "dept": "department", "Dept": "Department",
    "Ave": "Avenue", "Rd": "Road", "Blvd": "Boulevard", "Mon": "Monday", "Tue": "Tuesday",
    "Tues": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Thurs": "Thursday",
    "Fri": "Friday", "Sept": "September",
    **{month[:3]: month for month in MONTHS if month != "May"},
}  # fmt: skip
"""Abbreviations, which have a full stop behind them."""
SIGNS = {
    "&": "and", "+": "plus", "=": "equals", "@": "at", "%": "percent", "#": "number", "×": "times",
    "÷": "divided by", "±": "plus or minus", "<": "less than", ">": "greater than", "≈": "about",
    "~": "about", "→": "to", "°": "degrees", "$": "dollars", "£": "pounds", "€": "euros",
    "−": "minus", "§": "section", "µ": "micro", "π": "pie",
}  # fmt: skip
IN_ADDRESSES = {".": "dot", "/": "slash", "-": "dash", "_": "underscore", "@": "at", ":": "colon",
                "?": "question mark", "=": "equals", "&": "and", "#": "hash", "+": "plus",
                "~": "tilde", "%": "percent"}  # fmt: skip
SPOKEN = {"OK": "okay", "ok": "okay", "NASA": "nasa", "NATO": "nato", "AIDS": "aids", "RAM": "ram",
          "ROM": "rom", "LAN": "lan", "PIN": "pin", "UNESCO": "unesco", "UNICEF": "unicef",
          "COVID": "covid", "ASAP": "ay sap", "GIF": "gif", "JPEG": "jay peg", "THE": "the",
          "hmm": "hm", "shh": "sh", "km": "kilometers", "kg": "kilograms", "cm": "centimeters",
          "mm": "millimeters", "mph": "miles per hour", "nth": "enth"}  # fmt: skip
"""Words that would be spelled letter by letter otherwise, or not be understood."""
SPELLED = ("io", "ai", "uk", "eu", "us", "tv", "de", "fr", "ca", "au", "ui", "ux", "id")
"""Parts of addresses that are spelled letter by letter."""

NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_MONTH = rf"(?:{'|'.join(f'{m}|{m[:3]}' for m in MONTHS)}|Sept)"
_SCALED = {"k": "thousand", "m": "million", "b": "billion", "bn": "billion"}
_WORDS_OF_SCALE = "hundred|thousand|million|billion|trillion"
_HOST = r"(?:[\w-]+\.)+(?:com|org|net|edu|gov|io|dev|ai|app|co|info|uk|de|eu|fr|us|tv)"


# ---- numbers


def cardinal(n: int) -> str:
    if n >= LARGEST:
        return digits(str(n))
    for size, name in SCALES:
        if n >= size:
            rest = n % size
            joint = " and " if 0 < rest < 100 else " "
            return f"{cardinal(n // size)} {name}" + (joint + cardinal(rest) if rest else "")
    if n >= 100:
        return f"{ONES[n // 100]} hundred" + (f" and {cardinal(n % 100)}" if n % 100 else "")
    if n >= 20:
        return TENS[n // 10 - 2] + (f" {ONES[n % 10]}" if n % 10 else "")
    return ONES[n]


def ordinal(n: int) -> str:
    head, _, last = f" {cardinal(n)}".rpartition(" ")
    if last.endswith("y"):
        last = last[:-1] + "ie"
    return f"{head} {ORDINALS.get(last, last + 'th')}".strip()


def year(n: int) -> str:
    """A year in words; also another number of four digits, since pairs of digits are short."""
    if not 1100 <= n <= 2099 or 2000 <= n <= 2009:
        return cardinal(n)
    last = n % 100
    if not last:
        return f"{cardinal(n // 100)} hundred"
    return f"{cardinal(n // 100)} {'oh ' if last < 10 else ''}{cardinal(last)}"


def digits(text: str) -> str:
    return " ".join(ONES[int(d)] for d in text if d.isdigit())


def number(text: str) -> str:
    """As it is written, with commas and a decimal point or without."""
    whole, point, rest = text.partition(".")
    plain = whole.replace(",", "")
    if point:
        return f"{cardinal(int(plain))} point {digits(rest)}"
    if len(plain) > 1 and plain.startswith("0"):
        return digits(plain)
    return year(int(plain)) if len(whole) == 4 else cardinal(int(plain))


def plural(word: str) -> str:
    irregular = {"foot": "feet", "penny": "pence", "yen": "yen", "half": "halves"}
    if word in irregular:
        return irregular[word]
    return word if word.endswith("hertz") else f"{word[:-1]}ies" if word[-1] == "y" else f"{word}s"


def counted(text: str, noun: str) -> str:
    return f"{number(text)} {noun if text == '1' else plural(noun)}"


# ---- rules


def _decade(m: Match[str]) -> str:
    head, _, last = f" {year(int(m[1]))}".rpartition(" ")
    return f"{head} {plural(last)}".strip()


def _date(month: str, day: str, year_: str | None) -> str:
    name = next(full for full in MONTHS if full.startswith(month[:3]))
    return f"{name} {ordinal(int(day))}" + (f", {year(int(year_))}" if year_ else "")


def _numbered(m: Match[str], order: str) -> str:
    """A date in digits, whose numbers come in this order."""
    parts = dict(zip(order, m.groups(), strict=True))
    month, day = int(parts["m"]), int(parts["d"])
    if month > 12:
        month, day = day, month
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return " ".join(number(n) for n in m.groups())
    written = int(parts["y"])
    full = written + (0 if written > 99 else 2000 if written < 70 else 1900)
    return _date(MONTHS[month - 1], str(day), str(full))


def _time(m: Match[str]) -> str:
    hour, minute, half = int(m[1]), int(m[2]), m[3]
    if minute:
        spoken = f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    elif half or not 0 < hour <= 12:
        spoken = cardinal(hour) + ("" if half else " hundred")
    else:
        spoken = f"{cardinal(hour)} o'clock"
    return f"{spoken} {spell(half[0] + 'm')}" if half else spoken


def _money(m: Match[str]) -> str:
    return money(m["sign"], m["amount"], m["scale"] or _SCALED.get((m["k"] or "").lower()))


def money(sign: str, amount: str, scale: str | None = None) -> str:
    unit, small = MONEY[CODES.get(sign, sign)]
    if scale:
        return f"{number(amount)} {scale} {plural(unit)}"
    whole, point, rest = amount.partition(".")
    if not point or not small:
        return counted(amount, unit)
    cents = counted(str(int(rest.ljust(2, "0")[:2])), small)
    if not int(rest):
        return counted(whole, unit)
    return cents if whole == "0" else f"{counted(whole, unit)} and {cents}"


def _fraction(m: Match[str]) -> str:
    whole, top, bottom = m[1], int(m[2]), int(m[3])
    if not 0 < top < bottom <= 20:
        joint = " " if (top, bottom) == (24, 7) else " over "
        return f"{whole or ''} {number(m[2])}{joint}{number(m[3])}"
    part = {2: "half", 4: "quarter"}.get(bottom) or ordinal(bottom)
    parts = part if top == 1 else plural(part)
    return (f"{number(whole)} and " if whole else "") + f"{cardinal(top)} {parts}"


def _measure(m: Match[str]) -> str:
    return f"{number(m[1])} {RATES[m[2]]}" if m[2] in RATES else counted(m[1], UNITS[m[2]])


def _phone(m: Match[str]) -> str:
    return ", ".join(digits(group) for group in re.findall(r"\d+", m[0]))


def _address(m: Match[str]) -> str:
    """An address of a page or of mail in words, without its scheme."""
    text = re.sub(r"^(?:\w+://|mailto:)?(?:www\.)?", "", m[0])
    tail = re.search(r"[.,!?;:)'\"]*$", text)
    end = tail[0] if tail else ""
    parts = re.findall(r"[A-Za-z]+|\d+|[^\w]|_", text.removesuffix(end).rstrip("/"))
    return " ".join(_in_address(part) for part in parts if part.strip()) + end


def _in_address(part: str) -> str:
    if part.isdigit():
        return number(part) if len(part) < 5 else digits(part)
    if part.lower() in SPELLED:
        return spell(part)
    return IN_ADDRESSES.get(part, part if part.isalpha() else "")


def _ends_sentence(m: Match[str]) -> bool:
    """Whether a full stop at the end of a match is that of its sentence too."""
    return re.match(r"\s+[A-Z]|\s*$", m.string[m.end() :]) is not None


def _abbreviation(m: Match[str]) -> str:
    street = m[1] == "St" and re.search(r"[A-Za-z] $", m.string[: m.start()]) is not None
    if m[1] in TITLES and not street:
        return TITLES[m[1]]
    return ("Street" if street else ABBREVIATIONS[m[1]]) + ("." if _ends_sentence(m) else "")


def _initials(m: Match[str]) -> str:
    return m[0].replace(".", "").upper() + ("." if _ends_sentence(m) else "")


def spell(letters: str) -> str:
    return " ".join(LETTERS[c] for c in letters.lower())


def _capitals(m: Match[str]) -> str:
    """A word in capitals: its letters, or a word."""
    word, many = m[1], m[2]
    if word in SPOKEN:
        return SPOKEN[word] + many
    if len(word) > 5 or (len(word) > 3 and re.search("[AEIOU]", word[1:-1])):
        return word.capitalize() + many
    return spell(word) + many


def _letters(m: Match[str]) -> str:
    """A word without a vowel."""
    return SPOKEN.get(m[0]) or spell(m[0])


def _quiet_capitals(text: str) -> str:
    """A text in capitals throughout is not made of abbreviations."""
    words = re.findall(r"[A-Za-z]{2,}", text)
    if len(words) > 2 and sum(map(str.isupper, words)) > 0.8 * len(words):
        return re.sub(r"[A-Z]{2,}", lambda m: m[0].lower(), text)
    return text


Rule = tuple[re.Pattern[str], Callable[[Match[str]], str]]


def _rule(pattern: str, made: Callable[[Match[str]], str]) -> Rule:
    return re.compile(pattern, re.ASCII), made


_ALL_UNITS = "|".join(map(re.escape, sorted({**UNITS, **RATES}, key=len, reverse=True)))
_ABBREVIATED = "|".join(map(re.escape, sorted(ABBREVIATIONS, key=len, reverse=True)))
RULES: tuple[Rule, ...] = (
    _rule(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", _address),
    _rule(rf"(?:https?://|ftp://|www\.)\S+|\b{_HOST}\b(?:[/?#]\S*)?", _address),
    _rule(r"[*_`|\\^{}]+", lambda m: " "),
    _rule(r"(?<!\w)#(?=[A-Za-z])", lambda m: "hashtag "),
    _rule(r"(?m)^\s*(?:[-•*#>]+|\d{1,2}[.)])\s+", lambda m: ""),
    # dates and times
    _rule(r"\b(\d{4})-(\d\d?)-(\d\d?)\b", lambda m: _numbered(m, "ymd")),
    _rule(r"\b(\d\d?)/(\d\d?)/(\d{4}|\d\d)\b", lambda m: _numbered(m, "mdy")),
    _rule(r"\b(\d\d?)\.(\d\d?)\.(\d{4})\b", lambda m: _numbered(m, "dmy")),
    _rule(rf"\b({_MONTH})\.? (\d\d?)(?:st|nd|rd|th)?\b(?:,? (\d{{4}})\b)?",
          lambda m: _date(m[1], m[2], m[3])),
    _rule(rf"\b(\d\d?)(?:st|nd|rd|th)? ({_MONTH})\b\.?(?:,? (\d{{4}})\b)?",
          lambda m: _date(m[2], m[1], m[3])),
    _rule(r"(?i)\b(\d\d?):([0-5]\d)(?::[0-5]\d)?\b(?: ?\b([ap]\.?m)\b(?:\.(?!\s+[A-Z]|\s*$))?)?",
          _time),
    _rule(r"(?i)\b(\d\d?) ?([ap])\.?m\b(?:\.(?!\s+[A-Z]|\s*$))?",
          lambda m: f"{cardinal(int(m[1]))} {spell(m[2] + 'm')}"),
    _rule(r"\b(\d{4})s\b", _decade),
    _rule(r"'?\b(\d0)s\b", lambda m: plural(cardinal(int(m[1])))),
    # money, units
    _rule(rf"(?P<sign>[$£€¥₹]) ?(?P<amount>{NUMBER})"
          rf"(?: ?(?P<scale>{_WORDS_OF_SCALE})\b| ?(?P<k>k|K|M|m|bn|B)\b)?", _money),
    _rule(rf"({NUMBER}) ?([$£€¥₹]|\b(?:{'|'.join(CODES)})\b)", lambda m: money(m[2], m[1])),
    _rule(rf"(?<![\w.])({NUMBER}) ?({_ALL_UNITS})(?![\w/])", _measure),
    # abbreviations
    _rule(r"\b(?:No|Nr)\. ?(?=\d)", lambda m: "number "),
    _rule(rf"\b({_ABBREVIATED})\.(?!\w)", _abbreviation),
    _rule(r"\b(?:[A-Za-z]\.){2,}", _initials),
    # numbers
    _rule(r"(?:\+\d{1,3}[ -])?(?:\(\d{3}\) ?|\b\d{3}[-. ])\d{3}[-. ]\d{4}\b|\b\d{3}-\d{4}\b",
          _phone),
    _rule(r"\b(\d+)(?:st|nd|rd|th)\b", lambda m: ordinal(int(m[1]))),
    _rule(r"(?:\b(\d+) )?\b(\d{1,4})/(\d{1,4})\b", _fraction),
    _rule(r"(?<![\d.])\d+(?:\.\d+){2,}\b",
          lambda m: f" {' point '.join(number(part) for part in m[0].split('.'))} "),
    _rule(rf"({NUMBER}) ?[-–—] ?(?={NUMBER})", lambda m: f"{m[1]} to "),
    _rule(r"(?<![\w.])[-−](?=\d)", lambda m: "minus "),
    _rule(r"(?<=\d) ?[x×*] ?(?=\d)|(?<=\d)x\b", lambda m: " times "),
    _rule(r"#(?=\d)", lambda m: "number "),
    _rule(NUMBER, lambda m: f" {number(m[0])} "),
    # signs and letters
    _rule(r"\band/or\b", lambda m: "and or"),
    _rule(r"(?<=[A-Za-z])/(?=[A-Za-z])", lambda m: " or "),
    _rule("[" + re.escape("".join(SIGNS)) + "]", lambda m: f" {SIGNS[m[0]]} "),
    _rule(r"\b([A-Z]{2,})(s?)\b", _capitals),
    _rule(r"\b[B-HJ-Z]\b(?!')", lambda m: spell(m[0])),
    _rule(r"\b(?<!')[b-df-hj-np-tv-xz]{2,5}\b|\b(?:OK|ok)\b", _letters),
    # what is left: marks that a voice reads by resting
    _rule(r"\s*(?:\.\s*){2,}(?=[A-Z]|$)", lambda m: ". "),
    _rule(r"(?:\.\s*){2,}", lambda m: ", "),
    _rule(r"(?<=\w)-(?=\w)|~", lambda m: " "),
    _rule(r"\s*[;:()\[\]–—]+\s*|\s+-+\s+", lambda m: ", "),
    _rule(r"[^A-Za-z\s.,?!']", lambda m: " "),
    _rule(r"(?<![A-Za-z])'|'(?![A-Za-z])", lambda m: ""),
    _rule(r"\s+(?=[.,?!])", lambda m: ""),
    _rule(r",+(?=[.?!])|(?<=[.?!,]),+|^[\s.,?!]+", lambda m: ""),
    _rule(r"([.?!])[.?!]+", lambda m: "?" if "?" in m[0] else m[1]),
    _rule(r"(?<=[,.?!])(?=[A-Za-z])", lambda m: " "),
    _rule(r"\s+", lambda m: " "),
)  # fmt: skip
_MARKS = {"’": "'", "‘": "'", "“": '"', "”": '"', "′": "'", "…": "...", "™": "", "®": "", "©": ""}
_PLAIN = str.maketrans({**_MARKS, **{k: f" {v} " for k, v in FRACTIONS.items()}})


def as_words(text: str) -> str:
    text = unicodedata.normalize("NFKC", text.translate(_PLAIN))
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = _quiet_capitals(text)
    for pattern, made in RULES:
        text = pattern.sub(made, text)
    return text.lstrip(" .,?!").rstrip(" ,")
