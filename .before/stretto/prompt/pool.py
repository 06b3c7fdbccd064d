"""Prompts are built in other processes: the server's side of the prompt worker (`worker.py`).

Owned by the engine, used on the event loop, which never waits and never copies anything large: what a client sent lies
in a memory file, and so does the prompt that comes back. Short texts are done by the worker itself, one after the
other; everything else in processes of their own, so many at a time, senders taking turns (`lane.py`). A caller that is
cancelled (its client left) ends its process, and the place is free when that process is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from stretto import errors
from stretto.errors import Busy, CheckpointError, Invalid, StageDead, StrettoError
from stretto.prompt.jobs import (
    MAX_DATAGRAM,
    Apart,
    Build,
    Built,
    BuiltPrompt,
    Conversation,
    Died,
    Failed,
    FromWorker,
    Job,
    Outline,
    Outlined,
    Read,
    Ready,
    Stop,
    ToWorker,
    decode_from_worker,
    decode_head,
    encode,
)
from stretto.prompt.lane import Lane
from stretto.prompt.packed import Packed
from stretto.prompt.spool import Spool

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 16 << 10  # of text: ten milliseconds of the worker's time at worst
PATIENCE_S = 20.0  # that the worker may take for something short, when it is not loading
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
RESTART_DELAYS = (0.0, 0.2, 1.0, 5.0)  # longer each time that it dies young
YOUNG_S = 10.0

Work = Build | Read | Outline


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How prompts are built beside the server."""

    workers: int = 2  # processes at a time for what takes long
    cpu_s: int = 60  # of CPU time for one request
    memory_mb: int = 2048  # of memory for one request
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("workers", "cpu_s", "memory_mb"):
            if getattr(self, name) < 1:
                raise Invalid(f"prompt {name} must be at least 1, got {getattr(self, name)}", f"prompt_{name}")


@dataclass(slots=True, eq=False)
class _Call:
    """One job that was sent. `answer` comes at most once; `over` when nothing of it runs any more."""

    number: int
    sock: socket.socket
    answer: asyncio.Future[tuple[FromWorker, Spool | None]]
    over: Callable[[], None]


class _NotSent(StageDead):
    """A job that the worker never got."""


