"""The ablation on one loaded host: each row does what it says, gives the same answer and leaves
nothing behind."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.ablation.rows import ROWS, Row, measure_row
from bench.harness.host import Asker, OneHost, Question
from bench.harness.workload import WORKLOADS, Workload
from stretto.config.engine import HostSettings
from stretto.messages.requests import FromHost, Pcm
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.types import RequestId

NUMBERS = itertools.count()


class Listening(OneHost):
    """Keeps the samples too."""

    sound: dict[RequestId, list[bytes]]

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        super().post(message, blob)
        if isinstance(message, Pcm):
            self.sound.setdefault(message.request, []).append(bytes(blob))


@pytest.fixture(scope="module")
def host(tiny_dir: Path) -> Iterator[Listening]:
    settings = HostSettings(max_rows=2, blocks={"thinker": 64, "talker": 64})
    Listening.sound = {}
    host = Listening(tiny_dir, settings)
    yield host
    host.close()


@pytest.fixture(scope="module")
def asker(tiny_dir: Path) -> Asker:
    return Asker(PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)))


SHORT: Workload = replace(WORKLOADS["small"], text_tokens=12, frames=9)


def state(host: OneHost) -> list[object]:
    """What rows change."""
    stages = [stage.core for stage in host.host.stages.values()]
    runners = host.runners()
    kept: list[object] = [host.host.context.settings, host.codec().config, host.codec().graphs]
    kept += [(s.scheduler.config, s.timer.on) for s in stages if s is not host.codec()]
    kept.append(host.host.loop.driven)
    kept += [(r.graphs, r.adapter.fused, r.adapter.prompts) for r in runners]
    return kept


def heard(host: Listening, questions: list[Question]) -> list[np.ndarray]:
    """The sound of each answer. No id is ever used twice, so the same questions go by other
    names."""
    host.sound.clear()
    named = [
        (msgspec.structs.replace(a, request=RequestId(f"n{next(NUMBERS)}")), blob)
        for a, blob in questions
    ]
    host.ask(named)
    return [np.frombuffer(b"".join(host.sound[a.request]), np.float32) for a, _ in named]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_a_row_changes_no_answer_and_is_undone(host: Listening, asker: Asker, row: Row) -> None:
    questions = asker.round(SHORT, 2)
    plain = heard(host, questions)
    before = state(host)
    with row.change(host):
        again = heard(host, questions)
        samples = list(host.heard.values())
    assert state(host) == before
    assert {len(sound) for sound in plain} == {host.codec().model.num_samples(9)}
    for a, b in zip(again, plain, strict=True):  # frames may go to the vocoder in other groups
        np.testing.assert_allclose(a, b, atol=1e-5)
    for s in samples:
        assert s.first_audio is not None
        assert s.end is not None
        assert s.first_audio < s.end
        if row.name == "stage by stage":
            assert s.first_audio > max(w for other in samples for w in other.words)


def test_streaming_sounds_before_the_text_is_over(host: Listening, asker: Asker) -> None:
    for s in host.ask(asker.round(SHORT, 1)):
        assert s.first_audio is not None
        assert s.first_audio < s.words[-1]


def test_what_was_held_back_is_told_and_on_a_cpu_it_is_nothing(host: Listening) -> None:
    told = host.host.recorder.values()
    for name in ("thinker", "talker"):
        stage = host.host.stages[name].core
        assert not stage.timer.on
        for what in ("held", "late"):
            assert told.pop(f'stretto_stage_{what}_total{{stage="{name}"}}') == 0
            setattr(stage.stats, what, 7)
            assert host.host.recorder.values()[f'stretto_stage_{what}_total{{stage="{name}"}}'] == 7
            setattr(stage.stats, what, 0)
    assert not [n for n in told if "_held_" in n or "_late_" in n]


def test_requests_that_come_one_by_one_are_timed_from_when_they_came(
    host: Listening, asker: Asker
) -> None:
    """Each finds others at work, none is admitted much before its time, and all are answered."""
    samples = host.ask(asker.round(SHORT, 4), apart_s=0.01)
    for i, s in enumerate(samples):
        assert 0.01 * i - 0.001 <= s.sent <= 0.01 * i
        assert s.first_audio is not None
        assert s.end is not None
        assert 0 < s.first_audio < s.end
    assert samples[1].sent < (samples[0].end or 0.0)


def test_media_travel_with_their_question(asker: Asker) -> None:
    (admit, blob) = asker.round(WORKLOADS["small-audio"], 1)[0]
    assert admit.prompt.audios
    assert blob


def test_a_round_at_least_is_measured(host: Listening, asker: Asker) -> None:
    assert len(measure_row(host, asker, SHORT, ROWS[0], 2, rounds=5, seconds=0.0)) == 2
    assert {r.base for r in ROWS} == {r.name for r in ROWS if r.name == r.base}
