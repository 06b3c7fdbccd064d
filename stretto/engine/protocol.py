"""What an engine looks like from outside: requests in, typed events out. Imports no torch.

The server, the command line and the sync wrapper know nothing but this. `EngineClient` is a
protocol; the pipeline implements it over hosts, and tests may implement it over anything that keeps
the same promises:

- `generate` and `speak` raise `Invalid` or `Busy` when called or from the iterator's first step
  (decoding media takes time and happens there), before any other event. The iterator yields events
  in order and ends after exactly one `Finished`, or raises a `StrettoError`.
- Text arrives as deltas whose texts concatenate to the answer; ids are as sampled, up to the end
  token or the one that completes a stop string, which is included.
- Audio chunks tile the stream: each starts where the last ended, in samples from 0.
- Closing the iterator cancels the request in all stages at once: `aclose`, or cancellation of the
  task that waits in it. A caller that may be cancelled elsewhere closes it on the way out
  (`contextlib.aclosing`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from stretto.engine.events import Event, Message, Modality, Progress
from stretto.engine.session import Session
from stretto.family import ModelInfo
from stretto.params import DEFAULT_STYLE, Params, SpeechStyle
from stretto.preprocess.pool.jobs import Conversation, Outlined, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.types import RequestId


class EngineClient(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def progress(self) -> Progress: ...

    def generate(
        self,
        messages: Sequence[Message] | Conversation,
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        voice: str | None = None,
        params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: RequestId | None = None,
        session: str | None = None,
        owner: str = "",
    ) -> AsyncIterator[Event]:
        """Answer a conversation. A prompt is only found in caches if it was the same `owner`'s
        before. Requests of one `session` go to the same pipeline, as long as it is up."""
        ...

    def speak(
        self,
        text: str | AsyncIterator[str],
        *,
        voice: str | None = None,
        style: SpeechStyle = DEFAULT_STYLE,
        params: Params | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
        client: str = "",
    ) -> AsyncIterator[Event]:
        """Read a text aloud, instead of an answer that the model writes; some models can while it
        is being written. `client`: who takes turns with whom where prompts are built, as in
        `Conversation`."""
        ...

    async def enrol(self, clip: Conversation, *, owner: str = "") -> bytes:
        """Make a voice of a clip, for `SpeechStyle.voice`: of one message with a sound and, for a
        closer likeness, what is said in it. The voice is this model's alone."""
        ...

    def session(self, *, owner: str = "", client: str = "") -> Session:
        """A conversation that goes on, whose sound comes in while it is spoken. Sessions of one
        `client` take turns as one where prompts are built."""
        ...

    async def outline(
        self, body: MemFile, long: tuple[str, ...], max_short_bytes: int, client: str = ""
    ) -> tuple[Outlined, MemFile]:
        """Cut a JSON object that is too large for the event loop into its short fields, which may
        have `max_short_bytes` together, and the `long` ones, in another process. The caller closes
        the file that comes back."""
        ...

    async def cut(
        self, sound: MemFile, seconds: float | None, client: str = ""
    ) -> tuple[Windows, MemFile]:
        """Decode a sound file, in another process, and cut it into windows of at most `seconds`;
        where speech pauses, if that is None. The caller closes the file that comes back."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Plain counters and gauges by name, for /metrics; labels are part of the name in
        Prometheus form."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take no new request, let the running ones finish for at most `timeout` seconds."""
        ...

    async def close(self) -> None: ...
