"""Loudspeaker and microphone of the terminal, through the optional package `sounddevice`.

The device calls back on a thread of its own; it and the caller share one buffer under a lock."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

HINT = f"to hear answers and speak questions here: {sys.executable} -m pip install sounddevice"
MICROPHONE_RATE = 24000


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


class Speaker:
    """16-bit samples, played as they come."""

    def __init__(self, module: Any, rate: int) -> None:
        self._buffer = PlayBuffer()
        self._stream = module.RawOutputStream(
            samplerate=rate, channels=1, dtype="int16", callback=self._play
        )
        self._stream.start()

    def _play(self, out: Any, frames: int, time: Any, status: Any) -> None:
        self._buffer.fill(memoryview(out).cast("B"))

    def write(self, pcm: bytes) -> None:
        """Never waits."""
        self._buffer.write(pcm)

    def wait(self) -> None:
        """Until all that was written has been heard."""
        self._buffer.wait()
        self._stream.stop()  # plays what the device itself still holds
        self._stream.close()

    def close(self) -> None:
        """Silence at once."""
        self._stream.abort()
        self._stream.close()

    @property
    def pending(self) -> int:
        """Bytes that were written and not played yet."""
        with self._buffer.lock:
            return len(self._buffer.pending)


class Microphone:
    """`take` gets 16-bit samples on the device's thread, and must not wait."""

    def __init__(self, module: Any, rate: int, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._stream = module.RawInputStream(
            samplerate=rate, channels=1, dtype="int16", callback=self._receive
        )
        self._stream.start()

    def _receive(self, data: Any, frames: int, time: Any, status: Any) -> None:
        self._take(bytes(data))

    def close(self) -> None:
        self._stream.stop()
        self._stream.close()


@dataclass(frozen=True, slots=True)
class SoundDevice:
    """`module`: the package."""

    module: Any

    def speaker(self, rate: int) -> Speaker:
        return Speaker(self.module, rate)

    def listen(self, rate: int, take: Callable[[bytes], None]) -> Microphone:
        return Microphone(self.module, rate, take)


def find_sound() -> SoundDevice | NoSound:
    """The machine's sound, or why there is none. Importing the package is what can fail, so it
    happens here."""
    try:
        module = import_module("sounddevice")
    except ImportError:
        return NoSound(f"the package sounddevice is not installed ({HINT})")
    except OSError as e:  # the package is there, PortAudio is not
        return NoSound(f"sound is not available: {e}; on Debian: apt-get install libportaudio2")
    try:
        module.check_output_settings(channels=1, dtype="int16")
    except (ValueError, module.PortAudioError) as e:
        return NoSound(f"no sound device: {e}")
    return SoundDevice(module)