class PromptPool:
    def __init__(self, model: Path, settings: PoolSettings) -> None:
        self.model, self.settings = model, settings
        self.lane = Lane(settings.workers)
        self._control: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._broken: StrettoError | None = None
        self._calls: dict[int, _Call] = {}
        self._numbers = count(1)
        self._counts: Counter[str] = Counter()
        self._keeper: asyncio.Task[None] | None = None

    # -- life

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="prompt worker")
        await self._wait_until_ready(self.settings.start_timeout_s)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for call in list(self._calls.values()):  # their processes ended with the worker
            self._end_call(call)

    async def _keep(self) -> None:
        """Keep one worker running."""
        deaths = 0
        try:
            while self._broken is None:
                await self._begin()
                assert self._process is not None
                began = time.monotonic()
                await self._process.wait()
                self._end()
                if self._broken is None:
                    deaths = 1 if time.monotonic() - began > YOUNG_S else deaths + 1
                    self._counts["restarts"] += 1
                    log.warning("the prompt worker died (%s) and is started again", self._process.returncode)
                    await asyncio.sleep(RESTART_DELAYS[min(deaths - 1, len(RESTART_DELAYS) - 1)])
        finally:
            self._end()
            if self._process is not None and self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGKILL)
                await self._process.wait()

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        s = self.settings
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "stretto.prompt.worker", str(self.model), "--fd", str(theirs.fileno())),
                *("--cpu-s", str(s.cpu_s), "--memory-mb", str(s.memory_mb)),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
            )
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def _end(self) -> None:
        """The worker is gone, and with it all that it did."""
        self._ready.clear()
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _hear(self) -> None:
        """The worker says one word in its life: that it is ready, or why not."""
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
        message = msgspec.msgpack.decode(data, type=Ready | Failed)
        if isinstance(message, Failed):
            self._broken = CheckpointError(message.message)
        self._ready.set()

    async def _wait_until_ready(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        except TimeoutError:
            raise StageDead("the prompt worker did not come up") from None
        if self._broken is not None:
            raise self._broken

    # -- what callers want

    async def build(self, talk: Conversation, audio_in_video: bool = False) -> BuiltPrompt:
        made: list[Spool] = []
        source = talk.body
        if not isinstance(source, Spool):
            source = Spool.of(source)
            made.append(source)
        files = [source]
        if talk.recalled:
            files.append(Spool.of(msgspec.json.encode(talk.recalled)))
            made.append(files[1])
        try:
            work = Build(talk.messages, talk.tools, audio_in_video)
            return self._built(await self._do(work, files, talk.sender))
        finally:
            for file in made:
                file.close()

    async def read(self, text: str, sender: str = "") -> BuiltPrompt:
        """Of a text that is to be read aloud."""
        source = Spool.of(text.encode("utf-8", "replace"))
        try:
            return self._built(await self._do(Read((0, source.size)), [source], sender))
        finally:
            source.close()

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        """Cut a large JSON object; the caller closes the file that comes back."""
        answer, file = await self._do(Outline(long, most), [body], sender)
        if not isinstance(answer, Outlined) or file is None:
            raise errors.Bug(f"an outline was answered with {type(answer).__name__}")
        return answer, file

    def metrics(self) -> Mapping[str, float]:
        return {
            "stretto_prompts_running": self.lane.running,
            "stretto_prompts_waiting": self.lane.waiting,
            "stretto_prompt_worker_restarts_total": self._counts["restarts"],
            "stretto_prompts_killed_total": self._counts["killed"],
            "stretto_prompts_over_limit_total": self._counts["over_limit"],
        }

    # -- jobs

    async def _do(self, work: Work, files: list[Spool], sender: str) -> tuple[FromWorker, Spool | None]:
        await self._wait_until_ready(PATIENCE_S)
        try:
            return await self._ask(work, files, sender)
        except _NotSent:  # the worker died a moment ago: nothing of this was done
            await self._wait_until_ready(PATIENCE_S)
            return await self._ask(work, files, sender)

    async def _ask(self, work: Work, files: list[Spool], sender: str) -> tuple[FromWorker, Spool | None]:
        if sum(f.size for f in files) <= AT_ONCE_BYTES:
            answer, file = await self._at_once(work, files)
            if not isinstance(answer, Apart):
                return self._checked(answer), file
        answer, file = await self._apart(work, files, sender)
        return self._checked(answer), file

    async def _at_once(self, work: Work, files: list[Spool]) -> tuple[FromWorker, Spool | None]:
        call = self._send(work, files, apart=False, over=lambda: None)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call.answer
        except TimeoutError:
            self._kill()
            raise Busy("prompts take too long at the moment") from None

    async def _apart(self, work: Work, files: list[Spool], sender: str) -> tuple[FromWorker, Spool | None]:
        await self.lane.enter(sender)
        try:
            call = self._send(work, files, apart=True, over=lambda: self.lane.leave(sender))
        except BaseException:
            self.lane.leave(sender)
            raise
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._counts["killed"] += 1
            self._tell(Stop(call.number))
            raise

    def _send(self, work: Work, files: list[Spool], *, apart: bool, over: Callable[[], None]) -> _Call:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        call = _Call(next(self._numbers), ours, loop.create_future(), over)
        with theirs:
            try:
                self._tell(Job(call.number, work, apart), theirs.fileno(), *(f.fd for f in files))
            except BaseException:
                ours.close()
                raise
        self._calls[call.number] = call
        loop.add_reader(ours, self._answered, call)
        return call

    def _tell(self, message: ToWorker, *fds: int) -> None:
        if self._control is None:
            if isinstance(message, Stop):
                return  # the worker is gone, and its children with it
            raise _NotSent("the prompt worker has died and is being started again")
        try:
            socket.send_fds(self._control, [encode(message)], list(fds))
        except BlockingIOError:
            if isinstance(message, Stop):  # hundreds of messages wait: it does not take any
                self._kill()
                return
            raise Busy("too many prompts wait to be built") from None
        except OSError:
            self._ready.clear()  # its end will be told soon
            if not isinstance(message, Stop):
                raise _NotSent("the prompt worker has died and is being started again") from None

    def _kill(self) -> None:
        """A worker that does not answer; its successor is started by `_keep`."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _answered(self, call: _Call) -> None:
        """Something came on a job's own socket: its answer, or the end of it."""
        try:
            data, fds, _, _ = socket.recv_fds(call.sock, MAX_DATAGRAM, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._end_call(call)
            return
        answer, file = self._understood(data, fds)
        if call.answer.done():  # cancelled, or a second answer
            if file is not None:
                file.close()
        else:
            call.answer.set_result((answer, file))

    @staticmethod
    def _understood(data: bytes, fds: list[int]) -> tuple[FromWorker, Spool | None]:
        file: Spool | None = None
        try:
            file = Spool.received(fds[0]) if fds else None
            return decode_from_worker(data), file
        except (msgspec.MsgspecError, StrettoError) as e:
            if file is not None:
                file.close()
            return Failed("Bug", f"a prompt cannot be understood: {e}"), None

    def _end_call(self, call: _Call) -> None:
        """Nothing of it runs any more."""
        asyncio.get_running_loop().remove_reader(call.sock)
        call.sock.close()
        del self._calls[call.number]
        if not call.answer.done():
            call.answer.set_exception(StageDead("the prompt worker died"))
        call.over()

    def _checked(self, answer: FromWorker) -> FromWorker:
        """The answer, unless it is an error."""
        match answer:
            case Failed(kind=kind, message=message, param=param):
                raise _error(kind, message, param)
            case Died(signal=number) if number in (signal.SIGXCPU, signal.SIGKILL, signal.SIGXFSZ):
                self._counts["over_limit"] += 1
                s = self.settings
                raise Invalid(
                    f"the request takes more to prepare than is allowed ({s.cpu_s} s of CPU time, {s.memory_mb:,} MiB)",
                    "messages",
                )
            case Died(signal=number):
                self._counts["over_limit"] += 1
                log.error("a request made its prompt's process end with signal %d", number)
                raise Invalid("the request cannot be prepared: what it holds breaks its decoder", "messages")
        return answer

    def _built(self, result: tuple[FromWorker, Spool | None]) -> BuiltPrompt:
        answer, file = result
        if not isinstance(answer, Built) or file is None:
            raise errors.Bug(f"a prompt was answered with {type(answer).__name__}")
        try:
            view = file.view()
        finally:
            file.close()  # the view keeps the memory
        try:
            head = decode_head(view[: answer.head])
        except msgspec.MsgspecError as e:
            raise errors.Bug(f"a prompt cannot be understood: {e}") from None
        packed = Packed(head.meta, head.media, view[answer.start :])
        packed.check()
        return BuiltPrompt(packed, head.spoken)


def _error(kind: str, message: str, param: str | None) -> StrettoError:
    """The worker's error, as its own class."""
    theirs: dict[str, type[Invalid]] = {c.__name__: c for c in (Invalid, errors.MediaError, errors.TooLong)}
    if kind in theirs:
        return theirs[kind](message, param)
    return CheckpointError(message) if kind == "CheckpointError" else errors.Bug(message)
