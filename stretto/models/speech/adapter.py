"""A talker's adapter: text ids in, codec frames out. A family adds what its prompts are made of.

A generated row's input is the embedding of the last frame (on the device) plus the row of one text
token (an id from the host). The frames and text that came so far stay on the host as well, so that
rows can be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import Bug
from stretto.kernels.reference.paged import KVCache, Paging
from stretto.kernels.reference.sampling import guarded
from stretto.kernels.triton import MAX_ROWS
from stretto.layers.upload import to_device
from stretto.models.speech.talker import FrameRows, FrameTalker
from stretto.stage.request import StageRequest
from stretto.stage.runner.adapter import HostInput, Picked, SideRows
from stretto.stage.runner.columns import SamplingColumns, SamplingMode
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.runner.rows import DeviceRows
from stretto.stage.scheduler.batch import RowJoin
from stretto.types import SamplingParams

if TYPE_CHECKING:
    from stretto.models.speech.fused_frame import FusedFrame


class FramePrompt(Protocol):
    """The talker's prompt, as far as it is known when the request arrives."""

    def __len__(self) -> int: ...

    @property
    def first_decode(self) -> float:
        """Rotary position of the first row after the prompt."""
        ...


P = TypeVar("P", bound=FramePrompt)


@dataclass(slots=True, eq=False)
class FrameInput(Generic[P]):
    """What a request brings, and what came for it since."""

    prompt: P
    code0: SamplingParams
    residual: SamplingParams
    # spoken tokens: the first is in the prompt's last row
    text: list[int] = field(default_factory=list)
    text_ended: bool = False
    # confirmed frames, for rows to be computed again
    frames: list[list[int]] = field(default_factory=list)
    min_frames: int = 0  # before the end may come
    end: int | None = None  # what follows the text, once; None: the text's end mark


T = TypeVar("T", bound=FrameTalker)
I = TypeVar("I", bound=FrameInput[Any])  # noqa: E741


