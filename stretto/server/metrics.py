"""The server's metrics, in Prometheus' text format. One set per app, written on the event loop.

The engine's numbers are added as the engine reports them; `HELP` has their descriptions."""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from stretto import __version__
from stretto.engine.events import Usage
from stretto.server.request_log import RequestLog

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_GAPS = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.08,
    0.15,
    0.3,
    0.6,
    1.2,
)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_CANCEL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)
_SPEECH_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 4.0)
_PARTS = ("_bucket", "_sum", "_count")  # of a histogram
_NAME = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?")


PAGE_S = 1.0
"""Seconds for which one rendered page answers all scrapes: to render it takes two milliseconds of
the event loop."""


class Metrics:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_s = PAGE_S
        self._clock = clock
        self._page: tuple[float, bytes] | None = None  # when it was made
        self._registry = CollectorRegistry(auto_describe=True)
        r = self._registry
        self.requests = Counter(
            "stretto_requests", "Requests by route and status", ["route", "status"], registry=r
        )
        self.running = Gauge("stretto_num_requests_running", "Requests being answered", registry=r)
        self.waiting = Gauge(
            "stretto_num_requests_waiting", "Requests in the admission queue", registry=r
        )
        self.queue = Histogram(
            "stretto_queue_wait_seconds",
            "Wait in the admission queue, of requests whose turn came",
            buckets=(0.0, *_SECONDS),
            registry=r,
        )
        self.seconds = Histogram(
            "stretto_request_duration_seconds",
            "From arrival to the last byte",
            ["route"],
            buckets=_LONG,
            registry=r,
        )
        self.first_text = Histogram(
            "stretto_time_to_first_token_seconds",
            "From arrival to the first text",
            buckets=_SECONDS,
            registry=r,
        )
        self.first_audio = Histogram(
            "stretto_time_to_first_audio_seconds",
            "From arrival to the first sound",
            buckets=_SECONDS,
            registry=r,
        )
        self.rtf = Histogram(
            "stretto_audio_rtf",
            "Time to make speech over the time it plays",
            buckets=_RATIOS,
            registry=r,
        )
        self.audio = Counter("stretto_audio_seconds", "Speech made", registry=r)
        self.tokens = Counter("stretto_generation_tokens", "Text tokens made", registry=r)
        self.prompts = Counter(
            "stretto_prompt_tokens", "Tokens of prompts, media included", registry=r
        )
        self.cached = Counter(
            "stretto_prompt_cached_tokens", "Of these, tokens found in the prefix cache", registry=r
        )
        self.token_gap = Histogram(
            "stretto_inter_token_seconds",
            "Mean time between two text tokens of an answer",
            buckets=_GAPS,
            registry=r,
        )
        self.underrun = Counter(
            "stretto_audio_underrun_seconds",
            "How long players that start at once would have waited",
            registry=r,
        )
        self.smooth = Counter(
            "stretto_audio_continuity_ok", "Spoken answers without such a wait", registry=r
        )
        self.gone = Counter("stretto_disconnects", "Clients that left before the end", registry=r)
        self.connections = Gauge("stretto_connections", "Open connections", registry=r)
        info = Gauge(
            "stretto_build_info",
            "Always 1; the labels say what runs",
            ["version", "python"],
            registry=r,
        )
        info.labels(__version__, platform.python_version()).set(1)
        ProcessCollector(registry=r)
        self.refused = Counter(
            "stretto_connections_refused",
            "Connections ended by the server, by reason",
            ["reason"],
            registry=r,
        )
        self.realtime = RealtimeMetrics(r)

    def record(self, request_log: RequestLog) -> None:
        """A request is over."""
        self.requests.labels(request_log.route, str(request_log.status)).inc()
        self.seconds.labels(request_log.route).observe(request_log.elapsed())
        if request_log.queued is not None:
            self.queue.observe(request_log.queued)
        if request_log.first_text is not None:
            self.first_text.observe(request_log.first_text)
            self.tokens.inc(request_log.num_tokens)
            if request_log.token_gap is not None:
                self.token_gap.observe(request_log.token_gap)
        self.prompts.inc(request_log.prompt_tokens)
        self.cached.inc(request_log.cached_tokens)
        if request_log.first_audio is not None and request_log.rtf is not None:
            self.first_audio.observe(request_log.first_audio)
            self.rtf.observe(request_log.rtf)
            self.audio.inc(request_log.audio_seconds)
            self.underrun.inc(request_log.underrun)
            self.smooth.inc(0 if request_log.underrun else 1)
        if request_log.ended == "left":
            self.gone.inc()

    def record_answer(self, usage: Usage, audio_s: float, queued: float | None) -> None:
        """An answer in a realtime session is over. The gaps between its tokens and packets say
        nothing: they follow the playback."""
        if queued is not None:
            self.queue.observe(queued)
        self.tokens.inc(usage.text_tokens)
        self.prompts.inc(usage.prompt_tokens)
        self.cached.inc(usage.cached_tokens)
        self.audio.inc(audio_s)

    def page(self, render: Callable[[], bytes]) -> bytes:
        """The page for /metrics, made anew once it is `page_s` old."""
        now = self._clock()
        if self._page is None or now - self._page[0] >= self.page_s:
            self._page = now, render()
        return self._page[1]

    def render(self, running: int, engine: Mapping[str, float]) -> bytes:
        self.running.set(running)
        ours = generate_latest(self._registry)
        known = set(re.findall(rb"^# TYPE (\S+)", ours, re.M))
        return ours + "".join(_lines(engine, {k.decode() for k in known})).encode()


