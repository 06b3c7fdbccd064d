"""A conversation: its messages so far, the sound that is coming in, and answers to both. Asyncio.

`engine.session()` makes one. Sound is appended while it is spoken and committed when the turn is
over; text, pictures and earlier answers are added as messages. `respond` answers all that is there.
Every method is called on the engine's event loop, by one task at a time; several sessions go on
side by side.

Nothing of a session is held in the stages. Each answer is a request of its own, and finds what of
its prompt was read before in the prefix caches. While somebody speaks, each window of sound that is
complete is read ahead, by a request for the conversation up to there that wants no answer; so an
answer has only the rest to read. What the caches have lost is computed again, and the answer is the
same."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.engine.events import Event, Message, Modality, TextDelta, Usage
from stretto.engine.request import prompt_usage
from stretto.engine.request_manager import RequestManager
from stretto.engine.time_scaling import at_speed
from stretto.errors import Gone, Invalid, StrettoError, TooLong
from stretto.params import Params, RequestOptions
from stretto.preprocess.live_audio import LiveAudio
from stretto.preprocess.mel import SAMPLE_RATE
from stretto.preprocess.packed_prompt import PackedPrompt, pack
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.threads import InThreads, Prompts
from stretto.preprocess.prepared import encoded, prepared, with_encoded
from stretto.preprocess.prompt import AudioClip, Prompt

log = logging.getLogger(__name__)

INPUT_RATE = SAMPLE_RATE
"""Samples per second of appended sound, as the model takes them."""
END = "end"
"""The default place of `add`: behind all items."""
MAX_PENDING_S = 2400.0
"""Seconds of sound that may wait for their commit."""
AT_ONCE = INPUT_RATE
"""Samples whose features are made on the event loop: a millisecond's work. More go to a thread."""
FULL, ROOM = 7 / 8, 3 / 4
"""Shares of the context. When a prompt takes more than the first (or leaves less than its answer
may need), the oldest turns go until it takes no more than the second: each time the prompt begins
otherwise it is read anew, so that should be rare."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One entry of the conversation. `message` is in OpenAI's chat format, with features in place
    of its media: the media themselves are not held."""

    id: str
    message: Message

    @property
    def role(self) -> object:
        return self.message.get("role")


@dataclass(frozen=True, slots=True, eq=False)
class PromptSettings:
    """What a prompt is made of beside the items."""

    speak: bool = True
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None

    def messages(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, *(dict(i.message) for i in items)]


