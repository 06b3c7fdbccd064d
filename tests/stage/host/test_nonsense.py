"""Messages that look right and mean nonsense: a request that fits nothing fails alone, a link that
is not here is refused, and the host answers the next request as if nothing had been.
`tests/slow/fuzz/control.py` looks for more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stretto.config.engine import HostSettings
from stretto.messages.hosts import Connect, LinkDown, Listen, Ping, Stats
from stretto.messages.requests import Admit, Cancel, Ended, Failed
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.preprocess.packed_prompt import PackedPatches, PackedPiece, PackedPrompt, pack_ids
from stretto.preprocess.prompt import DIGEST_BYTES
from stretto.stage.host.host import Host
from stretto.types import GREEDY, RequestId
from tests.engine.common import HandDriven
from tests.pipeline import LINKS, STAGES, announcement, configure
from tests.stage.reports import Reports

BAD = RequestId("bad")
HUGE = 2**31 - 1


SETTINGS = HostSettings(max_rows=4, max_context=256, blocks={"thinker": 32, "talker": 32})
SECRET = bytes(32)


@pytest.fixture(scope="module")
def driven(tiny_dir: Path) -> HandDriven:
    return HandDriven(tiny_dir, SETTINGS)


@pytest.fixture(scope="module")
def middle(tiny_dir: Path) -> Host:
    """A host with one end of each link."""
    host = Host(configure(str(tiny_dir), ("talker",), {}), SETTINGS, reports)
    host.load()
    return host


reports = Reports()  # of `middle`


def refusal(host: Host, message: Listen | Connect) -> str:
    """Why the host does not set up a link."""
    reports.clear()
    host.handle(message, b"")
    [down] = reports.messages
    assert isinstance(down, LinkDown)
    assert (down.link, down.generation) == (message.link, message.generation)
    return down.message


@pytest.fixture(scope="module")
def plain(tiny_config: OmniConfig) -> Admit:
    t, s = tiny_config.tokens, GREEDY
    ids = (t.im_start, t.user, 11, 12, 13, t.im_end, t.im_start, t.assistant, 10)
    return announcement(BAD, PackedPrompt.of_ids(ids), True, None, s, s, s, 2, 1)


def changed(speak: bool = True, **fields: Any) -> Callable[[Admit, Any], Admit]:
    s = GREEDY
    return lambda a, _: announcement(BAD, a.prompt, speak, None, s, s, s, 2, 1, **fields)


def with_ids(
    edit: Callable[[tuple[int, ...], Any], tuple[int, ...]], speak: bool
) -> Callable[[Admit, Any], Admit]:
    s = GREEDY
    return lambda a, t: announcement(
        BAD, PackedPrompt.of_ids(edit(a.prompt.ids, t)), speak, None, s, s, s, 2, 1
    )


def with_params(stage: str, params: bytes) -> Callable[[Admit, Any], Admit]:
    return lambda a, _: msgspec.structs.replace(a, stages={**a.stages, stage: msgspec.Raw(params)})


def with_picture(
    grid: tuple[int, int, int], shape: tuple[int, ...], offset: int | None = 0
) -> Callable[[Admit, Any], Admit]:
    def make(a: Admit, tokens: Any) -> Admit:
        ids = (*a.prompt.ids[:3], tokens.image_pad, *a.prompt.ids[3:])
        values = PackedPiece(shape, bytes(DIGEST_BYTES), offset)
        return msgspec.structs.replace(
            a, prompt=PackedPrompt(pack_ids(ids), images=(PackedPatches(grid, 1.0, values),))
        )

    return make


CASES: dict[str, tuple[str, Callable[[Admit, Any], Admit]]] = {
    "an id beyond the vocabulary": ("Invalid", with_ids(lambda ids, t: (HUGE, *ids), speak=False)),
    "an id beyond the talker's": ("Invalid", with_ids(lambda ids, t: (HUGE, *ids), speak=True)),
    "an id below 0": ("Invalid", with_ids(lambda ids, t: (-1, *ids), speak=False)),
    "no ids": ("Invalid", with_ids(lambda ids, t: (), speak=False)),
    "words beyond the vocabulary": ("Invalid", changed(spoken=(2**31 - 1,))),
    "a bias beyond the vocabulary": (
        "Invalid",
        changed(logit_bias=((2**31 - 1, 1.0),), speak=False),
    ),
    "words of 2**31 and more": ("WireError", changed(spoken=(2**31,))),
    "parameters that are none": ("WireError", with_params("talker", b"\xc1")),
    "parameters of another stage": (
        "WireError",
        with_params("code2wav", msgspec.msgpack.encode({"max_frames": 1})),
    ),
    "a pad without its picture": ("Bug", with_ids(lambda ids, t: (t.image_pad, *ids), speak=False)),
    "a picture of another size": ("Bug", with_picture((1, 2, 2), (3, 4), 0)),
    "a picture of no size": ("WireError", with_picture((1, 0, 2), (0, 4), 0)),
    "a picture that might fill all memory": (
        "WireError",
        with_picture((2**20, 2, 2), (1, 1), None),
    ),
    "a product that overflows": ("WireError", with_picture((1, 2, 2), (2**32, 2**32), 0)),
    "a size below 0": ("WireError", with_picture((1, 2, 2), (-4, 4), 0)),
    "an offset below 0": ("WireError", with_picture((1, 2, 2), (1, 1), -4)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_request_that_fits_nothing_fails_alone(
    driven: HandDriven, plain: Admit, tiny_config: OmniConfig, case: str
) -> None:
    kind, spoil = CASES[case]
    driven.reports.clear()
    driven.host.handle(spoil(plain, tiny_config.tokens), bytes(64))
    driven.host.loop.round()  # media are encoded in turns
    [failed] = [m for m, _ in driven.reports if isinstance(m, Failed)]
    assert (failed.request, failed.kind) == (BAD, kind), failed
    driven.host.handle(Cancel(BAD), b"")  # as the engine does
    while driven.host.loop.round():
        pass
    driven.reports.clear()
    driven.host.handle(Ping(1), b"")
    [(told, _)] = driven.reports
    assert isinstance(told, Stats)
    assert [told.values[f'stretto_stage_requests{{stage="{s}"}}'] for s in STAGES] == [0, 0, 0]
    driven.reports.clear()
    good = RequestId("good-after-" + case.replace(" ", "-"))
    driven.answer(msgspec.structs.replace(plain, request=good), b"")
    assert sum(isinstance(m, Ended) for m, _ in driven.reports) == len(STAGES)


def test_a_lost_device_is_the_end_of_the_host(
    driven: HandDriven, plain: Admit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise torch.AcceleratorError("gone")

    monkeypatch.setattr(type(driven.host.stages["thinker"]), "admit", lost)
    with pytest.raises(torch.AcceleratorError):
        driven.host.handle(plain, b"")
    monkeypatch.undo()
    driven.host.handle(Cancel(BAD), b"")


@pytest.mark.parametrize("name", ["", "a>b", "code2wav>talker", *LINKS])
def test_a_link_that_is_not_here_is_refused(driven: HandDriven, middle: Host, name: str) -> None:
    """Nor is one that ends elsewhere, is of no generation, or does not leave the host."""
    listen, connect = Listen(name, "shm", 1, SECRET), Connect(name, "shm", b"", 1, SECRET)
    here = {"thinker>talker": listen, "talker>code2wav": connect}.get(name)
    for message in (listen, connect):
        driven.reports.clear()
        driven.host.handle(message, b"")
        [(down, _)] = driven.reports
        assert "no such end" in down.message
        bad = msgspec.structs.replace(message, generation=-1) if message is here else message
        assert "no such end" in refusal(middle, bad)


@pytest.mark.parametrize(
    "endpoint", [b"", b"\xa5\xff\xff\xff\xff\xff", b"\x81\xa9connector\xa2\xff\xff"]
)
def test_an_endpoint_that_is_none_is_refused(middle: Host, endpoint: bytes) -> None:
    message = Connect("talker>code2wav", "shm", endpoint, 1, SECRET)
    assert "not an endpoint" in refusal(middle, message)
