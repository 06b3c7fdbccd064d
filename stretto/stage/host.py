"""A host: one process that drives some of the stages on one device, from one loop thread.

Started by the orchestrator with one end of a socket pair. The main thread reads control messages and posts them to the
loop; a writer thread sends reports, so that the loop never waits for the orchestrator. When the channel closes, the
host is over: it exits, whatever it was doing."""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from stretto.connector.contract import Endpoint, LinkOptions, OnLink, Receiver, Sender
from stretto.connector.courier import Incoming, InLink, Outgoing, OutLink
from stretto.connector.inline import InlineIn, InlineOut
from stretto.connector.registry import Registry
from stretto.connector.switches import OverlapSwitches
from stretto.errors import Bug, StageDead, StrettoError
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.load import Source
from stretto.orchestrator.messages import (
    Admit,
    Broken,
    Cancel,
    Configure,
    Connect,
    FromHost,
    LinkDown,
    Linked,
    Listen,
    Listening,
    Loading,
    Ping,
    Quit,
    Ready,
    Stats,
    StopText,
    Throttle,
    ToHost,
    Unlink,
    unpack_prompt,
)
from stretto.orchestrator.settings import LINKS, HostSettings
from stretto.prompt.prompt import Prompt
from stretto.stage.ahead import Ahead
from stretto.stage.channel import Channel
from stretto.stage.codec import CodecConfig, CodecStage
from stretto.stage.loop import Loop, Turns
from stretto.stage.nodes import Code2WavNode, Node, TalkerNode, ThinkerNode, failed
from stretto.stage.payload.copies import HostToDevice
from stretto.stage.payload.schema import CodecFrames, ThinkerRows
from stretto.stage.plan import RESERVE, check, free_memory, plan, sized
from stretto.stage.runner.graphs import SIZES, DecodeGraphs
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.talker import TalkerLane
from stretto.stage.runner.thinker import ThinkerLane
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.stage.stage import PayloadStore, Stage
from stretto.stage.warming import Warming, begin
from stretto.types import RequestId

log = logging.getLogger(__name__)

PRIORITIES = {"thinker": 0, "talker": -1}
"""Of the stages' streams on a device they share: what is heard sooner goes first. (The vocoder's is -2.)"""

SWITCH_S = 0.001


@dataclass(slots=True, eq=False)
class _LinkEnd:
    receiver: Receiver | None = None
    sender: Sender | None = None
    incoming: InLink | None = None
    outgoing: OutLink | None = None
    last: StrettoError | None = None  # fault
    down: bool = False  # and reported so


