"""The prompt worker: a process beside the server that decodes what clients send and builds prompts from it.

Started and spoken to by `pool.py` alone. It loads the checkpoint's tokenizer once. Short texts it does at once, in
about a millisecond. Everything else is done in a child that it forks, one for each job: a child has limits on CPU
time and memory, can be killed when its client leaves, gives all its memory back, and has the descriptors of its own
job alone. The worker runs one thread, so forking is safe. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.child import die_with_parent
from stretto.errors import Invalid, StrettoError
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.prompt import work
from stretto.prompt.build import PromptBuilder
from stretto.prompt.jobs import (
    MAX_DATAGRAM,
    MAX_WORDS,
    Apart,
    Build,
    Built,
    Died,
    Failed,
    FromWorker,
    Head,
    Job,
    Outline,
    Outlined,
    Read,
    Ready,
    Span,
    Stop,
    decode_to_worker,
    encode,
    references,
)
from stretto.prompt.packed import lay_out, media_digest
from stretto.prompt.prompt import Prompt
from stretto.prompt.spool import Spool

NICE = 19  # of jobs apart: running answers come first
MAX_RESULT = 1 << 30  # bytes of a memory file that a job may write


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one job that runs apart."""

    cpu_s: int
    memory_mb: int


@dataclass(slots=True, eq=False)
class Worker:
    control: socket.socket
    builder: PromptBuilder
    limits: Limits
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    children: dict[int, tuple[int, int, socket.socket]] = field(default_factory=dict)  # by job: pid, pidfd, answer

    def serve(self) -> None:
        """Until the server goes."""
        self.selector.register(self.control, selectors.EVENT_READ, None)
        self.control.send(encode(Ready()))
        while True:
            for key, _ in self.selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._take():
                    return

    def _take(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.control, MAX_DATAGRAM, 3)
        if not data:
            return False
        message = decode_to_worker(data)
        if isinstance(message, Stop):
            if message.number in self.children:
                os.kill(self.children[message.number][0], signal.SIGKILL)
            return True
        answer, files = socket.socket(fileno=fds[0]), [Spool(f, os.fstat(f).st_size) for f in fds[1:]]
        try:
            if message.apart:
                self._fork(message, files, answer)
            else:
                with answer:
                    say(answer, *self._at_once(message, files))
        finally:
            for file in files:
                file.close()
        return True

    def _at_once(self, job: Job, files: list[Spool]) -> tuple[FromWorker, Spool | None]:
        """Text that is short; media are for a process of their own."""
        try:
            return do(self.builder, job.work, files, only_text=True)
        except StrettoError as e:
            return failed(e), None

    def _fork(self, job: Job, files: list[Spool], answer: socket.socket) -> None:
        worker = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._apart(job, files, answer, worker)
        pidfd = os.pidfd_open(pid)
        self.children[job.number] = (pid, pidfd, answer)
        self.selector.register(pidfd, selectors.EVENT_READ, job.number)

    def _apart(self, job: Job, files: list[Spool], answer: socket.socket, worker: int) -> None:
        """The child: does not return."""
        code = 1
        try:
            die_with_parent(worker)
            self.control.close()
            self.selector.close()
            for _, pidfd, other in self.children.values():
                os.close(pidfd)
                other.close()
            limit(self.limits)
            try:
                result = do(self.builder, job.work, files, only_text=False)
            except StrettoError as e:
                result = failed(e), None
            except MemoryError:
                message = f"the request needs more than {self.limits.memory_mb:,} MiB of memory to be prepared"
                result = Failed("MediaError", message, "messages"), None
            say(answer, *result)
            code = 0
        finally:
            os._exit(code)  # nothing of the worker's is to be run here

    def _reap(self, number: int) -> None:
        pid, pidfd, answer = self.children.pop(number)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with answer:
            if status:
                say(answer, Died(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), None)


def limit(limits: Limits) -> None:
    """Of this process, from now on."""
    os.nice(NICE)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # waking up does not interrupt anybody
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + (limits.memory_mb << 20)
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    cpu = int(used) + limits.cpu_s
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_RESULT, MAX_RESULT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def do(
    builder: PromptBuilder, job: Build | Read | Outline, files: list[Spool], *, only_text: bool
) -> tuple[FromWorker, Spool | None]:
    data = files[0].view()
    match job:
        case Build():
            messages = work.decode(_part(data, job.messages), "messages")
            if only_text and work.has_media(messages):
                return Apart(), None
            tools = _part(data, job.tools) if job.tools is not None else None
            recalled = msgspec.json.decode(files[1].view(), type=dict[str, str]) if len(files) > 1 else {}
            return pack(work.build_conversation(builder, messages, tools, recalled, job.audio_in_video))
        case Read():
            return pack(*work.read_aloud(builder, _text(_part(data, job.text))))
        case Outline():
            return do_outline(data, job.long, job.most)


def pack(prompt: Prompt, spoken: tuple[int, ...] | None = None) -> tuple[Built, Spool]:
    meta, arrays = lay_out(prompt)
    head = encode(Head(meta, media_digest(prompt), spoken))
    gap = b"\0" * (-len(head) % 4)  # floats lie where they should
    file = _sealed(head, gap, *(np.ravel(a).view(np.uint8).data for a in arrays))
    return Built(len(head), len(head) + len(gap)), file


def do_outline(data: memoryview, long: tuple[str, ...], most: int) -> tuple[Outlined, Spool]:
    short, found = work.outline(data, long, most)
    spans, at = {}, len(short)
    for name, value in found.items():
        spans[name] = (at, at + len(value))
        at += len(value)
    ids = tuple({i: None for value in found.values() for i in references(value)})
    return Outlined(len(short), spans, ids), _sealed(short, *found.values())


def _sealed(*parts: Any) -> Spool:
    spool = Spool.of(*parts)
    spool.seal()
    return spool


def _part(data: memoryview, span: Span) -> memoryview:
    return data[span[0] : span[1]]


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as e:
        raise Invalid(f"the text is not UTF-8 ({e.reason})", "input") from None


def failed(error: StrettoError) -> Failed:
    param = error.param if isinstance(error, Invalid) else None
    return Failed(type(error).__name__, str(error)[:MAX_WORDS], param[:MAX_WORDS] if param else None)


def say(answer: socket.socket, message: FromWorker, file: Spool | None) -> None:
    """Nobody may be there to hear it any more."""
    with contextlib.suppress(OSError):
        socket.send_fds(answer, [encode(message)], [file.fd] if file is not None else [])


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("model", type=Path)
    p.add_argument("--fd", type=int, required=True)
    p.add_argument("--cpu-s", type=int, required=True)
    p.add_argument("--memory-mb", type=int, required=True)
    args = p.parse_args()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the server's to handle
    control = socket.socket(fileno=args.fd)
    try:
        builder = PromptBuilder.open(args.model, OmniConfig.read(args.model))
    except StrettoError as e:
        control.send(encode(failed(e)))
        sys.exit(1)
    with contextlib.suppress(ImportError):
        import av  # noqa: F401  # once, here, rather than in every child that meets a video
    gc.collect()
    gc.freeze()  # what is shared with children stays shared: a collection would write to all of it
    Worker(control, builder, Limits(args.cpu_s, args.memory_mb)).serve()


if __name__ == "__main__":
    main()
