"""A session's input: sound as it comes, cut into turns, given to the engine while it is spoken.

Without turn detection all sound goes to the engine at once. With it, only a turn's own sound does:
from a little before its first word to a short pause after its last, however long the silence is
that ends it. So silence is never encoded, and a turn's sound is the same whether or not an answer
was begun at the pause. On the event loop, by the session's reader; what takes long is done in
threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from stretto.engine.session import Session
from stretto.server.realtime.options import Turns
from stretto.server.realtime.sound import Float, FormatName, SoundIn
from stretto.server.realtime.turns import RATE, START_WINDOWS, WINDOW, Signal, TurnDetector
from stretto.server.realtime.vad import Batcher, VadState

IN_A_THREAD = 64 << 10  # bytes of sound that are converted elsewhere
AT_ONCE = 256 << 10  # bytes that are heard in one go: some seconds
SAMPLE_BYTES = 4
OnSignal = Callable[[Signal], Awaitable[None]]
_NOTHING = np.zeros(0, np.float32)


@dataclass(slots=True)
class Turn:
    """The turn that is being spoken. Positions are samples since the session began."""

    start: int
    stop: int

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
    _kept: list[Float] = field(
        default_factory=list
    )  # whole windows that the engine does not have, and may get
    _kept_size: int = 0  # samples of them
    _paused: bool = False  # as of the last window that was looked at
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
        ready = sum(map(len, self._ready))
        return (self.session.pending + len(self._rest) + self._kept_size + ready) * SAMPLE_BYTES

    def configure(self, turns: Turns | None, format: FormatName) -> None:
        """New settings. What was heard stays."""
        if format != self.format:
            self.format = format
            self._sound = SoundIn(format)
        if turns != self.turns:
            if turns is None:
                self._release()
            else:
                self._detector.pauses = turns.pauses
            self.turns = turns

    async def hear(self, data: bytes, on: OnSignal) -> None:
        """More sound of the client's. `on` is called for each signal when the engine has all that
        belongs before it. A long sound is heard bit by bit, so that it does not keep the event loop
        from others."""
        for at in range(0, len(data), AT_ONCE):
            await self._hear(data[at : at + AT_ONCE], on)

    async def _hear(self, data: bytes, on: OnSignal) -> None:
        if len(data) > IN_A_THREAD:
            samples = await asyncio.to_thread(self._sound.feed, data)
        else:
            samples = self._sound.feed(data)
        if self.turns is None:
            self.position += len(samples)
            self._ready.append(samples)
            await self._give()
        else:
            await self._listen(samples, on)

    async def _listen(self, samples: Float, on: OnSignal) -> None:
        if len(self._rest):
            samples = np.concatenate([self._rest, samples])
        whole = len(samples) // WINDOW * WINDOW
        self._rest = samples[whole:].copy()
        probabilities = await self.batcher.run(self._state, samples[:whole].reshape(-1, WINDOW))
        at = 0
        for place, signals in self._signals(probabilities.tolist()):
            self._pass(samples[at * WINDOW : place * WINDOW])
            at = place + 1
            self._keep(samples[place * WINDOW : at * WINDOW])
            for signal in signals:
                await self._step(signal, on)
        self._pass(samples[at * WINDOW : whole])
        await self._give()

    def _signals(self, probabilities: list[float]) -> list[tuple[int, list[Signal]]]:
        """The windows, by number, at which something happens."""
        fed = ((place, self._detector.feed(p)) for place, p in enumerate(probabilities))
        return [(place, signals) for place, signals in fed if signals]

    def _pass(self, sound: Float) -> None:
        """Windows at which nothing happens."""
        if not len(sound):
            return
        self._keep(sound)
        if self.turn is None:
            self._trim(START_WINDOWS * WINDOW + -(-self._detector.pauses.prefix // WINDOW) * WINDOW)
        elif not self._paused:
            self._take_kept()

    async def _step(self, signal: Signal, on: OnSignal) -> None:
        """Something happens at the window that was kept last."""
        match signal:
            case Signal.STARTED:
                length = min(self._kept_size, self._detector.pauses.prefix + START_WINDOWS * WINDOW)
                self._trim(length)
                sound = self._all_kept()
                # What a client has left uncommitted before it asked for turns belongs to the first
                # one.
                start = self.position - length - self.session.pending
                self.turn = Turn(start, self.position)
                self._paused = False
                await on(signal)  # first of all: it may have to silence an answer
                self._take(sound)
            case Signal.RESUMED:
                self._paused = False
                await on(signal)
                self._take_kept()
            case Signal.PAUSED:
                self._paused = True
                self._take_kept()
                await self._give()
                await on(signal)
            case Signal.STOPPED:
                try:
                    await on(signal)
                finally:
                    self.turn = None

    def _keep(self, sound: Float) -> None:
        self.position += len(sound)
        self._kept.append(sound.copy())  # a view would keep all of a large sound
        self._kept_size += len(sound)

    def _trim(self, most: int) -> None:
        """Keep only the newest samples, this many."""
        while self._kept_size > most:
            over, first = self._kept_size - most, self._kept[0]
            if over < len(first):
                self._kept[0] = first[over:].copy()
                self._kept_size = most
            else:
                del self._kept[0]
                self._kept_size -= len(first)

    def _all_kept(self) -> Float:
        sound = (
            _NOTHING
            if not self._kept
            else self._kept[0]
            if len(self._kept) == 1
            else np.concatenate(self._kept)
        )
        self._drop_kept()
        return sound

    def _drop_kept(self) -> None:
        self._kept.clear()
        self._kept_size = 0

    def _take_kept(self) -> None:
        self._take(self._all_kept())

    def _take(self, sound: Float) -> None:
        """Belongs to the turn; the engine gets it with the next `_give`."""
        if self.turn is not None and len(sound):
            self.turn.stop = self.position
            self._ready.append(sound)

    async def _give(self) -> None:
        if self._ready:
            sound = self._ready[0] if len(self._ready) == 1 else np.concatenate(self._ready)
            self._ready.clear()
            await self.session.append(sound)

    async def finish(self) -> None:
        """The client ends the turn: all that was heard and kept belongs to it."""
        self._release()
        if len(last := self._sound.flush()):
            self.position += len(last)
            self._ready.append(last)
        await self._give()

    def _release(self) -> None:
        """No turn is looked for any more: all that was heard and kept is the engine's, in its
        order."""
        self.position += len(self._rest)
        self._ready += [sound for sound in (*self._kept, self._rest) if len(sound)]
        self._drop_kept()
        self._rest = _NOTHING
        self._detector.reset()
        self.turn = None

    async def clear(self) -> None:
        """Forget what is not committed."""
        self._sound.flush()
        self._drop_kept()
        self._ready.clear()
        self._rest = _NOTHING
        self._detector.reset()
        self._state.forget()
        self.turn = None
        await self.session.clear()
