"""A host: one process that drives some of the stages on one device, from one loop thread.

The process (`process.py`) builds the stages on its main thread, then reads control messages there
and posts them to the loop, which never waits for the engine (see `channel.py`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec
import torch

from stretto._imports import load
from stretto.config.engine import HostSettings
from stretto.errors import Bug, Busy, Gone, StrettoError, WireError
from stretto.messages.hosts import Configure, Connect, LinkDown, Listen, Ping, Quit, Stats, Unlink
from stretto.messages.requests import (
    Admit,
    Cancel,
    Ended,
    Failed,
    Features,
    Finish,
    MediaData,
    StepInputs,
    Throttle,
    ToHost,
)
from stretto.observe.recorder import Recorder
from stretto.preprocess.packed_prompt import Bytes, unpack_pieces
from stretto.stage.host.channel import Channel
from stretto.stage.host.context import BuildStages, StageContext, check_built
from stretto.stage.host.loop import Loop, Wakeup
from stretto.stage.host.stats import record_host
from stretto.stage.links.endpoints import LinkEndpoints, RequestFault
from stretto.stage.links.links import Links
from stretto.stage.stage import (
    Output,
    Stage,
    Transfer,
)
from stretto.stage.timings import failed
from stretto.types import Mark, RequestId

log = logging.getLogger(__name__)

# at most in one answer to a ping
SPANS = 20_000
RESERVED_PLACES = 2048
"""Of the places for messages, those that new requests leave free: what was taken must be able to
end."""


def poll_groups(stages: Sequence[Stage]) -> tuple[list[Stage], list[Stage], list[Stage]]:
    """In which order a host polls its stages; `stages` are in data-flow order. Reports leave behind
    each group. What is ready leaves before anything else is done, and a stage goes before the one
    that feeds it, whose launches may be long. The last one, if it is cheap to poll, comes once more
    behind each stage of the second group, so that what these sent is launched behind their own
    steps at once. The third group is the stage that takes prompts."""
    prompts = [] if stages[0].receives else [stages[0]]
    last = [stages[-1]] if len(stages) > 1 and stages[-1].cheap else []
    others = stages[len(prompts) : len(stages) - len(last)]
    return last, [polled for stage in reversed(others) for polled in (stage, *last)], prompts


class Host:
    """The stages of this process and their links. `load` makes them; their reports go to the
    `channel`."""

    def __init__(
        self,
        configure: Configure,
        settings: HostSettings,
        channel: Channel,
    ) -> None:
        self.configure = configure
        self.channel = channel
        self.device = torch.device(settings.device)
        if self.device.type == "cpu":
            torch.set_num_threads(settings.threads)
        self.wakeup = Wakeup()
        self.recorder = Recorder(settings.trace)
        self.context = StageContext(
            configure.model,
            settings,
            self.device,
            self.wakeup.wake,
            channel,
            self.num_requests,
            recorder=self.recorder,
            configure=configure,
        )
        self.stages: dict[str, Stage] = {}
        # requests were, since the last round
        self._admitted = False

    def load(self) -> None:
        """Build the stages and the loop that polls them. On the main thread; the loop does not run
        yet."""
        c = self.configure
        build: BuildStages = load(c.build)
        self.stages = build(c.stages, self.context)
        check_built(self.stages, c)
        self.links = Links(self.stages)
        self.endpoints = LinkEndpoints(
            self.links,
            self.context.settings,
            self.device,
            self.wakeup.wake,
            recorder=self.recorder,
        )
        self.poll_groups = poll_groups(list(self.stages.values()))
        self.loop = Loop(self, self.wakeup)
        record_host(self.recorder, self.loop, self.stages.values(), self.links)

    def num_requests(self) -> int:
        """That any stage here holds something for."""
        return max((len(stage) for stage in self.stages.values()), default=0)

    # -- stages, on the loop thread

    def poll(self) -> bool:
        """One round over links and stages, without waiting. True: something happened. Only a new
        prompt goes to the first stage before the others: their part of it can be done while the
        first one's runs."""
        last, others, prompts = self.poll_groups
        new = prompts if self._admitted and len(self.stages) > 1 else []
        self._admitted = False
        progress = self._poll_links()
        for group in (last, [*new, *others], prompts):
            for stage in group:
                progress = self.poll_stage(stage) or progress
            self.channel.push()
        return progress

    @property
    def due_ns(self) -> int | None:
        """When a stage must be polled again though nothing wakes the loop."""
        times = [at for stage in self.stages.values() if (at := stage.due_ns) is not None]
        return min(times, default=None)

    def poll_stage(self, stage: Stage) -> bool:
        """Give a stage what has arrived for it, take what it made, let it launch more. True:
        something happened."""
        received = self._receive(stage)
        made = self._move(stage, stage.poll())
        launched = stage.launch()
        if launched:
            # on a CPU the launch was the work
            self._move(stage, stage.poll())
        return received or made or launched

    def _receive(self, stage: Stage) -> bool:
        """Move what waits on links to and from other hosts. True: something came."""
        received = False
        for outlet in self.links.outlets.values():
            if outlet.sender is stage:
                for id in outlet.flush():
                    self._set_blocked(stage, id)
        for inlet in self.links.inlets.values():
            for item in inlet.receive() if inlet.receiver is stage else ():
                received = True
                if isinstance(item, Transfer):
                    self._accept(stage, item)
                else:
                    id, error = item
                    self._fail(id, stage.name, error)
        return received

    def _move(self, stage: Stage, outputs: Sequence[Output]) -> bool:
        """To the stages behind, and to the engine."""
        for output in outputs:
            if isinstance(output, Transfer):
                self._send(stage, output)
                continue
            message = output.message
            if isinstance(message, Ended | Failed):
                self.links.close(message.request, stage, purge=isinstance(message, Failed))
            self.channel.post(message, output.blob)
        return bool(outputs)

    def _send(self, stage: Stage, transfer: Transfer) -> None:
        local = self.links.local.get(transfer.link)
        if local is None:
            sent = self.links.outlets[transfer.link].send(transfer)
            if not sent and transfer.mark is Mark.MORE:
                self._set_blocked(stage, transfer.request)
        elif local.hand_over(transfer):
            self._accept(local.receiver, transfer)

    def _poll_links(self) -> bool:
        faults = self.endpoints.poll()
        for fault in faults:
            if isinstance(fault, RequestFault):
                self._fail(fault.request, fault.link, fault.error)
            else:
                self.channel.post(fault)
        return bool(faults)

    def _accept(self, stage: Stage, transfer: Transfer) -> None:
        try:
            stage.accept(transfer)
        except StrettoError as e:
            self._fail(transfer.request, stage.name, e)

    def _set_blocked(self, stage: Stage, id: RequestId) -> None:
        stage.throttle(id, any(link.blocked(id) for link in self.links.sent_by(stage)))

    # -- messages, on the loop thread

    def handle(self, message: ToHost, blob: Bytes) -> None:
        match message:
            case Admit():
                start = time.perf_counter_ns()
                self._admit(message, blob)
                self.recorder.span("loop", "admit", start, time.perf_counter_ns())
            case MediaData():
                self._supply(message, blob)
            case Cancel(request=id):
                self._cancel(id)
            case StepInputs(request=id, stage=stage, ids=ids, last=last):
                self._stage(stage).take_step_inputs(id, ids, last)
            case Finish(request=id, stage=stage):
                if stage in self.stages:
                    self.stages[stage].finish(id)
            case Throttle(request=id, on=on):
                self._throttle(id, on)
            case Listen() | Connect() | Unlink():
                self._set_up_link(message)
            case Ping(number=n):
                spans = tuple(self.recorder.take_spans(SPANS))
                self.channel.post(Stats(n, self.recorder.values(), time.monotonic(), spans))
            case _:
                raise Bug(f"a host was sent {type(message).__name__}")

    def _admit(self, a: Admit, blob: Bytes) -> None:
        """Announce a request to its stages here, the last one first, so that its inputs find it
        ready. One that cannot be taken, for whatever is wrong with it, fails alone."""
        first = next(iter(self.stages))
        try:
            prompt = a.prompt.unpack(blob)
            for name, stage in reversed(self.stages.items()):
                if name in a.stages:
                    stage.admit(a, _decoded(a.stages[name], stage), prompt)
                    self.links.open(a.request, stage, {*a.stages, *a.elsewhere})
            self._admitted = True
        except StrettoError as e:
            self._fail(a.request, first, e)
        except torch.AcceleratorError:
            # the device is lost, and this host with it
            raise
        except Exception as e:  # noqa: BLE001  what numbers that fit nothing make of the models, numpy and torch
            self._fail(a.request, first, Bug(f"it cannot be taken: {e!r}"))

    def _set_up_link(self, message: Listen | Connect | Unlink) -> None:
        try:
            answer = self.endpoints.handle(message)
        except StrettoError as e:
            if isinstance(message, Unlink):
                raise
            self.channel.post(LinkDown(message.link, message.generation, str(e)))
        else:
            if answer is not None:
                self.channel.post(answer)

    def _supply(self, m: MediaData, blob: Bytes) -> None:
        try:
            self._stage(m.stage).supply(m.request, unpack_pieces(m.pieces, blob))
        except StrettoError as e:
            self._fail(m.request, m.stage, e)

    def _stage(self, name: str) -> Stage:
        if name not in self.stages:
            raise WireError(f"there is no stage {name!r} here")
        return self.stages[name]

    def _cancel(self, id: RequestId) -> None:
        for stage in self.stages.values():
            stage.cancel(id)
            self.links.close(id, stage, purge=True)

    def _throttle(self, id: RequestId, on: bool) -> None:
        """The request's listener is slow, or no longer."""
        for stage in self.stages.values():
            for link in self.links.sent_by(stage):
                link.throttle(id, on)
                self._set_blocked(stage, id)

    def _fail(self, id: RequestId, where: str, error: StrettoError) -> None:
        """End a request in all stages here, and say why."""
        self._cancel(id)
        self.channel.post(failed(id, where, error))

    def close(self) -> None:
        self.loop.stop()
        self.endpoints.close()
        for waiter in self.context.waiters:
            waiter.close()


def _decoded(params: msgspec.Raw, stage: Stage) -> msgspec.Struct:
    try:
        return msgspec.msgpack.decode(params, type=stage.params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise WireError(f"{stage.name}: not a request's parameters: {e}") from None


def take_messages(host: Host, channel: Channel) -> None:
    """Post the engine's messages to the loop, until the engine has gone or sends `Quit`, or the
    loop has died. On the main thread. A request that the loop has no room for is refused; `Busy`
    for any other message: one that is lost would leave a request or a link behind for good, so the
    host cannot go on."""
    while (item := channel.read()) is not None and host.loop.failure is None:
        message, blob = item
        if isinstance(message, Quit):
            return
        if isinstance(message, Features):
            # gathered by the channel until their request is announced
            continue
        spare = RESERVED_PLACES if isinstance(message, Admit) else 0
        try:
            host.loop.post(message, blob, spare=spare)
        except Gone:
            # it died just now, and all its requests with it: the next read says so
            pass
        except Busy as e:
            if not isinstance(message, Admit):
                raise
            channel.send(failed(message.request, "host", e))