def _lines(values: Mapping[str, float], known: set[str]) -> Iterator[str]:
    """The engine's numbers, each name's together as the format demands; a name of ours is not said
    twice."""
    names = {key: match[1] for key in values if (match := _NAME.fullmatch(key))}
    histograms = {
        name.removesuffix("_bucket") for name in names.values() if name.endswith("_bucket")
    }
    groups: dict[str, list[str]] = {}
    for key, name in names.items():
        whole = next(
            (h for h in (name.removesuffix(end) for end in _PARTS) if h in histograms), name
        )
        if whole not in known:
            groups.setdefault(whole, []).append(f"{key} {_number(values[key])}\n")
    for name, lines in groups.items():
        kind = (
            "histogram" if name in histograms else "counter" if name.endswith("_total") else "gauge"
        )
        if name in HELP:
            yield f"# HELP {name} {HELP[name]}\n"
        yield f"# TYPE {name} {kind}\n"
        yield from lines


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class RealtimeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        self.sessions = Gauge(
            "stretto_realtime_sessions", "Realtime sessions that are open", registry=r
        )
        self.closed = Counter(
            "stretto_realtime_closed", "Realtime sessions ended, by reason", ["reason"], registry=r
        )
        self.responses = Counter(
            "stretto_realtime_responses",
            "Responses in realtime sessions, by how they ended",
            ["status"],
            registry=r,
        )
        self.errors = Counter(
            "stretto_realtime_errors", "Events answered with an error", ["code"], registry=r
        )
        self.barge_in = Counter(
            "stretto_barge_in", "Responses that speech or the client stopped", ["by"], registry=r
        )
        self.cancel = Histogram(
            "stretto_cancel_seconds",
            "From such a stop until the engine has let go",
            buckets=_CANCEL_BUCKETS,
            registry=r,
        )
        self.first_audio = Histogram(
            "stretto_speech_to_audio_seconds",
            "From the end of speech to the first sound",
            buckets=_SPEECH_BUCKETS,
            registry=r,
        )
        self.speculations = Counter(
            "stretto_speculations",
            "Answers begun at a pause: kept, dropped as speech went on, or failed and begun anew",
            ["how"],
            registry=r,
        )
        self.transcriptions = Counter(
            "stretto_transcriptions",
            "Transcriptions of what was said, by how they ended",
            ["how"],
            registry=r,
        )
        self.partial_transcripts = Counter(
            "stretto_partial_transcripts",
            "Times that a turn was written down while it was being spoken",
            registry=r,
        )


