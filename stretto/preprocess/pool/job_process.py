"""Jobs that the prompt worker does not do itself: each in a child of its own, which has limits on
CPU time and memory, can be killed when its client leaves, gives all its memory back, and has the
descriptors of its own job alone. Two children are forked ahead and wait for theirs: forking and the
first use of all that a child inherits take as long as the features of some seconds of sound. The
worker runs one thread, so forking is safe. Imports no torch."""

from __future__ import annotations

import logging
import mmap
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto._process import die_with_parent
from stretto.observe import logs
from stretto.preprocess.pool.jobs import (
    MAX_DATAGRAM,
    MAX_FDS,
    Check,
    Continue,
    Died,
    Job,
    JobFailed,
    JobResult,
    decode_job,
    encode,
    failed,
    send_answer,
)
from stretto.preprocess.pool.memfile import MemFile

log = logging.getLogger(__name__)

SPARES = 2  # one cuts a large body into its fields, the next builds the prompt of it
NAME = Path("/proc/self/comm")  # as ps and top show it
SHORT_S = 0.05  # of CPU time: ten seconds of sound, a photo
BURST_S, SHARE = (
    0.25,
    0.05,
)  # CPU time of all jobs while they are short: the most at once, and of each second
MAX_RESULT = 1 << 30  # bytes of a memory file that a job may write

Work = Callable[[Job, list[MemFile]], JobResult]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of one job that runs apart."""

    cpu_s: int
    memory_mb: int


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A process that waits for its one job."""

    pid: int
    pidfd: int
    jobs: socket.socket  # where its job is sent
    warmed: mmap.mmap  # shared with it: its first byte says that it is ready

    def send(self, job: Job, answer: socket.socket, files: Sequence[MemFile], short: bool) -> None:
        with self.jobs:
            if not short:
                make_idle(self.pid)
            socket.send_fds(self.jobs, [encode(job)], [answer.fileno(), *(f.fd for f in files)])

    def ready(self) -> bool:
        """Has it done what it does while it waits?"""
        return self.warmed[0] != 0

    def end(self) -> tuple[int, float]:
        """Its status, and the CPU time that it took. It has ended, or was killed."""
        os.close(self.pidfd)
        _, status, used = os.wait4(self.pid, 0)
        return status, used.ru_utime + used.ru_stime


@dataclass(slots=True)
class Credit:
    """A token bucket of CPU time: each job spends its first part from it at the worker's priority,
    and is idle without. Clients that send long work and leave soon empty it."""

    clock: Callable[[], float] = time.monotonic
    left: float = BURST_S
    at: float = 0.0

    def take(self) -> float:
        """Take what a job that starts now may spend."""
        now = self.clock()
        self.left = min(BURST_S, self.left + SHARE * (now - self.at))
        self.at = now
        taken = SHORT_S if self.left >= SHORT_S else 0.0
        self.left -= taken
        return taken

    def give_back(self, seconds: float) -> None:
        self.left += max(0.0, seconds)


