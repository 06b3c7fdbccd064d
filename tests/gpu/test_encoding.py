"""Sounds of several requests, encoded together: the same answers as alone, and what is wrong with
one is its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.models.qwen3_omni.audio_encoder import ReplayWindows
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.preprocess.prompt import Prompt
from tests.gpu.onehost import SETTINGS, Listener, about, kernels


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def host(request: pytest.FixtureRequest, directory: Path) -> Iterator[Listener]:
    with kernels("force"):
        opened = Listener(directory, replace(SETTINGS, device=str(request.param)))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[Prompt]:
    config = OmniConfig.read(directory)
    return [about(config, sound, words=0) for sound in range(3)]


class Launches:
    """How many windows each launch had. One with the window `bad` in it fails."""

    def __init__(self, tower: Any, bad: torch.Tensor | None = None) -> None:
        self.real, self.bad, self.sizes = tower.encode_windows, bad, list[int]()

    def __call__(
        self, mels: Sequence[torch.Tensor], padded: bool = True, replay: ReplayWindows | None = None
    ) -> list[torch.Tensor]:
        self.sizes.append(len(mels))
        if self.bad is not None and any(torch.equal(m, self.bad) for m in mels):
            raise ValueError("not a sound")
        found: list[torch.Tensor] = self.real(mels, padded, replay)
        return found


def test_sounds_of_several_requests_in_one_launch(
    host: Listener, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []
    for prompt in prompts:
        host.forget()
        alone += [a.output for a in host.answer([prompt])]
    host.forget()
    tower = host.stages["thinker"].model.audio_tower
    monkeypatch.setattr(tower, "encode_windows", launches := Launches(tower))
    assert [a.output for a in host.answer(prompts)] == alone
    assert launches.sizes == [3]


def test_one_that_cannot_be_encoded_fails_alone(
    host: Listener, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.forget()
    wanted = [a.output for a in host.answer(prompts)]
    host.forget()
    model = host.stages["thinker"].model
    (piece,) = prompts[1].audios[0].pieces
    bad = torch.as_tensor(piece.values).to(model.device, model.dtype)
    monkeypatch.setattr(
        model.audio_tower, "encode_windows", launches := Launches(model.audio_tower, bad)
    )
    first, second, third = host.answer(prompts)
    assert second.error is not None
    assert "cannot be encoded" in second.error
    assert [first.output, third.output] == [wanted[0], wanted[2]]
    assert launches.sizes == [3, 1, 1, 1]


def test_only_a_cpu_rests_between_two_parts(
    host: Listener, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For fifteen times as long as a part took, while others are being answered."""
    host.forget()
    encoders = host.stages["thinker"].encoders
    (first,) = host.admit(prompts[:1])
    while encoders.num_due:
        host.step()
    now = [10**18]  # ns: each look at the clock takes 1 µs
    monkeypatch.setattr(encoders, "clock", lambda: now.append(now[-1] + 1000) or now[-1])
    encoded = encoders.encoded
    (second,) = host.admit(prompts[1:2])
    while encoders.encoded == encoded:
        host.step()
    monkeypatch.undo()
    rest = encoders._rests_ns - now[-1]
    encoders._rests_ns = 0
    while not (host.answers[first].done and host.answers[second].done):
        host.step()
    host.settle()
    assert (rest > 0) == (host.device.type == "cpu")
