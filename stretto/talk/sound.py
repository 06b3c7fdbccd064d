"""Loudspeaker and microphone of the terminal, through the optional package `sounddevice`.

The device calls back on a thread of its own; it and the caller share one buffer under a lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

HINT = "to hear answers and speak questions here, install it: pip install sounddevice"
MICROPHONE_RATE = 24000


class Speaker(Protocol):
    def write(self, pcm: bytes) -> None:
        """Queue 16-bit samples; never waits."""
        ...

    def wait(self) -> None:
        """Until all that was queued has been heard."""
        ...

    def close(self) -> None:
        """Stop at once."""
        ...

    @property
    def pending(self) -> int:
        """Bytes that were queued and not played yet."""
        ...


class Listening(Protocol):
    def close(self) -> None:
        """Give the microphone back."""
        ...


class Recording(Protocol):
    def stop(self) -> bytes:
        """Ends it and gives the 16-bit samples."""
        ...


class SoundDevice(Protocol):
    def speaker(self, rate: int) -> Speaker: ...

    def record(self, rate: int) -> Recording: ...

    def listen(self, rate: int, take: Callable[[bytes], None]) -> Listening:
        """An open microphone; `take` gets 16-bit samples on the device's thread, and must not
        wait."""
        ...


@dataclass(frozen=True, slots=True)
class NoSound:
    """Why there is no sound here, in words."""

    why: str


class PlayBuffer:
    """What is still to be played: filled by the caller, drained by the device's thread."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.pending = bytearray()

    def write(self, pcm: bytes) -> None:
        with self.lock:
            self.pending += pcm

    def fill(self, out: memoryview | bytearray) -> None:
        """Silence where nothing is left."""
        with self.lock:
            n = min(len(out), len(self.pending))
            out[:n] = self.pending[:n]
            out[n:] = bytes(len(out) - n)
            del self.pending[:n]
            if not self.pending:
                self.lock.notify_all()

    def wait(self) -> None:
        with self.lock:
            self.lock.wait_for(lambda: not self.pending)


class _Speaker:
    def __init__(self, module: Any, rate: int) -> None:
        self.buffer = PlayBuffer()
        self.stream = module.RawOutputStream(
            samplerate=rate, channels=1, dtype="int16", callback=self._play
        )
        self.stream.start()

    def _play(self, out: Any, frames: int, time: Any, status: Any) -> None:
        self.buffer.fill(memoryview(out).cast("B"))

    def write(self, pcm: bytes) -> None:
        self.buffer.write(pcm)

    def wait(self) -> None:
        self.buffer.wait()
        self.stream.stop()  # plays what the device itself still holds
        self.stream.close()

    def close(self) -> None:
        self.stream.abort()
        self.stream.close()

    @property
    def pending(self) -> int:
        with self.buffer.lock:
            return len(self.buffer.pending)


class _Listening:
    def __init__(self, module: Any, rate: int, take: Callable[[bytes], None]) -> None:
        self.take = take
        self.stream = module.RawInputStream(
            samplerate=rate, channels=1, dtype="int16", callback=self._hear
        )
        self.stream.start()

    def _hear(self, data: Any, frames: int, time: Any, status: Any) -> None:
        self.take(bytes(data))

    def close(self) -> None:
        self.stream.stop()
        self.stream.close()


class _Recording:
    def __init__(self, module: Any, rate: int) -> None:
        self.pieces: list[bytes] = []
        self.stream = module.RawInputStream(
            samplerate=rate, channels=1, dtype="int16", callback=self._take
        )
        self.stream.start()

    def _take(self, data: Any, frames: int, time: Any, status: Any) -> None:
        self.pieces.append(bytes(data))

    def stop(self) -> bytes:
        self.stream.stop()
        self.stream.close()
        return b"".join(self.pieces)


@dataclass(frozen=True, slots=True)
class _Device:
    module: Any

    def speaker(self, rate: int) -> Speaker:
        return _Speaker(self.module, rate)

    def record(self, rate: int) -> Recording:
        return _Recording(self.module, rate)

    def listen(self, rate: int, take: Callable[[bytes], None]) -> Listening:
        return _Listening(self.module, rate, take)


def find_sound() -> SoundDevice | NoSound:
    """The machine's sound, or why there is none. Importing the package is what can fail, so it
    happens here."""
    try:
        module = import_module("sounddevice")
    except ImportError:
        return NoSound(f"the package sounddevice is not installed ({HINT})")
    except OSError as e:  # the package is there, PortAudio is not
        return NoSound(f"sound is not available: {e}")
    try:
        module.check_output_settings(channels=1, dtype="int16")
    except (ValueError, module.PortAudioError) as e:
        return NoSound(f"no sound device: {e}")
    return _Device(module)
