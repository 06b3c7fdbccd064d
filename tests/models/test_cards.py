"""What is said of cards is what a host's own plan would say there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.config.devices import rows_for
from stretto.config.engine import HostSettings
from stretto.errors import Invalid
from stretto.family import PipelineSpec, StageSpec
from stretto.models.building import FamilyBuild
from stretto.models.cards import CARDS, CONTEXT, Card, CardRoom, card_rooms, describe_cards
from stretto.models.qwen3_omni.build import BUILD
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.registry import open_model, write_tiny
from stretto.stage.host.memory_plan import GIB, RESERVE, DoesNotFit, check
from stretto.testing.qwen3_omni import FORMATS, released_config, released_formats
from tests.models.quantised.packers import CASES, write


@pytest.mark.parametrize("name", FORMATS)
def test_a_host_on_such_a_card_would_say_the_same(name: str) -> None:
    """`check` refuses exactly what does not fit, and a token more does not."""
    config = parse(released_config()).with_formats(released_formats(name))
    order = ("code2wav", "thinker", "talker")
    for room in card_rooms(BUILD, config, PIPELINE.names, torch.bfloat16):
        total = int(room.card.memory * GIB)
        s = HostSettings(device="cuda", max_rows=room.rows)
        assert room.rows == rows_for(total - room.weights)
        tokens = room.tokens or s.max_context  # the least there can be
        blocks = dict.fromkeys(("thinker", "talker"), tokens // s.block_size)
        plans = BUILD.plan(config, order, s, blocks, torch.bfloat16)
        assert room.weights == sum(p.weights for p in plans)
        if room.tokens:
            check(plans, total - CONTEXT, RESERVE["cuda"], "cuda")
            continue
        with pytest.raises(DoesNotFit):
            check(plans, total - CONTEXT, RESERVE["cuda"], "cuda")
        check(plans, total - CONTEXT + room.short, RESERVE["cuda"], "cuda")
        with pytest.raises(DoesNotFit):
            check(plans, total - CONTEXT + room.short - 1, RESERVE["cuda"], "cuda")


def test_in_words() -> None:
    card = Card(24, 23.5, "some card")
    assert str(CardRoom(card, 1, 16, 0, 3 * GIB)) == "no: 3.0 GiB short"
    assert str(CardRoom(card, 1, 16, 8192, 0)) == "8,192 tokens, 8 listeners"
    assert str(CardRoom(card, 1, 16, 123_456, 0)) == "123,000 tokens, 16 listeners"


def test_a_quantised_checkpoint_is_planned_as_a_gpu_keeps_it(
    tiny_dir: Path, tmp_path: Path
) -> None:
    packed = write(tiny_dir, tmp_path, CASES["A"])

    def weights(directory: Path) -> int:
        assert BUILD.config is not None
        config = BUILD.config(directory)
        return next(card_rooms(BUILD, config, PIPELINE.names, torch.bfloat16)).weights

    assert weights(packed.directory) < weights(packed.wide)
    lines = describe_cards(packed.directory, open_model(packed.directory).pipeline)
    assert list(lines) == [f"{card.gigabytes} GB" for card in CARDS]


def test_random_weights_need_no_files(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tiny_dir / "config.json")
    assert "tokens" in describe_cards(tmp_path, PIPELINE)["16 GB"]


def test_another_family(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tts", family="qwen3-tts")
    pipeline = open_model(tmp_path / "tts").pipeline
    assert "listeners" in describe_cards(tmp_path / "tts", pipeline)["16 GB"]


SILENT = FamilyBuild(open=BUILD.open, stages=BUILD.stages)


def test_a_family_that_does_not_say(tmp_path: Path) -> None:
    pipeline = PipelineSpec(f"{__name__}:SILENT", (StageSpec("thinker"),), (), {})
    with pytest.raises(Invalid, match="does not say what it takes of a card"):
        describe_cards(tmp_path, pipeline)
