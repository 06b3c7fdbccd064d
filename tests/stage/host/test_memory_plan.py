"""The memory plan: its sizes are those of the stages that are then built, and what does not fit is
refused readably."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.engine import EngineConfig, HostSettings, check_model
from stretto.config.placement import HostPlace
from stretto.errors import Invalid, StageDead
from stretto.messages.hosts import Configure, Loading
from stretto.models.qwen3_omni.build import BUILD
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Source
from stretto.stage.host import context as context_module
from stretto.stage.host.context import StageContext
from stretto.stage.host.host import Host
from stretto.stage.host.memory_plan import (
    GIB,
    DoesNotFit,
    StagePlan,
    check,
    free_memory,
    group_free,
    needed,
    size,
)
from stretto.stage.runner.graphs import SIZES, sizes_for
from stretto.stage.vocoder import CodecConfig, VocoderCore
from tests.pipeline import STAGES, configure
from tests.stage.reports import Reports

PLANS = [
    StagePlan("thinker", 60 * GIB, 10 * GIB, 0, "--kv-blocks thinker=N"),
    StagePlan("talker", 6 * GIB, 4 * GIB, 2 * GIB),
]


def test_planned_is_what_is_built(tiny_dir: Path, tiny_config: OmniConfig) -> None:
    s = HostSettings(max_rows=5, blocks={"thinker": 7, "talker": 9})
    plans = {p.stage: p for p in BUILD.plan(tiny_config, STAGES, s, s.blocks, torch.float32)}
    source = Source.open(tiny_dir, progress=False)
    thinker, talker, code2wav = source.thinker(), source.talker(), source.code2wav()
    for model, p in ((thinker, plans["thinker"]), (code2wav, plans["code2wav"])):
        built = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert 0 <= built - p.weights < 1 << 14  # but for constants of a few KiB
    assert (
        plans["talker"].weights
        >= sum(t.nbytes for t in talker.parameters()) + talker.text_table.nbytes
    )
    assert plans["thinker"].state == thinker.cache(8, s.block_size).data.nbytes
    assert plans["talker"].state == talker.cache(10, s.block_size).data.nbytes
    state = VocoderCore(code2wav, CodecConfig(slots=5)).state
    assert plans["code2wav"].state == state.window.nbytes + state.tails.nbytes


def test_float8_experts_are_planned_as_they_are_built(
    tiny_dir: Path, tiny_config: OmniConfig
) -> None:
    s = HostSettings(expert_weights="float8")
    source = Source.open(tiny_dir, progress=False, expert_weights="float8")
    [p] = BUILD.plan(source.config, ("thinker",), s, BUILD.cpu_blocks, torch.float32)
    model = source.thinker()
    assert 0 <= sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - p.weights < 1 << 14
    [full] = BUILD.plan(tiny_config, ("thinker",), HostSettings(), BUILD.cpu_blocks, torch.float32)
    experts = sum(e.numel() for n, e in model.named_parameters() if ".experts." in n)
    scales = sum(b.nbytes for n, b in model.named_buffers() if n.endswith("_scale"))
    assert full.weights - p.weights == 3 * experts - scales > 0
    # Where it is not chosen, and would help, it is named.
    assert [(q.alternative, q.state) for q in (p, full)] == [
        ("", p.state), ("load experts as float8 (--expert-weights float8)", p.state)
    ]  # fmt: skip
    assert full.saved_bytes() == full.weights - p.weights
    for free, how in ((1 << 20, "does not fit alone"), (full.total - 1, "fits")):
        with pytest.raises(
            DoesNotFit,
            match=rf"MiB\), load experts as float8 \(--expert-weights float8\): .*which {how}",
        ):
            check([full], free, 0, "cuda:0")


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        (HostSettings(), "loading"),
        (HostSettings(expert_weights="float8"), "loading, experts as float8"),
    ],
)
def test_a_host_says_how_it_loads(settings: HostSettings, how: str, tiny_dir: Path) -> None:
    told = Reports()
    host = Host(configure(str(tiny_dir), ("thinker",), {}), settings, told)
    host.load()
    assert told.messages == [Loading("thinker", f"{how}, with room for 8192 tokens")]
    source = Source.open(tiny_dir, progress=False, expert_weights=settings.expert_weights)
    [p] = BUILD.plan(source.config, ("thinker",), settings, BUILD.cpu_blocks, torch.float32)
    assert host.context.memory == {"thinker": p.total}


def test_a_talker_without_a_thinker_borrows_its_words(tiny_config: OmniConfig) -> None:
    together = BUILD.plan(
        tiny_config, ("thinker", "talker"), HostSettings(), BUILD.cpu_blocks, torch.float32
    )[1]
    alone = BUILD.plan(tiny_config, ("talker",), HostSettings(), BUILD.cpu_blocks, torch.float32)[0]
    text = tiny_config.thinker.text
    assert (
        alone.transient_bytes - together.transient_bytes == text.vocab_size * text.hidden_size * 4
    )
    assert alone.total == together.total


@given(
    st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=4), st.integers(0, 100)
)
def test_it_fits_exactly_if_the_highest_water_does(
    parts: list[tuple[int, int, int]], reserve: int
) -> None:
    plans = [
        StagePlan(f"s{i}", w, state, transient_bytes)
        for i, (w, state, transient_bytes) in enumerate(parts)
    ]
    level, highest = 0, 0
    for (
        w,
        state,
        transient_bytes,
    ) in parts:  # load: weights and state come, what passes comes and goes
        level += w + state
        highest = max(highest, level + transient_bytes)
    assert needed(plans) == highest
    check(plans, highest + reserve, reserve, "here")
    with pytest.raises(DoesNotFit):
        check(plans, highest + reserve - 1, reserve, "here")


def test_a_refusal_names_every_number_and_what_to_lower() -> None:
    with pytest.raises(StageDead) as e:
        check(PLANS, 79 * GIB, 2 * GIB, "cuda:0", 80 * GIB)
    assert str(e.value) == (
        "thinker 70.0 GiB (weights 60.0 GiB, state 10.0 GiB), talker 12.0 GiB (weights 6.0 GiB, "
        "state 4.0 GiB, while "
        "loading 2.0 GiB) and 2.0 GiB of reserve are 84.0 GiB, but cuda:0 has 79.0 GiB free; lower "
        "--kv-blocks "
        'thinker=N (now 10.0 GiB), or use 2 such cards: --placement "thinker@0, talker@1" (with '
        "--backend "
        "ray without @)"
    )
    assert [size(n) for n in (1024, 5 << 20, 3 * GIB)] == ["1 KiB", "5.0 MiB", "3.0 GiB"]


def test_a_refusal_names_the_split_that_fits() -> None:
    def advice(free: int, *sizes: int, card: int | None = 40, others: bool = False) -> str:
        plans = [StagePlan(f"s{i}", n, 0) for i, n in enumerate(sizes)]
        with pytest.raises(DoesNotFit) as e:
            check(plans, free, 5, "there", card, others)
        return (
            str(e.value)
            .partition(" free")[2]
            .removeprefix("; ")
            .removesuffix(" (with --backend ray without @)")
        )

    assert advice(40, 3, 30, 6) == 'or use 2 such cards: --placement "s1@0, s0+s2@1"'
    assert advice(40, 30, 20, 25) == 'or use 3 such cards: --placement "s0@0, s2@1, s1@2"'
    assert advice(40, 36, 1, 1) == "and no --placement on several such cards fits"
    # A card that others use: what it has is more than what is free.
    assert advice(20, 3, 30, 6) == 'or use 2 such cards: --placement "s1@0, s0+s2@1"'
    assert advice(20, 3, 20, 6) == "or use a card that nothing else uses: such a one has 0 KiB"
    # A flag must name all stages, and this host does not know where the others are.
    assert advice(40, 30, 6, others=True) == "or part s0 and s1 in --placement, each on such a card"
    assert advice(40, 36, others=True) == "and no --placement on several such cards fits"
    assert advice(40, 30, 20, card=None) == "", "a machine without cards has no more of them"


@pytest.mark.parametrize(
    ("others", "words"), [(True, "or part a and b in --placement"), (False, "use 2 such cards")]
)
def test_a_host_knows_its_card_and_whether_it_is_all(
    others: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "free_memory", lambda device, share: 10 * GIB)
    monkeypatch.setattr(context_module, "card_memory", lambda device, share: 40 * GIB)
    told = Configure(
        "", "", ("a", "b"), {}, (("a", "b"), *([("b", "d")] if others else [])), (("c",),)
    )
    it = StageContext(
        "",
        HostSettings(),
        torch.device("cuda"),
        lambda: None,
        Reports(),
        configure=told,
    )
    assert it.loading_later == (("c",),)
    with pytest.raises(DoesNotFit, match=words):
        it.fit([StagePlan("a", 30 * GIB, 0), StagePlan("b", 20 * GIB, 0)])


def test_hosts_on_one_card_leave_room_for_each_other(tiny_config: OmniConfig) -> None:
    """The first of two hosts takes so many blocks that the second finds room for as many."""
    s = HostSettings(max_rows=4, max_context=640)
    both = [*STAGES[:1], *STAGES[1:], *STAGES]
    bare = needed(BUILD.plan(tiny_config, both, s, {"thinker": 0, "talker": 0}, torch.float32))
    got = BUILD.share_room(tiny_config, both, s, torch.float32, bare + 9_000_000)
    assert got["thinker"] == got["talker"] > 40
    assert needed(BUILD.plan(tiny_config, both, s, got, torch.float32)) <= bare + 9_000_000
    alone = BUILD.share_room(tiny_config, STAGES, s, torch.float32, bare + 9_000_000)
    assert alone["thinker"] > got["thinker"]


def test_pools_share_what_is_left(tiny_config: OmniConfig) -> None:
    """As much as fits and no more, the same number of tokens for each; stated sizes stay."""

    s = HostSettings(max_rows=4, max_context=640)  # 40 blocks hold a request

    def taken(blocks: dict[str, int]) -> int:
        return needed(BUILD.plan(tiny_config, STAGES, s, blocks, torch.float32))

    bare = taken({"thinker": 0, "talker": 0})
    for room in (bare, bare + 3_000_000, bare + 5_000_000):
        got = BUILD.share_room(tiny_config, STAGES, s, torch.float32, room)
        assert got["thinker"] == got["talker"]
        assert 40 <= got["thinker"] <= 160
        assert taken({name: n + 1 for name, n in got.items()}) > room, (
            "one more would not have fitted"
        )
        assert taken(got) <= room or got["thinker"] == 40
    plenty = BUILD.share_room(tiny_config, STAGES, s, torch.float32, 1 << 40)
    assert plenty == {"thinker": 160, "talker": 160}, "more could never be used"
    stated = HostSettings(max_rows=4, max_context=640, blocks={"thinker": 9})
    got = BUILD.share_room(tiny_config, STAGES, stated, torch.float32, bare + 3_000_000)
    assert got["thinker"] == 9
    assert got["talker"] > 40


def test_free_memory_of_a_container() -> None:
    assert free_memory(torch.device("cpu")) > 0
    assert group_free(100, "90\n", "anon 50\nactive_file 10\ninactive_file 20\nother 5\n") == 40


# ---- rows of a step


@pytest.mark.parametrize(
    "devices",
    [{"devices": ("cpu", "cuda:1"), "replicas": 2}, {"host": "cuda"}, {"place": "cuda:0"}],
)
def test_more_rows_than_the_largest_captured_step_are_refused(devices: dict[str, Any]) -> None:
    """Such a step would be launched kernel by kernel, and all of its streams would fall behind."""

    def config(rows: int, graphs: bool = True) -> EngineConfig:
        host = HostSettings(max_rows=rows, graphs=graphs, device=devices.get("host", "cpu"))
        named = {k: v for k, v in devices.items() if k in ("devices", "replicas")}
        placement = (
            (HostPlace(("a",), devices["place"]), HostPlace(("b",)))
            if "place" in devices
            else "one"
        )
        return EngineConfig(placement=placement, host=host, **named)

    check_model(config(SIZES[-1]), ("a", "b"), 1 << 20)
    check_model(config(SIZES[-1] + 1, graphs=False), ("a", "b"), 1 << 20)
    with pytest.raises(
        Invalid, match=r"max_rows is 129, but .* at most 128 rows.*: --max-rows 128 fits"
    ):
        check_model(config(SIZES[-1] + 1), ("a", "b"), 1 << 20)


def test_on_a_cpu_steps_have_any_number_of_rows() -> None:
    check_model(EngineConfig(host=HostSettings(max_rows=512)), ("a",), 1 << 20)


@pytest.mark.parametrize("rows", [1, 3, 32, 100, 127, 128])
def test_every_batch_fits_into_a_captured_step(rows: int) -> None:
    sizes = sizes_for(rows)
    assert sizes[-1] == rows
    assert set(sizes) <= {*SIZES, rows}
