"""A prompt between processes: what a host is sent of it, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from stretto.errors import WireError
from stretto.preprocess.packed_prompt import (
    PackedPrompt,
    PromptFeatures,
    lay_out,
    pack,
    pack_ids,
)
from stretto.preprocess.prompt import AudioClip, Prompt

IDS = (1, 2, 151_935)


def with_clip() -> Prompt:
    mel = np.arange(12, dtype=np.float32).reshape(2, 6)
    return Prompt(IDS, audios=(AudioClip.of(mel, window=4),))


def test_ids_and_features_are_what_was_packed() -> None:
    prompt = with_clip()
    packed = pack(prompt, tts_ids=(7, 8))
    assert packed.ids == IDS
    assert packed.num_tokens == 3
    assert packed.tts_ids == (7, 8)
    again = packed.unpack(packed.feature_bytes())
    assert again.ids == prompt.ids
    np.testing.assert_array_equal(again.audios[0].mel, prompt.audios[0].mel)


@pytest.mark.parametrize("with_features", [True, False])
def test_a_host_is_sent_ids_and_digests_and_places_only_if_it_encodes(with_features: bool) -> None:
    packed = pack(with_clip(), tts_ids=(7, 8))
    sent = packed.for_host(with_features=with_features)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=PackedPrompt)
    assert received == sent
    assert received.token_ids == packed.token_ids
    assert received.tts_ids is None
    assert [p.digest for p in received.pieces()] == [p.digest for p in packed.pieces()]
    assert [p.offset is not None for p in received.pieces()] == [with_features] * 2


def test_features_cannot_be_sent_inside_a_message() -> None:
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(pack(with_clip()))


def test_known_features_stay_behind_and_can_be_asked_for() -> None:
    prompt = with_clip()
    first, second = prompt.pieces()
    packed = pack(prompt, known={first.digest}, on_demand={first.digest: first})
    assert [p.offset for p in packed.pieces()] == [None, 0]
    assert packed.features is not None
    assert packed.features.on_demand[first.digest] is first
    assert len(packed.feature_bytes()) == second.array.nbytes


def test_places_outside_the_features_and_broken_ids_are_refused() -> None:
    packed, arrays = lay_out(with_clip())
    short = PromptFeatures(bytes(sum(a.nbytes for a in arrays) - 4))
    with pytest.raises(WireError, match="not within"):
        msgspec.structs.replace(packed, features=short).check()
    for broken in (PackedPrompt(b"123"), PackedPrompt(pack_ids(IDS), tts_token_ids=b"1")):
        with pytest.raises(WireError, match="token ids"):
            broken.check()
    with pytest.raises(WireError, match="token ids"):
        PackedPrompt(b"12345").unpack(b"")
