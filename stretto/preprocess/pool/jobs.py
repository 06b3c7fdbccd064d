"""The messages between the server and its prompt worker. They are typed and small: all that is long
lies in memory files whose descriptors go with them (see `memfile.py`).

A job is one datagram with descriptors: the socket for its answer, and the memory files that it
reads. An answer is one datagram, with at most one memory file; then the socket is closed."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from stretto.errors import Bug, Invalid, StrettoError
from stretto.preprocess.build import Form
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.remote_media import RemoteMedia
from stretto.types import Wire

log = logging.getLogger(__name__)

MAX_DATAGRAM = 1 << 16
MAX_FDS = 4  # that go along with a job
MAX_MESSAGE = 4096  # characters of an error's message

ByteRange = tuple[int, int]
"""Bytes of a memory file: from, to."""


# -- jobs


class Build(Wire, frozen=True, tag="build"):
    """Make a prompt of messages and tools, both JSON. The next file, if answers are recalled, holds
    the texts of earlier answers by their ids, as JSON; the last, if media were to be fetched, their
    content."""

    messages: ByteRange
    tools: ByteRange | None = None
    audio_in_video: bool = False
    variables: dict[str, bool | int | float | str | None] = msgspec.field(
        default_factory=dict
    )  # of the chat template
    form: Form = "chat"
    instructions: ByteRange | None = None  # of a response
    recalls: bool = False
    remote: dict[str, ByteRange] | None = None  # by address; None: nothing was to be fetched
    not_fetched: dict[str, str] = msgspec.field(default_factory=dict)  # and why


class Continue(Wire, frozen=True, tag="continue"):
    """Make a prompt of a session's messages and tools, both JSON. In place of media, messages have
    parts that name only their kind. The file also holds shapes and digests of the features
    (`PackedPrompt`), but not the features."""

    messages: ByteRange
    media: ByteRange
    tools: ByteRange | None = None


class Read(Wire, frozen=True, tag="read"):
    """Make a prompt of a text that is to be read aloud, and the text's tokens. Instructions, if
    there are any, lie behind the text."""

    text: ByteRange
    instructions: ByteRange | None = None


class Divide(Wire, frozen=True, tag="divide"):
    """Divide a text into what is read aloud at once, as words if it is to be normalised."""

    max_chars: int  # of each part
    normalise: str | None


class Outline(Wire, frozen=True, tag="outline"):
    """Cut a JSON object into its short fields and the `long` ones."""

    long: tuple[str, ...]
    max_short_bytes: int  # of all short fields together


class Cut(Wire, frozen=True, tag="cut"):
    """Decode a sound file and cut it, at quiet places, into windows of at most `seconds`. None:
    where speech pauses (`pauses.py`)."""

    seconds: float | None


class Check(Wire, frozen=True, tag="check"):
    """Compile a grammar, within limits of its own, and try it."""

    cpu_s: float
    memory_mb: int


Work = Build | Continue | Read | Divide | Outline | Cut | Check


class Job(Wire, frozen=True, tag="job"):
    number: int
    work: Work
    apart: bool  # in a process of its own, with limits; else at once, if there is little to do


class Stop(Wire, frozen=True, tag="stop"):
    """End a job that runs apart; nobody waits for its answer."""

    number: int


ToWorker = Job | Stop


# -- answers


class Built(Wire, frozen=True, tag="built"):
    """The memory file holds `header` bytes of msgpack (`PackedPrompt`), and the features from
    `start` on."""

    header: int
    start: int


class Divided(Wire, frozen=True, tag="divided"):
    """The memory file holds the texts, one after the other."""

    texts: tuple[ByteRange, ...]


class Outlined(Wire, frozen=True, tag="outlined"):
    """The memory file holds the short fields as a JSON object (`short` bytes), then the long ones,
    one after the other. `references`: ids of earlier answers that may be in them."""

    short: int
    long: dict[str, ByteRange]
    references: tuple[str, ...] = ()
    remote: tuple[str, ...] = ()  # addresses of media that may be in them


class Windows(Wire, frozen=True, tag="windows"):
    """The memory file holds the whole sound: samples of 16 bits at 16 kHz. `quiet`, where it was
    cut at pauses: how many samples at the beginning and at the end of a window are no speech."""

    windows: tuple[ByteRange, ...]
    quiet: tuple[tuple[int, int], ...] = ()


class Checked(Wire, frozen=True, tag="checked"):
    """The grammar can be compiled."""


class NeedsProcess(Wire, frozen=True, tag="apart"):
    """This takes longer than a moment: send it again, to be done apart."""


class JobFailed(Wire, frozen=True, tag="failed"):
    """`kind` names the error's class."""

    kind: str
    message: str
    param: str | None = None


