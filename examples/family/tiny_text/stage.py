"""The stage: prompts in, tokens out as reports. Driven by the host, on the loop thread."""

from __future__ import annotations

from stretto.messages.requests import Admit, Text
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import CoreOutput, StageCore
from stretto.stage.request import Reason, RequestSpec
from stretto.stage.stage import CoreStage, ToEngine
from stretto.stage.timings import StageTimings, failed
from stretto.types import RequestId
from tiny_text.family import WriterParams


class WriterStage(CoreStage[StageCore]):
    name = "writer"
    params = WriterParams

    def __init__(self, core: StageCore, end: int) -> None:
        super().__init__(core)
        self.end = end
        self.requests: dict[RequestId, StageTimings] = {}

    def admit(self, a: Admit, params: WriterParams, prompt: Prompt) -> None:
        stop_ids = frozenset() if params.ignore_eos else frozenset({self.end})
        spec = RequestSpec(
            a.request,
            params.max_tokens,
            stop_ids,
            priority=a.priority,
            cache_root=a.cache_root,
        )
        self.core.submit(spec, params.sampling, prompt.ids)
        self.requests[a.request] = StageTimings(self.clock())

    def cancel(self, id: RequestId) -> None:
        self.core.cancel(id)
        self.requests.pop(id, None)

    def finish(self, id: RequestId) -> None:
        """A stop string was found: what there is, is the answer."""
        timings = self.requests.get(id)
        if timings is not None:
            self.cancel(id)
            self.outputs.append(ToEngine(timings.ended(id, self.name, Reason.STOP)))

    def take(self, o: CoreOutput) -> None:
        id = o.request.id
        timings = self.requests.get(id)
        if timings is None:
            return  # cancelled meanwhile
        if o.request.error is not None:
            self.cancel(id)
            self.outputs.append(ToEngine(failed(id, self.name, o.request.error)))
            return
        if o.token is not None:
            timings.mark(self.clock())
            self.outputs.append(ToEngine(Text(id, (o.token,))))
        if o.reason is not None:
            timings.cached = o.request.num_cached
            del self.requests[id]
            self.outputs.append(ToEngine(timings.ended(id, self.name, o.reason)))