class SpeechAdapter(Generic[T, I]):
    def __init__(self, model: T, cache: KVCache, num_rows: int, max_context: int) -> None:
        self.model = model
        self.cache = cache
        c = model.frames
        self.columns = c.num_code_groups
        self.rows = DeviceRows(
            num_rows, -(-max_context // cache.block_size), c.decoder.vocab_size, cache
        )
        self.code0 = SamplingColumns(num_rows + 1, model.device)
        self.residual = SamplingColumns(num_rows + 1, model.device)
        self.embedding = torch.zeros(
            num_rows + 1, c.decoder.hidden_size, device=model.device, dtype=model.dtype
        )
        with torch.inference_mode():
            self.begin = model.codec_rows(torch.tensor([c.bos], device=model.device))[0]
        self.frame_cache = model.frame_cache(num_rows + 1)
        self.frame: FusedFrame | None = None
        layers = model.code_predictor.model.fused
        if layers is not None:
            from stretto.kernels.triton.sampling import Columns
            from stretto.models.speech.fused_frame import FusedFrame

            code0, rest = (Columns(c.floats, c.ints) for c in (self.code0, self.residual))
            self.frame = FusedFrame(model, layers, self.rows.seen, self.rows.min_end, code0, rest)
        self.fused = self.frame is not None and model.model.fused is not None
        # Passes over prompts. They serve once they are captured.
        self.prompts = PrefillGraphs.where_usable(model.model, cache, self.rows)

    def prompt_input(
        self, state: I, start: int, stop: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
        """Input rows [start, stop) of a prompt, and their rotary positions [3, rows]."""
        raise NotImplementedError

    def before_text(self, state: I) -> torch.Tensor:
        """What stands beside the first text token in the prompt's last row: the codec's begin mark,
        or what a family has in its place."""
        return self.begin

    def sampling(self, request: StageRequest) -> tuple[SamplingParams, ...]:
        return request.input.code0, request.input.residual

    def join(self, join: RowJoin) -> None:
        state: I = join.request.input
        offset = state.prompt.first_decode - len(state.prompt)
        self.rows.join(
            join.row,
            join.blocks,
            offset,
            sorted({f[0] for f in state.frames}),
            len(state.prompt) + state.min_frames,
        )
        self.code0.write(join.row, state.code0)
        self.residual.write(join.row, state.residual)
        if state.frames:  # back after a preemption: the next input needs the last frame
            self.embedding[join.row] = self.frame_rows(state.frames[-1:])[0]
        else:  # the prompt's last row runs as a decode
            self.embedding[join.row] = self.before_text(state)

    def scatter(self, rows: int) -> None:
        """Random last frames for the first rows, where no requests are."""
        self.embedding[:rows].normal_(std=0.02)

    def confirm(self, request: StageRequest, row: Sequence[int]) -> None:
        request.input.frames.append(list(row))

    def decode_value(self, request: StageRequest, position: int) -> int:
        """Row prompt + k carries text token k + 2; after the text, its end mark once, then
        padding."""
        state: I = request.input
        c = self.model.frames
        index = position - len(state.prompt) + 1
        if index < len(state.text):
            return state.text[index]
        if not state.text_ended:
            raise Bug(f"{request.id}: row {position} launched before its text token")
        if index > len(state.text):
            return c.text_pad
        return c.text_end if state.end is None else state.end

    def device_input(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding[rows] + self.model.text_rows(values)
        return x, (positions + self.rows.offset[rows]).expand(3, -1)

    def host_input(
        self, request: StageRequest, start: int, stop: int, publish_from: int
    ) -> HostInput[None]:
        state: I = request.input
        device = self.model.device
        length, first = len(state.prompt), state.prompt.first_decode
        parts, places = [], []
        if start < length:
            x, positions = self.prompt_input(state, start, min(stop, length))
            parts.append(x)
            places.append(positions)
        if stop > length:
            low = max(start, length)
            text = [self.decode_value(request, r) for r in range(low, stop)]
            frames = self.frame_rows(state.frames[low - length : stop - length])
            parts.append(frames + self.model.text_rows(to_device(text, device, torch.int64)))
            beyond = first + np.arange(low, stop, dtype=np.float32) - length
            places.append(np.broadcast_to(beyond, (3, len(beyond))))
        return HostInput(
            torch.cat(parts), to_device(np.concatenate(places, 1), device, torch.float32)
        )

    def frame_rows(self, frames: Sequence[Sequence[int]] | npt.NDArray[np.int64]) -> torch.Tensor:
        """Embeddings of whole frames, summed as the step that made them summed them."""
        codes = to_device(np.array(frames, dtype=np.int64), self.model.device, torch.int64)
        return self.model.frame_rows(codes)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        paging: Paging,
        extras: list[tuple[int, int, None]],
    ) -> tuple[torch.Tensor, SideRows]:
        found = None if self.prompts is None else self.prompts.run(x, positions, paging)
        hidden = self.model(x, positions, self.cache, paging) if found is None else found[0]
        return hidden, SideRows()

    def pick(
        self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, mode: SamplingMode
    ) -> Picked:
        if self.frame is not None and len(hidden) <= MAX_ROWS:
            place, pair = self.frame.places(len(hidden))
            place.copy_(hidden)
            return Picked(
                self.frame(place, pair, rows, positions, self.frame_cache, self.embedding)
            )
        state = FrameRows(
            code0=self.code0.pick(rows, mode),
            residual=self.residual.pick(rows, mode),
            frame=positions + 1,
            seen=self.rows.seen[rows],
        )
        end = self.model.frames.eos

        def hold(logits: torch.Tensor) -> None:
            self.rows.hold_end(logits, rows, positions, end)

        step = self.model.frame(hidden, state, self.frame_cache, hold=hold)
        self.rows.seen[rows] = state.seen
        self.embedding[rows] = step.embedding
        return Picked(guarded(step.codes, step.hidden))

    def fused_step(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> Picked:
        assert self.frame is not None
        hidden, pair = self.frame.places(rows.shape[0])
        self.model.model.fused_step(
            rows,
            positions,
            values,
            self.model.text_table,
            self.embedding,
            self.rows.tables,
            self.rows.offset,
            self.cache,
            out=hidden,
        )
        return Picked(self.frame(hidden, pair, rows, positions, self.frame_cache, self.embedding))
