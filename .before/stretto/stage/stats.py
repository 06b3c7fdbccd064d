"""A host's numbers, by the names under which the server shows them. Asked for by the orchestrator's pings, and taken
on the loop thread. What is only known to the orchestrator is added there (`PipelineEngine.metrics`), and so are the
labels that tell several hosts and replicas apart (`Pipeline.metrics`)."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.stage.ends import LinkEnd
from stretto.stage.loop import Loop
from stretto.stage.nodes.code2wav import Code2WavNode
from stretto.stage.nodes.node import Node
from stretto.stage.nodes.thinker import ThinkerNode
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
    for name, end in ends.items():
        for way, numbers in link_stats(end).items():
            values |= {f'{what}{{link="{name}",end="{way}"}}': value for what, value in numbers.items()}
    return values


def node_stats(node: Node) -> Values:
    stage = node.stage
    values: Values = {
        "stretto_stage_requests": len(stage),
        "stretto_stage_steps_total": stage.stats.steps,
        "stretto_stage_launch_seconds_total": stage.stats.launch_ns / 1e9,
        "stretto_stage_retire_seconds_total": stage.stats.retire_ns / 1e9,
    }
    if isinstance(stage, Stage):
        values |= {
            "stretto_stage_tokens_total": stage.stats.tokens,
            "stretto_stage_rows_total": stage.stats.rows,
            "stretto_stage_held_total": stage.stats.held,
            "stretto_stage_late_total": stage.stats.late,
            "stretto_stage_waiting": stage.scheduler.num_waiting,
            "stretto_stage_blocks_available": stage.scheduler.pool.num_available,
            "stretto_stage_blocks": stage.scheduler.pool.num_blocks,
        }
    else:
        values |= {
            "stretto_stage_frames_total": stage.stats.frames,
            "stretto_stage_slots_available": stage.num_free,
            "stretto_stage_slots": stage.config.slots,
        }
    if not isinstance(node, Code2WavNode):
        values["stretto_stage_outboxes"] = len(node.link.boxes)
    if not isinstance(node, ThinkerNode):
        values["stretto_stage_inboxes"] = len(list(node.intake.boxes)) + node.intake.boxes.num_early
    return values


def link_stats(end: LinkEnd) -> dict[str, Values]:
    """By direction: of a link within this host, both ends are here."""
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
