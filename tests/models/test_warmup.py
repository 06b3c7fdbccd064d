"""Before a host is ready, it serves made-up requests: the first real one then does nothing for the
first time, and finds no trace of them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.messages.hosts import Loading
from stretto.messages.requests import Ended
from stretto.stage.warmup import Reports, WarmUpRequest, warm_up
from stretto.types import RequestId
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
def test_nothing_is_left_of_it(opened: Open, kind: str, wants: str) -> None:
    plain, driven = opened(kind), opened(kind)
    before = driven.values()
    assert driven.warm_up() == {"omni": 1, "custom_voice": 1, "base": 2}[kind]
    assert driven.reports == []
    assert driven.values() == before
    assert not driven.host.recorder.take_spans(1)
    assert driven.host.num_requests() == 0
    assert not driven.host.context.warm_up
    nodes: dict[str, Any] = driven.host.stages
    others: dict[str, Any] = plain.host.stages
    assert nodes["talker"].frame_timing == others["talker"].frame_timing
    assert not nodes["talker"].core.runner.adapter.inputs
    assert not len(nodes["code2wav"].core.primers)
    for name in nodes.keys() & {"thinker", "talker"}:
        stage = nodes[name].core
        assert stage.scheduler.pool._free == others[name].core.scheduler.pool._free
        assert not len(stage.store)
        assert stage.timer._launches.high is None
    if kind == "omni":
        assert nodes["thinker"].encoders.kept.num_bytes == 0
    for times in ("first", "again"):
        mine, theirs = (
            driven.ask(driven.question(wants), times),
            plain.ask(plain.question(wants), times),
        )
        assert mine == theirs
        assert mine["pcm"]
        assert any(mine["cached"].values()) == (times == "again" and kind == "omni")


ALONE = [
    ("omni", ("thinker",), 1), ("omni", ("talker",), 1), ("omni", ("code2wav",), 1),
    ("omni", ("talker", "code2wav"), 1),
    ("custom_voice", ("talker",), 1), ("custom_voice", ("code2wav",), 1), ("base", ("code2wav",),
    2),
    ("base", ("enroller",), 0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stages", "requests"), ALONE)
def test_stages_warm_up_without_those_of_other_hosts(
    opened: Open, kind: str, stages: tuple[str, ...], requests: int
) -> None:
    driven = opened(kind, stages)
    nodes: dict[str, Any] = driven.host.stages
    steps: list[str] = []
    for name, node in nodes.items():
        if requests:
            what = node.core if name == "code2wav" else node.core.runner
            watch(
                what,
                "run" if name == "code2wav" else "launch",
                lambda name=name: steps.append(name),
            )
    before, within = driven.values(), remote_ends(driven)
    assert driven.warm_up() == requests
    assert set(steps) == (set(stages) if requests else set())
    assert driven.values() == before
    assert remote_ends(driven) == within


def remote_ends(driven: Driven) -> list[bool]:
    links = driven.host.links
    return [i.is_local for i in links.inlets.values()] + [
        o.is_local for o in links.outlets.values()
    ]


def watch(owner: Any, name: str, note: Callable[[], None]) -> None:
    real = getattr(owner, name)
    setattr(owner, name, lambda *args: (note(), real(*args))[1])


def test_one_that_fails_or_does_not_end_is_given_up(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    driven, plain = opened("custom_voice"), opened("custom_voice")
    [good] = driven.host.context.warm_up
    endless = {**good.told, "talker": msgspec.structs.replace(good.told["talker"], live=True)}
    unheard = {**good.told, "talker": msgspec.structs.replace(good.told["talker"], spoken=())}
    requests = [WarmUpRequest(endless, good.prompt), WarmUpRequest(unheard, good.prompt), good]
    driven.host.context.warm_up = requests
    ticks = count()
    with caplog.at_level(logging.INFO, "stretto"):
        assert warm_up(driven.host, driven.outgoing, lambda: float(next(ticks))) == 1
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert said[0] == (
        "WARNING",
        "a warm-up request did not end in 60 s: stages ['code2wav', 'talker']",
    )
    assert said[1] == ("INFO", "a warm-up request failed: talker: there is nothing to say")
    assert driven.host.num_requests() == 0
    assert driven.ask(driven.question("reading")) == plain.ask(plain.question("reading"))


def test_what_is_not_about_requests_leaves_meanwhile() -> None:
    said: list[Any] = []
    reports = Reports(lambda message, blob: said.append(message))
    reports.muted = True
    loading, ended = Loading("talker", "loading"), Ended(RequestId("a"), "talker", "stop", 0.0, ())
    reports.post(loading)
    reports.post(ended)
    assert (said, reports.ended) == ([loading], {"talker"})
    reports.muted = False
    reports.post(ended)
    assert said == [loading, ended]