@dataclass(slots=True, eq=False)
class Host:
    """The stages of this process and their links."""

    configure: Configure
    settings: HostSettings
    report: Callable[[FromHost, bytes], None]  # collects
    push: Callable[[], None] = lambda: None  # sends what was collected
    device: torch.device = field(init=False)
    switches: OverlapSwitches = field(init=False)
    nodes: dict[str, Node] = field(init=False, default_factory=dict)
    links: dict[str, _LinkEnd] = field(init=False, default_factory=dict)
    loop: Loop = field(init=False)
    registry: Registry = field(init=False, default_factory=Registry)
    waiters: list[Waiter] = field(init=False, default_factory=list)
    streams: dict[str, torch.cuda.Stream] = field(init=False, default_factory=dict)  # that links copy on, by end
    memory: dict[str, int] = field(init=False, default_factory=dict)  # bytes by stage
    fresh: bool = field(init=False, default=False)  # requests were admitted in this round
    warming: Warming | None = field(init=False, default=None)  # while kernels are being compiled

    def load(self) -> None:
        """Build the stages, one after the other, if they fit; says how far it is.

        On a GPU, kernels that were never compiled on this machine are compiled by other processes meanwhile. These
        start when the plan is made, so that it does not take their memory for gone, and have ended before the first KV
        pool is allocated. The vocoder comes first: it has no such kernels, and takes as long as they do."""
        s = self.settings
        self.device = torch.device(s.device)
        self.switches = OverlapSwitches.read(s.switches, os.environ)
        if self.device.type == "cpu":
            torch.set_num_threads(s.threads)
        self.loop = Loop([])
        source = Source.open(
            self.configure.model,
            self.device,
            getattr(torch, s.dtype) if s.dtype else None,
            s.load_format,
            progress=False,
            expert_weights=s.expert_weights,
        )
        order = sorted(self.configure.stages, key=lambda name: name != "code2wav")
        self.settings = s = sized(source.config, order, s, source.dtype, self.device)
        plans = plan(source.config, order, s, source.dtype)
        free, reserve = free_memory(self.device), RESERVE[self.device.type]
        check(plans, free, reserve, str(self.device))
        self.memory = {p.stage: p.kept for p in plans}
        if self.device.type == "cuda":
            weights = sum(p.weights + p.passing + (p.state if p.stage == "code2wav" else 0) for p in plans)
            self.warming = begin(self.configure.model, source.config, order, s, source.dtype, free - reserve, weights)
        try:
            self._build(source, order)
        finally:
            if self.warming is not None:
                self.warming.close()
        # In the order of the data's way again.
        self.nodes = {name: self.nodes[name] for name in self.configure.stages}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.loop.stages = self._turns()

    def _build(self, source: Source, order: Sequence[str]) -> None:
        s = self.settings
        assert s.thinker_blocks is not None
        assert s.talker_blocks is not None
        embedding = None
        for name in order:
            if name != "code2wav" and self.warming is not None and self.warming.apart:
                self._finish_warming(name)
            self._progress(name, self._room(name))
            waiter = self._waiter(name)
            match name:
                case "thinker":
                    thinker = source.thinker()
                    embedding = thinker.model.embed_tokens.weight.data
                    self._finish_warming(name)
                    lane = ThinkerLane(thinker, self._cache(thinker, s.thinker_blocks), s.max_rows, s.max_context)
                    stage = self._stage(name, lane, s.thinker_blocks, waiter)
                    self.nodes[name] = ThinkerNode(stage, thinker, self.report)
                case "talker":
                    talker = source.talker(embedding)
                    self._finish_warming(name)
                    speech = TalkerLane(talker, self._cache(talker, s.talker_blocks), s.max_rows, s.max_context)
                    stage = self._stage(name, speech, s.talker_blocks, waiter)
                    self.nodes[name] = TalkerNode(stage, talker, self.report)
                case "code2wav":
                    codec = self._vocoder(source, waiter)
                    self.nodes[name] = Code2WavNode(codec, self.report)
                case _:
                    raise Bug(f"no stage is called {name!r}")

    def _vocoder(self, source: Source, waiter: Waiter | None) -> CodecStage:
        s = self.settings
        config = CodecConfig(slots=s.max_rows, max_waiting=s.max_waiting, overlap_depth=s.overlap_depth)
        graphs = self.device.type == "cuda" and s.graphs
        codec = CodecStage(source.code2wav(), _nobody, config.captured() if graphs else config, waiter)
        if graphs:
            self._progress("code2wav", "capturing graphs")
            codec.capture(progress=False)
            torch.cuda.empty_cache()  # what the library tried out its convolutions in
        return codec

    def _finish_warming(self, stage: str) -> None:
        """Wait until kernels are compiled, and the memory of those who did it is back."""
        if self.warming is not None:
            if self.warming.running:
                self._progress(stage, "compiling kernels")
            self.warming.finish()
            self.warming = None

    def _room(self, stage: str) -> str:
        s = self.settings
        blocks = {"thinker": s.thinker_blocks, "talker": s.talker_blocks}.get(stage)
        room = f"{blocks * s.block_size} tokens" if blocks is not None else f"{s.max_rows} streams"
        narrow = ", experts as float8" if stage == "thinker" and s.expert_weights == "float8" else ""
        return f"loading{narrow}, with room for {room}"

    def _progress(self, stage: str, what: str) -> None:
        self.report(Loading(stage, what), b"")
        self.push()

    def _turns(self) -> list[Turns]:
        """In the order of the data's way (the loop goes through them from the end): samples that are ready leave before
        anything else is done; the talker goes before the thinker, whose launches may be long; and the vocoder comes
        once more in between, so that frames that the talker sent are launched behind its own step at once. Only a new
        prompt goes to the thinker first: the talker's part of it can be done while the thinker's runs."""
        vocoder: list[Turns] = [self.nodes["code2wav"]] if "code2wav" in self.nodes else []
        push = _Push(self.push)
        order: list[Turns] = [push]
        if "thinker" in self.nodes:
            order += [self.nodes["thinker"], push]
        if "talker" in self.nodes:
            order += [*vocoder, self.nodes["talker"]]
        if "thinker" in self.nodes:
            order.append(_Fresh(self, self.nodes["thinker"]))
        return [*order, push, *vocoder, _Faults(self)]

    def _cache(self, model: Any, blocks: int) -> Any:
        return model.cache(blocks + 1, self.settings.block_size)

    def _waiter(self, name: str) -> Waiter | None:
        if self.device.type != "cuda":
            return None
        waiter = Waiter(self.loop.bell.ring, name)
        self.waiters.append(waiter)
        return waiter

    def _stage(self, name: str, lane: Any, blocks: int, waiter: Waiter | None) -> Stage:
        s = self.settings
        graphs = None
        if self.device.type == "cuda" and s.graphs:
            graphs = DecodeGraphs(lane, [n for n in SIZES if n <= s.max_rows])
        runner = Runner(lane, graphs, PRIORITIES[name])
        if graphs is not None and runner.stream is not None:
            self._progress(name, "capturing graphs")
            graphs.capture(runner.stream, name, progress=False)
            self._capture_prompts(name, lane, runner.stream)
        store = PayloadStore()
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=blocks,
                block_size=s.block_size,
                max_rows=s.max_rows,
                max_waiting=s.max_waiting,
                max_context=s.max_context,
                max_step_tokens=s.max_step_tokens,
                prefill_chunk=s.prefill_chunk,
                lone_prefill_chunk=s.lone_prefill_chunk,
                overlap_depth=s.overlap_depth,
                prefix_cache=s.prefix_cache,
                # A captured frame serves decoding rows alone; beside a prompt it would be launched kernel by kernel.
                mixed=s.mixed_steps and not (name == "talker" and graphs is not None and lane.fused),
            ),
            store.drop,
        )
        # On a CPU a step is done when its launch is, so there is nothing to wait for.
        hold = self.device.type == "cuda" and self.switches.just_in_time
        sizes = graphs.sizes if graphs is not None else SIZES
        ahead = Ahead(sizes, int(1e6 * s.launch_lead_ms), hold, self.loop.clock)
        return Stage(name, scheduler, runner, _nobody, store, waiter, ahead)

    def _capture_prompts(self, name: str, lane: ThinkerLane | TalkerLane, stream: torch.cuda.Stream) -> None:
        """Passes over prompts, and the audio encoder's. After the decode steps: their warm-ups must not find these."""
        accept = lane.model.accept_layer if isinstance(lane, ThinkerLane) else None
        prompts = PrefillGraphs.where_usable(lane.model.model, lane.cache, lane.rows, accept)
        if prompts is not None:
            self._progress(name, "capturing prompts")
            prompts.capture(stream, name, progress=False)
            lane.prompts = prompts
        if isinstance(lane, ThinkerLane):
            windows = WindowGraphs(lane.model.audio_tower)
            windows.capture(stream)
            lane.model.audio_tower.graphs = windows

    # -- messages, on the loop thread

    def handle(self, message: ToHost, blob: bytes) -> None:
        match message:
            case Admit():
                self._admit(message, blob)
            case Cancel(request=id):
                for node in self.nodes.values():
                    node.cancel(id)
            case StopText(request=id):
                thinker = self.nodes.get("thinker")
                if isinstance(thinker, ThinkerNode):
                    thinker.stop_text(id)
            case Throttle(request=id, on=on):
                for node in self.nodes.values():
                    node.throttle(id, on)
            case Listen():
                self._listen(message)
            case Connect():
                self._connect(message)
            case Unlink(link=name):
                self._unlink(name)
            case Ping(number=n):
                self.report(Stats(n, self.stats()), b"")
            case _:
                raise Bug(f"a host was sent {type(message).__name__}")

    def _admit(self, a: Admit, blob: bytes) -> None:
        """Announce a request to all stages here, the last one first, so that its inputs find it ready."""
        try:
            prompt: Prompt = unpack_prompt(a.prompt, blob)
            for node in reversed(self.nodes.values()):
                node.admit(a, prompt)
            self.fresh = True
        except StrettoError as e:
            for node in self.nodes.values():
                node.cancel(a.request)
            self.report(failed(a.request, next(iter(self.nodes)), e), b"")

    def _options(self, generation: int, secret: bytes, host: str = "127.0.0.1") -> LinkOptions:
        s = self.settings
        return LinkOptions(
            slots=s.link_slots,
            slot_bytes=s.link_slot_bytes,
            generation=generation,
            zero_copy=self.switches.zero_copy_encode,
            secret=secret or None,
            host=host,
        )

    def _listen(self, m: Listen) -> None:
        connector = self.registry.get(m.connector)
        receiver = connector.listen(m.link.replace(">", "-"), self._options(m.generation, m.secret, m.host))
        end = self.links.setdefault(m.link, _LinkEnd())
        end.receiver = receiver
        node = self.nodes[LINKS[m.link][1]]
        assert not isinstance(node, ThinkerNode)
        if connector.inline:
            end.incoming = InlineIn(receiver, m.link, self.loop.bell.ring)  # type: ignore[arg-type]
        else:
            keep = ThinkerRows.HOST if isinstance(node, TalkerNode) else CodecFrames.HOST
            uploader = HostToDevice(self.device, self.switches, keep, self._stream_for(f"{m.link} in", node))
            incoming = Incoming(receiver, m.link, self.loop.bell.ring, uploader=uploader)
            incoming.start()
            end.incoming = incoming
        node.intake.link = end.incoming
        self.report(Listening(m.link, msgspec.msgpack.encode(receiver.endpoint)), b"")

    def _connect(self, m: Connect) -> None:
        connector = self.registry.get(m.connector)
        endpoint = msgspec.msgpack.decode(m.endpoint, type=Endpoint)
        sender: Sender = connector.connect(endpoint, self._options(m.generation, m.secret))
        end = self.links.setdefault(m.link, _LinkEnd())
        end.sender = sender
        node = self.nodes[LINKS[m.link][0]]
        assert not isinstance(node, Code2WavNode)
        if connector.inline:
            end.outgoing = InlineOut(sender, m.link, self.loop.bell.ring)
        else:
            stream = self._stream_for(f"{m.link} out", node)
            outgoing = Outgoing(sender, m.link, self.loop.bell.ring, stream=stream, async_d2h=self.switches.async_d2h)
            outgoing.start()
            end.outgoing = outgoing
        node.link.out = end.outgoing
        self.report(Linked(m.link), b"")

    def _stream_for(self, end: str, node: Node) -> torch.cuda.Stream | None:
        """Where one end of a link copies. It stays the same when the link is laid anew: CUDA hands out 32 streams and
        then the same ones again, so that copies would sooner or later queue behind the thinker's steps."""
        if self.device.type != "cuda":
            return None
        if not self.switches.payload_stream:
            return node.stage.runner.stream if isinstance(node.stage, Stage) else node.stage.stream
        if end not in self.streams:
            self.streams[end] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self.streams[end]

    def _unlink(self, name: str) -> None:
        end = self.links.pop(name, None)
        if end is None:
            return
        sender, receiver = LINKS[name]
        if end.outgoing is not None:
            node = self.nodes[sender]
            assert not isinstance(node, Code2WavNode)
            node.link.out = None
            end.outgoing.close(drain=False)
        if end.incoming is not None:
            node = self.nodes[receiver]
            assert not isinstance(node, ThinkerNode)
            node.intake.link = None
            end.incoming.close()

    def stats(self) -> dict[str, float]:
        idle = self.loop.idle_ns / 1e9
        values: dict[str, float] = {
            "stretto_host_idle_seconds_total": idle,
            "stretto_host_busy_seconds_total": self.loop.age_s - idle,
        }
        for name, node in self.nodes.items():
            stage = node.stage
            values[f'stretto_stage_requests{{stage="{name}"}}'] = len(stage)
            values[f'stretto_stage_steps_total{{stage="{name}"}}'] = stage.stats.steps
            values[f'stretto_stage_launch_seconds_total{{stage="{name}"}}'] = stage.stats.launch_ns / 1e9
            values[f'stretto_stage_retire_seconds_total{{stage="{name}"}}'] = stage.stats.retire_ns / 1e9
            if isinstance(stage, Stage):
                pool = stage.scheduler.pool
                values[f'stretto_stage_tokens_total{{stage="{name}"}}'] = stage.stats.tokens
                values[f'stretto_stage_rows_total{{stage="{name}"}}'] = stage.stats.rows
                values[f'stretto_stage_held_total{{stage="{name}"}}'] = stage.stats.held
                values[f'stretto_stage_late_total{{stage="{name}"}}'] = stage.stats.late
                values[f'stretto_stage_waiting{{stage="{name}"}}'] = stage.scheduler.num_waiting
                values[f'stretto_stage_blocks_available{{stage="{name}"}}'] = pool.num_available
                values[f'stretto_stage_blocks{{stage="{name}"}}'] = pool.num_blocks
            else:
                values[f'stretto_stage_frames_total{{stage="{name}"}}'] = stage.stats.frames
                values[f'stretto_stage_slots_available{{stage="{name}"}}'] = stage.num_free
                values[f'stretto_stage_slots{{stage="{name}"}}'] = stage.config.slots
            if not isinstance(node, Code2WavNode):
                values[f'stretto_stage_outboxes{{stage="{name}"}}'] = len(node.link.boxes)
            if not isinstance(node, ThinkerNode):
                values[f'stretto_stage_inboxes{{stage="{name}"}}'] = (
                    len(list(node.intake.boxes)) + node.intake.boxes.num_early
                )
        for name, end in self.links.items():
            for way, link, ring in (("out", end.outgoing, end.sender), ("in", end.incoming, end.receiver)):
                if link is not None and ring is not None:
                    m = link.metrics
                    label = f'{{link="{name}",end="{way}"}}'
                    values[f"stretto_link_chunks_total{label}"] = m.chunks
                    values[f"stretto_link_bytes_total{label}"] = m.bytes
                    values[f"stretto_link_stalls_total{label}"] = m.stalls
                    values[f"stretto_link_credits{label}"] = ring.credits()
        return values

    def close(self) -> None:
        self.loop.stop()
        for name in list(self.links):
            self._unlink(name)
        for waiter in self.waiters:
            waiter.close()


