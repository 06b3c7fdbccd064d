"""Loudspeaker and microphone of the terminal, through the optional package `sounddevice`. Samples
have 16 bits."""

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


class Speaker:
    """Plays samples as they come. The device calls `fill` on a thread of its own; it and the caller
    share one buffer under a lock."""

    def __init__(self, module: Any, rate: int) -> None:
        self._changed = threading.Condition()
        self._buffer = bytearray()
        self._stream = module.RawOutputStream(
            samplerate=rate, channels=1, dtype="int16", callback=self.fill
        )
        self._stream.start()

    def write(self, pcm: bytes) -> None:
        """Add samples to play; never waits."""
        with self._changed:
            self._buffer += pcm

    def fill(self, out: Any, *_: Any) -> None:
        """Silence where nothing is left."""
        out = memoryview(out).cast("B")
        with self._changed:
            n = min(len(out), len(self._buffer))
            out[:] = self._buffer[:n] + bytes(len(out) - n)
            del self._buffer[:n]
            self._changed.notify_all()

    @property
    def pending(self) -> int:
        """Bytes that were written and not played yet."""
        with self._changed:
            return len(self._buffer)

    def wait(self) -> None:
        """Wait until all samples have been played."""
        with self._changed:
            self._changed.wait_for(lambda: not self._buffer)
        self._stream.stop()  # plays what the device itself still holds
        self._stream.close()

    def close(self) -> None:
        """Silence at once."""
        self._stream.abort()
        self._stream.close()


@dataclass(frozen=True, slots=True)
class SoundDevice:
    """`module`: the package."""

    module: Any

    def speaker(self, rate: int) -> Speaker:
        return Speaker(self.module, rate)

    def listen(self, rate: int, take: Callable[[bytes], None]) -> Any:
        """Open the microphone, until what is returned is closed. `take` gets samples on the
        device's thread, and must not wait."""
        stream = self.module.RawInputStream(
            samplerate=rate, channels=1, dtype="int16", callback=lambda data, *_: take(bytes(data))
        )
        stream.start()
        return stream


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
