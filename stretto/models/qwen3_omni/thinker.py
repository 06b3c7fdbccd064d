"""The thinker, a multimodal mixture-of-experts language model, and its adapter.

The model is weights only. `embed` makes input rows from ids and encoder rows, `forward` runs any
mix of prompt chunks and decoding rows over the paged cache, `logits` heads the rows that sample. A
pass can also hand out the accept layer's residual stream at chosen rows: the talker needs it at
media positions of the prompt, and nowhere else. The adapter: words and media rows in, text tokens
out, accept-layer rows handed on at media positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.kernels.reference.sampling import guarded, sample
from stretto.kernels.triton import MAX_ROWS
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.linear import Embedding, Linear
from stretto.layers.upload import to_device
from stretto.models.qwen3_omni.audio_encoder import AudioEncoder
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.vision_encoder import VisionEncoder
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
from stretto.types import GREEDY, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class MediaRows:
    """Encoder output of one prompt, row by row for its pads, in prompt order."""

    places: torch.Tensor  # [media] int64: prompt positions of the pads
    rows: torch.Tensor  # [media, hidden]: what replaces the pads' embeddings
    visual_places: torch.Tensor  # [visual] int64: the image and video pads among them
    deep: torch.Tensor  # [levels, visual, hidden]: DeepStack additions

    def within(self, start: int, stop: int) -> MediaRows:
        """The part that falls into prompt positions [start, stop), with places counted from
        `start`."""
        if not len(self.places) or start > self.places[-1] or stop <= self.places[0]:
            none = self.places[:0]
            return MediaRows(none, self.rows[:0], none, self.deep[:, :0])
        a, b = torch.searchsorted(self.places, torch.tensor([start, stop])).tolist()
        c, d = torch.searchsorted(self.visual_places, torch.tensor([start, stop])).tolist()
        return MediaRows(
            self.places[a:b] - start,
            self.rows[a:b],
            self.visual_places[c:d] - start,
            self.deep[:, c:d],
        )

    @staticmethod
    def joined(parts: Sequence[MediaRows]) -> MediaRows | None:
        """Several as one, None if there is nothing in them. Their order is theirs: places need not
        rise."""
        parts = [p for p in parts if len(p.places)]
        if len(parts) < 2:
            return parts[0] if parts else None
        visual = [p for p in parts if len(p.visual_places)] or parts[:1]
        return MediaRows(
            torch.cat([p.places for p in parts]),
            torch.cat([p.rows for p in parts]),
            torch.cat([p.visual_places for p in visual]),
            torch.cat([p.deep for p in visual], 1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Deep:
    """DeepStack additions of one pass."""

    rows: torch.Tensor  # [visual] int64: rows of the pass
    levels: torch.Tensor  # [levels, visual, hidden]


class TextModel(Decoder):
    """The decoder with its embedding beside the layers, as the checkpoint names them."""

    def __init__(self, config: OmniConfig) -> None:
        c = config.thinker.text
        super().__init__(c)
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)


class Thinker(nn.Module):
    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        self.config = config
        self.accept_layer = config.talker.accept_layer
        self.audio_tower = AudioEncoder(config.thinker.audio)
        self.visual = VisionEncoder(config.thinker.vision)
        self.model = TextModel(config)
        self.lm_head = Linear(config.thinker.text.hidden_size, config.thinker.text.vocab_size)

    def prepare(self) -> None:
        """Derived constants; once, after the weights are in place."""
        self.model.prepare(self.device)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def cache(self, num_blocks: int, block_size: int = 16) -> KVCache:
        return self.model.cache(num_blocks, block_size, self.device, self.dtype)

    def embed(self, ids: torch.Tensor, media: MediaRows | None = None) -> torch.Tensor:
        """Input rows of a run of ids; `media` holds the encoder rows that fall into the run."""
        x: torch.Tensor = self.model.embed_tokens(ids)
        if media is not None and len(media.places):
            x.index_copy_(0, to_device(media.places.numpy(), x.device, torch.int64), media.rows)
        return x

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        paging: Paging,
        deep: Deep | None = None,
        capture: torch.Tensor | Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One pass: rows x [rows, hidden], positions [3, rows].

        Returns the final-normed rows, and the accept layer's residual stream at the rows named by
        `capture`."""
        taken: list[torch.Tensor] = []
        captured_rows = None if capture is None else torch.as_tensor(capture, device=x.device)
        if captured_rows is not None and self.accept_layer == 0:
            taken.append(x[captured_rows])

        def after(layer: int, stream: torch.Tensor) -> torch.Tensor:
            if (
                captured_rows is not None
                and layer + 1 == self.accept_layer < self.config.thinker.text.num_layers
            ):
                taken.append(stream[captured_rows])  # before this layer's DeepStack addition
            if deep is not None and layer < len(deep.levels):
                stream = stream.index_add(0, deep.rows, deep.levels[layer])
            return stream

        watch = after if captured_rows is not None or deep is not None else None
        hidden: torch.Tensor = self.model(x, positions, PagedPass(cache, paging), watch)
        if captured_rows is not None and not taken:
            # the last state a model reports is the normed one
            taken.append(hidden[captured_rows])
        return hidden, taken[0] if taken else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(hidden)
        return out


