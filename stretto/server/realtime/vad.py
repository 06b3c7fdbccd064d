"""Is somebody speaking? Silero's model, run by onnxruntime on one CPU thread for all sessions
together.

`Batcher` runs it in a thread of its own: each round takes the next window of every session that has
one, so a session that sends an hour of sound at once does not keep the others waiting. Imports
neither torch nor, until it is used, onnxruntime."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import StrettoError
from stretto.server.realtime.turn_detection import RATE, WINDOW

Float = npt.NDArray[np.float32]
CONTEXT = 64  # samples before a window that are part of its input
# two seconds of clear silence: then the model starts afresh, or music and noise would blunt it
FORGET_WINDOWS = 63
CLEAR_SILENCE = 0.1
MAX_BATCH = 64


@dataclass(slots=True)
class VadState:
    """The model's state for one stream."""

    memory: Float = field(default_factory=lambda: np.zeros((2, 128), np.float32))
    context: Float = field(default_factory=lambda: np.zeros(CONTEXT, np.float32))
    silence: int = 0  # windows of clear silence in a row

    def forget(self) -> None:
        self.memory = np.zeros((2, 128), np.float32)
        self.context = np.zeros(CONTEXT, np.float32)
        self.silence = 0


class Silero:
    """The model of the `silero-vad` package (MIT). The package is never imported: it would import
    torch."""

    def __init__(self, path: Path | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        file = str(path or find_model())
        self._session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )
        self._rate = np.array(RATE, np.int64)

    def run(self, windows: Float, states: Sequence[VadState]) -> Float:
        """The probability of speech in each window `[n, WINDOW]`, each of another stream, whose
        state goes on."""
        inputs = np.concatenate([np.stack([s.context for s in states]), windows], axis=1)
        memory = np.stack([s.memory for s in states], axis=1)
        out, memory = self._session.run(None, {"input": inputs, "state": memory, "sr": self._rate})
        probabilities: Float = np.asarray(out, np.float32)[:, 0]
        for i, state in enumerate(states):
            state.memory = memory[:, i]
            state.context = inputs[i, -CONTEXT:]
            state.silence = state.silence + 1 if probabilities[i] < CLEAR_SILENCE else 0
            if state.silence >= FORGET_WINDOWS:
                state.forget()
        return probabilities


def find_model() -> Path:
    """The file within the package, found without importing it."""
    spec = find_spec("silero_vad")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise StrettoError("voice activity detection needs the package silero-vad")
    return Path(places[0]) / "data" / "silero_vad.onnx"


@dataclass(slots=True, eq=False)
class _Job:
    state: VadState
    windows: Float
    done: asyncio.Future[Float]
    loop: asyncio.AbstractEventLoop
    out: Float = field(init=False)
    at: int = 0
    dropped: bool = False  # the caller was cancelled

    def __post_init__(self) -> None:
        self.out = np.zeros(len(self.windows), np.float32)

    def finish(self, error: Exception | None = None) -> None:
        def resolve() -> None:
            if self.done.done():
                return
            if error is None:
                self.done.set_result(self.out)
            else:
                self.done.set_exception(error)

        with suppress(RuntimeError):  # the loop is closed, and with it the caller
            self.loop.call_soon_threadsafe(resolve)


class Batcher:
    """One per server. The thread starts with the first sound and loads the model there."""

    def __init__(self, load: Callable[[], Silero]) -> None:
        self._load = load
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.rounds = self.windows = 0

    async def run(self, state: VadState, windows: Float) -> Float:
        """Probabilities for windows of one stream, `[n, WINDOW]`, in order. One call at a time for
        each state."""
        if not len(windows):
            return np.zeros(0, np.float32)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="vad", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        job = _Job(state, windows, loop.create_future(), loop)
        self._jobs.put(job)
        try:
            return await job.done
        finally:
            job.dropped = True

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)

    def _work(self) -> None:
        model: Any = None
        running: list[_Job] = []
        while True:
            while not running or not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    return
                running.append(job)
            try:
                model = model or self._load()
                running = self._round(model, running)
            except Exception as e:  # noqa: BLE001 - a thread's boundary: the callers get the error
                for job in running:
                    job.finish(
                        e
                        if isinstance(e, StrettoError)
                        else StrettoError(f"speech detection failed: {e}")
                    )
                running = []

    def _round(self, model: Silero, running: list[_Job]) -> list[_Job]:
        """The next window of up to `MAX_BATCH` jobs; those behind them come first in the next
        round."""
        jobs = [j for j in running if not j.dropped]
        batch = jobs[:MAX_BATCH]
        rest = jobs[MAX_BATCH:]
        if not batch:
            return rest
        found = model.run(np.stack([j.windows[j.at] for j in batch]), [j.state for j in batch])
        self.rounds = self.rounds + 1
        self.windows = self.windows + len(batch)
        for job, probability in zip(batch, found, strict=True):
            job.out[job.at] = probability
            job.at += 1
            if job.at == len(job.windows):
                job.finish()
        return rest + [j for j in batch if j.at < len(j.windows)]


__all__ = ["RATE", "WINDOW", "Batcher", "Silero", "VadState"]
