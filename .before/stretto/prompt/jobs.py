"""What the server asks of its prompt worker, and what comes back. Typed and small: all that is long lies in memory
files that go along (see `spool.py`).

A job is one datagram with descriptors: the socket for its answer, and the memory files that it reads. An answer is one
datagram, with a memory file if there is more to say; then the socket is closed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.errors import Invalid
from stretto.prompt.packed import Packed, PromptMeta
from stretto.prompt.spool import Spool

MAX_DATAGRAM = 1 << 16
MAX_WORDS = 4096  # characters of an error's message
AUDIO_ID = re.compile(rb"audio_[0-9a-f]{32}")  # how the server names spoken answers
MAX_REFERENCES = 1024  # they fit into a datagram

Span = tuple[int, int]
"""Bytes of a memory file: from, to."""


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


# -- jobs


class Build(Wire, frozen=True, tag="build"):
    """Make a prompt of messages and tools, both JSON. A second file, if there is one, holds the texts of earlier
    answers by their ids, as JSON."""

    messages: Span
    tools: Span | None = None
    audio_in_video: bool = False


class Read(Wire, frozen=True, tag="read"):
    """Make a prompt of a text that is to be read aloud, and its tokens."""

    text: Span


class Outline(Wire, frozen=True, tag="outline"):
    """Cut a JSON object into its short fields and the `long` ones."""

    long: tuple[str, ...]
    most: int  # bytes of all short fields


class Job(Wire, frozen=True, tag="job"):
    number: int
    work: Build | Read | Outline
    apart: bool  # in a process of its own, with limits; else at once, if there is little to do


class Stop(Wire, frozen=True, tag="stop"):
    """End a job that runs apart; nobody waits for its answer."""

    number: int


ToWorker = Job | Stop


# -- answers


class Built(Wire, frozen=True, tag="built"):
    """The memory file holds `head` bytes of msgpack (`Head`), and the features from `start` on."""

    head: int
    start: int


class Head(Wire, frozen=True):
    meta: PromptMeta
    media: bytes
    spoken: tuple[int, ...] | None = None


class Outlined(Wire, frozen=True, tag="outlined"):
    """The memory file holds the short fields as a JSON object (`short` bytes), then the long ones, one after the
    other. `references`: ids of earlier answers that may be in them."""

    short: int
    long: dict[str, Span]
    references: tuple[str, ...] = ()


class Apart(Wire, frozen=True, tag="apart"):
    """This takes longer than a moment: ask again, to be done apart."""


class Failed(Wire, frozen=True, tag="failed"):
    """`kind` names the error's class."""

    kind: str
    message: str
    param: str | None = None


class Died(Wire, frozen=True, tag="died"):
    """The job's process was ended by a signal, or (0) left without an answer."""

    signal: int


FromWorker = Built | Outlined | Apart | Failed | Died


# -- the worker itself


class Ready(Wire, frozen=True, tag="ready"):
    pass


# -- what a client sent


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """Messages and tools as JSON that nobody has decoded yet; `body` holds both. Good for one prompt: `close` is called
    when that is built."""

    body: bytes | Spool
    messages: Span
    tools: Span | None = None
    recalled: dict[str, str] = field(default_factory=dict)  # texts of earlier answers, by the id they are referred to
    sender: str = ""  # whose turn it is when many ask at once
    close: Callable[[], None] = lambda: None  # gives the body's memory back

    @classmethod
    def of(cls, messages: bytes, tools: bytes | None = None, **more: Any) -> Conversation:
        a, b = len(messages), len(messages) + len(tools or b"")
        return cls(messages + (tools or b""), (0, a), (a, b) if tools is not None else None, **more)

    def parts(self) -> tuple[memoryview, memoryview | None]:
        """Messages and tools."""
        data = self.body.view() if isinstance(self.body, Spool) else memoryview(self.body)
        return data[slice(*self.messages)], data[slice(*self.tools)] if self.tools is not None else None


def references(data: bytes | memoryview) -> tuple[str, ...]:
    """Ids of earlier answers that JSON may refer to."""
    found: dict[str, None] = {}
    for match in AUDIO_ID.finditer(data):
        found[match[0].decode()] = None
        if len(found) > MAX_REFERENCES:
            raise Invalid(f"the messages refer to over {MAX_REFERENCES} earlier answers", "messages")
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltPrompt:
    """A prompt from a worker; `spoken` are the tokens to be read aloud, if that was asked for."""

    packed: Packed
    spoken: tuple[int, ...] | None = None


encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_head = msgspec.msgpack.Decoder(Head).decode
