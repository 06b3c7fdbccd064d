"""A voice that is being made keeps nobody waiting: not while its parts run, and not while it is
copied to the host."""

from __future__ import annotations

import msgspec
import pytest

from stretto.messages.requests import Admit
from stretto.models.qwen3_tts import enroller
from stretto.models.qwen3_tts.enroller import Copied, EnrollerStage
from stretto.models.qwen3_tts.params import ClonedVoice, EnrollerParams
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.prompt import AudioClip, Prompt
from stretto.types import RequestId
from tests.models.qwen3_tts.cases import NOISE_SAMPLES, cases, clip
from tests.models.qwen3_tts.conftest import Checkpoint
from tests.models.qwen3_tts.hosted import Hosted

STAGES = ("talker", "enroller", "code2wav")


class Clip:
    """A copy's event that fires when it is told to."""

    def __init__(self) -> None:
        self.fired = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.fired


@pytest.fixture
def clips(monkeypatch: pytest.MonkeyPatch) -> list[Clip]:
    """As on a GPU: what was made is not there yet."""
    events: list[Clip] = []

    def copied(made: tuple, waiter: object) -> Copied:  # type: ignore[type-arg]
        events.append(Clip())
        return Copied(made, events[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(enroller.Copied, "of", copied)
    return events


def enrol(host: Hosted, id: str, text: tuple[int, ...] = (1, 2)) -> EnrollerStage:
    node = host.host.stages["enroller"]
    assert isinstance(node, EnrollerStage)
    prompt = Prompt(text, (AudioClip.of(clip(NOISE_SAMPLES)[None]),))
    node.admit(Admit(RequestId(id), PackedPrompt.of_ids(text), {}), EnrollerParams(), prompt)
    return node


def test_a_voice_as_it_was_made(tts: Checkpoint) -> None:
    host = Hosted(tts("base"), STAGES)
    for id, text in (("a", (1, 2)), ("b", ())):
        enrol(host, id, text)
        host.run()
        voice = msgspec.msgpack.decode(host.answers[id].made, type=ClonedVoice)
        assert voice.text == text
        assert bool(voice.codes) == bool(text)
    assert host.answers["a"].ended == {"enroller": "stop"}


def test_frames_are_made_between_the_parts_of_a_clip(tts: Checkpoint) -> None:
    [case, *_] = [c for c in cases("base", "1b7") if "vector" in c]
    host = Hosted(tts("base"), STAGES)
    node = enrol(host, "clip")
    host.admit("speech", {**case, "max_new": 8})
    seen: list[int] = []
    while "clip" not in host.answers or not host.answers["clip"].made:
        host.turn()
        seen.append(len(host.answers["speech"].codes) if "speech" in host.answers else 0)
    assert seen[-1] > 0, "frames came while the clip was on its way"
    assert len(seen) > 10, "in parts"
    host.run()
    assert not len(node)
    assert host.answers["speech"].ended["talker"]


def test_others_go_on_while_a_voice_is_copied(tts: Checkpoint, clips: list[Clip]) -> None:
    [case, *_] = [c for c in cases("base", "1b7") if "vector" in c]
    host = Hosted(tts("base"), STAGES)
    wanted = host.speak(case, "before")
    node = enrol(host, "clip")
    host.run()  # ends, since a node that waits for a copy has nothing to do
    [event] = clips
    assert not host.host.poll_stage(node)
    assert len(node) == 1
    asked = event.asked
    spoken = host.speak(case, "meanwhile")
    assert spoken.codes == wanted.codes
    assert event.asked > asked, "it is looked for in each round"
    enrol(host, "next")  # and another clip is begun behind it
    host.run()
    assert len(clips) == 2
    assert "clip" not in host.answers or not host.answers["clip"].made
    clips[1].fired = True
    assert host.host.poll_stage(node)
    assert host.answers["next"].made
    event.fired = True
    assert host.host.poll_stage(node)
    assert host.answers["clip"].made == host.answers["next"].made
    assert not len(node)


def test_a_voice_nobody_wants_any_more(tts: Checkpoint, clips: list[Clip]) -> None:
    host = Hosted(tts("base"), STAGES)
    node = enrol(host, "clip")
    host.run()
    host.cancel("clip")
    clips[0].fired = True
    host.run()
    assert not len(node)
    assert "clip" not in host.answers or not host.answers["clip"].made
