"""Which numbers of a host's stages and links are recorded, and by which names the server shows
them.

Asked for by the engine's pings, and taken on the loop thread. The engine adds what only it knows
(`PipelineEngine.metrics`), and the labels that tell several hosts and replicas apart."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from stretto.observe import logs
from stretto.observe.descriptors import OPEN_FILES, open_descriptors
from stretto.observe.recorder import Recorder
from stretto.stage.ar import StageCore
from stretto.stage.counters import KINDS
from stretto.stage.host.loop import Loop
from stretto.stage.links.links import Links
from stretto.stage.stage import Stage
from stretto.stage.vocoder import VocoderCore
from stretto.transport.contract import Receiver, Sender
from stretto.transport.courier import Incoming, Outgoing

PAGE = os.sysconf("SC_PAGE_SIZE")


def record_host(recorder: Recorder, loop: Loop, stages: Iterable[Stage], links: Links) -> None:
    recorder.number("stretto_host_memory_bytes", resident)
    recorder.number("stretto_host_log_lines_dropped_total", logs.dropped)
    recorder.number(OPEN_FILES, lambda: open_descriptors() or 0)
    recorder.number("stretto_host_idle_seconds_total", lambda: loop.idle_ns / 1e9)
    recorder.number("stretto_host_busy_seconds_total", lambda: loop.age_s - loop.idle_ns / 1e9)
    for stage in stages:
        recorder.number("stretto_stage_requests", stage.__len__, stage=stage.name)
        if sent := links.sent_by(stage):
            recorder.number(
                "stretto_stage_outboxes",
                lambda s=sent: sum(link.num_sending for link in s),  # type: ignore[misc]
                stage=stage.name,
            )
        if received := links.received_by(stage):
            recorder.number(
                "stretto_stage_inboxes",
                lambda r=received: sum(link.num_receiving for link in r),  # type: ignore[misc]
                stage=stage.name,
            )
    for local in links.local.values():
        recorder.number(
            "stretto_link_handed_total",
            lambda o=local: o.num_payloads,  # type: ignore[misc]
            link=local.name,
        )


def resident() -> int:
    """Bytes of this process in the machine's memory (not the device's)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def record_stage(recorder: Recorder, core: StageCore) -> None:
    """An autoregressive stage."""
    s = core.stats
    for name, read in {
        "stretto_stage_tokens_total": lambda: s.tokens,
        "stretto_stage_rows_total": lambda: s.rows,
        "stretto_stage_failed_steps_total": lambda: s.failed,
        "stretto_stage_held_total": lambda: s.held,
        "stretto_stage_late_total": lambda: s.late,
        "stretto_stage_gave_way_total": lambda: s.held_for_prefill,
        "stretto_stage_waiting": lambda: core.scheduler.num_waiting,
        "stretto_stage_blocks_available": lambda: core.scheduler.pool.num_available,
        "stretto_stage_blocks": lambda: core.scheduler.pool.num_blocks,
    }.items():
        recorder.number(name, read, stage=core.name)
    _record_steps(recorder, core, KINDS)


def record_codec(recorder: Recorder, core: VocoderCore) -> None:
    """A stage that makes samples of frames."""
    for name, read in {
        "stretto_stage_frames_total": lambda: core.stats.rows,
        "stretto_stage_slots_available": lambda: core.num_free,
        "stretto_stage_slots": lambda: core.config.slots,
    }.items():
        recorder.number(name, read, stage=core.name)
    _record_steps(recorder, core, ("decode",))


def _record_steps(recorder: Recorder, core: StageCore | VocoderCore, kinds: Sequence[str]) -> None:
    s, name = core.stats, core.name
    recorder.number("stretto_stage_retire_seconds_total", lambda: s.retire_ns / 1e9, stage=name)
    recorder.histogram("stretto_stage_queue_seconds", s.queue, stage=name)
    for kind in kinds:
        steps = s.kinds[kind]
        labels = {"stage": name, "kind": kind}
        recorder.number("stretto_stage_steps_total", lambda o=steps: o.steps, **labels)  # type: ignore[misc]
        recorder.histogram("stretto_stage_launch_seconds", steps.launch, **labels)
        recorder.histogram("stretto_stage_device_seconds", steps.device, **labels)


def record_link(
    recorder: Recorder, name: str, end: str, courier: Incoming | Outgoing, peer: Sender | Receiver
) -> None:
    """One end of a link, `in` or `out`; `Recorder.forget` takes it back."""
    m = courier.metrics
    labels = {"link": name, "end": end}
    for number, read in {
        "stretto_link_chunks_total": lambda: m.chunks,
        "stretto_link_bytes_total": lambda: m.bytes,
        "stretto_link_queued": lambda: m.queued,
        "stretto_link_stalls_total": lambda: m.stalls,
        "stretto_link_purged_total": lambda: m.purged,
        "stretto_link_errors_total": lambda: m.errors.total(),
        "stretto_link_credits": peer.credits,
    }.items():
        recorder.number(number, read, **labels)
    moved = {"put": m.put} if end == "out" else {"take": m.take}
    for number, histogram in {**moved, "queue": m.queue, "copy": m.copy}.items():
        recorder.histogram(f"stretto_link_{number}_seconds", histogram, **labels)
