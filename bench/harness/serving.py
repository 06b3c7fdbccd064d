"""A server under test and its GPU: started, watched, ended. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.harness.results import ROOT
from stretto.errors import StrettoError


class Stopped(StrettoError):
    """The server has died, or did not start."""


@dataclass(slots=True)
class Server:
    """A running `stretto serve`, and how it came up."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    flags: list[str] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)  # what it was doing from when on
    ready_s: float = 0.0

    def wait(self, limit: float) -> None:
        start, last = time.monotonic(), ""
        while time.monotonic() - start < limit:
            if self.process.poll() is not None:
                raise Stopped(
                    f"the server ended with {self.process.returncode} while "
                    f"starting:\n{self.tail()}"
                )
            state, stages = self.health()
            told = json.dumps([state, stages])
            if told != last:
                self.phases.append(
                    {"at_s": time.monotonic() - start, "state": state, "stages": stages}
                )
                last = told
            if state == "ready":
                self.ready_s = time.monotonic() - start
                return
            time.sleep(0.05)
        raise Stopped(f"the server was not ready after {limit:.0f} s:\n{self.tail()}")

    def health(self) -> tuple[str, dict[str, str]]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=5
            ) as answer:
                body = json.loads(answer.read())
        except urllib.error.HTTPError as e:  # 503: not ready yet
            body = json.loads(e.read())
        except OSError:
            return "not listening", {}
        return str(body["status"]), dict(body.get("stages") or {})

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (
            line.rsplit(" ", 1) for line in lines if line.startswith("stretto_") and " " in line
        )
        return {name: float(value) for name, value in pairs}

    def tail(self, size: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""


@contextmanager
def serving(
    args: argparse.Namespace, directory: Path, folder: Path, *, tree: Path = ROOT,
    unread_log: bool = False,
    more: Mapping[str, str] | None = None,
    knows: Callable[[str], bool] = lambda flag: True,
) -> Iterator[Server]:  # fmt: skip
    """Started with the settings of a service with many listeners; ended by SIGTERM, then by
    SIGKILL. `tree`: the checkout whose server it is. `unread_log`: its output goes into a pipe that
    nobody reads. `more`: for its environment. `knows`: whether that server has a flag."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "port": port,
        "device": args.device,
        "load-format": "dummy" if args.model.startswith("released") else "safetensors",
        "max-rows": args.max_rows,
        "max-concurrent": 2 * args.max_rows,
        "drain-timeout": 2,
        "min-pace": 0,  # overload is to be measured, not refused
    }
    words = [
        word
        for name, value in flags.items()
        if knows(f"--{name}")
        for word in (f"--{name}", str(value))
    ]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto", "serve", str(directory), *words, *args.serve],
            cwd=tree,
            env=environment(tree, more), stdout=subprocess.PIPE if unread_log else out,
            stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_usual_limit_of_files,
        )  # fmt: skip
    # Ended from outside, by `timeout` for one: the server must not outlive us, with a GPU in its
    # hands.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped from outside"))
    try:
        yield Server(port, process, log, [*words, *args.serve])
    finally:
        signal.signal(signal.SIGTERM, before)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the hosts too, should any be left
        process.wait()


def _usual_limit_of_files() -> None:
    """As most systems begin, so that a result does not depend on the shell that it was started
    from."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def environment(tree: Path = ROOT, more: Mapping[str, str] | None = None) -> dict[str, str]:
    given = {**os.environ, **(more or {})}
    path = os.pathsep.join([str(tree), *filter(None, [given.get("PYTHONPATH")])])
    return {**given, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class GpuWatch:
    """nvidia-smi's numbers, ten a second, by time; empty where there is none."""

    FIELDS = ("utilization.gpu", "power.draw", "clocks.sm", "memory.used")

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        if (program := shutil.which("nvidia-smi")) is not None:
            fields = ",".join(("timestamp", *self.FIELDS))
            ask = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "100"]
            self._process = subprocess.Popen(
                ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for (
            line
        ) in process.stdout:  # by their own time: what comes through a pipe may come in lumps
            with suppress(ValueError):
                when, *values = line.split(",")
                at = datetime.strptime(when.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
                self.samples.append(
                    (at - time.time() + time.monotonic(), [float(x) for x in values])
                )

    def between(self, start: float, stop: float) -> dict[str, Any]:
        found = [values for at, values in self.samples if start <= at <= stop]
        if not found:
            return {}
        busy = [v[0] for v in found]
        means = {
            name: statistics.fmean(column)
            for name, column in zip(self.FIELDS, zip(*found, strict=True))
        }
        return {
            "samples": len(found),
            "busy_percent": means.pop(self.FIELDS[0]),
            "busy_min": min(busy),
            **means,
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
