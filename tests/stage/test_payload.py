"""Payload types: cutting loses nothing, reading refuses what was never sent."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.speech.payloads import CodecFrames
from stretto.stage.payload import unpack
from stretto.transport import wire
from stretto.transport.contract import Corrupt
from stretto.types import Mark, RequestId, Span

R = RequestId("r-1")


def rows(start: int, kinds: list[bool]) -> ThinkerRows:
    """Positions from `start`; True is a media position. Ids and hidden rows say where they
    belong."""
    positions = [start + i for i, media in enumerate(kinds) if media]
    runs: list[Span] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = Span(runs[-1].start, position + 1)
        else:
            runs.append(Span(position, position + 1))
    ids = torch.arange(start, start + len(kinds), dtype=torch.int32)
    hidden = torch.tensor(positions, dtype=torch.bfloat16)[:, None].expand(-1, 4)
    return ThinkerRows(Span(start, start + len(kinds)), ids, tuple(runs), hidden)


def same(left: ThinkerRows, right: ThinkerRows) -> bool:
    return (
        (left.span, left.media) == (right.span, right.media)
        and torch.equal(left.ids, right.ids)
        and (not left.media or torch.equal(left.hidden, right.hidden))
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_thinker_rows_cut(start: int, kinds: list[bool], data: st.DataObject) -> None:
    whole = rows(start, kinds)
    cuts = (
        sorted(data.draw(st.sets(st.integers(start + 1, start + len(kinds) - 1), max_size=4)))
        if len(kinds) > 1
        else []
    )
    edges = [start, *cuts, start + len(kinds)]
    parts = [whole.part(Span(a, b)) for a, b in pairwise(edges)]
    for part in parts:
        assert same(
            part, rows(part.span.start, kinds[part.span.start - start : part.span.stop - start])
        )
        chunk = wire.decode(wire.encode(wire.chunk(R, part.span, Mark.MORE, part.tensors())))
        read = unpack(ThinkerRows, chunk)
        assert read is not None
        assert same(read, part)


def test_codec_frames_cut() -> None:
    whole = CodecFrames(Span(3, 9), torch.arange(24, dtype=torch.int32).view(6, 4))
    part = whole.part(Span(4, 6))
    assert (part.span, part.codes.tolist()) == (Span(4, 6), whole.codes[1:3].tolist())
    assert part.codes.data_ptr() == whole.codes[1:].data_ptr(), "a view"
    with pytest.raises(ValueError, match="within"):
        whole.part(Span(2, 5))


I32, I64 = torch.int32, torch.int64
HIDDEN = torch.zeros(1, 4)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"codes": torch.zeros(2, 4, dtype=I32), "more": torch.zeros(1)},
        {"codes": torch.zeros(3, 4, dtype=I32)},
        {"codes": torch.zeros(2, 4, dtype=I64)},
        {"codes": torch.zeros(2, dtype=I32)},
    ],
)
def test_frames_that_were_never_sent(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(Corrupt) as caught:
        unpack(CodecFrames, wire.chunk(R, Span(0, 2), Mark.MORE, tensors))
    assert caught.value.request == R


@pytest.mark.parametrize(
    "runs",
    [
        [[0, 3]],
        [[-1, 0]],
        [[1, 1]],
        [[1, 0]],
        [[0, 1], [0, 1]],
        [[1, 2], [0, 1]],
        [[0, 2]],
        [],
        [[2, 3]],
    ],
)
def test_rows_that_were_never_sent(runs: list[list[int]]) -> None:
    """One hidden row for two positions: only one run of one position fits."""
    tensors = {
        "ids": torch.zeros(2, dtype=I32),
        "media": torch.tensor(runs, dtype=I64).reshape(-1, 2),
        "hidden": HIDDEN,
    }
    with pytest.raises(Corrupt):
        unpack(ThinkerRows, wire.chunk(R, Span(0, 2), Mark.MORE, tensors))
    tensors["media"] = torch.tensor([[1, 2]], dtype=I64)
    assert unpack(ThinkerRows, wire.chunk(R, Span(0, 2), Mark.MORE, tensors)) is not None


def test_an_empty_span_carries_no_tensors() -> None:
    assert unpack(CodecFrames, wire.chunk(R, Span(4, 4), Mark.REQUEST_END, {})) is None
    with pytest.raises(Corrupt):
        unpack(
            CodecFrames,
            wire.chunk(R, Span(4, 4), Mark.REQUEST_END, {"codes": torch.zeros(0, 4, dtype=I32)}),
        )


@pytest.mark.parametrize(
    "error", [KeyError("codes"), IndexError("row"), TypeError("None"), ValueError("shape")]
)
def test_a_type_that_breaks_on_a_payload_fails_its_request_alone(error: Exception) -> None:
    class Careless(CodecFrames):
        @classmethod
        def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> Careless:
            raise error

    with pytest.raises(Corrupt, match="not a Careless") as caught:
        unpack(
            Careless, wire.chunk(R, Span(0, 1), Mark.MORE, {"codes": torch.zeros(1, 4, dtype=I32)})
        )
    assert caught.value.request == R
