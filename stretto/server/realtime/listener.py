"""A session's ear: sound as it comes, cut into turns, given to the engine while it is spoken.

Without turn detection all sound goes to the engine at once. With it, only a turn's own sound does: from a little before
its first word to a short pause after its last, however long the silence is that ends it. So silence is never encoded,
and a turn's sound is the same whether or not an answer was begun at the pause. On the event loop, by the session's
reader; what takes long is done in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from stretto.orchestrator.session import Session
from stretto.server.realtime.options import Turns
from stretto.server.realtime.sound import Float, FormatName, SoundIn
from stretto.server.realtime.turns import RATE, START_WINDOWS, WINDOW, Signal, TurnDetector
from stretto.server.realtime.vad import Batcher, VadState

IN_A_THREAD = 64 << 10  # bytes of sound that are converted elsewhere
SAMPLE_BYTES = 4
OnSignal = Callable[[Signal], Awaitable[None]]
_NOTHING = np.zeros(0, np.float32)


@dataclass(slots=True)
class Turn:
    """The turn that is being spoken. Positions are samples since the session began."""

    start: int
    stop: int
    sound: list[Float] = field(default_factory=list)  # what the engine has of it

    @property
    def start_ms(self) -> int:
        return to_ms(self.start)

    @property
    def stop_ms(self) -> int:
        return to_ms(self.stop)


def to_ms(samples: int) -> int:
    return samples * 1000 // RATE


@dataclass(slots=True)
class Listener:
    session: Session
    batcher: Batcher
    turns: Turns | None
    format: FormatName
    turn: Turn | None = None
    position: int = 0  # samples that were looked at
    _sound: SoundIn = field(init=False)
    _detector: TurnDetector = field(init=False)
    _state: VadState = field(default_factory=VadState)
    _rest: Float = field(default_factory=lambda: _NOTHING)  # less than a window
    _kept: list[Float] = field(default_factory=list)  # windows that the engine does not have, and may get
    _ready: list[Float] = field(default_factory=list)  # that it gets before anything else happens

    def __post_init__(self) -> None:
        self._sound = SoundIn(self.format)
        self._detector = TurnDetector((self.turns or Turns()).pauses)

    @property
    def silence_s(self) -> float:
        """How long a pause ends a turn."""
        return self._detector.pauses.end * WINDOW / RATE

    @property
    def held(self) -> int:
        """Bytes of sound that are not part of the conversation yet."""
        return (self.session.pending + len(self._rest) + WINDOW * len(self._kept)) * SAMPLE_BYTES

    def configure(self, turns: Turns | None, format: FormatName) -> None:
        """New settings. What was heard stays."""
        if format != self.format:
            self.format, self._sound = format, SoundIn(format)
        if turns != self.turns:
            if turns is None:
                self._detector.reset()
                self.turn = None
            else:
                self._detector.pauses = turns.pauses
            self.turns = turns

    async def hear(self, data: bytes, on: OnSignal) -> None:
        """More sound of the client's. `on` is called for each signal when the engine has all that belongs before it."""
        if len(data) > IN_A_THREAD:
            samples = await asyncio.to_thread(self._sound.feed, data)
        else:
            samples = self._sound.feed(data)
        if self.turns is None:
            self.position += len(samples)
            await self.session.append(samples)
        else:
            await self._listen(samples, on)

    async def _listen(self, samples: Float, on: OnSignal) -> None:
        samples = np.concatenate([self._rest, samples])
        count = len(samples) // WINDOW
        windows = samples[: count * WINDOW].reshape(count, WINDOW)
        self._rest = samples[count * WINDOW :].copy()
        for window, probability in zip(windows, await self.batcher.run(self._state, windows), strict=True):
            self.position += WINDOW
            self._kept.append(window.copy())  # a view would keep all of a large sound
            was_paused = self._detector.paused
            for signal in self._detector.feed(float(probability)) or (None,):
                await self._step(signal, was_paused, on)
        await self._give()

    async def _step(self, signal: Signal | None, was_paused: bool, on: OnSignal) -> None:
        match signal:
            case Signal.STARTED:
                length = min(len(self._kept) * WINDOW, self._detector.pauses.prefix + self._detector.run * WINDOW)
                sound = np.concatenate(self._kept)[len(self._kept) * WINDOW - length :]
                self._kept.clear()
                self.turn = Turn(self.position - length, self.position)
                await on(signal)  # first of all: it may have to silence an answer
                self._take(sound)
            case Signal.RESUMED:
                await on(signal)
                self._take_kept()
            case Signal.PAUSED:
                self._take_kept()
                await self._give()
                await on(signal)
            case Signal.STOPPED:
                await on(signal)
                self.turn = None
            case None if self._detector.speaking and not was_paused:
                self._take_kept()
            case None if not self._detector.speaking:
                most = START_WINDOWS + -(-self._detector.pauses.prefix // WINDOW)
                del self._kept[: max(0, len(self._kept) - most)]

    def _take_kept(self) -> None:
        sound = np.concatenate(self._kept) if self._kept else _NOTHING
        self._kept.clear()
        self._take(sound)

    def _take(self, sound: Float) -> None:
        """Belongs to the turn; the engine gets it with the next `_give`."""
        if self.turn is not None and len(sound):
            self.turn.sound.append(sound)
            self.turn.stop = self.position
            self._ready.append(sound)

    async def _give(self) -> None:
        if self._ready:
            sound = self._ready[0] if len(self._ready) == 1 else np.concatenate(self._ready)
            self._ready.clear()
            await self.session.append(sound)

    async def restore(self) -> None:
        """The engine no longer has the turn that is being spoken (it was committed and withdrawn): give it again."""
        if self.turn is not None and self.turn.sound:
            await self.session.append(np.concatenate(self.turn.sound))

    async def finish(self) -> None:
        """The client ends the turn: all that was heard and kept belongs to it."""
        rest = np.concatenate([self._rest, self._sound.flush()])
        self.position += len(rest)
        if self.turns is not None:
            rest = np.concatenate([*self._kept, rest])
            self._kept.clear()
            self._rest = _NOTHING
            self._detector.reset()
            self.turn = None
        if len(rest):
            await self.session.append(rest)

    async def clear(self) -> None:
        """Forget what is not committed."""
        self._sound.flush()
        self._kept.clear()
        self._ready.clear()
        self._rest = _NOTHING
        self._detector.reset()
        self._state.forget()
        self.turn = None
        await self.session.clear()
