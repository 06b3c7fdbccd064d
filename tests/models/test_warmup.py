"""After the requests that the engine sends before it is ready, the first real one does nothing for
the first time, and its answer is as without them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.driven import Driven
from tests.models.qwen3_tts.cases import write

KINDS = ("omni", "custom_voice", "voice_design", "base")
Open = Callable[..., Driven]


@pytest.fixture
def opened(tiny_dir: Path, tmp_path: Path) -> Open:
    def open_kind(kind: str, stages: tuple[str, ...] = (), **settings: Any) -> Driven:
        model = tiny_dir if kind == "omni" else tmp_path / f"{kind}-1b7"
        if not model.exists():
            write(tmp_path, kind, "1b7")
        return Driven(model, stages, **settings)

    return open_kind


class Noted(TorchDispatchMode):
    """Which operations were run, on numbers of which kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [
            t
            for a in (*args, *(kwargs or {}).values())
            for t in (a if isinstance(a, list | tuple) else [a])
        ]
        self.found.add((func, *(t.dtype for t in given if isinstance(t, torch.Tensor))))
        return func(*args, **(kwargs or {}))


REQUESTS = [
    ("omni", "text"), ("omni", "sound"), ("omni", "short sound"), ("omni", "picture"), ("omni",
    "reading"),
    ("custom_voice", "reading"), ("voice_design", "reading"), ("base", "reading"), ("base",
    "cloned"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "wants"), REQUESTS)
def test_a_first_request_does_nothing_for_the_first_time(
    opened: Open, kind: str, wants: str
) -> None:
    driven = opened(kind)
    question = driven.question(wants)
    with Noted() as before:
        driven.warm_up()
    modules, threads = set(sys.modules), set(threading.enumerate())
    with Noted() as first:
        driven.ask(question)
    assert sorted(map(str, first.found - before.found)) == []
    assert set(sys.modules) == modules
    assert set(threading.enumerate()) == threads
    assert first.found, "there is something to compare"


@pytest.mark.parametrize(
    ("kind", "wants"), [("omni", "sound"), ("custom_voice", "reading"), ("base", "cloned")]
)
def test_answers_are_as_without_it(opened: Open, kind: str, wants: str) -> None:
    plain, driven = opened(kind), opened(kind)
    assert driven.warm_up() == {"omni": 1, "custom_voice": 1, "base": 2}[kind]
    assert driven.host.num_requests() == 0
    for id in ("first", "again"):
        mine, other = (d.ask(d.question(wants), id) for d in (driven, plain))
        samples = [np.frombuffer(found.pop("pcm"), np.float32) for found in (mine, other)]
        assert len(samples[0]) > 0
        # Packets may be of other sizes after frames were timed, and a sum is rounded by them.
        np.testing.assert_allclose(*samples, rtol=0, atol=1e-5)
        assert mine == other
        assert any(mine["cached"].values()) == (id == "again" and kind == "omni")
