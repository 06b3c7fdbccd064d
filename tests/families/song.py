"""A family with the two kinds of stage that the package brings along: one that writes token by token, and a vocoder.

Its models only add. A token is the sum of all tokens before it, read from the KV cache by way of the block tables that
the pass is given; a sample is the sum of all frames so far, kept in the slot of its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.control.messages import Admit, Pcm, Text
from stretto.errors import StrettoError
from stretto.family import LinkSpec, ModelInfo, PipelineSpec, StageSpec
from stretto.kernels.paged import KVCache, Paging
from stretto.prompt.prompt import Prompt
from stretto.stage.codec import AudioOutput
from stretto.stage.context import StageContext
from stretto.stage.links import Arrival, Inlet, Outlet
from stretto.stage.node import Node
from stretto.stage.report import Journal, failed
from stretto.stage.request import Reason, RequestSpec, StageRequest
from stretto.stage.runner.lane import HostInput, Picked, SideRows
from stretto.stage.runner.rows import DeviceRows, How
from stretto.stage.scheduler.batch import RowJoin
from stretto.stage.stage import Output
from stretto.types import GREEDY, Mark, RequestId, SamplingParams, Span
from tests.families.toys import Numbers, ToyModel, ToyParams

VOCAB, WIDTH = 512, 4  # tokens; samples of a frame


class SumLane:
    """What the runner needs of a model: here, rows of one number."""

    columns, fused = 1, False

    def __init__(self, c: StageContext, blocks: int) -> None:
        s = c.settings
        self.cache = KVCache(1, blocks + 1, 1, s.block_size, 1, c.device, torch.float64)  # block 0 is nobody's
        self.rows = DeviceRows(s.max_rows, -(-s.max_context // s.block_size), VOCAB, self.cache)
        self.next = torch.zeros(s.max_rows + 1, dtype=torch.int64)
        self.inputs: dict[RequestId, Any] = {}

    def sampling(self, id: RequestId) -> tuple[SamplingParams, ...]:
        return (GREEDY,)

    def join(self, join: RowJoin, request: StageRequest) -> None:
        self.rows.join(join.row, join.blocks, 0.0, ())

    def confirm(self, request: StageRequest, row: Sequence[int]) -> None:
        pass  # the scheduler keeps the ids

    def decode_value(self, request: StageRequest, position: int) -> int:
        return 0

    def device_input(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.next[rows].double()[:, None], positions.float().expand(3, -1)

    def host_input(self, request: StageRequest, start: int, stop: int, fresh: int) -> HostInput[None]:
        x = torch.tensor(request.ids[start:stop], dtype=torch.float64)[:, None]
        return HostInput(x, torch.arange(start, stop, dtype=torch.float32).expand(3, -1))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, paging: Paging, extras: list[tuple[int, int, None]]
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

    def pick(self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, how: How) -> Picked:
        self.next[rows] = hidden[:, 0].long() % VOCAB
        return Picked(self.next[rows][:, None])

    def fused_step(self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> Picked:
        raise NotImplementedError


class PoetNode:
    """Prompts in, text out as reports, and as numbers to the organ."""

    name, params, cheap = "poet", ToyParams, False

    def __init__(self, c: StageContext) -> None:
        self.report = c.report
        self.outlet: Outlet[Numbers] = Outlet("poet>organ", Numbers)
        self.inlets: tuple[()] = ()
        self.outlets = (self.outlet,)
        self.journals: dict[RequestId, Journal] = {}
        blocks = c.settings.blocks["poet"]
        self.stage = c.autoregressive("poet", SumLane(c, blocks), blocks, self._emit)

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def due_ns(self) -> int | None:
        return self.stage.due_ns

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.stage.runner.stream

    def admit(self, a: Admit, params: ToyParams, prompt: Prompt) -> None:
        self.stage.submit(RequestSpec(a.request, params.count, cache_root=a.cache_root), params, prompt.ids)
        self.journals[a.request] = Journal(time.monotonic())
        if params.passes_on:
            self.outlet.open(a.request)

    def cancel(self, id: RequestId) -> None:
        self.stage.cancel(id)
        self.outlet.close(id, purge=True)
        self.journals.pop(id, None)

    def finish(self, id: RequestId) -> None:
        pass  # the toys have no stop strings

    def throttle(self, id: RequestId, on: bool) -> None:
        self.outlet.throttle(id, on)
        self.outlet.tell(id, self.stage.scheduler)

    def turn(self) -> bool:
        for id in self.outlet.flush():
            self.outlet.tell(id, self.stage.scheduler)
        return self.stage.turn()

    def _emit(self, o: Output) -> None:
        id, journal = o.request.id, self.journals.get(o.request.id)
        if journal is None:
            return  # cancelled meanwhile
        if o.error is not None:
            self.cancel(id)
            self.report(failed(id, self.name, o.error), b"")
            return
        if o.token is not None:
            journal.mark(time.monotonic())
            self.report(Text(id, (o.token,)), b"")
            self._pass_on(o, o.token)
        if o.reason is not None:
            journal.cached = self.stage.num_cached(id)
            self.report(journal.ended(id, self.name, o.reason), b"")
            del self.journals[id]

    def _pass_on(self, o: Output, token: int) -> None:
        id = o.request.id
        if len(self.outlet) and self.stage.runner.lane.inputs[id].passes_on:
            at = self.outlet.sent(id)
            mark = Mark.MORE if o.reason is None else Mark.REQUEST_END
            if not self.outlet.send(id, Numbers(Span(at, at + 1), torch.tensor([token])), mark) and o.reason is None:
                self.outlet.tell(id, self.stage.scheduler)


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

    def step(self, state: OrganState, codes: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        there = torch.arange(codes.shape[2])[None] < lengths[:, None]
        sums = state.totals[slots, None] + (codes[:, 0] * there).cumsum(1)
        state.totals[slots] = sums[:, -1]
        state.frames[slots] += lengths
        return (sums / 1e4).float().repeat_interleave(WIDTH, 1)

    def valid(self, before: int, length: int) -> Span:
        return Span(0, WIDTH * length)

    def num_samples(self, frames: int) -> int:
        return WIDTH * frames


class OrganNode:
    name, params, cheap, due_ns = "organ", ToyParams, True, None

    def __init__(self, c: StageContext) -> None:
        self.report = c.report
        self.inlet = Inlet("poet>organ", Numbers, self._read, self._fail)
        self.inlets, self.outlets = (self.inlet,), ()
        self.journals: dict[RequestId, Journal] = {}
        self.stage = c.vocoder("organ", Organ(), self._emit)

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.stage.stream

    def admit(self, a: Admit, params: ToyParams, prompt: Prompt) -> None:
        self.stage.open(a.request)
        self.journals[a.request] = Journal(time.monotonic())
        self.inlet.open(a.request)

    def cancel(self, id: RequestId) -> None:
        self.stage.cancel(id)
        self.inlet.close(id, purge=True)
        self.journals.pop(id, None)

    def finish(self, id: RequestId) -> None:
        pass

    def throttle(self, id: RequestId, on: bool) -> None:
        pass

    def turn(self) -> bool:
        did = self.inlet.turn()
        return self.stage.turn() or did

    def _read(self, id: RequestId, arrival: Arrival[Numbers]) -> None:
        assert arrival.payload is not None
        last = Reason.STOP if arrival.mark is Mark.REQUEST_END else None
        self.stage.push(id, arrival.payload.numbers[:, None], last)

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        self.cancel(id)
        self.report(failed(id, self.name, error), b"")

    def _emit(self, o: AudioOutput) -> None:
        journal = self.journals[o.request]
        if len(o.samples):
            journal.mark(time.monotonic())
            self.report(Pcm(o.request, o.start, o.frames), o.samples.tobytes())
        if o.reason is not None:
            self.inlet.close(o.request, purge=False)
            self.report(journal.ended(o.request, self.name, o.reason), b"")
            del self.journals[o.request]


def build(stages: Sequence[str], c: StageContext) -> dict[str, Node]:
    kinds = {"poet": PoetNode, "organ": OrganNode}
    return {name: kinds[name](c) for name in stages}


def open_song(directory: Path) -> ToyModel:
    names = ("poet", "organ")
    stages = (StageSpec("poet", decides="text"), StageSpec("organ", decides="audio"))
    spec = PipelineSpec("tests.families.song:build", stages, (LinkSpec(*names),), {"text": names[:1], "speech": names})
    return ToyModel(spec, ModelInfo(directory.name, ("plain",), "plain", 8000, 4096), VOCAB)


def expected(prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
    """The answer's tokens and samples, by plain sums."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum(ids) % VOCAB)
    answer = ids[len(prompt) :]
    return answer, np.repeat((np.cumsum(answer) / 1e4).astype(np.float32), WIDTH)