class _Push:
    """Lets the reports of the turns before it go."""

    due_ns: int | None = None

    def __init__(self, push: Callable[[], None]) -> None:
        self.push = push

    def turn(self) -> bool:
        self.push()
        return False


class _Fresh:
    """A turn of the thinker's in rounds that brought requests."""

    due_ns: int | None = None

    def __init__(self, host: Host, thinker: Node) -> None:
        self.host, self.thinker = host, thinker

    def turn(self) -> bool:
        fresh, self.host.fresh = self.host.fresh, False
        return fresh and self.thinker.turn()


class _Faults:
    """Looks after the links in each round: a fault that names a request fails it, others end the link. A link that has
    ended is reported whatever its faults named: else the next request would wait on it for ever."""

    due_ns: int | None = None

    def __init__(self, host: Host) -> None:
        self.host = host

    def turn(self) -> bool:
        did = False
        for name, end in list(self.host.links.items()):
            for link in (end.incoming, end.outgoing):
                if link is None:
                    continue
                for error in link.faults():
                    did = True
                    end.last = error
                    self._fault(name, error)
                if link.ended and not end.down:  # not among the faults: a courier tells them before it ends
                    did = end.down = True
                    self.host.report(LinkDown(name, str(end.last or "it ended")), b"")
        return did

    def _fault(self, name: str, error: StrettoError) -> None:
        request: RequestId | None = error.request if isinstance(error, OnLink) else None
        if request is not None:
            for node in self.host.nodes.values():
                node.cancel(request)
            self.host.report(failed(request, name, error), b"")
        else:
            self.host.report(LinkDown(name, str(error)), b"")