HELP = {
    "stretto_body_bytes": "Bytes of requests that are being read or prepared",
    "stretto_log_lines_dropped_total": "Lines of the server's log that were dropped because nobody "
    "read its stderr",
    "stretto_otlp_traces_total": "Requests by what became of their traces: exported to the "
    "collector, dropped because it was too slow, or failed as it refused them",
    "stretto_host_log_lines_dropped_total": "Lines of a host's log that were dropped because "
    "nobody read its stderr",
    "stretto_engine_requests_total": "Requests that the engine took",
    "stretto_engine_finished_total": "Requests that were answered to the end",
    "stretto_engine_failed_total": "Requests that ended with an error",
    "stretto_engine_cancelled_total": "Requests that their caller gave up",
    "stretto_engine_refused_total": "Requests that the engine had no room or no pace for",
    "stretto_engine_ahead_total": "Requests that read a turn's sound ahead of its end; not among "
    "the others",
    "stretto_engine_windows_changed_total": "Windows of sound that a louder one changed after they "
    "were read ahead",
    "stretto_engine_running": "Requests in the engine now, those included whose prompt is being "
    "built",
    "stretto_host_busy_seconds_total": "Time that a host's loop worked",
    "stretto_host_idle_seconds_total": "Time that a host's loop slept",
    "stretto_host_memory_bytes": "A host process in the machine's memory, without its GPU",
    "stretto_host_restarts_total": "Times that a host died and came back",
    "stretto_grammars_checking": "JSON schemas that are being checked",
    "stretto_grammars_waiting": "JSON schemas that wait to be checked",
    "stretto_prompts_running": "Requests that are being prepared in processes of their own",
    "stretto_prompts_waiting": "Requests that wait for a process that prepares them",
    "stretto_prompts_killed_total": "Preparations that ended because the client left",
    "stretto_prompts_over_limit_total": "Preparations that took too much, or broke a decoder",
    "stretto_prompt_worker_restarts_total": "Times that the prompt worker died",
    "stretto_prompt_worker_ready": "1 while prompts can be built, else 0",
    "stretto_process_open_fds": "Files and sockets that a process holds open: the server, the "
    "prompt worker, a host",
    "stretto_stage_requests": "Requests that a stage holds something for",
    "stretto_stage_waiting": "Requests that wait for a row of a stage's batch",
    "stretto_stage_queue_seconds": "Wait of a request for a row of a stage's batch, or for a slot "
    "of the vocoder",
    "stretto_stage_encoding": "Requests whose media are being encoded",
    "stretto_stage_encoded_total": "Pieces of media that were encoded",
    "stretto_stage_asked_total": "Pieces of media that a stage had to ask for again",
    "stretto_stage_steps_total": "Batches that a stage computed, by kind",
    "stretto_stage_rows_total": "Rows of the batches that a stage computed",
    "stretto_stage_tokens_total": "Tokens (or frames) that a stage picked",
    "stretto_stage_frames_total": "Frames that the vocoder made sound of",
    "stretto_stage_failed_steps_total": "Batches that failed",
    "stretto_stage_held_total": "Launches that were held back while the device still had work",
    "stretto_stage_late_total": "Launches that were held back for too long: the device had run out "
    "of work",
    "stretto_stage_gave_way_total": "Launches for frames that waited while another stage read "
    "prompts",
    "stretto_stage_launch_seconds": "Host time to launch a batch, by kind",
    "stretto_stage_device_seconds": "Time that the device worked on a batch, by kind",
    "stretto_stage_retire_seconds_total": "Host time to take in the results of batches",
    "stretto_stage_blocks": "Blocks of a stage's KV cache",
    "stretto_stage_blocks_available": "KV blocks that are free, or hold only what a later prompt "
    "may find again",
    "stretto_stage_slots": "Streams that the vocoder can hold",
    "stretto_stage_slots_available": "Streams that the vocoder has room for now",
    "stretto_stage_memory_bytes": "Device memory that was planned for a stage: weights and state",
    "stretto_stage_inboxes": "Requests whose input from the stage before is not all taken",
    "stretto_stage_outboxes": "Requests whose output for the next stage is not all sent",
    "stretto_link_handed_total": "Payloads that one stage handed to another of its host",
    "stretto_link_chunks_total": "Chunks over a link between processes",
    "stretto_link_bytes_total": "Bytes of payload over a link between processes",
    "stretto_link_stalls_total": "Chunks that found no credit (end out), or a full queue (end in)",
    "stretto_link_errors_total": "Chunks that were refused or lost",
    "stretto_link_credits": "Chunks that may be sent over a link now",
    "stretto_link_queued": "Chunks that wait between a stage and the thread of its end of a link",
    "stretto_link_purged_total": "Chunks that were dropped because their request was over",
    "stretto_link_put_seconds": "Time to send a chunk, the wait for a credit included",
    "stretto_link_take_seconds": "Time from a chunk's arrival until a stage can read it, its "
    "upload included",
    "stretto_link_queue_seconds": "Time that a chunk waited between a stage and the thread of its "
    "end of a link",
    "stretto_link_copy_seconds": "Time to copy a chunk off or onto the device",
}
