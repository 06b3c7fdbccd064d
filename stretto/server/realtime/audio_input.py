"""A session's input: it cuts a client's sound into turns and passes them to the engine while they
are spoken. The session's reader calls it on the event loop; threads do what takes long.

Without turn detection all sound goes to the engine at once. With it, only a turn's own sound does:
from a little before its first word to a short pause after its last, however long the silence is
that ends it. So silence is never encoded, and a turn's sound is the same whether or not an answer
was begun at the pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from stretto.engine.session import INPUT_RATE, Session
from stretto.server.realtime.audio_formats import AudioDecoder, Float, FormatName
from stretto.server.realtime.options import TurnSettings
from stretto.server.realtime.turn_detection import RATE, START_WINDOWS, WINDOW, Signal, TurnDetector
from stretto.server.realtime.vad import Batcher, VadState

IN_A_THREAD = 64 << 10  # bytes of sound that are converted elsewhere
AT_ONCE = 256 << 10  # bytes that are processed in one go: some seconds
SAMPLE_BYTES = 4
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
class AudioInput:
    session: Session
    batcher: Batcher
    turns: TurnSettings | None
    format: FormatName
    turn: Turn | None = None
    position: int = 0  # samples that were processed
    idle_from: int | None = None  # position at which waiting for the user to speak began
    _decoder: AudioDecoder = field(init=False)
    _detector: TurnDetector = field(init=False)
    _state: VadState = field(default_factory=VadState)
    _partial_window: Float = field(default_factory=lambda: _NOTHING)  # less than a window
    # whole windows that the engine does not have, and may get
    _buffered: list[Float] = field(default_factory=list)
    _buffered_size: int = 0  # samples of them
    _paused: bool = False  # as of the last window that was processed
    _queued: list[Float] = field(default_factory=list)  # sound for the next `_flush_to_engine`

    def __post_init__(self) -> None:
        self._decoder = AudioDecoder(self.format)
        self._detector = TurnDetector((self.turns or TurnSettings()).pauses)

    @property
    def silence_s(self) -> float:
        """Length of the pause that ends a turn."""
        return self._detector.pauses.end * WINDOW / RATE

    @property
    def held_bytes(self) -> int:
        """Bytes of sound that are not part of the conversation yet."""
        ready = sum(map(len, self._queued))
        return (
            self.session.pending + len(self._partial_window) + self._buffered_size + ready
        ) * SAMPLE_BYTES

    def configure(self, turns: TurnSettings | None, format: FormatName) -> None:
        """New settings. The sound so far stays."""
        if format != self.format:
            self.format = format
            self._decoder = AudioDecoder(format)
        if turns != self.turns:
            if turns is None:
                self._release()
            else:
                self._detector.pauses = turns.pauses
            self.turns = turns

    def begin_idle(self, after_s: float) -> None:
        """The user may speak when so much more sound has come: until then, an answer is played."""
        self.idle_from = self.position + int(after_s * INPUT_RATE)

    def end_idle(self) -> None:
        self.idle_from = None

    async def append(self, data: bytes) -> AsyncGenerator[Signal]:
        """More of the client's sound. Yields each signal when the engine has all sound before it;
        the caller acts on it before it goes on. A long sound is processed piece by piece, so that
        it does not keep the event loop from others."""
        for at in range(0, len(data), AT_ONCE):
            samples = await self._decode(data[at : at + AT_ONCE])
            if self.turns is None:
                self.position += len(samples)
                self._queued.append(samples)
                await self._flush_to_engine()
                continue
            async with aclosing(self._detect_turns(samples)) as signals:
                async for signal in signals:
                    yield signal

    async def _decode(self, data: bytes) -> Float:
        if len(data) > IN_A_THREAD:
            return await asyncio.to_thread(self._decoder.feed, data)
        return self._decoder.feed(data)

    async def _detect_turns(self, samples: Float) -> AsyncGenerator[Signal]:
        if len(self._partial_window):
            samples = np.concatenate([self._partial_window, samples])
        whole = len(samples) // WINDOW * WINDOW
        self._partial_window = samples[whole:].copy()
        probabilities = await self.batcher.run(self._state, samples[:whole].reshape(-1, WINDOW))
        at = 0
        for place, signals in self._signals(probabilities.tolist()):
            self._skip(samples[at * WINDOW : place * WINDOW])
            at = place + 1
            self._buffer(samples[place * WINDOW : at * WINDOW])
            for signal in signals:
                match signal:
                    case Signal.STARTED:
                        sound = self._begin_turn()
                        yield signal
                        self._queue(sound)
                    case Signal.RESUMED:
                        self._paused = False
                        yield signal
                        self._queue_buffered()
                    case Signal.PAUSED:
                        self._paused = True
                        self._queue_buffered()
                        await self._flush_to_engine()
                        yield signal
                    case Signal.STOPPED:
                        try:
                            yield signal
                        finally:
                            self.turn = None
        self._skip(samples[at * WINDOW : whole])
        await self._flush_to_engine()

    def _signals(self, probabilities: list[float]) -> list[tuple[int, list[Signal]]]:
        """The windows, by number, that have signals."""
        fed = ((place, self._detector.feed(p)) for place, p in enumerate(probabilities))
        return [(place, signals) for place, signals in fed if signals]

    def _skip(self, sound: Float) -> None:
        """Windows without a signal."""
        if not len(sound):
            return
        self._buffer(sound)
        if self.turn is None:
            self._trim_buffer(
                START_WINDOWS * WINDOW + -(-self._detector.pauses.prefix // WINDOW) * WINDOW
            )
        elif not self._paused:
            self._queue_buffered()

    def _begin_turn(self) -> Float:
        """The sound that belongs to a turn which begins at the window that was buffered last."""
        prefix = self._detector.pauses.prefix + START_WINDOWS * WINDOW
        length = min(self._buffered_size, prefix)
        self._trim_buffer(length)
        # What a client has left uncommitted before it asked for turns belongs to the first one.
        start = self.position - length - self.session.pending
        self.turn = Turn(start, self.position)
        self._paused = False
        self.end_idle()
        return self._drain_buffer()

    def _buffer(self, sound: Float) -> None:
        self.position += len(sound)
        self._buffered.append(sound.copy())  # a view would keep all of a large sound
        self._buffered_size += len(sound)

    def _trim_buffer(self, max_size: int) -> None:
        """Keep only the newest samples, this many."""
        while self._buffered_size > max_size:
            over = self._buffered_size - max_size
            first = self._buffered[0]
            if over < len(first):
                self._buffered[0] = first[over:].copy()
                self._buffered_size = max_size
            else:
                del self._buffered[0]
                self._buffered_size -= len(first)

    def _drain_buffer(self) -> Float:
        sound = self._buffered[0] if len(self._buffered) == 1 else _NOTHING
        if len(self._buffered) > 1:
            sound = np.concatenate(self._buffered)
        self._clear_buffer()
        return sound

    def _clear_buffer(self) -> None:
        self._buffered.clear()
        self._buffered_size = 0

    def _queue_buffered(self) -> None:
        self._queue(self._drain_buffer())

    def _queue(self, sound: Float) -> None:
        """Sound of the turn: the engine gets it with the next `_flush_to_engine`."""
        if self.turn is not None and len(sound):
            self.turn.stop = self.position
            self._queued.append(sound)

    async def _flush_to_engine(self) -> None:
        if self._queued:
            sound = self._queued[0] if len(self._queued) == 1 else np.concatenate(self._queued)
            self._queued.clear()
            await self.session.append(sound)

    async def finish(self) -> None:
        """The client ends the turn: all buffered sound belongs to it."""
        self._release()
        if len(last := self._decoder.flush()):
            self.position += len(last)
            self._queued.append(last)
        await self._flush_to_engine()

    def _release(self) -> None:
        """Turn detection ends: all buffered sound goes to the engine, in its order."""
        self.position += len(self._partial_window)
        self._queued += [sound for sound in (*self._buffered, self._partial_window) if len(sound)]
        self._clear_buffer()
        self._partial_window = _NOTHING
        self._detector.reset()
        self.turn = None

    async def clear(self) -> None:
        """Forget the sound that is not committed."""
        self._decoder.flush()
        self._clear_buffer()
        self._queued.clear()
        self._partial_window = _NOTHING
        self._detector.reset()
        self._state.forget()
        self.turn = None
        await self.session.clear()
