"""Links between hosts, laid anew again and again with each overlap switched off in turn: the same
text and codes, whatever is copied when and on which stream. On a CPU the same, where nothing is
copied behind anyone's back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.config.engine import OverlapSwitches
from stretto.messages.requests import Cancel
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.preprocess.prompt import Prompt
from stretto.types import RequestId
from tests.gpu.onehost import FRAMES, SETTINGS, TOKENS, Answer, Listener, about, kernels

ON = OverlapSwitches()
NAMES = [
    f.name for f in fields(OverlapSwitches) if f.name not in ("just_in_time", "prefill_priority")
]  # not about links
SWITCHES = {"all on": ON, **{f"no {name}": replace(ON, **{name: False}) for name in NAMES}}
SWITCHES["all off"] = replace(ON, **dict.fromkeys(NAMES, False))
LAYINGS = {"cpu": 1, "cuda": 5}  # a CPU has nothing to race with
Output = tuple[list[int], list[list[int]]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def together(device: str, directory: Path) -> Iterator[Listener]:
    """All stages in one host, which hands over."""
    yield from opened(directory, device, apart=False)


@pytest.fixture(scope="module")
def apart(device: str, directory: Path) -> Iterator[Listener]:
    """Each stage in a host of its own."""
    yield from opened(directory, device, apart=True)


def opened(directory: Path, device: str, apart: bool) -> Iterator[Listener]:
    with kernels("force"):
        host = Listener(directory, replace(SETTINGS, device=device), apart)
        if device == "cuda":
            assert all(runner.adapter.fused for runner in host.runners())
            assert all(runner.adapter.prompts is not None for runner in host.runners())
        yield host
        host.close()


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[Prompt]:
    """Two sounds, four questions about each."""
    config = OmniConfig.read(directory)
    return [about(config, sound, words) for words in range(4) for sound in range(2)]


@pytest.fixture(scope="module")
def alone(together: Listener, prompts: list[Prompt]) -> list[Output]:
    """Each by itself, nothing cached, handed over inside the host."""
    found = []
    for prompt in prompts:
        together.forget()
        (answer,) = together.answer([prompt])
        assert not answer.cached
        assert (len(answer.text), len(answer.codes)) == (TOKENS, FRAMES)
        found.append(answer.output)
    assert len({str(output) for output in found}) == len(found), "each has its own answer"
    return found


def pads(host: Listener, prompt: Prompt) -> list[int]:
    tokens = host.stages["thinker"].config.tokens
    return [place for place, id in enumerate(prompt.ids) if id in tokens.media_pads]


def check(
    host: Listener, answers: list[Answer], prompts: list[Prompt], alone: list[Output]
) -> None:
    """As each alone; and some got media rows that were never computed for them."""
    for answer, wanted in zip(answers, alone, strict=True):
        assert answer.error is None
        assert answer.output == wanted
    assert any(a.cached > pads(host, p)[8] for a, p in zip(answers, prompts, strict=True))


def test_in_one_host(together: Listener, prompts: list[Prompt], alone: list[Output]) -> None:
    together.forget()
    check(together, together.answer(prompts), prompts, alone)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_shared_memory(
    apart: Listener, switches: OverlapSwitches, prompts: list[Prompt], alone: list[Output]
) -> None:
    last = LAYINGS[apart.device.type] - 1
    for laying in range(last + 1):
        apart.lay(switches)
        if laying < last or not apart.asked:  # the last time all sounds are known from the start
            apart.forget()
        with slow_steps(apart) if laying % 2 == 0 else nullcontext():
            check(apart, apart.answer(prompts), prompts, alone)


def slow_steps(host: Listener) -> AbstractContextManager[None]:
    """Behind each step its stream stands still for a while, so that whatever is queued there comes
    late, and who does not wait for it reads what was in that memory before."""
    if host.device.type != "cuda":
        return nullcontext()

    def slowed(runner: Any) -> Any:
        launch = runner.launch

        def slow(*args: Any) -> Any:
            step = launch(*args)
            with runner.on_stream():
                torch.cuda._sleep(10_000_000)  # cycles: some 5 ms
            return step

        return slow

    return patched(host, slowed)


@contextmanager
def patched(host: Listener, slowed: Callable[[Any], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for runner in host.runners():
            patch.setattr(runner, "launch", slowed(runner))
        yield


def test_links_are_laid_and_taken_up_under_load(
    apart: Listener, prompts: list[Prompt], alone: list[Output]
) -> None:
    """Copies are on their way when a link goes; its memory may go only when they are done, and what
    was on the link is gone without a trace."""
    host, ways = apart, list(SWITCHES.values())
    for way in (*ways, ON):  # what is made once, at the first use of a way, is no leak
        host.lay(way)
    host.answer(prompts[:1])  # links map memory as they are used: count when all have been
    before = resources()
    for number in range(20):
        host.lay(ways[number % len(ways)])
        ids = host.admit(prompts[:4])
        for _ in range(1 + 7 * number % 20):
            if not all(host.answers[id].done for id in ids):
                host.step()
        if number % 2:
            forget(host, ids)
            host.lay(ON)
        else:
            host.lay(ON)
            forget(host, ids)
        if number % 3:
            continue
        one = number % len(prompts)
        (answer,) = host.answer([prompts[one]])
        assert answer.error is None
        assert answer.output == alone[one]
    host.answer(prompts[:1])
    after = resources()
    assert all(now <= then for now, then in zip(after, before, strict=True)), f"{before} -> {after}"
    if host.device.type == "cuda":
        torch.cuda.synchronize()  # says so if any of them went wrong


def forget(host: Listener, ids: list[RequestId]) -> None:
    for id in ids:
        host.handle(Cancel(id))
        host.answers.pop(id, None)


def resources() -> tuple[int, int, int]:
    """Threads, mappings of slots, and descriptors of links. (A driver has its own.)"""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    files = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            files += os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "/memfd:stretto"))
    return threading.active_count(), maps.count("memfd:stretto"), files
