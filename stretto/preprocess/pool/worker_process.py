"""The prompt worker's process (`worker.py`), as the server sees it: started, sent its jobs, started
again when it dies. Used by `pool.py`, on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from stretto._process import end_of, start_apart
from stretto.config.engine import PoolSettings
from stretto.errors import Busy, CheckpointError, StageDead, StrettoError
from stretto.preprocess.pool.jobs import (
    MAX_DATAGRAM,
    Job,
    JobFailed,
    Stop,
    WorkerReady,
    encode,
)

log = logging.getLogger(__name__)

NICENESS = 10
"""Prompts that nobody hears yet are not built at the cost of those who listen, where cores are
few."""
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
RESTART_DELAYS = (0.0, 0.2, 1.0, 5.0)  # longer each time that it dies young
YOUNG_S = 10.0
# of workers in a row, soon after their start: after that, requests are refused at once
PATIENT_DEATHS = 2


class WorkerProcess:
    def __init__(
        self, model: Path, builder: str, settings: PoolSettings, grammars: str = ""
    ) -> None:
        self._model = model
        self._builder = builder
        self._grammars = grammars
        self._settings = settings
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.deaths = 0  # in a row, each soon after the start
        self._was_ready = False
        self._reason: str | None = None  # why it is going to end, if that is known before
        self._last_end = "it ended"
        self._control: socket.socket | None = None
        self._ready = asyncio.Event()
        self._broken: StrettoError | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="prompt worker")
        self._keeper.add_done_callback(self._keeper_ended)
        await self.wait_until_ready(self._settings.start_timeout_s)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def send(self, job: Job, fds: Sequence[int]) -> bool:
        """Send it a job. False: the worker is gone. `Busy`: it takes no more now."""
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [encode(job)], fds)
        except BlockingIOError:
            raise Busy("too many prompts wait to be built") from None
        except OSError:
            self._ready.clear()  # the event loop sees its end soon
            return False
        return True

    def stop_job(self, number: int) -> None:
        """End a job that runs apart, whose answer nobody reads. If the worker is gone, so are its
        jobs."""
        if self._control is None:
            return
        try:
            self._control.send(encode(Stop(number)))
        except BlockingIOError:  # hundreds of messages wait: it does not take any
            self.kill("it took no more messages")
        except OSError:
            self._ready.clear()  # the event loop sees its end soon

    @property
    def trouble(self) -> str | None:
        """Why no prompt can be built now. None: one can, or the worker has not been up yet."""
        if not self._was_ready or (self._ready.is_set() and self._broken is None):
            return None
        if self._broken is not None:
            return str(self._broken)
        return f"the prompt worker is being started again: {self._reason or self._last_end}"

    @property
    def hopeful(self) -> bool:
        """Whether a worker will be up soon, as far as can be told."""
        return self._broken is None and self.deaths <= PATIENT_DEATHS

    def kill(self, reason: str) -> None:
        """A worker that is of no use; its successor is started by `_keep`."""
        if self.process is not None and self.process.returncode is None:
            self._reason = reason
            self._ready.clear()
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """If it failed, no worker will be started any more: end the waiting for one."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            log.error("no prompt worker can be started: %s", error)
            self._broken = StageDead(f"the prompt worker cannot be started: {error}")
            self._ready.set()

    async def _keep(self) -> None:
        """Keep one worker running."""
        try:
            while self._broken is None:
                began = time.monotonic()
                self._last_end = await self._live()
                self._reason = None
                self._end()
                if self._broken is None:
                    self.deaths = 1 if time.monotonic() - began > YOUNG_S else self.deaths + 1
                    self.restarts += 1
                    log.warning("the prompt worker died and is started again: %s", self._last_end)
                    await asyncio.sleep(
                        RESTART_DELAYS[min(self.deaths - 1, len(RESTART_DELAYS) - 1)]
                    )
        finally:
            self._end()
            if self.process is not None and self.process.returncode is None:
                self.kill("the server closes")
                await self.process.wait()

    async def _live(self) -> str:
        """Start one worker, wait for its end, and say how it ended."""
        try:
            await self._begin()
        except OSError as e:
            if not self._was_ready:
                raise
            return f"it could not be started ({e})"  # what it lacks may come back
        assert self.process is not None
        status = await self.process.wait()
        return self._reason or end_of(status) or "it ended"

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        s = self._settings
        with theirs, ExitStack() as owned:
            owned.enter_context(ours)
            self.process = await start_apart(
                *(
                    sys.executable,
                    "-m",
                    "stretto.preprocess.pool.worker",
                    str(self._model),
                    "--fd",
                    str(theirs.fileno()),
                ),
                *(
                    "--builder",
                    self._builder,
                    "--grammars",
                    self._grammars,
                    "--cpu-s",
                    str(s.cpu_s),
                    "--memory-mb",
                    str(s.memory_mb),
                ),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
            )
            owned.pop_all()
        with suppress(ProcessLookupError):  # it is gone already
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self.process.pid, min(19, own + NICENESS))
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._read_status)

    def _end(self) -> None:
        """The worker is gone, and with it all that it did."""
        self._ready.clear()
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _read_status(self) -> None:
        """The worker sends one message in its life: that it is ready, or why it cannot be."""
        assert self._control is not None
        try:
            data = self._control.recv(MAX_DATAGRAM)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            self._ready.clear()
            return
        message = msgspec.msgpack.decode(data, type=WorkerReady | JobFailed)
        if isinstance(message, WorkerReady):
            self._was_ready = True
        elif self._was_ready:
            self._reason = message.message  # what it could read once, its successor may
            return
        else:
            self._broken = CheckpointError(message.message)
        self._ready.set()

    async def wait_until_ready(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        except TimeoutError:
            died = (
                f"; it died {self.deaths} times, at last: {self._last_end}" if self.deaths else ""
            )
            raise StageDead(f"the prompt worker did not come up in {seconds:g} s{died}") from None
        if self._broken is not None:
            raise self._broken
