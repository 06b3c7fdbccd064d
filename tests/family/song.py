"""A family with the two kinds of stage that the package brings along: one that writes token by
token, and a vocoder.

Its models only add. A token is the sum of all tokens before it, read from the KV cache by way of
the block tables that the pass is given; a sample is the sum of all frames so far, kept in the slot
of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stretto.family import LinkSpec, ModelInfo, PipelineSpec, StageSpec
from stretto.kernels.reference.paged import KVCache, Paging
from stretto.messages.requests import Admit, Pcm, Text
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import CoreOutput, StageCore
from stretto.stage.host.context import StageContext
from stretto.stage.payload import Payload
from stretto.stage.request import Reason, RequestSpec, StageRequest
from stretto.stage.runner.adapter import HostInput, Picked, SideRows
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.rows import DeviceRows
from stretto.stage.scheduler.batch import RowJoin
from stretto.stage.stage import CoreStage, Output, Stage, ToEngine, Transfer
from stretto.stage.timings import StageTimings, failed
from stretto.stage.vocoder import VocoderCore, VocoderOutput
from stretto.types import GREEDY, Mark, RequestId, SamplingParams, Span
from tests.family.toys import Numbers, ToyModel, ToyParams

LINK = "poet>organ"
VOCAB, WIDTH = 512, 4  # tokens; samples of a frame


class SumAdapter:
    """What the runner needs of a model: here, rows of one number."""

    columns, fused = 1, False

    def __init__(self, c: StageContext, blocks: int) -> None:
        s = c.settings
        self.cache = KVCache(
            1, blocks + 1, 1, s.block_size, 1, c.device, torch.float64
        )  # block 0 is nobody's
        self.rows = DeviceRows(s.max_rows, -(-s.max_context // s.block_size), VOCAB, self.cache)
        self.next = torch.zeros(s.max_rows + 1, dtype=torch.int64)

    def sampling(self, request: StageRequest) -> tuple[SamplingParams, ...]:
        return (GREEDY,)

    def join(self, join: RowJoin) -> None:
        self.rows.join(join.row, join.blocks, 0.0, ())

    def confirm(self, request: StageRequest, row: Sequence[int]) -> None:
        pass  # the scheduler keeps the ids

    def decode_value(self, request: StageRequest, position: int) -> int:
        return 0

    def device_input(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.next[rows].double()[:, None], positions.float().expand(3, -1)

    def host_input(
        self, request: StageRequest, start: int, stop: int, publish_from: int
    ) -> HostInput[None]:
        x = torch.tensor(request.ids[start:stop], dtype=torch.float64)[:, None]
        return HostInput(x, torch.arange(start, stop, dtype=torch.float32).expand(3, -1))

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        paging: Paging,
        extras: list[tuple[int, int, None]],
    ) -> tuple[torch.Tensor, SideRows]:
        keys = self.cache.data[0, 0, :, 0, :, 0]  # [blocks, places in a block]
        keys.view(-1)[paging.slots] = x[:, 0]
        owners = [*range(paging.num_decode)]
        for i, (queries, _) in enumerate(paging.prefills):
            owners += [paging.num_decode + i] * queries
        sums = [
            keys[paging.tables[owner].long()].flatten()[: int(at) + 1].sum()
            for owner, at in zip(owners, positions[0], strict=True)
        ]
        return torch.stack(sums)[:, None], SideRows()

    def pick(
        self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, mode: SamplingMode
    ) -> Picked:
        self.next[rows] = hidden[:, 0].long() % VOCAB
        return Picked(self.next[rows][:, None])

    def fused_step(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> Picked:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Poem:
    """One request."""

    passes_on: bool
    timings: StageTimings
    sent: int = 0  # tokens, to the organ


class PoetStage(CoreStage[StageCore]):
    """Prompts in, text out as reports, and as numbers to the organ."""

    name, params = "poet", ToyParams
    sends: Mapping[str, type[Payload]] = {LINK: Numbers}

    def __init__(self, c: StageContext) -> None:
        self.requests: dict[RequestId, Poem] = {}
        blocks = c.settings.blocks["poet"]
        super().__init__(c.autoregressive("poet", SumAdapter(c, blocks), blocks))

    def admit(self, a: Admit, params: ToyParams, prompt: Prompt) -> None:
        self.core.submit(
            RequestSpec(a.request, params.count, cache_root=a.cache_root), params, prompt.ids
        )
        self.requests[a.request] = Poem(params.passes_on, StageTimings(time.monotonic()))

    def cancel(self, id: RequestId) -> None:
        self.core.cancel(id)
        self.requests.pop(id, None)

    def take(self, o: CoreOutput) -> None:
        self.outputs += self._outputs_of(o)

    def _outputs_of(self, o: CoreOutput) -> Iterator[Output]:
        id, poem = o.request.id, self.requests.get(o.request.id)
        if poem is None:
            return  # cancelled meanwhile
        if o.request.error is not None:
            self.cancel(id)
            yield ToEngine(failed(id, self.name, o.request.error))
            return
        if o.token is not None:
            poem.timings.mark(time.monotonic())
            yield ToEngine(Text(id, (o.token,)))
            if poem.passes_on:
                mark = Mark.MORE if o.reason is None else Mark.REQUEST_END
                yield Transfer(
                    LINK, id, Numbers(Span(poem.sent, poem.sent + 1), torch.tensor([o.token])), mark
                )
                poem.sent += 1
        if o.reason is not None:
            poem.timings.cached = o.request.num_cached
            yield ToEngine(poem.timings.ended(id, self.name, o.reason))
            del self.requests[id]


@dataclass(frozen=True, slots=True)
class OrganConfig:
    num_quantizers: int = 1
    samples_per_frame: int = WIDTH


class OrganState:
    """A total for each slot, and one for padding."""

    def __init__(self, slots: int) -> None:
        self.frames, self.totals = torch.zeros(2, slots + 1, dtype=torch.int64)

    def reset(self, slot: int) -> None:
        self.frames[slot] = self.totals[slot] = 0


class Organ:
    config = OrganConfig()

    def state(self, slots: int, max_frames: int) -> OrganState:
        return OrganState(slots)

    def step(
        self, state: OrganState, codes: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        there = torch.arange(codes.shape[2])[None] < lengths[:, None]
        sums = state.totals[slots, None] + (codes[:, 0] * there).cumsum(1)
        state.totals[slots] = sums[:, -1]
        state.frames[slots] += lengths
        return (sums / 1e4).float().repeat_interleave(WIDTH, 1)

    def valid(self, before: int, length: int) -> Span:
        return Span(0, WIDTH * length)

    def num_samples(self, frames: int) -> int:
        return WIDTH * frames


class OrganStage(CoreStage[VocoderCore]):
    name, params, cheap = "organ", ToyParams, True
    receives: Mapping[str, type[Payload]] = {LINK: Numbers}

    def __init__(self, c: StageContext) -> None:
        self.requests: dict[RequestId, StageTimings] = {}
        super().__init__(c.vocoder("organ", Organ()))

    def admit(self, a: Admit, params: ToyParams, prompt: Prompt) -> None:
        self.core.open(a.request)
        self.requests[a.request] = StageTimings(time.monotonic())

    def accept(self, transfer: Transfer) -> None:
        last = Reason.STOP if transfer.mark is Mark.REQUEST_END else None
        self.core.push(transfer.request, transfer.payload.numbers[:, None], last)

    def cancel(self, id: RequestId) -> None:
        self.core.cancel(id)
        self.requests.pop(id, None)

    def take(self, o: VocoderOutput) -> None:
        timings = self.requests[o.request]
        if len(o.samples):
            timings.mark(time.monotonic())
            report = Pcm(o.request, o.start, o.frames)
            self.outputs.append(ToEngine(report, o.samples.tobytes()))
        if o.reason is not None:
            self.outputs.append(ToEngine(timings.ended(o.request, self.name, o.reason)))
            del self.requests[o.request]


def build(stages: Sequence[str], c: StageContext) -> dict[str, Stage]:
    kinds = {"poet": PoetStage, "organ": OrganStage}
    return {name: kinds[name](c) for name in stages}


def open_song(directory: Path) -> ToyModel:
    names = ("poet", "organ")
    stages = (StageSpec("poet", decides="text"), StageSpec("organ", decides="audio"))
    spec = PipelineSpec(
        "tests.family.song:build",
        stages,
        (LinkSpec(*names),),
        {"text": names[:1], "speech": names},
    )
    return ToyModel(spec, ModelInfo(directory.name, ("plain",), "plain", 8000, 4096), VOCAB)


def expected(prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
    """The answer's tokens and samples, by plain sums."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum(ids) % VOCAB)
    answer = ids[len(prompt) :]
    return answer, np.repeat((np.cumsum(answer) / 1e4).astype(np.float32), WIDTH)
