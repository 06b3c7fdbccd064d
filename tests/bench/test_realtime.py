"""What the benchmark of conversations makes of its samples; and that its turns are no two alike."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bench.realtime import PARTS, main
from bench.realtime.numbers import Gate, by_length, delta, fitting, listened
from bench.realtime.sounds import Clips
from bench.realtime.turns import PHASES, answer, phases, played, real_time_factor
from stretto.engine.events import Finished, TimelineSpan, Usage
from stretto.loadtest.player import Packet


def test_the_parts_of_a_latency_add_up() -> None:
    spans = (
        TimelineSpan("thinker", "prompt", 0.002, 0.006), TimelineSpan("thinker", "prompt", 0.006,
        0.010),
        TimelineSpan("talker", "prompt", 0.004, 0.017), TimelineSpan("code2wav", "first frame",
        0.017, 0.020),
    )  # fmt: skip
    end = Finished("stop", "stop", Usage(9, 2, 1, 1365), 0, spans)
    split = phases(end, 0.003, [Packet(0.025, 0.08)])
    assert split == pytest.approx([0.003, 0.002, 0.008, 0.007, 0.003, 0.002])
    assert len(split or ()) == len(PHASES)
    assert sum(split or ()) == pytest.approx(0.025)
    assert phases(end, 0.003, []) is None


def test_samples_by_length() -> None:
    good = {"error": None, "phases": [0.001] * len(PHASES), "new_tokens": 70, "encoded": 1}
    samples = [{"seconds": 5.0, "first_audio": at / 1000, **good} for at in (30, 10, 20)]
    samples += [{"seconds": 200.0, "error": "Busy: full"}]
    found = by_length(samples)
    assert found["5"]["first_audio_s"] == {
        "count": 3,
        "p50": 0.02,
        "p90": 0.03,
        "p99": 0.03,
        "max": 0.03,
    }
    assert found["5"]["phases_s"] == dict.fromkeys(PHASES, 0.001)
    assert found["200"] == {"errors": ["Busy: full"]}


def test_rtf_runs_from_the_commit_to_the_last_packet() -> None:
    assert real_time_factor([Packet(0.1, 0.5), Packet(0.3, 1.0)]) == pytest.approx(0.2)
    assert real_time_factor([]) is None
    samples = [{"seconds": 5.0, "first_audio": 0.1, "error": None, "rtf": r} for r in (0.2, 0.3)]
    assert by_length(samples)["5"]["rtf"]["p50"] == 0.3


def test_a_listener_who_had_to_wait() -> None:
    found = {"error": None, "packets": [[0.1, 0.08], [0.3, 0.08]]}
    heard = played(found)
    assert heard is not None
    told = listened(
        [{**found, "underruns": heard.underruns, "wait": heard.wait}, {"error": "no audio"}]
    )
    assert (told["answers"], told["failed"], told["stuttered"], told["underruns"]) == (2, 1, 1, 1)
    assert told["waited_s"] == pytest.approx(0.12)


def test_long_turns_are_left_out_where_many_speak() -> None:
    assert fitting([200.0, 5.0, 20.0], 8, 3000.0) == [5.0, 20.0, 200.0]
    assert fitting([200.0, 5.0, 20.0], 128, 3000.0) == [5.0, 20.0]
    assert fitting([200.0], 128, 3000.0) == [200.0]


def test_only_what_has_changed_is_told() -> None:
    name = 'stretto_stage_rows_total{stage="a"}'
    assert delta({name: 3.0, "other": 1.0}, {name: 5.0, "other": 2.0}) == {name: 2.0}


def test_all_go_at_once() -> None:
    async def run() -> list[int]:
        gate, went = Gate(3), []

        async def one(i: int) -> None:
            await gate.wait()
            went.append(i)

        tasks = [asyncio.create_task(one(i)) for i in range(3)]
        await gate.all_there()
        assert not went
        gate.open()
        await asyncio.gather(*tasks)
        return went

    assert asyncio.run(run()) == [0, 1, 2]


def test_no_two_turns_are_alike() -> None:
    clips = Clips(3)
    one, two = clips.clip(1.0), clips.clip(1.0)
    assert len(one) == len(two) == 16_000
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(Clips(3).clip(1.0), one)
    assert answer(12, 5).min_frames == answer(12, 5).max_frames == 12


def test_a_part_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "first,smell"])
    assert "no such part: smell" in capsys.readouterr().err
    assert len(PARTS) == 5
