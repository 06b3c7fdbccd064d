"""What the runner needs of the model: input rows from ids, a pass, and how a token is picked.
`device_input`, `forward` and `pick` make up a decode step, which is captured on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.kernels.reference.sampling import guarded, sample
from stretto.layers.upload import to_device
from stretto.stage.request import StageRequest
from stretto.stage.runner.adapter import HostInput, Picked, SideRows
from stretto.stage.runner.columns import SamplingColumns, SamplingMode
from stretto.stage.runner.rows import DeviceRows
from stretto.stage.scheduler.batch import RowJoin
from stretto.types import SamplingParams
from tiny_text.model import TinyTextModel


class TinyTextAdapter:
    columns = 1  # a row is one token
    fused = False  # there are no fused kernels

    def __init__(
        self, model: TinyTextModel, cache: KVCache, max_rows: int, max_context: int
    ) -> None:
        self.model = model
        self.cache = cache
        vocab, blocks = model.config.decoder.vocab_size, -(-max_context // cache.block_size)
        self.rows = DeviceRows(max_rows, blocks, vocab, cache)
        self.params = SamplingColumns(max_rows + 1, model.device)
        self.next = torch.zeros(max_rows + 1, dtype=torch.int64, device=model.device)

    def sampling(self, request: StageRequest) -> tuple[SamplingParams, ...]:
        return (request.input,)  # what the stage gave to `submit`

    def join(self, join: RowJoin) -> None:
        self.rows.join(join.row, join.blocks, 0.0, ())
        self.params.write(join.row, join.request.input)

    def confirm(self, request: StageRequest, row: Sequence[int]) -> None:
        pass  # the scheduler keeps the ids, which are all that a row needs to be computed again

    def decode_value(self, request: StageRequest, position: int) -> int:
        return 0

    def device_input(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.embed_tokens(self.next[rows]), positions.float().expand(3, -1)

    def host_input(
        self, request: StageRequest, start: int, stop: int, publish_from: int
    ) -> HostInput[None]:
        device = self.model.device
        x = self.model.embed_tokens(to_device(request.ids[start:stop], device, torch.int64))
        positions = torch.arange(start, stop, dtype=torch.float32, device=device)
        return HostInput(x, positions.expand(3, -1))

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        paging: Paging,
        extras: list[tuple[int, int, None]],
    ) -> tuple[torch.Tensor, SideRows]:
        return self.model(x, positions[0], self.cache, paging), SideRows()

    def pick(
        self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, mode: SamplingMode
    ) -> Picked:
        logits = self.model.lm_head(hidden)
        tokens = sample(logits, self.params.pick(rows, mode), positions + 1)
        self.next[rows] = tokens
        return Picked(guarded(tokens[:, None], logits))

    def fused_step(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> Picked:
        raise NotImplementedError