class Session:
    """Made by `engine.session`. `async with` closes it."""

    def __init__(
        self,
        requests: RequestManager,
        prompts: Prompts,
        threads: InThreads,
        *,
        owner: str = "",
        client: str = "",
        allow_paths: bool = False,
    ) -> None:
        """`prompts` builds what clients have sent, `threads` what a caller of this process has:
        with `allow_paths`, messages may hold arrays and name files.

        `owner` and `client` are those of its requests (`RequestOptions`). All sessions of one
        client take turns as one; a session without client and owner takes turns for itself."""
        self._requests = requests
        self._prompts = prompts
        self._threads = threads
        self._owner = owner
        self._allow_paths = allow_paths
        self._name = f"s-{secrets.token_hex(8)}"
        self._client = client or owner or self._name
        self._items: list[Item] = []
        self._dropped: list[str] = []
        self._sent: set[bytes] = set()  # digests of features that the stages have had
        self._next_settings = PromptSettings()  # of the next answer, as far as is known
        self._samples: list[npt.NDArray[np.float32]] = []  # sound, where the model takes it whole
        self._live_audio = self._new_live_audio()
        # the last commit
        self._last_commit: tuple[LiveAudio | None, list[npt.NDArray[np.float32]]] | None = None
        self._clip_to_prefill: AudioClip | None = None  # windows that were not read ahead yet
        self._prefill_task: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- sound that is being spoken

    @property
    def pending(self) -> int:
        """Samples that were appended and not committed yet."""
        return (
            self._live_audio.num_samples
            if self._live_audio is not None
            else sum(map(len, self._samples))
        )

    async def append(self, samples: npt.NDArray[np.float32]) -> None:
        """More of the sound that is being spoken: mono, from -1 to 1, at `INPUT_RATE`."""
        self._check()
        new = np.asarray(samples, np.float32).reshape(-1)
        if self.pending + len(new) > MAX_PENDING_S * INPUT_RATE:
            raise Invalid(f"over {MAX_PENDING_S:.0f} s of sound wait for their commit", "audio")
        if not np.isfinite(new).all():
            raise Invalid("the sound has samples that are not numbers", "audio")
        live_audio = self._live_audio
        self._last_commit = None
        if live_audio is None:
            self._samples.append(new)
            return
        complete = (
            await asyncio.to_thread(live_audio.push, new)
            if len(new) > AT_ONCE
            else live_audio.push(new)
        )
        if complete:
            self._clip_to_prefill = await asyncio.to_thread(live_audio.clip)
            if self._prefill_task is None or self._prefill_task.done():
                self._prefill_task = asyncio.create_task(
                    self._prefill_windows(), name=f"{self._name}-reader"
                )

    async def clear(self) -> None:
        """Forget what was appended since the last commit."""
        self._check()
        await self._stop_prefill()
        self._samples.clear()
        self._live_audio = self._new_live_audio()
        self._last_commit = None

    async def commit(self, id: str | None = None, *, maybe: bool = False) -> Item:
        """The turn is over: what was appended becomes an item of the user, the last one. `maybe`:
        as far as is known; `reopen` may take it back."""
        self._check()
        if not self.pending:
            raise Invalid("there is no sound to commit", "audio")
        self._last_commit = (
            (self._live_audio.fork() if self._live_audio is not None else None, self._samples[:])
            if maybe
            else None
        )
        data: AudioClip | npt.NDArray[np.float32]
        if self._live_audio is not None:
            data = await asyncio.to_thread(self._live_audio.finish)
            self._requests.count("windows_changed", self._live_audio.changed)
        else:
            data = np.concatenate(self._samples)
        self._samples.clear()
        self._live_audio = self._new_live_audio()
        self._clip_to_prefill = None
        part = {"type": "audio", "data": data, "sample_rate": INPUT_RATE}
        return await self.add({"role": "user", "content": [part]}, id=id)

    async def draft(self) -> Item:
        """An item of the sound that was appended since the last commit. It is no part of the
        conversation."""
        self._check()
        if not self.pending:
            raise Invalid("there is no sound yet", "audio")
        data: AudioClip | npt.NDArray[np.float32]
        if self._live_audio is not None:
            data = await asyncio.to_thread(self._live_audio.fork().finish)
        else:
            data = np.concatenate(self._samples)
        part = {"type": "audio", "data": data, "sample_rate": INPUT_RATE}
        return await self.item({"role": "user", "content": [part]})

    async def reopen(self, id: str) -> None:
        """The turn of this item, the last commit, was not over: more of its sound follows. Nothing
        of it is computed again. Whoever has begun an answer to it has ended that before."""
        self._check()
        if self._last_commit is None or self.pending:
            raise Invalid("there is no commit to take back, or sound has come since", "audio")
        await self.remove(id)
        self._live_audio, self._samples = self._last_commit
        self._last_commit = None

    async def read(self) -> None:
        """Wait until the complete windows have been prefilled, or could not be."""
        while self._prefill_task is not None and not self._prefill_task.done():
            await asyncio.wait({self._prefill_task})

    def _new_live_audio(self) -> LiveAudio | None:
        spec = self._requests.info.audio_input
        return LiveAudio(spec.num_bins, spec.window) if spec is not None else None

    # -- the conversation

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Ids of the items that were forgotten because the context was full, in that order."""
        return tuple(self._dropped)

    def expect(
        self,
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        instructions: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """The arguments of the next `respond`: sound is read ahead of it behind these. (Each
        `respond` says it for those that follow.) Where it turns out otherwise, what was read ahead
        is read again."""
        self._next_settings = PromptSettings(
            self._requests.check(modalities, None), instructions, tools
        )

    async def add(
        self, message: Message, *, id: str | None = None, after: str | None = END
    ) -> Item:
        """A message behind the item called `after`: None puts it in front of all, `END` behind
        all."""
        self._check()
        item = await self._item(id or f"item_{secrets.token_hex(12)}", message)
        if any(i.id == item.id for i in self._items):
            raise Invalid(f"there is an item {item.id} already", "item.id")
        place = 0 if after is None else len(self._items) if after == END else self._find(after) + 1
        self._items.insert(place, item)
        return item

    async def remove(self, id: str) -> None:
        self._check()
        del self._items[self._find(id)]

    async def replace(self, id: str, message: Message) -> None:
        """Another message in an item's place: an answer that was cut short keeps the words that
        were heard."""
        self._check()
        place, item = self._find(id), await self._item(id, message)
        self._items[place] = item

    async def item(self, message: Message, *, id: str | None = None) -> Item:
        """One that is not part of the conversation: for `respond(items=...)`. Its media are decoded
        here."""
        self._check()
        return await self._item(id or f"item_{secrets.token_hex(12)}", message)

    async def _item(self, id: str, message: Message) -> Item:
        if not isinstance(message.get("content"), list | tuple):
            return Item(id, message)
        if not self._allow_paths and (media := encoded(message)) is not None:
            message = with_encoded(message, await self._decode(media))
        builder = self._threads.builder
        return Item(id, await asyncio.to_thread(prepared, builder, message, self._allow_paths))

    async def _decode(self, message: Message) -> Prompt:
        """Have the media of a message decoded by the prompt worker, which limits time and memory: a
        stranger has encoded them. Clients take turns."""
        body = await asyncio.to_thread(msgspec.json.encode, [message])
        packed = await self._prompts.build(Conversation.of(body, client=self._client))
        return await asyncio.to_thread(lambda: packed.unpack(packed.feature_bytes()))

    def respond(
        self,
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        voice: str | None = None,
        params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        instructions: str | None = None,
        items: Sequence[Item] | None = None,
        remember: bool = True,
        on_prompt: Callable[[Usage], None] | None = None,
    ) -> AsyncGenerator[Event]:
        """Answer the conversation (or, instead, `items`). Events as those of `Engine.generate`;
        closing the iterator cancels the answer in all stages at once. `remember` adds the answer to
        the conversation, as far as it came. `on_prompt` is told what is asked, on the event loop,
        when it is: an answer that is closed has no end to tell its usage."""
        self._check()
        settings = PromptSettings(self._requests.check(modalities, voice), instructions, tools)
        params = params or self._requests.info.defaults
        if items is None:
            self._next_settings = settings
        answered = list(self._items if items is None else items)
        if not answered and not instructions:
            raise Invalid("there is nothing to answer: no items and no instructions", "messages")

        async def build() -> PackedPrompt:
            await self._prompts.check(params.grammar, self._client)
            await self.read()  # what is being read ahead is what this needs
            prompt = await self._fit(
                settings, answered, params.max_text_tokens, may_drop=items is None
            )
            if on_prompt is not None:
                on_prompt(prompt_usage(prompt.ids, self._requests.model.media_tokens))
            return self._pack(prompt)

        options = RequestOptions(
            "speech" if settings.speak else "text",
            params,
            voice,
            session=self._name,
            owner=self._owner,
            client=self._client,
        )
        events = self._requests.run(build, options)
        rate = self._requests.info.sample_rate
        return self._answer(at_speed(events, params.speed, rate), remember)

    async def _answer(self, events: AsyncIterator[Event], remember: bool) -> AsyncGenerator[Event]:
        text: list[str] = []
        try:
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, TextDelta):
                        text.append(event.text)
                    yield event
        finally:
            if remember and text and not self._closed:
                await self.add({"role": "assistant", "content": "".join(text)})

    async def close(self) -> None:
        """Give back what the session holds. A running answer is cancelled by whoever reads it."""
        self._closed = True
        await self._stop_prefill()
        self._items.clear()
        self._samples.clear()
        self._sent.clear()
        self._live_audio = self._last_commit = None

    # -- prompts

    async def _fit(
        self, settings: PromptSettings, items: list[Item], max_new: int, may_drop: bool
    ) -> Prompt:
        """The prompt for these items. Where it leaves too little room, the oldest turns are
        forgotten first."""
        most = self._requests.info.max_positions
        limit = min(int(FULL * most), most - min(max_new, most // 8))
        while True:
            try:
                prompt = await self._build(settings, items)
                if len(prompt.ids) <= limit or not may_drop:
                    return prompt
            except TooLong:
                if not may_drop:
                    raise
                prompt = None
            oldest = oldest_turn(items)
            if not oldest:
                if prompt is None:
                    raise TooLong(
                        f"the last turn alone exceeds the model's {most:,} tokens", "messages"
                    )
                return prompt
            limit = int(ROOM * most)
            items = [i for i in items if i not in oldest]
            self._items = [i for i in self._items if i not in oldest]
            self._dropped += [i.id for i in oldest]

    async def _build(self, settings: PromptSettings, items: Sequence[Item]) -> Prompt:
        messages = settings.messages(items)
        tools = [dict(t) for t in settings.tools] if settings.tools else None
        if self._allow_paths:
            # a caller of this process, whose messages may hold what JSON cannot express
            return await self._threads.build_for(self._client, messages, tools, allow_paths=True)
        return await self._prompts.build_for(self._client, messages, tools)

    def _pack(self, prompt: Prompt) -> PackedPrompt:
        """Pack a prompt with the features that the stages have not had; they ask for others, where
        they need them again."""
        media = {p.digest: p for p in prompt.pieces()}
        packed = pack(prompt, known=self._sent, on_demand=media)
        self._sent |= media.keys()
        return packed

    # -- reading ahead

    async def _prefill_windows(self) -> None:
        """Have the stages read the conversation up to the last complete window, until none has come
        meanwhile. It is only to save time later: what goes wrong is left to the answer to find
        out."""
        while (clip := self._clip_to_prefill) is not None:
            self._clip_to_prefill = None
            try:
                await self._prefill(clip)
            except StrettoError as e:
                log.debug("%s: not read ahead: %s", self._name, e)

    async def _prefill(self, clip: AudioClip) -> None:
        settings, model = self._next_settings, self._requests.model
        options = RequestOptions(
            "speech_prefill" if settings.speak else "text_prefill",
            Params(max_text_tokens=1),
            session=self._name,
            owner=self._owner,
            client=self._client,
        )
        if options.capability not in model.pipeline.paths:
            return
        last_item = Item("", {"role": "user", "content": [{"type": "audio", "data": clip}]})

        async def build() -> PackedPrompt:
            prompt = await self._build(settings, [*self._items, last_item])
            pads = [i for i, id in enumerate(prompt.ids) if id in model.media_tokens.audio]
            return self._pack(replace(prompt, ids=prompt.ids[: pads[-1] + 1]))

        events = self._requests.run(build, options)
        async with aclosing(events):  # type: ignore[type-var]
            async for _ in events:
                pass

    async def _stop_prefill(self) -> None:
        self._clip_to_prefill = None
        if self._prefill_task is not None:
            self._prefill_task.cancel()
            await asyncio.gather(self._prefill_task, return_exceptions=True)
            self._prefill_task = None

    def _find(self, id: str) -> int:
        for place, item in enumerate(self._items):
            if item.id == id:
                return place
        raise Invalid(f"there is no item {id}", "item_id")

    def _check(self) -> None:
        if self._closed:
            raise Gone("the session was closed")


def oldest_turn(items: Sequence[Item]) -> list[Item]:
    """The user's first message and all up to the user's next one; never a system message. Of the
    last turn, the older half of the user's messages in a row (such as a camera's pictures), never
    the last one."""
    spoken = [item for item in items if item.role not in ("system", "developer")]
    starts = [
        i for i, (a, b) in enumerate(pairwise([None, *spoken])) if _by_user(b) and not _by_user(a)
    ]
    if len(starts) > 1:
        return spoken[: starts[1]]
    if not starts or starts[0]:
        return spoken[: starts[0]] if starts else []
    row = list(takewhile(_by_user, spoken))
    return row[: len(row) // 2]


def _by_user(item: Item | None) -> bool:
    return item is not None and item.role == "user"
