"""Prompts are built in other processes: the server's side of the prompt worker (`worker.py`).

Owned by the engine, used on the event loop, which never waits and never copies anything large: what a client sent lies
in a memory file, and so does the prompt that comes back. Short texts are done by the worker itself, one after the
other; everything else in processes of their own, a few at a time, senders taking turns (`fairqueue.py`). A caller
that is cancelled (its client left) ends its process, and the place is free when that process is gone."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from stretto import errors
from stretto.errors import Busy, CheckpointError, Invalid, StageDead, StrettoError
from stretto.prompt.fairqueue import FairQueue
from stretto.prompt.grammars import why_ended
from stretto.prompt.jobs import (
    MAX_DATAGRAM,
    Apart,
    Build,
    Built,
    BuiltPrompt,
    Check,
    Checked,
    Conversation,
    Cut,
    Died,
    FromWorker,
    Job,
    JobFailed,
    Outline,
    Outlined,
    Read,
    Stop,
    Windows,
    Work,
    decode_from_worker,
    decode_head,
)
from stretto.prompt.packed import Packed
from stretto.prompt.settings import PoolSettings
from stretto.prompt.spool import Spool, Stored
from stretto.prompt.verdicts import Verdicts, digest_of
from stretto.prompt.workerprocess import NotSent, WorkerProcess

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 16 << 10  # of text: ten milliseconds of the worker's time at worst
PATIENCE_S = 20.0  # that the worker may take for something short, when it is not loading
A = TypeVar("A", Built, Outlined, Windows)


@dataclass(slots=True, eq=False)
class _Call:
    """One job that was sent. `answer` comes at most once; `over` when nothing of it runs any more."""

    number: int
    sock: socket.socket
    answer: asyncio.Future[tuple[FromWorker, Spool | None]]
    over: Callable[[], None]


class PromptPool:
    def __init__(self, model: Path, builder: str, settings: PoolSettings, grammars: str = "") -> None:
        """`builder`: the function that opens the model's prompt builder, as "module:function". `grammars`: the one that
        opens its grammar compiler, if it has any."""
        self.settings = settings
        self.worker = WorkerProcess(model, builder, settings, grammars)
        self.lane = FairQueue(settings.workers)
        self.checks = FairQueue(settings.workers)  # beside the prompts: a check takes a moment, and media take longer
        self._follows = bool(grammars)
        self._verdicts = Verdicts()
        self._calls: dict[int, _Call] = {}
        self._numbers = count(1)
        self._counts: Counter[str] = Counter()

    async def start(self) -> None:
        await self.worker.start()

    async def close(self) -> None:
        await self.worker.close()
        for call in list(self._calls.values()):  # their processes ended with the worker
            self._end_call(call)

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
            work = Build(talk.messages, talk.tools, audio_in_video, talk.variables)
            return _built(*await self._do(Built, work, files, talk.sender))
        finally:
            for file in made:
                file.close()

    async def read(self, text: str, sender: str = "", instructions: str = "") -> BuiltPrompt:
        """Of a text that is to be read aloud."""
        words, how = (t.encode("utf-8", "replace") for t in (text, instructions))
        source, size = Spool.of(words + how), len(words)
        work = Read((0, size), (size, size + len(how)) if how else None)
        try:
            return _built(*await self._do(Built, work, [source], sender))
        finally:
            source.close()

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        """Cut a large JSON object; the caller closes the file that comes back."""
        return await self._do(Outlined, Outline(long, most), [body], sender)

    async def cut(self, sound: Spool, seconds: float, sender: str = "") -> tuple[Windows, Spool]:
        """Cut a sound file into windows; the caller closes the file that comes back."""
        return await self._do(Windows, Cut(seconds), [sound], sender)

    async def check(self, grammar: str, sender: str = "") -> None:
        """Raises `Invalid` for a grammar that cannot be compiled and followed, or not within the limits."""
        if not grammar or not self._follows:  # the model's family refuses it
            return
        data = grammar.encode("utf-8", "replace")
        digest = digest_of(data)
        wrong = self._verdicts.find(sender, digest)
        if wrong is None:
            file = Spool.of(data)
            try:
                wrong = await self._verdict(digest, file, sender)
            except NotSent:  # the worker died a moment ago
                wrong = await self._verdict(digest, file, sender)
            finally:
                file.close()
        if wrong:
            raise Invalid(wrong, "response_format")

    async def _verdict(self, digest: bytes, file: Spool, sender: str) -> str:
        """What is wrong with a grammar, or nothing. It is checked when it is its sender's turn, unless another request
        has brought the same one meanwhile."""
        await self.worker.wait_until_ready(PATIENCE_S)
        await self.checks.enter(sender)
        if (known := self._verdicts.find(sender, digest)) is not None:
            self.checks.leave(sender)
            return known
        cpu_s, memory_mb = self.settings.grammar_cpu_s, self.settings.grammar_memory_mb
        answer, _ = await self._placed(Check(cpu_s, memory_mb), [file], lambda: self.checks.leave(sender))
        match answer:
            case Checked():
                wrong = ""
            case JobFailed(kind="Invalid", message=wrong):
                pass
            case Died(signal=number) if number:
                self._counts["over_limit"] += 1
                wrong = f"the schema cannot be used: {why_ended(number, cpu_s, memory_mb)}"
            case JobFailed(message=message):
                raise errors.Bug(message)
            case _:
                raise errors.Bug(f"a check was answered with {type(answer).__name__}")
        self._verdicts.keep(sender, digest, wrong)
        return wrong

    def metrics(self) -> Mapping[str, float]:
        return {
            "stretto_grammars_checking": self.checks.running,
            "stretto_grammars_waiting": self.checks.waiting,
            "stretto_prompts_running": self.lane.running,
            "stretto_prompts_waiting": self.lane.waiting,
            "stretto_prompt_worker_restarts_total": self.worker.restarts,
            "stretto_prompts_killed_total": self._counts["killed"],
            "stretto_prompts_over_limit_total": self._counts["over_limit"],
        }

    # -- jobs

    async def _do(self, kind: type[A], work: Work, files: list[Spool], sender: str) -> tuple[A, Spool]:
        """The answer, which must be of this kind and come with a memory file. Once more, if the worker died a moment
        ago and nothing was done."""
        await self.worker.wait_until_ready(PATIENCE_S)
        try:
            answer, file = await self._ask(work, files, sender)
        except NotSent:
            await self.worker.wait_until_ready(PATIENCE_S)
            answer, file = await self._ask(work, files, sender)
        if not isinstance(answer, kind) or file is None:
            raise errors.Bug(f"{type(work).__name__} was answered with {type(answer).__name__}")
        return answer, file

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
            self.worker.kill()
            raise Busy("prompts take too long at the moment") from None

    async def _apart(self, work: Work, files: list[Spool], sender: str) -> tuple[FromWorker, Spool | None]:
        await self.lane.enter(sender)
        return await self._placed(work, files, lambda: self.lane.leave(sender))

    async def _placed(
        self, work: Work, files: list[Spool], leave: Callable[[], None]
    ) -> tuple[FromWorker, Spool | None]:
        """In a process of its own. The place that it has is given back when nothing of it runs any more."""
        try:
            call = self._send(work, files, apart=True, over=leave)
        except BaseException:
            leave()
            raise
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._counts["killed"] += 1
            self.worker.tell(Stop(call.number))
            raise

    def _send(self, work: Work, files: list[Spool], *, apart: bool, over: Callable[[], None]) -> _Call:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        call = _Call(next(self._numbers), ours, loop.create_future(), over)
        with theirs:
            try:
                self.worker.tell(Job(call.number, work, apart), theirs.fileno(), *(f.fd for f in files))
            except BaseException:
                ours.close()
                raise
        self._calls[call.number] = call
        loop.add_reader(ours, self._answered, call)
        return call

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
            return JobFailed("Bug", f"a prompt cannot be understood: {e}"), None

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
            case JobFailed(kind=kind, message=message, param=param):
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


def _built(answer: Built, file: Spool) -> BuiltPrompt:
    features = Stored(file, answer.start)  # frees the file, whatever is in it
    try:
        head = decode_head(file.read(0, answer.head))
    except msgspec.MsgspecError as e:
        raise errors.Bug(f"a prompt cannot be understood: {e}") from None
    packed = Packed(head.meta, features)
    packed.check()
    return BuiltPrompt(packed, head.spoken)


def _error(kind: str, message: str, param: str | None) -> StrettoError:
    """The worker's error, as its own class."""
    theirs: dict[str, type[Invalid]] = {c.__name__: c for c in (Invalid, errors.MediaError, errors.TooLong)}
    if kind in theirs:
        return theirs[kind](message, param)
    return CheckpointError(message) if kind == "CheckpointError" else errors.Bug(message)