class Died(Wire, frozen=True, tag="died"):
    """The job's process was ended by a signal, or (0) left without an answer."""

    signal: int


FromWorker = Built | Divided | Outlined | Windows | Checked | NeedsProcess | JobFailed | Died
JobResult = tuple[FromWorker, MemFile | None]
"""An answer and its memory file. Whoever is returned one closes the file."""


# -- the worker itself


class WorkerReady(Wire, frozen=True, tag="ready"):
    pass


# -- what a client sent


@dataclass(frozen=True, slots=True, eq=False)
class RemoteFiles:
    """What was fetched for a conversation, and why some was not, by address. The file is the
    request's, which closes it."""

    file: MemFile
    spans: dict[str, ByteRange]
    failures: dict[str, str]

    def media(self) -> RemoteMedia:
        view = self.file.view()
        content = {url: view[slice(*span)] for url, span in self.spans.items()}
        return RemoteMedia(content, self.failures)


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """Messages and tools as JSON that nobody has decoded yet; `body` holds both. Good for one
    prompt: `close` is called when that is built."""

    body: bytes | MemFile
    messages: ByteRange
    tools: ByteRange | None = None
    recalled: dict[str, str] = field(
        default_factory=dict
    )  # texts of earlier answers, by the id they are referred to
    client: str = ""  # whose turn it is when many ask at once
    close: Callable[[], None] = lambda: None  # gives the body's memory back
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template
    form: Form = "chat"
    instructions: ByteRange | None = None  # of a response
    remote: RemoteFiles | None = None

    @classmethod
    def of(cls, messages: bytes, tools: bytes | None = None, **more: Any) -> Conversation:
        a, b = len(messages), len(messages) + len(tools or b"")
        return cls(messages + (tools or b""), (0, a), (a, b) if tools is not None else None, **more)

    def shared(self, count: int) -> list[Conversation]:
        """The same for `count` prompts; the body goes back when the last of them is built."""
        if count == 1:
            return [self]
        left = [count]

        def close() -> None:
            left[0] -= 1
            if not left[0]:
                self.close()

        return [replace(self, close=close) for _ in range(count)]

    def parts(self) -> tuple[memoryview, memoryview | None, memoryview | None]:
        """Messages, tools and instructions."""
        data = self.body.view() if isinstance(self.body, MemFile) else memoryview(self.body)
        tools, instructions = (
            data[slice(*span)] if span is not None else None
            for span in (self.tools, self.instructions)
        )
        return data[slice(*self.messages)], tools, instructions


encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_prompt = msgspec.msgpack.Decoder(PackedPrompt).decode


def failed(error: Exception) -> JobFailed:
    """The answer to a job that raised an error. One that is not ours is a bug of the builder's: its
    stack is for the log alone."""
    if not isinstance(error, StrettoError):
        log.error("the prompt of a request cannot be built", exc_info=error)
        error = Bug("the prompt cannot be built")
    param = error.param if isinstance(error, Invalid) else None
    return JobFailed(
        type(error).__name__, str(error)[:MAX_MESSAGE], param[:MAX_MESSAGE] if param else None
    )


def send_answer(answer: socket.socket, message: FromWorker, file: MemFile | None) -> None:
    """Send an answer and close its memory file: the receiver, if it still listens, has a descriptor
    of its own."""
    with file if file is not None else contextlib.nullcontext(), contextlib.suppress(OSError):
        socket.send_fds(answer, [encode(message)], [file.fd] if file is not None else [])
