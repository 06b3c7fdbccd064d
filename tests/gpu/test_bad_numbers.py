"""A request whose numbers go bad fails alone: those beside it, those after it in the same memory,
and the same question asked again get what they get by themselves. Through the plain path on a CPU,
through the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.qwen3_omni.pieces import MediaPiece
from stretto.models.qwen3_omni.stages.encoders import Encoders, Encoding, Rows
from stretto.preprocess.prompt import Prompt
from stretto.stage.stage import Transfer
from stretto.types import RequestId
from tests.gpu.onehost import SETTINGS, Answer, Listener, about, kernels

BAD = 1
"""Which of the prompts."""
ROOMY = replace(SETTINGS, max_rows=4, blocks={"thinker": 30, "talker": 30})
"""All at once; and later ones must take the memory of earlier ones."""


class Case:
    def __init__(self, directory: Path, device: str, chunk: int, apart: bool) -> None:
        settings = replace(ROOMY, device=device, prefill_chunk=chunk, lone_prefill_chunk=chunk)
        self.host = Listener(directory, settings, apart)
        config = OmniConfig.read(directory)
        self.prompts = [about(config, sound, sound) for sound in range(4)]
        self.alone = [self.ask([prompt])[0].output for prompt in self.prompts]

    def ask(self, prompts: list[Prompt]) -> list[Answer]:
        return self.host.answer(prompts)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["one host", "hosts"])
def apart(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=[24, 512], ids=["prompts in parts", "whole prompts"])
def case(
    request: pytest.FixtureRequest, directory: Path, device: str, apart: bool
) -> Iterator[Case]:
    """In parts, a prompt's first blocks can be found by others before anyone knows that its numbers
    are bad."""
    with kernels("force"):
        case = Case(directory, device, request.param, apart)
        yield case
        case.host.close()


@pytest.mark.parametrize("rows", [slice(None), slice(3, 4)], ids=["all rows", "one row"])
def test_a_request_whose_numbers_go_bad_fails_alone(
    case: Case, rows: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, prompts = case.host, case.prompts
    host.forget()
    add_encoded = Encoders._add_encoded
    poisoned = 0

    def poison(
        self: Encoders, e: Encoding, pieces: Sequence[MediaPiece], encoded: Sequence[Rows]
    ) -> None:
        nonlocal poisoned
        if pieces[0].digest == prompts[BAD].audios[0].pieces[0].digest:
            encoded[0][0][rows] = float("nan")
            poisoned += 1
        add_encoded(self, e, pieces, encoded)

    with monkeypatch.context() as m:
        m.setattr(Encoders, "_add_encoded", poison)
        for _ in range(2):  # the second time in memory that held bad numbers
            answers = case.ask(prompts)
            for i, answer in enumerate(answers):
                if i == BAD:
                    assert answer.error is not None
                    assert "the model's output is not a number" in answer.error
                    assert not answer.text
                else:
                    assert answer.error is None
                    assert answer.output == case.alone[i]
    assert poisoned == 2
    # Nothing bad was kept to be found by its likes.
    (again,) = case.ask([prompts[BAD]])
    assert again.error is None
    assert again.output == case.alone[BAD]


@pytest.mark.parametrize("what", ["beyond the words", "before the words", "too narrow"])
def test_rows_that_are_not_of_this_model_fail_their_request_alone(
    case: Case, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a link brings: ids are looked up on the device, where one that is not there ends the
    whole process."""
    host, prompts = case.host, case.prompts
    bad, length = RequestId(f"q{host.asked + 1 + BAD}"), len(prompts[BAD].ids)
    words = host.stages["talker"].model.text_table.shape[0]

    def spoiled(rows: ThinkerRows) -> ThinkerRows:
        if what == "too narrow":
            return replace(rows, hidden=rows.hidden[:, 1:]) if rows.media else rows
        if rows.span.stop <= length:
            return rows
        ids = rows.ids.clone()
        ids[-1] = words if what == "beyond the words" else -1
        return replace(rows, ids=ids)

    talker = host.stages["talker"]
    accept = talker.accept

    def spoil(transfer: Transfer) -> None:
        if transfer.request == bad and transfer.payload is not None:
            transfer = replace(transfer, payload=spoiled(transfer.payload))
        accept(transfer)

    monkeypatch.setattr(talker, "accept", spoil)
    for i, answer in enumerate(case.ask(prompts)):
        if i == BAD:
            assert answer.error is not None
            assert ("vocabulary" in answer.error) != ("media rows" in answer.error)
        else:
            assert answer.error is None
            assert answer.output == case.alone[i]
