"""Jobs that the prompt worker does not do itself: each in a child of its own, which has limits on CPU time and memory,
can be killed when its client leaves, gives all its memory back, and has the descriptors of its own job alone. The
worker runs one thread, so forking is safe. Imports no torch."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stretto.child import die_with_parent
from stretto.prompt.jobs import Died, FromWorker, JobFailed, failed, say
from stretto.prompt.spool import Spool

NICE = 19  # running answers come first
MAX_RESULT = 1 << 30  # bytes of a memory file that a job may write

Work = Callable[[], tuple[FromWorker, Spool | None]]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Of one job that runs apart."""

    cpu_s: int
    memory_mb: int


@dataclass(slots=True, eq=False)
class Children:
    control: socket.socket  # the worker's, which children do not keep
    limits: WorkerLimits
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _running: dict[int, tuple[int, int, socket.socket]] = field(default_factory=dict)  # by job: pid, pidfd, answer

    def __post_init__(self) -> None:
        self._selector.register(self.control, selectors.EVENT_READ, None)

    def wait(self) -> Iterator[int | None]:
        """Until something happens: the numbers of jobs that are over, None for what the server says."""
        for key, _ in self._selector.select():
            yield key.data

    def fork(self, number: int, answer: socket.socket, work: Work) -> None:
        worker = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._child(answer, work, worker)
        pidfd = os.pidfd_open(pid)
        self._running[number] = (pid, pidfd, answer)
        self._selector.register(pidfd, selectors.EVENT_READ, number)

    def stop(self, number: int) -> None:
        """Nobody waits for its answer. It may be over."""
        if number in self._running:
            os.kill(self._running[number][0], signal.SIGKILL)

    def reap(self, number: int) -> None:
        pid, pidfd, answer = self._running.pop(number)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with answer:
            if status:
                say(answer, Died(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), None)

    def _child(self, answer: socket.socket, work: Work, worker: int) -> None:
        """Does not return."""
        code = 1
        try:
            die_with_parent(worker)
            self.control.close()
            self._selector.close()
            for _, pidfd, other in self._running.values():
                os.close(pidfd)
                other.close()
            limit(self.limits)
            try:
                result = work()
            except MemoryError:
                message = f"the request needs more than {self.limits.memory_mb:,} MiB of memory to be prepared"
                result = JobFailed("MediaError", message, "messages"), None
            except Exception as e:  # noqa: BLE001  else its caller would hear that the process died, and nobody why
                result = failed(e), None
            say(answer, *result)
            code = 0
        finally:
            os._exit(code)  # nothing of the worker's is to be run here


def limit(limits: WorkerLimits) -> None:
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
