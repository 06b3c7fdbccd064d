"""Text to token ids and back: the checkpoint's tokenizer, its chat template, and the stream that
prints an answer.

Called by the prompt builder and by whoever shows text to a client; stateless but for `TextStream`,
which belongs to one answer. The rule that keeps turns and media honest: a *marker* (a special token
such as <|im_end|> or <|audio_pad|>) is a marker only where the template itself wrote it. The same
letters in a client's text are plain text, because

1. before rendering, a private character is put into every client string wherever a marker is
   written in it, or could come about by joining it to what the template puts before or after it;
2. the rendered prompt is cut at the markers that are still whole: these are the template's own;
3. the private character is removed, and what lies between two markers is encoded by a tokenizer
   that does not look for markers.

The text between two markers is encoded in one go, template and client text together, exactly as a
tokenizer does with a whole prompt. So for text without markers in it the ids are those of the whole
rendered string: the newline after a role still merges with newlines at the start of a message."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stretto._validation import read_json_file
from stretto.errors import CheckpointError, Invalid

# Unicode sets these aside for a program's own use; text is not supposed to hold any of them.
_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]
_UNRENDERABLE = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)
MAX_VARIABLES = 16
MAX_STEPS = 1_000_000  # of a template, for one short message: released ones take some hundreds
TraceFunction = Callable[[FrameType, str, object], Any]
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")

# How text is cut into pieces that merges do not cross, for checkpoints that state vocabulary and
# merges but not the whole tokenizer: the widespread rule of byte-level vocabularies, with digits
# one by one.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_letters() -> dict[str, int]:
    """The printable letter a byte-level vocabulary writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_letters()


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A byte-level BPE that does not see markers in text."""

    plain: tokenizers.Tokenizer
    markers: dict[str, int]  # special tokens by their text
    added: dict[int, str]  # all tokens beside the BPE, special or not

    @classmethod
    def open(cls, directory: str | Path, markers: Iterable[int] = ()) -> Tokenizer:
        """From tokenizer.json, else vocab.json and merges.txt. `markers` are special whatever the
        file says."""
        path = Path(directory) / "tokenizer.json"
        spec = read_json_file(path) if path.exists() else _assemble(Path(directory))
        if (spec.get("decoder") or {}).get("type") != "ByteLevel":
            raise CheckpointError(f"{path}: only byte-level tokenizers are supported")
        added, always = spec.get("added_tokens") or [], set(markers)
        for token in added:
            token["special"] = token.get("special", False) or token["id"] in always
            if token["special"] and (token.get("lstrip") or token.get("rstrip")):
                raise CheckpointError(
                    f"{path}: {token['content']} swallows spaces around it; that is not supported"
                )
        try:
            plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as e:  # noqa: BLE001 - the library raises a bare Exception for a bad file
            raise CheckpointError(f"{path}: cannot be used as a tokenizer ({e})") from None
        plain.encode_special_tokens = True
        plain.no_truncation()
        plain.no_padding()
        return cls(
            plain,
            {t["content"]: t["id"] for t in added if t["special"]},
            {t["id"]: t["content"] for t in added},
        )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; markers written in it stay text."""
        ids: list[int] = self.plain.encode(text, add_special_tokens=False).ids
        return ids

    def marker(self, text: str) -> int:
        if text not in self.markers:
            raise CheckpointError(f"the tokenizer has no special token {text}")
        return self.markers[text]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for ids that no text has."""
        if token in self.added:
            return self.added[token].encode()
        letters = self.plain.id_to_token(token) if token >= 0 else None
        return bytes(_BYTES[c] for c in letters) if letters is not None else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        stream = TextStream(self, skip_special=skip_special)
        return stream.push(ids) + stream.finish()


class TextStream:
    """The text of one answer, token by token, never half a character: bytes wait until their
    character is whole."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.markers.values()) if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters these tokens complete."""
        return self._decoder.decode(
            b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skipped)
        )

    def describe(self, token: int) -> tuple[str, bytes | None]:
        """A token for people to read, and the bytes that it adds to the text: None for one that is
        skipped."""
        data = self._tokenizer.token_bytes(token)
        return data.decode("utf-8", "replace"), None if token in self._skipped else data

    def finish(self) -> str:
        """No more tokens: whatever waited, as a replacement character. The stream can be used
        again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _assemble(directory: Path) -> dict[str, Any]:
    """The content tokenizer.json would have, from vocab.json, merges.txt and
    tokenizer_config.json."""
    config, path = read_json_file(directory / "tokenizer_config.json"), directory / "merges.txt"
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: added_tokens_decoder is missing"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [{**added[i], "id": int(i)} for i in sorted(added, key=int)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": read_json_file(directory / "vocab.json"),
            "merges": [
                line.split(" ") for line in lines if line and not line.startswith("#version")
            ],
        },
    }


class ChatTemplate:
    """Renders messages with the checkpoint's own template, which is trusted; the messages are
    not."""

    def __init__(self, source: str, markers: Iterable[str]) -> None:
        self._template = _environment().from_string(source)
        self._markers = sorted(markers, key=len, reverse=True)
        anyone = "|".join(map(re.escape, self._markers))
        self._cut = re.compile(f"({anyone})")
        self._whole = re.compile(f"(?={anyone})")
        self._heads = {m[:n] for m in self._markers for n in range(1, len(m))}
        self._tails = {m[n:] for m in self._markers for n in range(1, len(m))}
        self._longest = max(map(len, self._markers))

    @classmethod
    def open(cls, directory: str | Path, markers: Iterable[str]) -> ChatTemplate:
        """From chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
        folder = Path(directory)
        source: object = None
        if (path := folder / "chat_template.jinja").exists():
            source = path.read_text(encoding="utf-8")
        else:
            for name in ("chat_template.json", "tokenizer_config.json"):
                if source is None and (path := folder / name).exists():
                    source = read_json_file(path).get("chat_template")
        if not isinstance(source, str):
            raise CheckpointError(
                f"{folder}: no chat template in it; if it was made of another checkpoint, copy "
                f"chat_template.jinja or chat_template.json from there"
            )
        try:
            return cls(source, markers)
        except jinja2.TemplateError as e:
            raise CheckpointError(f"{path}: the chat template cannot be used ({e})") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The prompt, cut at the template's own markers: text, marker, text, marker, ... text.

        Roles are the caller's own words; every other string in `messages` and `tools` is taken for
        a client's. `variables` are switches of the template (`check_variables`): no text that could
        be one of its markers."""
        guard = ""

        def guarded(value: Any) -> Any:
            return each_string(value, lambda s: self._guard(s, guard))

        try:
            guard = _unused_noncharacter([messages, tools])
            context = dict(variables or {}, tools=guarded(tools), add_generation_prompt=True)
            context["messages"] = [
                {k: v if k == "role" else guarded(v) for k, v in m.items()} for m in messages
            ]
            text = self._template.render(context)
        except _UNRENDERABLE as e:
            reason = str(e).replace(guard, "")
            wrong = f"the model's chat template cannot render these messages: {reason}"
            raise Invalid(wrong, "messages") from None
        return [piece.replace(guard, "") for piece in self._cut.split(text)]

    def try_out(self, directory: str | Path) -> list[str]:
        """`render` for one short message, as a check of the template: it must come to an end."""
        try:
            with limited_steps(MAX_STEPS):
                return self.render([{"role": "user", "content": "Hello"}])
        except TooManySteps:
            message = (
                f"the chat template does not come to an end within {MAX_STEPS:,} steps for one "
                f"short message"
            )
            raise CheckpointError(f"{directory}: {message}") from None
        except Invalid as e:
            raise CheckpointError(f"{directory}: {e}") from None

    def _guard(self, text: str, guard: str) -> str:
        """Break up every marker in `text`, and those it could be the beginning or the end of."""
        text = well_formed(text)
        ends = range(1, min(self._longest, len(text) + 1))
        breaks = {m.start() + 1 for m in self._whole.finditer(text)}
        breaks |= {len(text) - n + 1 for n in ends if text[-n:] in self._heads}
        if any(text[:n] in self._tails for n in ends):
            breaks.add(0)
        borders = [0, *sorted(breaks), len(text)]
        return guard.join(text[a:b] for a, b in pairwise(borders)) if breaks else text


class TooManySteps(BaseException):
    """Not an `Exception`: what limits a template must not be caught by what it calls."""


@contextmanager
def limited_steps(most: int) -> Iterator[None]:
    """Ends what runs in it, on this thread, after so many lines of Python. A template is compiled
    to Python, a line or more for each of its statements; counting takes many times longer than
    running."""
    left = most

    def count(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooManySteps
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def check_variables(variables: object) -> dict[str, Any]:
    """Switches of a template that a client sets: few, and words, numbers or truth values, which can
    forge nothing."""
    at = "chat_template_kwargs"
    if not isinstance(variables, dict) or len(variables) > MAX_VARIABLES:
        raise Invalid(f"{at} must be an object of at most {MAX_VARIABLES} values", at)
    for name, value in variables.items():
        fine = (
            value is None
            or isinstance(value, bool | int | float)
            or (isinstance(value, str) and _WORD.fullmatch(value))
        )
        if not fine or not _WORD.fullmatch(str(name)):
            raise Invalid(f"{at}: {str(name)[:64]!r} must be a truth value, a number or a word", at)
        if name in ("messages", "tools", "add_generation_prompt"):
            raise Invalid(f"{at}: {name} is not for clients to set", at)
    return variables


def well_formed(text: str) -> str:
    """Halves of surrogate pairs, as cutting a JavaScript string in two leaves them, become
    replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def each_string(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every string in it changed, dictionary keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {each_string(k, change): each_string(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [each_string(v, change) for v in value]
    return value


def _unused_noncharacter(value: object) -> str:
    """A character that no string of this plain data holds."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    for c in _NONCHARACTERS:
        if c not in text:
            return c
    raise Invalid("the messages use all of Unicode's noncharacters U+FDD0 to U+FDEF", "messages")


def _environment() -> jinja2.Environment:
    """What chat templates are written for: the settings, filters and functions other engines give
    them."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter would escape < and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def encode_rendered(pieces: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Ids of what `ChatTemplate.render` returned."""
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        ids += [tokenizer.markers[piece]] if i % 2 else tokenizer.encode(piece) if piece else []
    return ids
