"""The stage: prompts in, tokens out as reports. Driven by the host, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from stretto.messages.requests import Admit, Text
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import CoreOutput, StageCore
from stretto.stage.payload import Payload
from stretto.stage.request import Reason, RequestSpec
from stretto.stage.stage import Arrival, Output, ToEngine
from stretto.stage.timings import StageTimings, failed
from stretto.types import RequestId
from tiny_text.family import WriterParams


class WriterStage:
    name = "writer"
    params = WriterParams
    cheap = False
    receives: Mapping[str, type[Payload]] = {}
    sends: Mapping[str, type[Payload]] = {}

    def __init__(self, core: StageCore, end: int) -> None:
        self.core = core
        self.end = end
        self.requests: dict[RequestId, StageTimings] = {}
        self.outputs: list[Output] = []  # that `poll` returns next

    def __len__(self) -> int:
        return len(self.core)

    @property
    def due_ns(self) -> int | None:
        return self.core.due_ns

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.core.runner.stream

    def admit(self, a: Admit, params: WriterParams, prompt: Prompt) -> None:
        stop_ids = frozenset() if params.ignore_eos else frozenset({self.end})
        spec = RequestSpec(
            a.request,
            params.max_tokens,
            stop_ids,
            params.sampling,
            a.priority,
            cache_root=a.cache_root,
        )
        self.core.submit(spec, params.sampling, prompt.ids)
        self.requests[a.request] = StageTimings(time.monotonic())

    def accept(self, arrival: Arrival) -> None:
        raise NotImplementedError("no link ends here")

    def cancel(self, id: RequestId) -> None:
        self.core.cancel(id)
        self.requests.pop(id, None)

    def finish(self, id: RequestId) -> None:
        """A stop string was found: what there is, is the answer."""
        timings = self.requests.get(id)
        if timings is not None:
            self.cancel(id)
            self.outputs.append(ToEngine(timings.ended(id, self.name, Reason.STOP)))

    def throttle(self, id: RequestId, on: bool) -> None:
        if id in self.core.scheduler:
            self.core.scheduler.set_blocked(id, on)

    def poll(self) -> Sequence[Output]:
        for confirmed in self.core.poll():
            self.outputs.extend(self._take(confirmed))
        outputs, self.outputs = self.outputs, []
        return outputs

    def launch(self) -> bool:
        return self.core.launch() or bool(self.outputs)

    def _take(self, o: CoreOutput) -> Iterator[Output]:
        id = o.request.id
        timings = self.requests.get(id)
        if timings is None:
            return  # cancelled meanwhile
        if o.error is not None:
            self.cancel(id)
            yield ToEngine(failed(id, self.name, o.error))
            return
        if o.token is not None:
            timings.mark(time.monotonic())
            yield ToEngine(Text(id, (o.token,)))
        if o.reason is not None:
            timings.cached = o.cached
            del self.requests[id]
            yield ToEngine(timings.ended(id, self.name, o.reason))
