"""Qwen3-TTS in a host: text in pieces, cloned voices that the vocoder has heard before, and what
does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.errors import CheckpointError
from stretto.models.qwen3_tts.load import Source
from tests.models.qwen3_tts.cases import cases
from tests.models.qwen3_tts.conftest import Checkpoint
from tests.models.qwen3_tts.hosted import Hosted
from tests.stage.stepping import idle


@pytest.mark.parametrize("kind", ["custom_voice", "base"])
def test_text_in_pieces_equals_text_at_once(tts: Checkpoint, kind: str) -> None:
    """Whenever the pieces come: before the prompt is read, in its middle, or one by one while it
    speaks."""
    spoken_cases = [{**c, "max_new": 6} for c in cases(kind, "1b7") if not c["whole"]][-2:]
    host = Hosted(tts(kind), prefill_chunk=3, lone_prefill_chunk=4)
    for n, case in enumerate(spoken_cases):
        expected = host.speak(case, f"{n}")
        for cuts in ((1, 1, 1, 1, 1, 1, 1, 1, 1), (0, 4, 5), (9, 0)):
            id, at = f"{n}-{cuts}", 0
            host.admit(id, case, live=True)
            for i, size in enumerate(cuts):
                host.run()
                host.add_text(id, case["text"][at : at + size], last=i + 1 == len(cuts))
                at += size
            host.run()
            got = host.answers.pop(id)
            assert got.codes == expected.codes
            np.testing.assert_allclose(got.wave, expected.wave, rtol=0, atol=1e-5)


def test_a_cloned_voice_comes_first_in_the_vocoder(tts: Checkpoint) -> None:
    """Samples are those of a decode of the reference and the speech, cut behind the reference: for
    the first request with a voice and for those after it, whose vocoder begins where the reference
    ended."""
    vocoder = Source.open(tts("base"), progress=False).vocoder()
    host = Hosted(tts("base"))
    for n, case in enumerate(c for c in cases("base", "1b7") if "ref_codes" in c):
        for again in range(2):
            got = host.speak(case, f"{n}-{again}")
            whole = vocoder.decode(torch.tensor(case["ref_codes"] + got.codes)).numpy()
            np.testing.assert_allclose(
                got.wave, whole[1920 * len(case["ref_codes"]) :], rtol=0, atol=1e-5
            )
    stage = host.host.stages["code2wav"].core
    assert len(stage.primers) == 2
    assert idle(stage)


def test_more_voices_than_cached_states(tts: Checkpoint) -> None:
    [case] = [c for c in cases("base", "1b7") if "ref_codes" in c and not c["whole"]][:1]
    host = Hosted(tts("base"))
    stage = host.host.stages["code2wav"].core
    stage.primers.max_states = 1
    first = host.speak(case, "a")
    other = {**case, "ref_codes": case["ref_codes"][::-1]}
    host.speak(other, "b")
    assert len(stage.primers) == 1
    host.admit("c", other)  # its state is there when it is announced, and gone when it has a slot
    stage.primers.states.clear()
    host.run()
    again = host.speak(case, "d")
    np.testing.assert_allclose(again.wave, first.wave, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        host.answers["c"].wave, host.speak(other, "e").wave, rtol=0, atol=1e-5
    )


def test_nothing_to_say_and_voices_of_other_models_fail_alone(tts: Checkpoint) -> None:
    [case, *_] = cases("custom_voice", "1b7")
    host = Hosted(tts("custom_voice"))
    bad = [
        {**case, "text": []},
        {**case, "speaker": "nobody"},
        {**case, "language": "beijing_dialect"},
        {**case, "vector": [0.5] * 7},
        {**case, "vector": [0.5] * 48, "ref_codes": [[4096] * 16], "ref_text": [1]},
        {**case, "text": [1 << 30]},
    ]
    for i, wrong in enumerate(bad):
        host.admit(str(i), wrong)
    fine = host.speak(case, "fine")
    assert fine.codes
    assert all(host.answers[str(i)].error is not None for i in range(len(bad)))
    host.admit("live", case, live=True)
    host.run()
    host.add_text("live", [], last=True)
    host.run()
    assert host.answers["live"].error is not None
    host.add_text("live", [5])  # was on its way
    host.cancel("live")  # as the engine does then
    for node in host.host.stages.values():
        assert not len(node)


@pytest.mark.parametrize("room", [{"max_context": 64}, {"blocks": {"talker": 4}}])
def test_speech_is_as_long_as_there_is_room_for(tts: Checkpoint, room: dict[str, Any]) -> None:
    """However long it may be: behind eight rows of opening, the text's nine and its end (whole),
    and the last row; or behind a reference."""
    for kind, expected in (("custom_voice", (54, 44)), ("base", (23, 7))):
        host = Hosted(tts(kind), **room)
        spoken_cases = cases(kind, "1b7")
        for case, frames in zip(
            spoken_cases[:2] if kind == "custom_voice" else spoken_cases[-2:], expected, strict=True
        ):
            got = host.speak({**case, "max_new": 4000}, min_frames=4000)
            assert (got.error, got.ended["talker"], len(got.codes)) == (None, "length", frames)


def test_a_text_that_leaves_no_room_is_refused(tts: Checkpoint) -> None:
    host = Hosted(tts("custom_voice"), max_context=64)
    host.admit("long", {**cases("custom_voice", "1b7")[1], "text": [300] * 60})
    error = host.answers["long"].error
    assert error is not None
    assert (error.kind, "no room to speak" in error.message) == ("TooLong", True)


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_random_weights_need_configurations_alone(
    tts: Checkpoint, tmp_path: Path, size: str
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(tts("base", size), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(CheckpointError, match="has neither"):
        Hosted(folder)
    host = Hosted(folder, ("talker", "enroller", "code2wav"), load_format="dummy")
    case = cases("base", size)[2]
    got = host.speak({**case, "max_new": 4}, min_frames=3)
    assert len(got.wave) == 3 * 1920
    assert np.isfinite(got.wave).all()


def test_a_missing_codec_is_named(tts: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(tts("base"), folder)
    (folder / "speech_tokenizer" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="speech_tokenizer"):
        Hosted(folder)