MAX_BIAS = 1024  # tokens of one request


@dataclass(slots=True, eq=False)
class ThinkerInput:
    """What a request brings beside its ids."""

    positions: npt.NDArray[np.float32]  # [3, prompt]
    first_decode: float  # rotary position of the first generated token
    sampling: SamplingParams = GREEDY
    media: list[MediaRows] = field(default_factory=list)  # of the pieces that are encoded by now
    # sorted prompt positions whose accept-layer rows the talker needs
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
        # Passes over prompts. They serve once they are captured.
        self.prompts = PrefillGraphs.where_usable(model.model, cache, self.rows, model.accept_layer)

    def sampling(self, request: StageRequest) -> tuple[SamplingParams, ...]:
        return (request.input.sampling,)

    def join(self, join: RowJoin) -> None:
        request = join.request
        state: ThinkerInput = request.input
        penalised = state.sampling.repetition_penalty != 1.0
        offset = state.first_decode - state.positions.shape[1]
        seen = sorted(set(request.ids)) if penalised else ()
        self.rows.join(join.row, join.blocks, offset, seen, request.cursor.prompt + state.min_new)
        self.params.write(join.row, state.sampling)
        self.bias.write(join.row, state.bias)
        self.min_p.write(join.row, 0.0 if state.sampling.greedy else state.min_p)

    def scatter(self, rows: int) -> None:
        """Random last tokens for the first rows, where no requests are."""
        self.next[:rows].random_(0, self.model.config.thinker.text.vocab_size)

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
        state: ThinkerInput = request.input
        device = self.model.device
        media = (
            MediaRows.joined([m.within(start, stop) for m in state.media]) if state.media else None
        )
        x = self.model.embed(to_device(request.ids[start:stop], device, torch.int64), media)
        capture: list[int] = []
        if state.capture is not None:
            low, high = np.searchsorted(state.capture, [max(start, publish_from), stop])
            capture = (state.capture[low:high] - start).tolist()
        extra = ThinkerExtra(media, capture, start) if media is not None or capture else None
        return HostInput(x, to_device(rope_rows(state, start, stop), device, torch.float32), extra)

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
        captured_rows = [row + r for _, row, e in extras for r in e.capture]
        capture = to_device(captured_rows, device, torch.int64) if captured_rows else None
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


def rope_rows(state: ThinkerInput, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Positions of rows [start, stop), prompt rows and generated ones alike."""
    prompt = state.positions.shape[1]
    beyond = (
        state.first_decode
        + np.arange(max(start, prompt), max(stop, prompt), dtype=np.float32)
        - prompt
    )
    tail = np.broadcast_to(beyond.astype(np.float32), (3, len(beyond)))
    return np.concatenate([state.positions[:, start : min(stop, prompt)], tail], 1)
