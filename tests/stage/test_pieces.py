"""Pieces of media: which rows they are, what is encoded when, what is kept, and what is asked
for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.config.engine import HostSettings
from stretto.errors import Invalid
from stretto.messages.requests import Cancel, Ended, Failed, MediaData, MediaRequest, Working
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.pieces import media_pieces, missing_runs
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.models.qwen3_omni.stages.encoders import EncoderCache
from stretto.models.qwen3_omni.stages.prefix import thinker_salts
from stretto.preprocess.packed_prompt import PackedPiece, PackedPrompt, pack
from stretto.preprocess.prompt import AudioClip, Piece, Prompt
from stretto.types import GREEDY, RequestId
from tests.engine.common import HandDriven, picture, say, sound
from tests.pipeline import STAGES, announcement
from tests.solo import CODE0

GREEDILY = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]


@pytest.fixture(scope="module")
def config(tiny_dir: Path) -> OmniConfig:
    return OmniConfig.read(tiny_dir)


@pytest.fixture(scope="module")
def builder(tiny_dir: Path, config: OmniConfig) -> PromptBuilder:
    return PromptBuilder.open(tiny_dir, config)


def chat(*content: dict) -> list[dict]:
    return [{"role": "user", "content": list(content)}]


def test_pieces_are_the_media_rows(builder: PromptBuilder, config: OmniConfig) -> None:
    film = {
        "type": "video", "data": np.zeros((6, 64, 64, 3), np.uint8), "fps": 2.0,
        "sound": np.zeros(48000, np.float32)
    }  # fmt: skip
    prompt = builder.build(chat(sound(17.0), say("and"), picture(), film), use_audio_in_video=True)
    pieces = media_pieces(prompt, config)
    places = [p for piece in pieces for p in piece.places.tolist()]
    assert sorted(places) == np.flatnonzero(np.isin(prompt.ids, config.tokens.media_pads)).tolist()
    assert [len(p.places) for p in pieces[:3]] == [104, 104, 13]
    assert [p.padded for p in pieces[:3]] == [True] * 3
    # A film and its sound take turns: many runs, of two pieces.
    assert len(pieces) == 6
    assert min(len(p.runs) for p in pieces[4:]) > 1
    runs = missing_runs(pieces)
    assert [p for run in runs for p in range(run.start, run.stop)] == sorted(places)
    assert [s.span for s in thinker_salts(pieces)] == runs


def test_a_prompt_that_grows_keeps_its_pieces(builder: PromptBuilder, config: OmniConfig) -> None:
    # The loudest moment is at the start, so that the floor stays where it is.
    wave = np.random.default_rng(0).uniform(-0.5, 0.5, 16_000 * 30).astype(np.float32)
    wave[0] = 1.0

    def salts(seconds: int, *more: dict) -> list:
        part = {"type": "audio", "data": wave[: 16_000 * seconds]}
        return thinker_salts(media_pieces(builder.build(chat(part, *more)), config))

    short, long = salts(17), salts(30)
    assert short[:2] == long[:2]
    assert short[2] != long[2]
    assert (
        salts(17, picture(seed=1))[:3] == salts(17, picture(seed=1), picture(seed=2))[:3] == short
    )
    assert salts(17, picture(seed=1))[3] != salts(17, picture(seed=2))[3]


def test_features_that_do_not_fit_the_prompt_are_refused(
    builder: PromptBuilder, config: OmniConfig
) -> None:
    prompt = builder.build(chat(sound(2.0)))
    for audios in ((), prompt.audios * 2, (AudioClip((Piece((3,), b"", None),)),)):
        with pytest.raises(Invalid):
            media_pieces(Prompt(prompt.ids, audios), config)


def test_the_cache_is_bounded_and_drops_the_oldest() -> None:
    kept, flat = EncoderCache(max_bytes=100), torch.empty(0)
    keys = [(b"", bytes([i]), True) for i in range(4)]
    for key in keys[:2]:
        kept.put(key, (torch.zeros(10), flat))  # 40 bytes
    assert kept.get(keys[0]) is not None
    kept.put(keys[2], (torch.zeros(10), flat))
    assert [key in kept for key in keys] == [True, False, True, False]
    kept.put(keys[2], (torch.zeros(10), flat))
    assert kept.num_bytes == 80
    kept.put(keys[3], (torch.zeros(50), flat))
    assert kept.num_bytes == 0
    assert kept.get(keys[3]) is None


class Desk:
    """A host by hand, asked about prompts whose features are along or not."""

    def __init__(self, tiny_dir: Path) -> None:
        self.driven, self.num_asked = HandDriven(tiny_dir, HostSettings()), 0
        self.node = self.driven.host.stages["thinker"]

    def announce(self, packed: PackedPrompt, root: bytes = b"") -> RequestId:
        self.num_asked += 1
        id = RequestId(f"r{self.num_asked}")
        self.driven.reports.clear()
        self.driven.host.handle(
            announcement(id, packed, True, None, *GREEDILY, 2, 2, cache_root=root),
            packed.feature_bytes(),
        )
        return id

    def settle(self) -> None:
        while self.driven.host.loop.round():
            pass

    def sent(self, kind: type) -> list:
        return [m for m, _ in self.driven.reports if isinstance(m, kind)]

    def encoded(self, packed: PackedPrompt, root: bytes = b"") -> int:
        """Pieces that were encoded for an answer."""
        self.announce(packed, root)
        self.settle()
        [how] = [m for m in self.sent(Ended) if m.stage == "thinker"]
        return how.encoded


@pytest.fixture(scope="module")
def desk(tiny_dir: Path) -> Desk:
    return Desk(tiny_dir)


def test_pieces_are_encoded_once_by_one_owner(desk: Desk, builder: PromptBuilder) -> None:
    media = [sound(17.0, seed=3), picture(seed=3)]
    packed = pack(builder.build(chat(*media)))
    assert desk.encoded(packed, b"a") == 4
    assert desk.encoded(packed, b"a") == 0, "its rows are in the prefix cache"
    assert desk.encoded(pack(builder.build(chat(say("Behind other words:"), *media))), b"a") == 0, (
        "they were kept"
    )
    assert desk.encoded(packed, b"b") == 4, "not for others"
    assert not desk.node.encoders.requests


def test_a_request_for_features_leaves_though_no_step_is_launched(
    desk: Desk, builder: PromptBuilder
) -> None:
    """Else it would wait in the stage until something else wakes the loop."""
    prompt = builder.build(chat(picture(seed=8)))
    id = desk.announce(pack(prompt, known={p.digest for p in prompt.pieces()}))
    desk.node.throttle(id, True)
    assert desk.node.poll() == []
    assert desk.node.launch()
    assert [type(output.message) for output in desk.node.poll()] == [MediaRequest]
    assert not desk.node.launch()
    desk.driven.host.handle(Cancel(id), b"")


def test_features_that_are_not_along_are_asked_for_when_they_are_needed(
    desk: Desk, builder: PromptBuilder
) -> None:
    prompt = builder.build(chat(sound(20.0, seed=4), picture(seed=4)))
    digests = [p.digest for p in prompt.pieces()]
    bare = pack(prompt, known=set(digests[1:]))  # the first window is along
    id = desk.announce(bare)
    desk.settle()
    assert desk.sent(MediaRequest) == [MediaRequest(id, "thinker", tuple(digests[1:]))], (
        "all at once"
    )
    assert len(desk.sent(Working)) == 1, "what is along is encoded meanwhile"
    assert not desk.sent(Ended)
    features = b"".join(p.array.tobytes() for p in list(prompt.pieces())[1:])
    metas, at = [], 0
    for p in list(prompt.pieces())[1:]:
        metas.append(PackedPiece(p.shape, p.digest, at))
        at += p.array.nbytes
    desk.driven.host.handle(MediaData(id, "thinker", tuple(metas)), features)
    desk.settle()
    assert {m.stage for m in desk.sent(Ended)} == set(STAGES)
    desk.announce(bare)  # found: nothing is asked for
    desk.settle()
    assert {m.stage for m in desk.sent(Ended)} == set(STAGES)
    assert not desk.sent(MediaRequest)


def test_a_supply_that_fits_nothing_fails_its_request_alone(
    desk: Desk, builder: PromptBuilder
) -> None:
    prompt = builder.build(chat(sound(2.0, seed=5)))
    [piece] = prompt.pieces()
    id = desk.announce(pack(prompt, known={piece.digest}))
    desk.settle()
    desk.driven.host.handle(MediaData(RequestId("nobody"), "thinker", ()), b"")
    desk.driven.host.handle(MediaData(RequestId("another"), "talker", ()), b"")
    assert [(m.request, m.kind) for m in desk.sent(Failed)] == [("another", "WireError")], (
        "it asks for none"
    )
    desk.driven.reports.clear()
    desk.driven.host.handle(
        MediaData(id, "thinker", (PackedPiece(piece.shape, piece.digest, 0),)), b"too short"
    )
    desk.settle()
    assert [(m.request, m.kind) for m in desk.sent(Failed)] == [(id, "WireError")]
    id = desk.announce(pack(prompt, known={piece.digest}))
    desk.settle()
    # Of another shape than was announced.
    desk.driven.host.handle(
        MediaData(id, "thinker", (PackedPiece((3, 4), piece.digest, 0),)), bytes(48)
    )
    desk.settle()
    assert [(m.request, m.kind) for m in desk.sent(Failed)] == [(id, "Bug")]
    assert desk.encoded(pack(prompt)) == 1


def test_digests_and_shapes_travel_without_the_features(builder: PromptBuilder) -> None:
    prompt = builder.build(chat(sound(9.0, seed=6), picture(seed=6)))
    packed = pack(prompt)
    bare = packed.for_host(with_features=False).unpack(b"")
    told = [(p.shape, p.digest) for p in prompt.pieces()]
    assert [(p.shape, p.digest) for p in bare.pieces()] == told
    assert all(p.values is None for p in bare.pieces())
    whole = packed.unpack(packed.feature_bytes())
    assert [(p.array.shape, p.digest) for p in whole.pieces()] == told
    assert np.array_equal(whole.audios[0].mel, prompt.audios[0].mel)
