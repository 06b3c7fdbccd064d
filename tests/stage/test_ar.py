"""Stages against the plain driver: whatever is batched, chunked, overlapped, preempted, cached or
cancelled, a request's tokens are those it gets alone."""

from dataclasses import replace

import numpy as np
import pytest

from stretto.errors import StageDead
from stretto.models.qwen3_omni.load import Models
from stretto.preprocess.prompt import AudioClip, Prompt
from stretto.stage.request import Reason
from stretto.types import RequestId, SamplingParams
from tests.prompts import KINDS, make
from tests.solo import Frame, Options, Solo, TextToken
from tests.stage.desk import CONFIG, Desk
from tests.stage.invariants import check_scheduler
from tests.stage.pools import clear_cache
from tests.stage.stepping import idle, in_flight

SIZE = 8


@pytest.fixture(autouse=True, params=[False, True], ids=["at once", "just in time"])
def hold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched as soon as there is room, or held back."""
    monkeypatch.setattr(Desk, "hold", request.param)


def options(i: int) -> Options:
    base = Options().seeded(i) if i % 2 else Options().greedy()
    text = SamplingParams(
        temperature=0.9 * (i % 2), top_k=40, seed=i, repetition_penalty=[1.0, 1.15][i % 3 == 1]
    )
    return replace(base, text=text, max_text_tokens=4 + 2 * i, max_frames=5 + 3 * (i % 4))


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[Prompt]:
    return [make(KINDS[i % len(KINDS)], models.config, seed=i) for i in range(SIZE)]


@pytest.fixture(scope="module")
def alone(models: Models, prompts: list[Prompt]) -> list[tuple[list[int], list[list[int]]]]:
    """Text and frames of each request by itself."""
    found = []
    for i, prompt in enumerate(prompts):
        events = list(Solo(models).run(prompt, options(i)))
        text = [e.id for e in events if isinstance(e, TextToken)]
        found.append((text, [e.codes.tolist() for e in events if isinstance(e, Frame)]))
    return found


def media_rows(models: Models, prompt: Prompt) -> dict[int, np.ndarray]:
    desk = Desk(models, "thinker")
    desk.think("m", prompt, replace(options(0), max_text_tokens=1))
    desk.run()
    return desk.media["m"]


@pytest.fixture(scope="module")
def accept(models: Models, prompts: list[Prompt]) -> list[dict[int, np.ndarray]]:
    return [media_rows(models, p) for p in prompts]


THINKER_CONFIGS = {
    "depth 1": replace(CONFIG, overlap_depth=1),
    "depth 2": CONFIG,
    "depth 3": replace(CONFIG, overlap_depth=3),
    "small chunks": replace(CONFIG, prefill_chunk=5, max_step_tokens=11, least_share=3),
    "whole prompts": replace(CONFIG, prefill_chunk=4096),
    "few rows": replace(CONFIG, max_rows=3),
    "no cache": replace(CONFIG, prefix_cache=False),
}


@pytest.mark.parametrize("name", THINKER_CONFIGS)
def test_thinker_stage_equals_alone(name: str, models: Models, prompts, alone, accept) -> None:
    desk = Desk(models, "thinker", THINKER_CONFIGS[name])
    for i, prompt in enumerate(prompts):
        desk.think(str(i), prompt, options(i))
        for _ in range(i % 3):  # ragged arrivals
            desk.poll()
    desk.run()
    for i in range(SIZE):
        assert desk.tokens[str(i)] == alone[i][0], i
        assert sorted(desk.media[str(i)]) == sorted(accept[i])
        for place, row in desk.media[str(i)].items():
            np.testing.assert_allclose(row, accept[i][place], atol=3e-5)
    assert idle(desk.stage)


def test_on_a_cpu_what_a_turn_computed_leaves_in_it(models: Models, prompts) -> None:
    """Else it would wait for the steps of all other stages in this process."""
    desk = Desk(models, "thinker")
    if desk.hold or desk.stage.runner.stream is not None:
        pytest.skip("a device computes beside the host")
    desk.think("0", prompts[0], options(0))
    for count in range(1, 4):
        while len(desk.tokens["0"]) < count:
            assert desk.poll()
            assert in_flight(desk.stage) == 0
    desk.run()


def talk(desk: Desk, prompts, alone, accept, late: int = 0) -> None:
    """Feed each request its own text, one token a turn; some are late, and starve meanwhile."""
    feeds = {}
    for i, prompt in enumerate(prompts):
        rows = [accept[i][p] for p in sorted(accept[i])]
        desk.speak(str(i), prompt, options(i), np.array(rows, dtype=np.float32) if rows else None)
        feeds[i] = [*alone[i][0][:-1], None]
    rng = np.random.default_rng(late)
    while feeds:
        for i in list(feeds):
            if str(i) in desk.ended or not feeds[i]:
                del feeds[i]
            elif late == 0 or rng.random() < 0.4:
                desk.feed(str(i), feeds[i].pop(0))
        desk.poll()
        check_scheduler(desk.stage.scheduler)
    desk.run()


TALKER_CONFIGS = {
    "depth 1": replace(CONFIG, overlap_depth=1, prefix_cache=False),
    "depth 2": CONFIG,
    "small chunks": replace(CONFIG, prefill_chunk=5, max_step_tokens=11, least_share=3),
}


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("name", TALKER_CONFIGS)
def test_talker_stage_equals_alone(
    name: str, late: int, models: Models, prompts, alone, accept
) -> None:
    desk = Desk(models, "talker", TALKER_CONFIGS[name])
    talk(desk, prompts, alone, accept, late)
    eos = models.config.talker.codec.eos
    for i in range(SIZE):
        frames = desk.rows[str(i)]
        if not alone[i][1] and not frames:
            continue
        # The last pick is the codec's end or the one beyond the limit; neither is a frame.
        assert frames[:-1] == alone[i][1], i
        assert (frames[-1][0] == eos) == (desk.ended[str(i)] is Reason.STOP)
    assert idle(desk.stage)


SCARCE = replace(CONFIG, num_blocks=24, prefix_cache=False)


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_thinker_requests_equal_undisturbed_ones(depth: int, models: Models) -> None:
    """Answers outgrow the pool, so requests lose their blocks and compute again; nothing is lost or
    repeated."""
    long = [replace(options(i), max_text_tokens=40) for i in range(6)]
    runs = []
    for config in (CONFIG, replace(SCARCE, overlap_depth=depth)):
        desk = Desk(models, "thinker", config)
        for i in range(6):
            desk.think(str(i), make("text", models.config, seed=i), long[i], stop_ids=frozenset())
        desk.run()
        runs.append(desk)
    assert runs[1].tokens == runs[0].tokens
    assert all(len(t) == 40 for t in runs[1].tokens.values())
    assert runs[1].stage.stats.rows > runs[0].stage.stats.rows + 50
    assert idle(runs[1].stage)


@pytest.mark.parametrize(
    "hold", [False], indirect=True, ids=["at once"]
)  # slow, and the thinker's do the same
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_talker_requests_equal_undisturbed_ones(depth: int, models: Models) -> None:
    runs = []
    for config in (CONFIG, replace(SCARCE, overlap_depth=depth)):
        desk = Desk(models, "talker", config)
        for i in range(5):
            # Without the end token in reach, every request speaks to its limit.
            desk.speak(
                str(i),
                make("text", models.config, seed=i),
                replace(options(i), max_frames=34),
                stop_ids=frozenset(),
            )
            for token in range(100, 120):
                desk.feed(str(i), token + i)
            desk.feed(str(i), None)
        desk.run()
        runs.append(desk)
    assert runs[1].rows == runs[0].rows
    assert all(len(r) == 35 for r in runs[1].rows.values())
    assert runs[1].stage.stats.rows > runs[0].stage.stats.rows + 50
    assert idle(runs[1].stage)


def test_cancelling_at_any_moment_leaves_the_others_alone(models: Models, prompts, alone) -> None:
    for when in range(1, 14, 3):
        desk = Desk(models, "thinker")
        for i, prompt in enumerate(prompts):
            desk.think(str(i), prompt, options(i))
        for turn in range(40):
            if turn == when:
                for i in (1, 4, 6):
                    desk.stage.cancel(RequestId(str(i)))
                gone = {i: len(desk.tokens[str(i)]) for i in (1, 4, 6)}
            desk.poll()
            check_scheduler(desk.stage.scheduler)
        desk.run()
        for i in range(SIZE):
            if i in gone:
                assert desk.tokens[str(i)] == alone[i][0][: gone[i]]
            else:
                assert desk.tokens[str(i)] == alone[i][0]
        assert idle(desk.stage)


def test_prefix_cached_equals_cold(models: Models, prompts, alone, accept) -> None:
    """A second request with the same prompt computes little and gives the same tokens and media
    rows."""
    desk = Desk(models, "thinker")
    for i, prompt in enumerate(prompts):
        desk.think(f"cold{i}", prompt, options(i))
    desk.run()
    before = desk.stage.stats.rows
    for i, prompt in enumerate(prompts):
        desk.think(f"warm{i}", prompt, options(i))
    desk.run()
    warm = desk.stage.stats.rows - before
    assert warm < 0.6 * before
    for i in range(SIZE):
        assert desk.tokens[f"warm{i}"] == desk.tokens[f"cold{i}"] == alone[i][0]
        assert sorted(desk.media[f"warm{i}"]) == sorted(accept[i])
        for place, row in desk.media[f"warm{i}"].items():
            np.testing.assert_allclose(row, accept[i][place], atol=3e-5)


def test_media_rows_stay_as_long_as_their_blocks_can_be_found(models: Models, prompts) -> None:
    """A stage keeps nothing that the cache has forgotten."""
    few = replace(CONFIG, num_blocks=40)
    desk = Desk(models, "thinker", few)
    for i in range(6):  # more than the pool holds
        desk.think(str(i), make("audio", models.config, seed=i), options(0))
        desk.run()
        assert 0 < len(desk.stage.scheduler.pool.payloads) <= few.num_blocks
    clear_cache(desk.stage.scheduler.pool)
    assert not desk.stage.scheduler.pool.payloads


def test_other_media_do_not_hit_the_cache(models: Models) -> None:
    one, other = make("audio", models.config, seed=1), make("audio", models.config, seed=1)
    other = replace(other, audios=tuple(AudioClip.of(a.mel + 0.3) for a in other.audios))
    desk = Desk(models, "thinker")
    desk.think("one", one, options(0))
    desk.run()
    before = desk.stage.stats.rows
    desk.think("other", other, options(0))
    desk.run()
    assert desk.stage.stats.rows - before > 0.8 * len(one.ids)
    [want] = [
        [
            e.id
            for e in Solo(models).run(other, replace(options(0), speak=False))
            if isinstance(e, TextToken)
        ]
    ]
    assert desk.tokens["other"] == want


def test_a_bias_is_its_own_requests_alone_and_ends_with_it(models: Models, prompts, alone) -> None:
    """Beside others in one batch; and the next request on its row has none."""
    desk = Desk(models, "thinker", replace(CONFIG, max_rows=2))
    banned, wanted = alone[0][0][1], 7
    desk.think("banned", prompts[0], replace(options(0), max_text_tokens=6), [(banned, -100.0)])
    desk.think("free", prompts[1], options(1))
    desk.run()
    assert banned not in desk.tokens["banned"]
    assert desk.tokens["banned"][0] == alone[0][0][0]
    assert desk.tokens["free"] == alone[1][0]
    greedy = replace(options(2).greedy(), max_text_tokens=3)
    desk.think("wanted", prompts[2], greedy, [(wanted, 100.0), (banned, -100.0)])
    desk.run()
    assert desk.tokens["wanted"] == [wanted] * 3
    for i in range(3):
        desk.think(f"after {i}", prompts[i], options(i))
        desk.run()
        assert desk.tokens[f"after {i}"] == alone[i][0]


def test_a_step_that_raises_fails_its_requests_and_the_stage_goes_on(
    models: Models, prompts, alone
) -> None:
    desk = Desk(models, "thinker")
    calls = []

    def breaking(run):
        def broken(*args):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("injected")
            return run(*args)

        return broken

    desk.adapter.forward = breaking(desk.adapter.forward)
    desk.adapter.fused_step = breaking(desk.adapter.fused_step)
    desk.think("0", prompts[0], options(0))
    desk.think("1", prompts[1], options(1))
    desk.run()
    assert isinstance(desk.errors["0"], StageDead)
    assert isinstance(desk.errors["1"], StageDead)
    assert "injected" in str(desk.errors["0"])
    desk.think("2", prompts[2], options(2))
    desk.run()
    assert desk.tokens["2"] == alone[2][0]
    assert idle(desk.stage)


def test_numbers_that_went_bad_fail_one_request(models: Models, prompts, alone) -> None:
    desk = Desk(models, "thinker")
    desk.think("bad", prompts[0], replace(options(0), max_text_tokens=8), [(5, float("nan"))])
    desk.think("good", prompts[1], options(1))
    desk.run()
    assert isinstance(desk.errors["bad"], StageDead)
    assert not desk.tokens.get("bad")
    assert desk.tokens["good"] == alone[1][0]
    assert idle(desk.stage)
