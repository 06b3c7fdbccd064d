"""Prompts are built in other processes: the server's side of the prompt worker (`worker.py`).

Owned by the engine, used on the event loop, which never waits and never copies anything large: what
a client sent lies in a memory file, and so does the prompt that comes back. Short texts are done by
the worker itself, one after the other; everything else in processes of their own, a few at a time,
clients taking turns (`fair_queue.py`). A caller that is cancelled (its client left) ends its
process, and the place is free when that process is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stretto import errors
from stretto.config.engine import PoolSettings
from stretto.errors import Busy, CheckpointError, Invalid, StageDead, StrettoError
from stretto.preprocess.build import encode as to_json
from stretto.preprocess.grammars import GrammarVerdicts, digest_of, why_ended
from stretto.preprocess.packed_prompt import PackedPrompt, PromptFeatures, lay_out
from stretto.preprocess.pool.fair_queue import FairQueue
from stretto.preprocess.pool.job_process import MAX_RESULT
from stretto.preprocess.pool.jobs import (
    MAX_DATAGRAM,
    Build,
    Built,
    Check,
    Checked,
    Continue,
    Conversation,
    Cut,
    Died,
    Divide,
    Divided,
    FromWorker,
    Job,
    JobFailed,
    JobResult,
    NeedsProcess,
    Outline,
    Outlined,
    Read,
    Windows,
    Work,
    decode_from_worker,
    decode_prompt,
    encode,
)
from stretto.preprocess.pool.memfile import MemFile, MemFileSlice, check_room
from stretto.preprocess.pool.threads import LONG_AT_ONCE, SHORT_CHARS, Message
from stretto.preprocess.pool.worker_process import WorkerProcess
from stretto.preprocess.prepared import without_features
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.template import well_formed
from stretto.preprocess.text_chunks import Passages

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 16 << 10  # of text: ten milliseconds of the worker's time at worst
TRIAL = b"Hello"
RESTARTING = "the prompt worker has died and is being started again"
PATIENCE_S = 20.0  # that the worker may take for something short, when it is not loading
# processes for short prompts of sessions: some tens of milliseconds each
SESSIONS_AT_ONCE = 4
A = TypeVar("A", Built, Divided, Outlined, Windows)


class PromptPool:
    def __init__(
        self, model: Path, builder: str, settings: PoolSettings, grammars: str = ""
    ) -> None:
        """`builder`: the function that opens the model's prompt builder, as "module:function".
        `grammars`: the one that opens its grammar compiler, if it has any."""
        self.settings = settings
        self.worker = WorkerProcess(model, builder, settings, grammars)
        self.queue = FairQueue(settings.workers)
        # prompts of sessions, which are text alone
        self.session_queue = FairQueue(SESSIONS_AT_ONCE)
        self.long_session_queue = FairQueue(LONG_AT_ONCE)
        # grammars do not wait for prompts: a check takes a moment, and media take longer
        self.grammar_queue = FairQueue(settings.workers)
        self._checks_grammars = bool(grammars)
        self._verdicts = GrammarVerdicts()
        # jobs in processes of their own that are answered or given up and still run: whose places
        # they have, by the socket of their answer
        self._ending: dict[socket.socket, tuple[FairQueue, str]] = {}
        self._trial: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._counts: Counter[str] = Counter()

    async def start(self) -> None:
        check_room(MAX_RESULT)
        await self.worker.start()

    async def close(self) -> None:
        if self._trial is not None:
            self._trial.cancel()
        await self.worker.close()
        for answers in list(self._ending):  # their processes ended with the worker
            self._end(answers)

    @property
    def trouble(self) -> str | None:
        """Why no prompt can be built now."""
        return self.worker.trouble

    @property
    def hopeful(self) -> bool:
        """Whether callers should wait for the end of the trouble."""
        return self.worker.hopeful

    @property
    def pid(self) -> int | None:
        process = self.worker.process
        return process.pid if process is not None and process.returncode is None else None

    # -- what callers ask for

    async def build(self, conversation: Conversation, audio_in_video: bool = False) -> PackedPrompt:
        body, recalled, remote = conversation.body, conversation.recalled, conversation.remote
        with ExitStack() as owned:
            files = [body if isinstance(body, MemFile) else owned.enter_context(MemFile.of(body))]
            if recalled:
                files.append(owned.enter_context(MemFile.of(msgspec.json.encode(recalled))))
            if remote is not None:
                files.append(remote.file)
            work = Build(
                conversation.messages,
                conversation.tools,
                audio_in_video,
                conversation.variables,
                conversation.form,
                conversation.instructions,
                bool(recalled),
                remote.spans if remote is not None else None,
                remote.failures if remote is not None else {},
            )
            return _to_prompt(*await self._do(Built, work, files, conversation.client))

    async def build_for(
        self, client: str, messages: Sequence[Message], tools: Any = None
    ) -> Prompt:
        bare, media = without_features(messages)
        known, _ = lay_out(media, known=frozenset(p.digest for p in media.pieces()))
        parts = to_json(bare, "messages"), encode(known), to_json(tools, "tools") if tools else b""
        ends = list(accumulate(map(len, parts)))
        work = Continue((0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2]) if tools else None)
        queue = self.long_session_queue if ends[2] > SHORT_CHARS else self.session_queue
        with MemFile.of(*parts) as source:
            built = _to_prompt(*await self._do(Built, work, [source], client, queue))
        if built.for_host(with_features=False).pieces() != known.pieces():
            raise errors.Bug("a prompt has other media than were asked for")
        return replace(media, ids=built.ids)

    async def read(self, text: str, client: str = "", instructions: str = "") -> PackedPrompt:
        """The prompt of a text that is to be read aloud."""
        encoded, style = (well_formed(t).encode() for t in (text, instructions))
        size = len(encoded)
        work = Read((0, size), (size, size + len(style)) if style else None)
        with MemFile.of(encoded + style) as source:
            return _to_prompt(*await self._do(Built, work, [source], client))

    async def divide(self, text: str, rules: Passages, client: str = "") -> list[str]:
        """A passage of a text, as the texts that the model reads at once."""
        work = Divide(rules.sentence, rules.normalise)
        with MemFile.of(well_formed(text).encode()) as source:
            divided, file = await self._do(Divided, work, [source], client)
        with file:
            return [file.read(*span).decode() for span in divided.texts]

    async def outline(
        self, body: MemFile, long: tuple[str, ...], max_short_bytes: int, client: str = ""
    ) -> tuple[Outlined, MemFile]:
        """Cut a large JSON object; the caller closes the file that comes back."""
        return await self._do(Outlined, Outline(long, max_short_bytes), [body], client)

    async def cut(
        self, sound: MemFile, seconds: float | None, client: str = ""
    ) -> tuple[Windows, MemFile]:
        """Cut a sound file into windows; the caller closes the file that comes back."""
        return await self._do(Windows, Cut(seconds), [sound], client)

    async def check(self, grammar: str, client: str = "") -> None:
        """Raises `Invalid` for a grammar that cannot be compiled and followed, or not within the
        limits."""
        if not grammar or not self._checks_grammars:  # the model's family refuses it
            return
        data = grammar.encode("utf-8", "replace")
        digest = digest_of(data)
        wrong = self._verdicts.find(client, digest)
        if wrong is None:
            with MemFile.of(data) as file:
                wrong = await self._verdict(digest, file, client)
        if wrong:
            raise Invalid(wrong, "response_format")

    async def _verdict(self, digest: bytes, file: MemFile, client: str) -> str:
        """What is wrong with a grammar, or nothing. It is checked when it is its client's turn,
        unless another request has brought the same one meanwhile."""
        await self.worker.wait_until_ready(PATIENCE_S)
        await self.grammar_queue.enter(client)
        if (known := self._verdicts.find(client, digest)) is not None:
            self.grammar_queue.leave(client)
            return known
        cpu_s, memory_mb = self.settings.grammar_cpu_s, self.settings.grammar_memory_mb
        work = Check(cpu_s, memory_mb)
        answer, unused = await self._do_apart(work, [file], self.grammar_queue, client)
        if unused is not None:
            unused.close()
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
        self._verdicts.store(client, digest, wrong)
        return wrong

    def metrics(self) -> Mapping[str, float]:
        queues = self.queue, self.session_queue, self.long_session_queue
        return {
            "stretto_prompts_running": sum(queue.running for queue in queues),
            "stretto_prompts_waiting": sum(queue.waiting for queue in queues),
            "stretto_grammars_checking": self.grammar_queue.running,
            "stretto_grammars_waiting": self.grammar_queue.waiting,
            "stretto_prompt_worker_restarts_total": self.worker.restarts,
            "stretto_prompt_worker_ready": self.trouble is None,
            "stretto_prompts_killed_total": self._counts["killed"],
            "stretto_prompts_over_limit_total": self._counts["over_limit"],
        }

    # -- jobs

    async def _do(
        self,
        kind: type[A],
        work: Work,
        files: list[MemFile],
        client: str,
        queue: FairQueue | None = None,
    ) -> tuple[A, MemFile]:
        """The answer, which must be of this kind and come with a memory file. The caller closes
        the file."""
        answer, file = await self._ask(work, files, client, queue or self.queue)
        if isinstance(answer, kind) and file is not None:
            return answer, file
        if file is not None:
            file.close()
        if isinstance(answer, JobFailed) and answer.kind == errors.Bug.__name__:
            self._doubt()
        self._raise_for(answer)
        raise errors.Bug(f"{type(work).__name__} was answered with {type(answer).__name__}")

    async def _ask(
        self, work: Work, files: list[MemFile], client: str, queue: FairQueue
    ) -> JobResult:
        """Have a short job done at once, any other in a process of its own when it is its client's
        turn."""
        await self.worker.wait_until_ready(PATIENCE_S)
        if sum(f.size for f in files) <= AT_ONCE_BYTES:
            answer, file = await self._do_at_once(work, files)
            if not isinstance(answer, NeedsProcess):
                return answer, file
            if file is not None:
                file.close()
        await queue.enter(client)
        return await self._do_apart(work, files, queue, client)

    def _doubt(self) -> None:
        """The worker failed where no client was at fault: one that can build no prompt at all is
        started again."""
        if self._trial is None or self._trial.done():
            self._trial = asyncio.create_task(self._try_out(), name="trial of the prompt worker")

    async def _try_out(self) -> None:
        """Build a prompt that any worker can build."""
        with MemFile.of(TRIAL) as source:
            try:
                answer, file = await self._do_at_once(Read((0, len(TRIAL))), [source])
            except (Busy, StageDead):
                return  # it is being ended, or it has died
        if file is not None:
            file.close()
        if not isinstance(answer, Built):
            self.worker.kill("it could build no prompt any more")

    async def _do_at_once(self, work: Work, files: list[MemFile]) -> JobResult:
        job = Job(next(self._numbers), work, apart=False)
        answers = self._send(job, files)
        if answers is None:
            await self.worker.wait_until_ready(PATIENCE_S)
            answers = self._send(job, files)
        if answers is None:
            raise StageDead(RESTARTING)
        with answers:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await _read_answer(answers)
            except TimeoutError:
                self.worker.kill(f"a short prompt took it over {PATIENCE_S:g} s")
                raise Busy("prompts take too long at the moment") from None

    async def _do_apart(
        self, work: Work, files: list[MemFile], queue: FairQueue, client: str
    ) -> JobResult:
        """Have a job done in a process of its own. The client has a place for it in the queue."""
        job = Job(next(self._numbers), work, apart=True)
        answers = self._send_or_leave(job, files, queue, client)
        if answers is None:
            # without the place: those behind this one wait for the worker beside it
            await self.worker.wait_until_ready(PATIENCE_S)
            await queue.enter(client)
            answers = self._send_or_leave(job, files, queue, client)
        if answers is None:
            raise StageDead(RESTARTING)
        try:
            return await _read_answer(answers)
        except asyncio.CancelledError:
            self._counts["killed"] += 1
            self.worker.stop_job(job.number)
            raise
        finally:
            # The place is given back when nothing of the job runs any more.
            self._ending[answers] = queue, client
            asyncio.get_running_loop().add_reader(answers, self._read_end, answers)

    def _send_or_leave(
        self, job: Job, files: list[MemFile], queue: FairQueue, client: str
    ) -> socket.socket | None:
        """Send a job, or give its place in the queue back."""
        answers = None
        try:
            answers = self._send(job, files)
        finally:
            if answers is None:
                queue.leave(client)
        return answers

    def _send(self, job: Job, files: list[MemFile]) -> socket.socket | None:
        """Send a job; returns the socket on which its answer comes, which the caller closes. The
        socket ends when nothing of the job runs any more. None: the worker is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as owned:
            owned.enter_context(ours)
            ours.setblocking(False)
            if not self.worker.send(job, [theirs.fileno(), *(f.fd for f in files)]):
                return None
            owned.pop_all()
        return ours

    def _read_end(self, answers: socket.socket) -> None:
        """The end of a job that was answered or given up; or an answer that nobody waits for."""
        try:
            data, fds = _receive(answers)
        except BlockingIOError:
            return
        for fd in fds:
            os.close(fd)
        if not data:
            self._end(answers)

    def _end(self, answers: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(answers)
        answers.close()
        queue, client = self._ending.pop(answers)
        queue.leave(client)

    def _raise_for(self, answer: FromWorker) -> None:
        """Raise what an answer says went wrong, if it is one that says so."""
        match answer:
            case JobFailed(kind=kind, message=message, param=param):
                raise _error(kind, message, param)
            case Died(signal=number) if number in (signal.SIGXCPU, signal.SIGKILL, signal.SIGXFSZ):
                self._counts["over_limit"] += 1
                s = self.settings
                raise Invalid(
                    f"the request takes more to prepare than is allowed ({s.cpu_s} s of CPU time, "
                    f"{s.memory_mb:,} MiB)",
                    "messages",
                )
            case Died(signal=number):
                self._counts["over_limit"] += 1
                log.error("a request made its prompt's process end with signal %d", number)
                raise Invalid(
                    "the request cannot be prepared: what it holds breaks its decoder", "messages"
                )


async def _read_answer(answers: socket.socket) -> JobResult:
    """Wait for a job's answer. Until the caller goes on, the answer stays in the socket: a caller
    that is cancelled has nothing to close."""
    while True:
        await wait_readable(answers)
        with suppress(BlockingIOError):
            data, fds = _receive(answers)
            break
    if not data:
        raise StageDead("the prompt worker died")
    file: MemFile | None = None
    try:
        file = MemFile.received(fds[0]) if fds else None
        return decode_from_worker(data), file
    except (msgspec.MsgspecError, StrettoError) as e:
        return JobFailed("Bug", f"a prompt cannot be understood: {e}"), file


async def wait_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """A datagram and its descriptors; no data: the other end is closed."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, MAX_DATAGRAM, 1)
    except BlockingIOError:
        raise
    except OSError:
        return b"", []
    return data, fds


def _to_prompt(answer: Built, file: MemFile) -> PackedPrompt:
    """The prompt that the file holds. It owns the file from here on; without media, the file is
    closed at once."""
    try:
        prompt = decode_prompt(file.read(0, answer.header))
    except msgspec.MsgspecError as e:
        file.close()
        raise errors.Bug(f"a prompt cannot be understood: {e}") from None
    if prompt.pieces():
        features = PromptFeatures(MemFileSlice(file, answer.start))
        prompt = msgspec.structs.replace(prompt, features=features)
    else:
        file.close()
    prompt.check()
    return prompt


def _error(kind: str, message: str, param: str | None) -> StrettoError:
    """The worker's error, as its own class."""
    theirs: dict[str, type[Invalid]] = {
        c.__name__: c for c in (Invalid, errors.MediaError, errors.TooLong)
    }
    if kind in theirs:
        return theirs[kind](message, param)
    return CheckpointError(message) if kind == "CheckpointError" else errors.Bug(message)
