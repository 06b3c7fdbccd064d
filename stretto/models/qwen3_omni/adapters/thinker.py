"""The thinker's adapter: words and media rows in, text tokens out, accept-layer rows handed on at
media positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.kernels.reference.sampling import guarded, sample
from stretto.kernels.triton import MAX_ROWS
from stretto.layers.upload import to_device
from stretto.models.qwen3_omni.thinker import Deep, MediaRows, Thinker
from stretto.stage.request import StageRequest
from stretto.stage.runner.adapter import HostInput, Picked, SideRows
from stretto.stage.runner.columns import (
    BiasColumns,
    MaskColumns,
    MinPColumns,
    SamplingColumns,
    SamplingMode,
)
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.runner.rows import DeviceRows
from stretto.stage.scheduler.batch import RowJoin
from stretto.types import GREEDY, RequestId, SamplingParams

MAX_BIAS = 1024  # tokens of one request


@dataclass(slots=True, eq=False)
class ThinkerInput:
    """What a request brings beside its ids."""

    positions: npt.NDArray[np.float32]  # [3, prompt]
    first_decode: float  # rotary position of the first generated token
    sampling: SamplingParams = GREEDY
    media: list[MediaRows] = field(default_factory=list)  # of the pieces that are encoded by now
    # sorted prompt positions whose accept-layer rows are wanted
    capture: npt.NDArray[np.int64] | None = None
    bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens
    min_new: int = 0  # tokens before the end may come
    min_p: float = 0.0  # least share of the best token's likelihood


@dataclass(frozen=True, slots=True, eq=False)
class ThinkerExtra:
    media: MediaRows | None  # places counted from the run's first row
    capture: list[int]  # rows of the run
    start: int


class ThinkerAdapter:
    columns = 1

    def __init__(self, model: Thinker, cache: KVCache, num_rows: int, max_context: int) -> None:
        self.model = model
        self.cache = cache
        vocab, blocks = model.config.thinker.text.vocab_size, -(-max_context // cache.block_size)
        self.fused = model.model.fused is not None
        self.params = SamplingColumns(num_rows + 1, model.device)
        self.bias = BiasColumns(num_rows + 1, MAX_BIAS, model.device, self.fused)
        self.min_p = MinPColumns(num_rows + 1, model.device, self.fused)
        self.masks = MaskColumns(num_rows + 1, vocab, model.device, self.fused)
        self.rows = DeviceRows(num_rows, blocks, vocab, cache, self.masks, self.bias, model.logits)
        self.true = torch.ones((), dtype=torch.bool, device=model.device)
        self.next = torch.zeros(num_rows + 1, dtype=torch.int64, device=model.device)
        self.prompts: PrefillGraphs | None = None  # captured passes, where there are some
        self.inputs: dict[RequestId, ThinkerInput] = {}

    def sampling(self, id: RequestId) -> tuple[SamplingParams, ...]:
        return (self.inputs[id].sampling,)

    def join(self, join: RowJoin, request: StageRequest) -> None:
        given = self.inputs[join.request]
        penalised = given.sampling.repetition_penalty != 1.0
        offset = given.first_decode - given.positions.shape[1]
        seen = sorted(set(request.ids)) if penalised else ()
        self.rows.join(join.row, join.blocks, offset, seen, request.cursor.prompt + given.min_new)
        self.params.write(join.row, given.sampling)
        self.bias.write(join.row, given.bias)
        self.min_p.write(join.row, 0.0 if given.sampling.greedy else given.min_p)

    def confirm(self, request: StageRequest, row: Sequence[int]) -> None:
        pass  # the scheduler keeps the ids

    def decode_value(self, request: StageRequest, position: int) -> int:
        return 0

    def device_input(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.embed(self.next[rows]), (positions + self.rows.offset[rows]).expand(3, -1)

    def host_input(
        self, request: StageRequest, start: int, stop: int, publish_from: int
    ) -> HostInput[ThinkerExtra]:
        given, device = self.inputs[request.id], self.model.device
        media = (
            MediaRows.joined([m.within(start, stop) for m in given.media]) if given.media else None
        )
        x = self.model.embed(to_device(request.ids[start:stop], device, torch.int64), media)
        capture: list[int] = []
        if given.capture is not None:
            low, high = np.searchsorted(given.capture, [max(start, publish_from), stop])
            capture = (given.capture[low:high] - start).tolist()
        extra = ThinkerExtra(media, capture, start) if media is not None or capture else None
        return HostInput(x, to_device(rope_rows(given, start, stop), device, torch.float32), extra)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        paging: Paging,
        extras: list[tuple[int, int, ThinkerExtra]],
    ) -> tuple[torch.Tensor, SideRows]:
        device, captured = self.model.device, SideRows()
        visual = [
            (row, e.media)
            for _, row, e in extras
            if e.media is not None and len(e.media.visual_places)
        ]
        deep = None
        if visual:
            places = np.concatenate([m.visual_places.numpy() + row for row, m in visual])
            deep = Deep(
                to_device(places, device, torch.int64), torch.cat([m.deep for _, m in visual], 1)
            )
        wanted = [row + r for _, row, e in extras for r in e.capture]
        capture = to_device(wanted, device, torch.int64) if wanted else None
        found = (
            None
            if self.prompts is None or deep is not None
            else self.prompts.run(x, positions, paging)
        )
        if found is None:
            hidden, rows = self.model(x, positions, self.cache, paging, deep, capture)
        else:
            hidden, accept = found
            rows = None if capture is None or accept is None else accept[capture]
        if rows is not None:
            taken = [(i, e) for i, _, e in extras if e.capture]
            for (i, e), part in zip(
                taken, rows.split([len(e.capture) for _, e in taken]), strict=True
            ):
                captured.places[i], captured.rows[i] = [e.start + r for r in e.capture], part
        return hidden, captured

    def pick(
        self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, mode: SamplingMode
    ) -> Picked:
        if self.fused and len(hidden) <= MAX_ROWS:
            return self._fused_pick(rows, positions, hidden)
        logits = self.model.logits(hidden)
        self.bias.add(logits, rows)
        self.masks.apply(logits, rows)
        self.rows.hold_end(logits, rows, positions, self.model.config.tokens.im_end)
        ends = self.rows.min_end, self.model.config.tokens.im_end
        self.min_p.apply(logits, rows, positions, self.params, self.rows.seen, ends)
        seen = self.rows.seen[rows] if mode.penalty else None
        tokens = sample(logits, self.params.pick(rows, mode), positions + 1, seen=seen)
        self.next[rows] = tokens
        if mode.penalty:
            self.rows.seen.index_put_((rows, tokens), self.true)
        return Picked(guarded(tokens[:, None], logits), hidden)

    def fused_step(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> Picked:
        model = self.model.model
        hidden = model.fused_step(
            rows,
            positions,
            values,
            model.embed_tokens.weight,
            self.next,
            self.rows.tables,
            self.rows.offset,
            self.cache,
        )
        return self._fused_pick(rows, positions, hidden)

    def _fused_pick(
        self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> Picked:
        from stretto.kernels.triton.linear import project
        from stretto.kernels.triton.sampling import Columns, PickState, pick_text

        answer = PickState(self.rows.seen, self.rows.min_end, self.model.config.tokens.im_end)
        params = Columns(self.params.floats, self.params.ints)
        logits = project(hidden, self.model.lm_head.weight)
        self.bias.add(logits, rows)
        self.masks.apply(logits, rows)
        ends = self.rows.min_end, self.model.config.tokens.im_end
        self.min_p.apply(logits, rows, positions, self.params, self.rows.seen, ends)
        return Picked(
            pick_text(logits, rows, positions, params, answer, self.next)[:, None], hidden
        )


def rope_rows(given: ThinkerInput, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Positions of rows [start, stop), prompt rows and generated ones alike."""
    prompt = given.positions.shape[1]
    beyond = (
        given.first_decode
        + np.arange(max(start, prompt), max(stop, prompt), dtype=np.float32)
        - prompt
    )
    tail = np.broadcast_to(beyond.astype(np.float32), (3, len(beyond)))
    return np.concatenate([given.positions[:, start : min(stop, prompt)], tail], 1)
