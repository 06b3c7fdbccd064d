"""Prompts built in threads of this process: for an engine without a prompt worker, and for callers
of this process, who are trusted.

Keeps the promises of `pool.PromptPool`, but for limits of time and memory, and that the event loop
goes on meanwhile: a thread that decodes holds the interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from stretto.preprocess import build as work
from stretto.preprocess.build import Builder
from stretto.preprocess.packed_prompt import PackedPrompt, pack
from stretto.preprocess.pool.fair_queue import FairQueue
from stretto.preprocess.pool.jobs import Conversation, Outlined, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.split import do_cut, do_outline
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.remote_media import NONE
from stretto.preprocess.text_chunks import Passages, divide

SHORT_CHARS = 1 << 16  # of a session's prompt: some tens of milliseconds
LONG_AT_ONCE = 1  # of longer ones: each may take a second, most of it holding the interpreter
T = TypeVar("T")
Message = Mapping[str, Any]


class Prompts(Protocol):
    """Makes prompts of what clients send."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def build(
        self, conversation: Conversation, audio_in_video: bool = False
    ) -> PackedPrompt: ...

    async def build_for(
        self, client: str, messages: Sequence[Message], tools: Any = None
    ) -> Prompt:
        """The prompt of a session, whose media are features already. Few long texts are built at a
        time, clients taking turns, so that short ones never wait for them."""
        ...

    async def read(self, text: str, client: str = "", instructions: str = "") -> PackedPrompt:
        """The prompt of a text that is to be read aloud."""
        ...

    async def divide(self, text: str, rules: Passages, client: str = "") -> list[str]:
        """A passage of a text, as the texts that the model reads at once."""
        ...

    async def outline(
        self, body: MemFile, long: tuple[str, ...], max_short_bytes: int, client: str = ""
    ) -> tuple[Outlined, MemFile]:
        """Cut a large JSON object into its short fields and the `long` ones; the caller closes the
        file."""
        ...

    async def cut(
        self, sound: MemFile, seconds: float | None, client: str = ""
    ) -> tuple[Windows, MemFile]:
        """Cut a sound file into windows of at most `seconds`; where speech pauses, if that is None.
        The caller closes the file that comes back."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why no prompt can be built now; None: one can."""
        ...

    @property
    def hopeful(self) -> bool:
        """Whether callers should wait for the end of the trouble."""
        ...

    @property
    def pid(self) -> int | None:
        """The process that builds them, if it is another than this one."""
        ...

    async def check(self, grammar: str, client: str = "") -> None:
        """Raises `Invalid` for a grammar that cannot be compiled, or not within limits. An empty
        one is fine."""
        ...

    def metrics(self) -> Mapping[str, float]: ...


class InThreads:
    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.long_queue = FairQueue(LONG_AT_ONCE)

    async def start(self) -> None:
        """Build prompts for nobody, so that the first one finds a thread, and all that it
        imports."""
        await asyncio.to_thread(work.warm, self.builder)

    async def close(self) -> None:
        pass

    async def build(self, conversation: Conversation, audio_in_video: bool = False) -> PackedPrompt:
        return await asyncio.to_thread(self._build, conversation, audio_in_video)

    def _build(self, conversation: Conversation, audio_in_video: bool) -> PackedPrompt:
        recalled, remote = conversation.recalled, conversation.remote
        messages, tools, instructions = conversation.parts()
        prompt = work.build_conversation(
            self.builder,
            work.read_messages(messages, conversation.form, instructions, recalled),
            tools,
            recalled,
            audio_in_video,
            conversation.variables,
            remote.media() if remote is not None else NONE,
        )
        return pack(prompt)

    async def cut(
        self, sound: MemFile, seconds: float | None, client: str = ""
    ) -> tuple[Windows, MemFile]:
        return await _with_file(do_cut, sound.view(), seconds)

    async def check(self, grammar: str, client: str = "") -> None:
        """Not checked: what cannot be compiled is refused by its stage, and trusted callers send
        nothing hostile."""

    async def build_for(
        self,
        client: str,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        allow_paths: bool = False,
    ) -> Prompt:
        """A caller that is cancelled keeps its place until the thread is done with its prompt."""
        run = partial(self.builder.build, messages, tools, False, allow_paths=allow_paths)
        if num_chars(messages, tools) <= SHORT_CHARS:
            return await asyncio.to_thread(run)
        await self.long_queue.enter(client)

        async def build() -> Prompt:
            try:
                return await asyncio.to_thread(run)
            finally:
                self.long_queue.leave(client)

        return await asyncio.shield(build())

    async def build_local(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        audio_in_video: bool,
        *,
        allow_paths: bool,
    ) -> PackedPrompt:
        """The prompt of messages from a caller of this process: they may hold arrays and, if
        allowed, name files."""

        def build() -> PackedPrompt:
            prompt = self.builder.build(messages, tools, audio_in_video, allow_paths=allow_paths)
            return pack(prompt)

        return await asyncio.to_thread(build)

    async def read(self, text: str, client: str = "", instructions: str = "") -> PackedPrompt:
        prompt, tts_ids = await asyncio.to_thread(work.read_aloud, self.builder, text, instructions)
        return pack(prompt, tts_ids)

    async def divide(self, text: str, rules: Passages, client: str = "") -> list[str]:
        return await asyncio.to_thread(divide, text, rules.sentence, rules.normalise)

    async def outline(
        self, body: MemFile, long: tuple[str, ...], max_short_bytes: int, client: str = ""
    ) -> tuple[Outlined, MemFile]:
        return await _with_file(do_outline, body.view(), long, max_short_bytes)

    @property
    def trouble(self) -> str | None:
        return None

    @property
    def hopeful(self) -> bool:
        return True

    @property
    def pid(self) -> int | None:
        return None

    def metrics(self) -> Mapping[str, float]:
        return {}


async def _with_file(work: Callable[..., tuple[T, MemFile]], *arguments: Any) -> tuple[T, MemFile]:
    """Run `work` in a thread; the caller closes the file. If the caller is cancelled, the file is
    closed when the thread is done."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close_file)
        raise


def _close_file(task: asyncio.Task[tuple[Any, MemFile]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[1].close()


def num_chars(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> int:
    """About how much text a prompt is made of."""
    texts = (part.get("text") or "" for m in messages for part in _parts(m.get("content")))
    calls = sum(len(str(m["tool_calls"])) for m in messages if m.get("tool_calls"))
    return sum(map(len, texts)) + calls + (len(str(tools)) if tools else 0)


def _parts(content: Any) -> Sequence[Mapping[str, Any]]:
    return content if isinstance(content, list | tuple) else [{"text": content or ""}]
