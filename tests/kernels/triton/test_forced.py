"""What the bfloat16 comparisons rely on: `tests.rows.Forced` sends rows to the experts it is given
on every path, and changes nothing else; and the share of rows that are off is what counts."""

from __future__ import annotations

import pytest
import torch

from stretto.layers.config import MoeConfig
from stretto.layers.decoder import PagedPass
from stretto.layers.fused import FusedLayers
from tests.kernels.triton.beds import Bed, config
from tests.rows import Forced, check_errors, chosen, row_errors

MOE = MoeConfig(num_experts=8, top_k=2, expert_size=32, norm_topk=True, shared_size=None)
SHARED = MoeConfig(num_experts=8, top_k=2, expert_size=32, norm_topk=True, shared_size=32)
ROWS = 5


def given(rows: int) -> list[torch.Tensor]:
    """Experts that no router chose."""
    return [
        torch.tensor([[(3 * r + layer) % 8, (3 * r + layer + 4) % 8] for r in range(rows)])
        for layer in range(2)
    ]


@pytest.mark.parametrize("rows", [1, 3, 0], ids=["one row", "rows", "prompt"])
@pytest.mark.parametrize("moe", [MOE, SHARED], ids=["alone", "shared"])
@torch.inference_mode()
def test_every_path_goes_to_the_given_experts(
    moe: MoeConfig, rows: int, device: torch.device
) -> None:
    bed = Bed(config(moe, hidden=64), device, torch.float32, rows=3, length=16)
    bed.decoder.fused = None  # the plain way, whatever is usable here
    spans = [(row, 0, 1) for row in range(rows)] or [(0, 0, ROWS)]
    forced = Forced(2, ROWS, 8, device)
    ids = [i.to(device) for i in given(rows or ROWS)]

    def fast() -> torch.Tensor:
        if not rows:
            return bed.fast(spans)
        x, positions, paging = bed.inputs(spans)
        cos, sin = bed.decoder.rope(positions, x.dtype)
        return FusedLayers(bed.decoder, device).paged(x, cos, sin, bed.cache, paging)

    free = bed.plain(spans)
    forced.give(ids)
    with forced(), chosen() as found:
        want = bed.plain(spans)
    assert [set(r.tolist()) for layer in found for r in layer] == [
        set(r.tolist()) for layer in ids for r in layer
    ]
    forced.give(ids)
    with forced():
        got = fast()
    assert float(row_errors(got, want).max()) < 1e-5
    assert float(row_errors(free, want).max()) > 0.1
    assert float(row_errors(fast(), free).max()) < 1e-5, "and afterwards as before"


@torch.inference_mode()
def test_rows_in_parts(device: torch.device) -> None:
    bed = Bed(config(MOE, hidden=64), device, torch.float32, rows=1, length=16)
    # the layers for few rows on a CPU route by themselves
    bed.decoder.fused = bed.decoder.host = None
    ids = [i.to(device) for i in given(ROWS)]
    forced = Forced(2, ROWS, 8, device, in_parts=True)
    forced.give(ids)
    with forced():
        whole = bed.plain([(0, 0, ROWS)])
    forced.give(ids)
    parts = []
    with forced():
        for start, stop in ((0, 2), (2, ROWS)):
            x, positions, paging = bed.inputs([(0, start, stop)])
            parts.append(bed.decoder(x, positions, PagedPass(bed.cache, paging)))
    assert forced.start == ROWS
    assert float(row_errors(torch.cat(parts), whole).max()) < 1e-5


def test_one_row_in_twenty_may_be_off() -> None:
    errors = torch.zeros(40)
    errors[:2] = 1.0
    check_errors(errors, 0.5)
    errors[2] = float("nan")
    with pytest.raises(AssertionError, match=r"92\.5% of 40 rows"):
        check_errors(errors, 0.5)
