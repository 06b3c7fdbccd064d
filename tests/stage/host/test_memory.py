"""A host through which many requests went holds no more than before them. What is remembered within
a bound (ids of requests that are over, headers that were seen) is cut down to a few here, so that
it is full before counting begins."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from stretto.config.engine import HostSettings
from stretto.messages.requests import Admit, Cancel, Ended, Failed
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.transport import wire
from stretto.transport.contract import PurgedRequests
from stretto.types import GREEDY, RequestId
from tests.engine.common import HandDriven
from tests.pipeline import STAGES, announcement

FEW = 4
WARM, COUNTED = 30, 40
SETTINGS = HostSettings(max_rows=4, max_context=256, blocks={"thinker": 32, "talker": 32})


def admit(number: int, ids: tuple[int, ...]) -> Admit:
    s = GREEDY
    return announcement(
        RequestId(f"r{number}"),
        PackedPrompt.of_ids(ids),
        True,
        None,
        s,
        s,
        s,
        2,
        1,
        want_codes=True,
    )


def answer(driven: HandDriven, number: int, ids: tuple[int, ...]) -> None:
    """One request, to its end; or, every third, to its cancellation in the middle."""
    driven.host.handle(admit(number, ids), b"")
    rounds = 2 if number % 3 == 2 else 500
    for _ in range(rounds):
        if not driven.host.loop.round():
            break
    reports = [m for m, _ in driven.reports]
    assert not any(isinstance(m, Failed) for m in reports), reports
    if rounds == 2:
        driven.host.handle(Cancel(RequestId(f"r{number}")), b"")
        while driven.host.loop.round():
            pass
    else:
        assert sum(isinstance(m, Ended) for m in reports) == len(STAGES)
    driven.reports.clear()
    driven.launched.clear()


def blocks() -> int:
    """Pieces of memory that Python's objects take up. Without the interpreter's cache of methods:
    it keeps the names that were looked up, and torch makes them anew, so that it takes hundreds of
    requests to fill."""
    gc.collect()
    sys._clear_type_cache()
    return sys.getallocatedblocks()


def growth(tiny_dir: Path) -> int:
    """Blocks more after COUNTED requests, when WARM have filled what fills."""
    t = OmniConfig.read(tiny_dir).tokens
    ids = (t.im_start, t.user, 11, 12, 13, t.im_end, t.im_start, t.assistant, 10)
    wire._MAX_CACHED = FEW  # type: ignore[misc]
    driven = HandDriven(tiny_dir, SETTINGS)
    for found in gc.get_objects():
        if type(found) is PurgedRequests:
            found.limit = FEW
    del found
    for number in range(WARM):
        answer(driven, number, ids)
    before = blocks()
    for number in range(WARM, WARM + COUNTED):
        answer(driven, number, ids)
    return blocks() - before


def test_requests_leave_nothing_behind(tiny_dir: Path) -> None:
    """In a process of its own: what other tests have left running in this one would count too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        more = alone.submit(growth, tiny_dir).result()
    assert more < 0.75 * COUNTED, f"{more} of {COUNTED} requests"
