"""A host's numbers, by the names under which the server shows them. Asked for by the orchestrator's pings, and taken
on the loop thread. What is only known to the orchestrator is added there (`PipelineEngine.metrics`), and so are the
labels that tell several hosts and replicas apart (`Pipeline.metrics`)."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.stage.codec import CodecStage
from stretto.stage.ends import LinkEnd
from stretto.stage.loop import Loop
from stretto.stage.node import Node
from stretto.stage.stage import Stage

Values = dict[str, float]


def host_stats(loop: Loop, nodes: Mapping[str, Node], ends: Mapping[str, LinkEnd]) -> Values:
    idle = loop.idle_ns / 1e9
    values: Values = {
        "stretto_host_idle_seconds_total": idle,
        "stretto_host_busy_seconds_total": loop.age_s - idle,
    }
    for name, node in nodes.items():
        values |= {f'{what}{{stage="{name}"}}': value for what, value in node_stats(node).items()}
        for outlet in node.outlets:
            if outlet.handed:
                values[f'stretto_link_handed_total{{link="{outlet.link}"}}'] = outlet.handed
    for name, end in ends.items():
        for way, numbers in link_stats(end).items():
            values |= {f'{what}{{link="{name}",end="{way}"}}': value for what, value in numbers.items()}
    return values


def node_stats(node: Node) -> Values:
    values = dict(node.stats())
    if node.outlets:
        values["stretto_stage_outboxes"] = sum(len(o) for o in node.outlets)
    if node.inlets:
        values["stretto_stage_inboxes"] = sum(len(i) for i in node.inlets)
    return values


def stage_stats(stage: Stage) -> Values:
    """Of an autoregressive stage, for its node to tell."""
    return {
        "stretto_stage_requests": len(stage),
        "stretto_stage_steps_total": stage.stats.steps,
        "stretto_stage_launch_seconds_total": stage.stats.launch_ns / 1e9,
        "stretto_stage_retire_seconds_total": stage.stats.retire_ns / 1e9,
        "stretto_stage_tokens_total": stage.stats.tokens,
        "stretto_stage_rows_total": stage.stats.rows,
        "stretto_stage_held_total": stage.stats.held,
        "stretto_stage_late_total": stage.stats.late,
        "stretto_stage_waiting": stage.scheduler.num_waiting,
        "stretto_stage_blocks_available": stage.scheduler.pool.num_available,
        "stretto_stage_blocks": stage.scheduler.pool.num_blocks,
    }


def codec_stats(stage: CodecStage) -> Values:
    """Of a stage that makes samples, for its node to tell."""
    return {
        "stretto_stage_requests": len(stage),
        "stretto_stage_steps_total": stage.stats.steps,
        "stretto_stage_launch_seconds_total": stage.stats.launch_ns / 1e9,
        "stretto_stage_retire_seconds_total": stage.stats.retire_ns / 1e9,
        "stretto_stage_frames_total": stage.stats.frames,
        "stretto_stage_slots_available": stage.num_free,
        "stretto_stage_slots": stage.config.slots,
    }


def link_stats(end: LinkEnd) -> dict[str, Values]:
    """By direction."""
    both: dict[str, Values] = {}
    for way, link, ring in (("out", end.outgoing, end.sender), ("in", end.incoming, end.receiver)):
        if link is not None and ring is not None:
            both[way] = {
                "stretto_link_chunks_total": link.metrics.chunks,
                "stretto_link_bytes_total": link.metrics.bytes,
                "stretto_link_stalls_total": link.metrics.stalls,
                "stretto_link_credits": ring.credits(),
            }
    return both
