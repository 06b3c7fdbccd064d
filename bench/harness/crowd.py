"""Requests for a server under test, and the processes of listeners that send them.

The listeners are processes of their own (listener.py); a `Crowd` starts them for one level and
gathers what they heard. Imports no torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.listener import Heard, Job
from bench.harness.results import ROOT
from bench.harness.serving import GpuWatch, Server, Stopped, environment
from bench.harness.workload import Workload
from stretto.loadtest.report import errors, rates, rows
from stretto.loadtest.runner import Closed, Level, Load, Open
from stretto.preprocess.template import Tokenizer

PREBUFFERS = (0.0, 0.2)


# ---- questions


@dataclass(slots=True)
class Questions:
    """Request bodies, no two alike."""

    model: str
    tokenizer: Tokenizer
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def bodies(self, workload: Workload, count: int, timeline: bool = False) -> list[bytes]:
        return [self.body(workload, next(self.numbers), timeline) for _ in range(count)]

    def body(self, workload: Workload, index: int, timeline: bool) -> bytes:
        params = workload.params(index)
        return msgspec.json.encode(
            {
                "model": self.model,
                "messages": workload.messages(
                    index, lambda text: len(self.tokenizer.encode(text)) if text else 0
                ),
                "stream": True,
                "stream_options": {"include_usage": True},
                "modalities": ["text", "audio"],
                "audio": {"format": "pcm16"},
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "seed": index,
                "max_tokens": params.max_text_tokens,
                "ignore_eos": True,
                "min_audio_frames": params.min_frames,
                "max_audio_frames": params.max_frames,
                "timeline": timeline,
            }
        )


# ---- listeners


@dataclass(slots=True)
class Crowd:
    """Starts listeners in processes of their own and gathers what they heard."""

    server: Server
    folder: Path
    gpu: GpuWatch
    processes: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def listen(
        self,
        load: Load,
        bodies: list[bytes],
        *,
        warmup: int = 0,
        seconds: float,
        timeout: float = 60.0,
        spread: float = 0.0,
        arrivals: Sequence[float] | None = None,
        lead: float | None = None,
        beside: Sequence[subprocess.Popen[str]] = (),
    ) -> tuple[Level, dict[str, Any], list[Heard]]:
        """One level, whose listeners share `bodies`; the first `warmup` are not counted. Closed:
        each of so many sends its next request when it has its answer. With `arrivals`: each body is
        sent at its own time, whatever happened to the others. Processes `beside` begin when the
        listeners do."""
        streams = load.streams if isinstance(load, Closed) and arrivals is None else len(bodies)
        many = min(self.processes, streams)
        jobs = [
            Job(
                self.server.port, "", "", streams // many + (i < streams % many),
                warmup=warmup // many + (i < warmup % many), seconds=seconds, timeout=timeout,
                spread=spread, lead=lead,
                arrivals=None if arrivals is None else list(arrivals[i::many]),
            )
            for i in range(many)
        ]  # fmt: skip
        before, started = self.server.metrics(), []
        try:
            for i, job in enumerate(jobs):
                name = f"listener-{next(self.numbers)}"
                job.bodies, job.out = (
                    str(self.folder / f"{name}.jsonl"),
                    str(self.folder / f"{name}.json"),
                )
                Path(job.bodies).write_bytes(b"\n".join(bodies[i::many]))
                started.append(self._start(job))
            for process in (*started, *beside):
                if self._line(process) != "ready":
                    raise Stopped("a listener did not start")
            begin = time.monotonic() + 0.2
            for process in (*started, *beside):
                self._tell(process, f"{begin!r}\n")
            for process in started:
                process.wait(seconds + timeout + 30)
            stop = time.monotonic()
        finally:
            for process in started:
                process.kill()
                process.wait()
        heard = [
            h
            for job in jobs
            for h in msgspec.json.decode(Path(job.out).read_bytes(), type=list[Heard])
        ]
        heard.sort(key=lambda h: h.sample.sent)
        level = Level(load, [h.sample for h in heard if h.counts])
        level.seconds = stop - begin
        extra = {"gpu": self.gpu.between(begin, stop), "host": delta(before, self.server.metrics())}
        if arrivals is not None:
            extra |= came(arrivals, level)
        return level, extra, [h for h in heard if h.counts]

    def _start(self, job: Job) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.harness.listener"],
            cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._tell(process, msgspec.json.encode(job).decode() + "\n")
        return process

    @staticmethod
    def _tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


def delta(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Changes of the counters of stages and host (the host is asked for them once a second), and of
    how many times something took how long in all."""
    kept = ("_total", "_seconds_sum", "_seconds_count")
    names = [
        n
        for n in after
        if n.startswith(("stretto_stage_", "stretto_host_")) and any(k in n for k in kept)
    ]
    return {n: after[n] - before.get(n, 0.0) for n in names}


def came(arrivals: Sequence[float], level: Level) -> dict[str, Any]:
    """When requests came, how late the listeners' own processes sent one at most (which no time of
    an answer shows), and how many answers were under way at once at most."""
    sent = [s.sent for s in level.samples]
    late = [s - at for s, at in zip(sent, sorted(arrivals), strict=False)]
    changes = sorted(
        [(s.sent, 1) for s in level.samples]
        + [(s.sent + (s.end or 0.0), -1) for s in level.samples]
    )
    return {
        "arrivals": list(arrivals),
        "sent_late_s": max(late, default=0.0),
        "most_at_once": max(itertools.accumulate(change for _, change in changes), default=0),
    }


def told(level: Level, extra: dict[str, Any]) -> dict[str, Any]:
    """A level for the file: summaries, and every sample."""
    summary = {
        key: {
            "p50": r.summary.p50,
            "p90": r.summary.p90,
            "p99": r.summary.p99,
            "max": r.summary.max,
        }
        for key, r in rows(level, PREBUFFERS).items()
        if r.summary is not None
    }
    raw = [
        {
            "sent": s.sent,
            "first_text": s.first_text,
            "first_audio": s.first_audio,
            "end": s.end,
            "rtf": s.rtf,
            "audio_s": s.audio_seconds,
            "prompt_tokens": s.prompt_tokens,
            "text_tokens": s.text_tokens,
            "error": s.error,
            "message": s.message,
            "packets": [[p.at, p.seconds] for p in s.packets],
        }
        for s in level.samples
    ]
    return {
        "streams": level.load.streams if isinstance(level.load, Closed) else None,
        "rate": level.load.rate if isinstance(level.load, Open) else None,
        "answers": len(level.good),
        "errors": errors(level),
        "rates": rates(level),
        "summary": summary,
        **extra,
        "samples": raw,
    }