@dataclass(slots=True, eq=False)
class Children:
    control: socket.socket  # the worker's, which children do not keep
    limits: WorkerLimits
    work: Work
    warm: Callable[
        [], None
    ]  # run by a child that waits: what it touches for the first time takes long
    credit: Credit = field(default_factory=Credit)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _running: dict[int, tuple[Child, socket.socket, float]] = field(
        default_factory=dict
    )  # by job; credit it has taken
    _spares: list[Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._selector.register(self.control, selectors.EVENT_READ, None)

    def wait(self) -> Iterator[int | None]:
        """Wait until something happens: yields the numbers of jobs that are over, and None if the
        server has sent something."""
        for key, _ in self._selector.select():
            yield key.data

    def prepare(self) -> None:
        """Have children that wait for the next jobs. Not while jobs run: under load, children are
        forked as needed."""
        try:
            while len(self._spares) < SPARES:
                self._spares.append(self._fork(self.warm))
        except OSError as e:  # the next job tries again
            log.warning("no process can be started for the next prompts: %s", e)

    def start(self, job: Job, answer: socket.socket, files: Sequence[MemFile]) -> None:
        """Let a child do a job. `answer` and `files` stay the caller's: the child has descriptors
        of its own. `OSError`: there can be no child."""
        own_answer = answer.dup()  # to say that the child died
        try:
            child, taken = self._assign(job, answer, files)
        except BaseException:
            own_answer.close()
            raise
        self._running[job.number] = child, own_answer, taken
        self._selector.register(child.pidfd, selectors.EVENT_READ, job.number)

    def _assign(
        self, job: Job, answer: socket.socket, files: Sequence[MemFile]
    ) -> tuple[Child, float]:
        """The child that has the job now, and the credit that it has taken."""
        child = self._spare(job) or self._fork()
        taken = 0.0 if interactive(job) else self.credit.take()
        short = interactive(job) or taken > 0
        try:
            child.send(job, answer, files, short)
        except OSError:  # it was killed
            child.end()
            child = self._fork()
            child.send(job, answer, files, short)
        return child, taken

    def _spare(self, job: Job) -> Child | None:
        """One that may do this job. A grammar is checked in less time than a spare takes to become
        ready."""
        for i, spare in enumerate(self._spares):
            if spare.ready() or not isinstance(job.work, Check):
                return self._spares.pop(i)
        return None

    def stop(self, number: int) -> None:
        """Nobody waits for its answer. It may be over."""
        if number in self._running:
            os.kill(self._running[number][0].pid, signal.SIGKILL)

    def close(self) -> None:
        """End the children that wait for a job."""
        for spare in self._spares:
            spare.jobs.close()
            os.kill(spare.pid, signal.SIGKILL)
            spare.end()
        self._spares.clear()
        self._selector.close()

    def reap(self, number: int) -> None:
        child, answer, taken = self._running.pop(number)
        self._selector.unregister(child.pidfd)
        status, used = child.end()
        self.credit.give_back(taken - used)
        with answer:
            if status:
                send_answer(
                    answer, Died(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), None
                )
        if not self._running:
            self.prepare()

    def _fork(self, warm: Callable[[], None] = lambda: None) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        warmed = mmap.mmap(-1, 1)
        worker = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._child(theirs, warm, warmed, worker)
            # Its waking up does not interrupt anybody. Set here, since the child would set it at
            # any time, and perhaps after `make_idle`.
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
            return Child(pid, os.pidfd_open(pid), ours, warmed)
        except BaseException:
            ours.close()  # a child that has no pidfd is told nothing, and ends
            raise
        finally:
            theirs.close()

    def _child(
        self, jobs: socket.socket, warm: Callable[[], None], warmed: mmap.mmap, worker: int
    ) -> None:
        """Does not return."""
        code = 1
        try:
            die_with_parent(worker)
            self.control.close()
            self._selector.close()
            for child, answer, _ in self._running.values():
                os.close(child.pidfd)
                answer.close()
            for spare in self._spares:
                os.close(spare.pidfd)
                spare.jobs.close()
            NAME.write_text("prompt spare")
            warm()
            warmed[0] = 1
            data, fds, _, _ = socket.recv_fds(jobs, MAX_DATAGRAM, MAX_FDS)
            if data:
                self._do(decode_job(data), *fds)
            code = 0
        finally:
            logs.drain()
            os._exit(code)  # nothing of the worker's is to be run here

    def _do(self, job: Job, answer: int, *files: int) -> None:
        NAME.write_text("prompt job")
        if not interactive(job):
            signal.signal(signal.SIGPROF, lambda *_: make_idle(0))
            signal.setitimer(signal.ITIMER_PROF, SHORT_S)
        limit(self.limits)
        try:
            result = self.work(job, [MemFile.trusted(f) for f in files])
        except MemoryError:
            message = (
                f"the request needs more than {self.limits.memory_mb:,} MiB of memory to be "
                f"prepared"
            )
            result = JobFailed("MediaError", message, "messages"), None
        except Exception as e:  # noqa: BLE001  else its caller would hear that the process died, and nobody why
            result = failed(e), None
        send_answer(socket.socket(fileno=answer), *result)


def interactive(job: Job) -> bool:
    """Text of a conversation that somebody is having: it takes a second at most, and few are done
    at a time. It never waits for an idle core, which a busy machine may not have."""
    return isinstance(job.work, Continue)


def make_idle(pid: int) -> None:
    """A long job: running answers and short jobs come first. Linux takes a core that runs nothing
    but such work for a free one, and wakes the server and its hosts there. No niceness says as
    much."""
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def limit(limits: WorkerLimits) -> None:
    """Limit this process from now on. Limits that it has already still hold."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (limits.memory_mb << 20))
    _limit(resource.RLIMIT_CPU, int(used) + limits.cpu_s, 1)  # SIGXCPU, then SIGKILL
    _limit(resource.RLIMIT_FSIZE, MAX_RESULT)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int, grace: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    last = value + grace if hard == resource.RLIM_INFINITY else min(value + grace, hard)
    resource.setrlimit(kind, (min(value, last), last))
