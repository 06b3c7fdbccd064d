"""The talker's lane: text ids and media rows in, codec frames out.

A generated row's input is the embedding of the last frame (on the device) plus the row of one text token (an id from
the host). The frames and text that came so far stay on the host as well, so that rows can be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from stretto.errors import Bug
from stretto.kernels.fast import MAX_ROWS
from stretto.kernels.paged import KVCache, Paging
from stretto.layers.upload import to_device
from stretto.models.qwen3_omni.bridge import NUM_OPENING, TalkerPrompt, first_text_row, opening_rows, user_rows
from stretto.models.qwen3_omni.talker import FrameRows, Talker
from stretto.stage.request import StageRequest
from stretto.stage.runner.lane import Captured, HostInput, Picked
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.runner.rows import DeviceRows, How, SamplingColumns
from stretto.stage.runner.thinker import guarded
from stretto.stage.scheduler.batch import RowJoin
from stretto.types import RequestId, SamplingParams

if TYPE_CHECKING:
    from stretto.models.qwen3_omni.fused_frame import FusedFrame


@dataclass(slots=True, eq=False)
class TalkerInput:
    """What a request brings, and what came for it since."""

    prompt: TalkerPrompt
    code0: SamplingParams
    residual: SamplingParams
    text: list[int] = field(default_factory=list)  # spoken tokens y1, y2, ...
    text_ended: bool = False
    media: list[torch.Tensor] = field(default_factory=list)  # accept-layer rows on the device, in order
    frames: list[list[int]] = field(default_factory=list)  # confirmed frames, for rows to be computed again
    min_frames: int = 0  # before the end may come

    @property
    def num_media(self) -> int:
        return sum(len(m) for m in self.media)

    @property
    def num_rows(self) -> int:
        """Prompt rows whose input is known by now."""
        users = len(self.prompt.ids)
        late = np.flatnonzero(np.cumsum(self.prompt.is_media) > self.num_media)
        if len(late):
            return int(late[0])
        return users + NUM_OPENING - 1 + bool(self.text)


class TalkerLane:
    def __init__(self, model: Talker, cache: KVCache, num_rows: int, max_context: int) -> None:
        self.model, self.cache = model, cache
        c = model.config.talker
        self.columns = c.num_code_groups
        self.rows = DeviceRows(num_rows, -(-max_context // cache.block_size), c.text.vocab_size, cache)
        self.code0 = SamplingColumns(num_rows + 1, model.device)
        self.residual = SamplingColumns(num_rows + 1, model.device)
        self.embedding = torch.zeros(num_rows + 1, c.text.hidden_size, device=model.device, dtype=model.dtype)
        with torch.inference_mode():
            self._begin = model.codec_rows(torch.tensor([c.codec.bos], device=model.device))[0]
        self.frame_cache = model.frame_cache(num_rows + 1)
        self._frame: FusedFrame | None = None
        layers = model.code_predictor.model.fused
        if layers is not None:
            from stretto.kernels.fast.sampling import Columns
            from stretto.models.qwen3_omni.fused_frame import FusedFrame

            code0, rest = (Columns(c.floats, c.ints) for c in (self.code0, self.residual))
            self._frame = FusedFrame(model, layers, self.rows.seen, self.rows.floor, code0, rest)
        self.fused = self._frame is not None and model.model.fused is not None
        self.prompts: PrefillGraphs | None = None  # captured passes, where there are some
        self.inputs: dict[RequestId, TalkerInput] = {}

    def sampling(self, id: RequestId) -> tuple[SamplingParams, ...]:
        return self.inputs[id].code0, self.inputs[id].residual

    def join(self, join: RowJoin, request: StageRequest) -> None:
        given = self.inputs[join.request]
        offset = given.prompt.first_decode - len(given.prompt)
        self.rows.join(
            join.row, join.blocks, offset, sorted({f[0] for f in given.frames}), len(given.prompt) + given.min_frames
        )
        self.code0.write(join.row, given.code0)
        self.residual.write(join.row, given.residual)
        if given.frames:  # back after a pause or preemption: the next input needs the last frame
            self.embedding[join.row] = self._frame_rows(given.frames[-1:])[0]
        else:  # the prompt's last row runs as a decode: the codec's begin mark stands for the frame before it
            self.embedding[join.row] = self._begin

    def confirm(self, request: StageRequest, row: Sequence[int]) -> None:
        self.inputs[request.id].frames.append(list(row))

    def decode_value(self, request: StageRequest, position: int) -> int:
        """Row prompt + k carries text token k + 2; after the text, its end mark once, then padding."""
        given, t = self.inputs[request.id], self.model.config.tokens
        index = position - len(given.prompt) + 1
        if index < len(given.text):
            return given.text[index]
        if not given.text_ended:
            raise Bug(f"{request.id}: row {position} launched before its text token")
        return t.tts_eos if index == len(given.text) else t.tts_pad

    def device_input(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding[rows] + self.model.text_rows(values)
        return x, (positions + self.rows.offset[rows]).expand(3, -1)

    def host_input(self, request: StageRequest, start: int, stop: int, fresh: int) -> HostInput[None]:
        given, device = self.inputs[request.id], self.model.device
        p = given.prompt
        users, length = len(p.ids), len(p)
        parts = []
        if start < users:
            end = min(stop, users)
            before, upto = int(p.is_media[:start].sum()), int(p.is_media[:end].sum())
            hidden = self.model.config.talker.thinker_hidden_size
            media = torch.cat(given.media) if given.media else torch.empty(0, hidden, device=device)
            parts.append(user_rows(self.model, p.ids[start:end], p.is_media[start:end], media[before:upto]))
        if start < length - 1 and stop > users:
            parts.append(opening_rows(self.model, p)[max(0, start - users) : stop - users])
        if start < length <= stop:
            parts.append(first_text_row(self.model, to_device(given.text[:1], device, torch.int64)))
        if stop > length:
            low = max(start, length)
            text = [self.decode_value(request, r) for r in range(low, stop)]
            frames = self._frame_rows(given.frames[low - length : stop - length])
            parts.append(frames + self.model.text_rows(to_device(text, device, torch.int64)))
        beyond = p.first_decode + np.arange(max(start, length), max(stop, length), dtype=np.float32) - length
        positions = np.concatenate(
            [p.positions[:, start : min(stop, length)], np.broadcast_to(beyond, (3, len(beyond)))], 1
        )
        return HostInput(torch.cat(parts), to_device(positions, device, torch.float32))

    def _frame_rows(self, frames: list[list[int]]) -> torch.Tensor:
        """Embeddings of whole frames, summed as the step that made them summed them."""
        codes = to_device(np.array(frames, dtype=np.int64), self.model.device, torch.int64)
        rows = [self.model.codec_rows(codes[:, 0])]
        for table, column in zip(self.model.code_predictor.model.codec_embedding, codes.T[1:], strict=True):
            rows.append(table(column))
        return torch.stack(rows, 1).sum(1, dtype=torch.float32).to(self.model.dtype)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, paging: Paging, extras: list[tuple[int, int, None]]
    ) -> tuple[torch.Tensor, Captured]:
        found = None if self.prompts is None else self.prompts.run(x, positions, paging)
        hidden = self.model(x, positions, self.cache, paging) if found is None else found[0]
        return hidden, Captured()

    def pick(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        how: How,
        edits: list[tuple[int, StageRequest]],
    ) -> Picked:
        if self._frame is not None and len(hidden) <= MAX_ROWS:
            pair = torch.stack((hidden, hidden), 1)  # the second place is for code 0
            return Picked(self._frame(pair, rows, positions, self.frame_cache, self.embedding))
        state = FrameRows(
            code0=self.code0.pick(rows, how),
            residual=self.residual.pick(rows, how),
            frame=positions + 1,
            seen=self.rows.seen[rows],
        )
        end = self.model.config.talker.codec.eos

        def hold(logits: torch.Tensor) -> None:
            self.rows.hold_end(logits, rows, positions, end)

        step = self.model.frame(hidden, state, self.frame_cache, hold=hold)
        self.rows.seen[rows] = state.seen
        self.embedding[rows] = step.embedding
        return Picked(guarded(step.codes, step.hidden))

    def fused_step(self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        assert self._frame is not None
        pair = self.embedding.new_empty(rows.shape[0], 2, self.embedding.shape[1])
        self.model.model.fused_step(
            rows,
            positions,
            values,
            self.model.text_table,
            self.embedding,
            self.rows.tables,
            self.rows.offset,
            self.cache,
            out=pair[:, 0],
        )
        return self._frame(pair, rows, positions, self.frame_cache, self.embedding)