def _nobody(output: Any) -> None:
    raise Bug("a stage without a node")


def serve(sock: socket.socket) -> int:
    channel = Channel(sock)
    first = channel.read()
    if first is None:
        return 0
    configure = first[0]
    assert isinstance(configure, Configure), configure
    host = Host(configure, HostSettings(**configure.settings), channel.post, channel.push)
    start = time.perf_counter()
    try:
        host.load()
    except (StrettoError, RuntimeError, OSError) as e:
        channel.send(Broken(type(e).__name__, str(e)))
        channel.flush()
        return 1
    if host.device.type == "cuda":
        host.memory["allocated"] = torch.cuda.memory_allocated(host.device)
    settle_down()
    channel.send(Ready(configure.stages, time.perf_counter() - start, host.memory))
    # Wakes the reader below, so that the orchestrator learns of it now and not with its next message.
    host.loop.on_failure = lambda: sock.shutdown(socket.SHUT_RD)
    host.loop.start()
    while (item := channel.read()) is not None:
        message, blob = item
        if isinstance(message, Quit):
            break
        if host.loop.failure is not None:
            break
        _post(host, channel, message, blob)
    code = 0
    if host.loop.failure is not None:
        channel.send(Broken("StageDead", f"the stage loop died: {host.loop.failure!r}"))
        code = 1
    host.close()
    channel.flush()
    return code


def settle_down() -> None:
    """What was made so far stays for good: without this, each full garbage collection would look through all of it, in
    the middle of a step. And threads that wait for the interpreter get it soon: they bring messages."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def _post(host: Host, channel: Channel, message: ToHost, blob: bytes) -> None:
    def run() -> None:
        try:
            host.handle(message, blob)
        except StrettoError as e:
            if isinstance(message, Listen | Connect):
                channel.send(LinkDown(message.link, str(e)))
            else:
                raise

    try:
        host.loop.post(run)
    except StrettoError as e:
        if isinstance(message, Admit):
            channel.send(failed(message.request, "host", StageDead(str(e))))


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--fd", type=int, required=True)
    args = p.parse_args()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the orchestrator's to handle
    logging.basicConfig(level=os.environ.get("STRETTO_LOG", "WARNING"))
    sock = socket.socket(fileno=args.fd)
    code = serve(sock)
    sys.stdout.flush()
    os._exit(code)  # threads in driver calls must not hold us up


if __name__ == "__main__":
    main()
