"""Runs batches: `launch` puts a batch on the device and returns at once, `retire` takes its tokens
to the host.

Owned by a stage, called on its loop thread. Several steps may be in flight; a launch depends on
earlier ones only through the device rows, in stream order, never through the host. All copies to
the host go to pinned memory with an event behind them. A batch that only decodes, with its inputs
on the device, replays a captured graph if there is one of its size; everything else runs eagerly
through the same functions, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from stretto.errors import Bug, StageDead, StrettoError
from stretto.layers.upload import to_device
from stretto.stage.runner.adapter import ModelAdapter, Picked, SideRows, decode_step
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.stage.runner.logprobs import StepLogprobs, score
from stretto.stage.runner.step import Step
from stretto.stage.scheduler.batch import Batch, RowSpan, StepResult
from stretto.types import RequestId

DRAWS = 1
PENALTY = 2
LOGPROBS = 4


def pass_order(span: RowSpan) -> tuple[bool, bool]:
    """Spans of one position first, of these the ones whose input is on the device."""
    return span.stop - span.start != 1, not span.from_device


class Runner:
    def __init__(
        self, adapter: ModelAdapter[Any], graphs: DecodeGraphs | None = None, priority: int = 0
    ) -> None:
        """`priority` of the stage's stream among those of its device: lower goes first."""
        self.adapter = adapter
        self.graphs = graphs
        self.device = adapter.rows.device
        # by row: DRAWS, PENALTY, LOGPROBS of the request that holds it
        self._flags = [0] * (adapter.rows.num_rows + 1)
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
            # weights and rows were made there
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def on_stream(self) -> AbstractContextManager[Any]:
        """Everything that touches device rows happens on the stage's own stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    @torch.inference_mode()
    def joined(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Device rows of earlier steps as one tensor, and when it is there (None: now)."""
        with self.on_stream():
            rows = torch.cat(list(parts))
            if self.stream is None:
                return rows, None
            return rows, self.stream.record_event()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Step:
        """Put a batch on the device. An error while launching is the step's, not the caller's."""
        with self.on_stream():
            try:
                return self._launch(batch)
            except StrettoError as e:
                return self._failed(batch, e)
            except torch.cuda.OutOfMemoryError as e:
                return self._failed(
                    batch,
                    StageDead(f"out of device memory in a step of {batch.num_tokens} rows: {e}"),
                )
            except RuntimeError as e:
                return self._failed(batch, StageDead(f"a step failed to launch: {e}"))

    def retire(self, step: Step) -> StepResult:
        """What the spans of a step picked that is done."""
        if step.error is not None:
            return StepResult.failed(step.batch, step.error)
        rows: list[Sequence[int]] = [()] * len(step.batch.spans)
        errors: dict[RequestId, StrettoError] = {}
        for i, row in zip(step.sampling, step.host.tolist(), strict=True):
            if row[0] < 0:
                id = step.batch.spans[i].request.id
                errors[id] = StageDead(f"{id}: the model's output is not a number")
            rows[i] = row
        return StepResult(rows, errors)

    def _failed(self, batch: Batch, error: StrettoError) -> Step:
        none = torch.empty(0, self.adapter.columns, dtype=torch.int64)
        return Step(batch, [], none, none, None, SideRows(), None, error=error)

    def _launch(self, batch: Batch) -> Step:
        adapter = self.adapter
        for join in batch.joined:
            adapter.join(join)
            mode = SamplingMode.of(adapter.sampling(join.request))
            flags = DRAWS * mode.sampled | PENALTY * mode.penalty
            if join.request.spec.logprobs is not None:
                flags |= LOGPROBS
            self._flags[join.row] = flags
        adapter.rows.put_blocks(
            [(s.row, s.first_block, s.new_blocks) for s in batch.spans if s.new_blocks]
        )
        adapter.rows.write_guides(batch.spans)
        decodes = batch.decode_only and all(span.from_device for span in batch.spans)
        order: Sequence[int] = range(len(batch.spans))
        spans: Sequence[RowSpan] = batch.spans
        if not decodes:
            order = sorted(order, key=lambda i: pass_order(batch.spans[i]))
            spans = [batch.spans[i] for i in order]
        samples = [i for i, span in enumerate(spans) if span.samples]
        flags = 0
        for i in samples:
            flags |= self._flags[spans[i].row]
        mode = SamplingMode(bool(flags & DRAWS), bool(flags & PENALTY))
        if decodes:
            picked, side_rows = self._decode(spans, mode), SideRows()
        else:
            picked, side_rows = self._mixed(spans, order, samples, mode)
        logprobs = self._score([spans[i] for i in samples], picked) if flags & LOGPROBS else None
        sampling = [order[i] for i in samples]
        return self._publish(batch, sampling, picked.tokens, side_rows, logprobs)

    def _score(self, sampling: list[RowSpan], picked: Picked) -> StepLogprobs:
        """Log-probabilities of the picks, for the requests that ask for them."""
        head = self.adapter.rows.head
        if head is None or picked.hidden is None:
            raise Bug("this stage has no log-probabilities")
        counts = [(at, span.request.spec.logprobs) for at, span in enumerate(sampling)]
        requested = [(at, count) for at, count in counts if count is not None]
        return score(head, picked.hidden, picked.tokens[:, 0], requested)

    def _decode(self, spans: Sequence[RowSpan], mode: SamplingMode) -> Picked:
        """Every row goes on from its own last pick."""
        host = self._device_rows(spans)
        if self.graphs is not None:
            picked = self.graphs.replay(host, mode)
            if picked is not None:
                return picked
        width = -(-int(host[1].max() + 1) // self.adapter.cache.block_size)
        rows, positions, extra = to_device(host, self.device, torch.int64)
        return decode_step(self.adapter, rows, positions, extra, mode, width)

    def _device_rows(self, spans: Sequence[RowSpan]) -> np.ndarray:
        """(row, position, host value) [3, rows] of the spans whose input is on the device."""
        spans = [s for s in spans if s.from_device]
        values = [self.adapter.decode_value(s.request, s.start) for s in spans]
        return np.array([[s.row for s in spans], [s.start for s in spans], values], dtype=np.int64)

    def _mixed(
        self, spans: Sequence[RowSpan], order: Sequence[int], samples: list[int], mode: SamplingMode
    ) -> tuple[Picked, SideRows]:
        """`spans` in the order of the pass, with their places in the batch; `samples`: which of
        them sample."""
        adapter = self.adapter
        xs, places, extras = [], [], []
        first = self._device_rows(spans)
        row = first.shape[1]
        if row:
            x, positions = adapter.device_input(*to_device(first, self.device, torch.int64))
            xs, places = [x], [positions]
        for i, span in enumerate(spans[row:], start=row):
            host_input = adapter.host_input(span.request, span.start, span.stop, span.publish_from)
            if host_input.extra is not None:
                extras.append((order[i], row, host_input.extra))
            xs.append(host_input.x)
            places.append(host_input.positions)
            row += span.stop - span.start
        paging = adapter.rows.mixed_paging([(s.row, s.start, s.stop) for s in spans])
        hidden, side_rows = adapter.forward(torch.cat(xs), torch.cat(places, 1), paging, extras)
        if not samples:
            return Picked(
                torch.empty(0, adapter.columns, dtype=torch.int64, device=self.device)
            ), side_rows
        last = paging.last_rows
        host = np.array(
            [[last[i], spans[i].row, spans[i].stop - 1] for i in samples], dtype=np.int64
        ).T
        pick, rows, positions = to_device(np.ascontiguousarray(host), self.device, torch.int64)
        return adapter.pick(rows, positions, hidden[pick], mode), side_rows

    def _publish(
        self,
        batch: Batch,
        sampling: list[int],
        tokens: torch.Tensor,
        side_rows: SideRows,
        logprobs: StepLogprobs | None,
    ) -> Step:
        # as links carry them
        tokens = tokens.to(torch.int32)
        if self.stream is None:
            return Step(batch, sampling, tokens, tokens, None, side_rows, None, logprobs)
        rows_at = None
        if side_rows.rows:
            # complete before the copy below: whoever takes them need not wait for it
            rows_at = torch.cuda.Event()  # type: ignore[no-untyped-call]
            rows_at.record(self.stream)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        if logprobs is not None:
            logprobs = logprobs.to_host()
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self.stream)
        return Step(batch, sampling, tokens, host, copied, side_rows, rows_at, logprobs)
