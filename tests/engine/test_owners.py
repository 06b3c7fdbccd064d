"""Whose prompts a request finds in the caches of the stages: those of its own root, with its own
voice."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.config.engine import HostSettings
from stretto.engine.request import RequestState
from stretto.engine.request_manager import announce
from stretto.messages.requests import Admit, encode
from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.models.qwen3_omni.params import RESIDUAL, stage_params
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params, RequestOptions
from stretto.preprocess.packed_prompt import pack
from stretto.preprocess.prompt import Prompt
from stretto.types import GREEDY, RequestId
from tests.engine.common import HandDriven, picture, say
from tests.pipeline import STAGES, announcement
from tests.solo import CODE0

WORDS = (
    "These are enough words to fill some blocks of the cache, of sixteen tokens each, and a few "
    "more than that."
)
CHATS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": WORDS}],
    "image": [{"role": "user", "content": [say("Look at this:"), picture(), say(WORDS)]}],
}
GREEDILY = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]
NUMBERS = count()


@pytest.fixture(scope="module")
def builder(tiny_dir: Path) -> PromptBuilder:
    return PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))


@pytest.fixture
def driven(tiny_dir: Path) -> Iterator[HandDriven]:
    made = HandDriven(tiny_dir, HostSettings())
    yield made
    made.host.close()


def first_rows(
    driven: HandDriven, prompt: Prompt, root: bytes, voice: str | None = None
) -> dict[str, int]:
    """Where each stage begins to compute a request's rows."""
    driven.launched.clear()
    driven.reports.clear()
    packed = pack(prompt)
    id = RequestId(f"r{next(NUMBERS)}")
    driven.answer(
        announcement(id, packed, True, voice, *GREEDILY, 2, 2, cache_root=root),
        packed.feature_bytes(),
    )
    return {
        stage: min(start for s, start, _ in driven.launched if s == stage) for stage in STAGES[:2]
    }


@pytest.mark.parametrize("kind", CHATS)
def test_each_stage_finds_rows_of_the_same_root_alone(
    driven: HandDriven, builder: PromptBuilder, kind: str
) -> None:
    prompt = builder.build(CHATS[kind])
    cold, whole = {"thinker": 0, "talker": 0}, (len(prompt.ids) - 1) // 16 * 16
    assert first_rows(driven, prompt, b"a") == cold
    assert first_rows(driven, prompt, b"b") == cold
    assert first_rows(driven, prompt, b"") == cold
    again = first_rows(driven, prompt, b"a")
    assert again["thinker"] == whole > 0
    assert again["talker"] > 0
    assert first_rows(driven, prompt, b"b") == again


def test_voices_are_kept_apart_in_the_talker(
    driven: HandDriven, builder: PromptBuilder, tiny_dir: Path
) -> None:
    """What the user said is the same for all of them; what begins the answer is not."""
    config = OmniConfig.read(tiny_dir)
    prompts = [builder.build([{"role": "user", "content": "Hello! " * n}]) for n in range(1, 30)]
    # The block that ends with the voice begins with what the user said.
    prompt = next(p for p in prompts if len(talker_prompt(p, config).ids) % 16 == 9)
    one, other, *_ = config.talker.speakers
    users = len(talker_prompt(prompt, config).ids)
    assert first_rows(driven, prompt, b"a", one) == {"thinker": 0, "talker": 0}
    found = first_rows(driven, prompt, b"a", other)
    assert found["thinker"] > 0
    assert 0 < found["talker"] == users // 16 * 16 <= users


class Line:
    """A pipeline of one host that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def stages_by_host(self, stages: tuple[str, ...]) -> dict[Any, list[str]]:
        return {self: list(stages)}

    def send(self, message: object, blob: bytes = b"") -> None:
        self.sent.append(message)


def announced(
    owner: str, shared: bool = False, tts_ids: tuple[int, ...] | None = None, client: str = ""
) -> Admit:
    line = Line()
    options = RequestOptions(
        "speech" if tts_ids is None else "tts",
        Params(seed=7),
        tts_ids=tts_ids,
        owner=owner,
        client=client,
    )
    stages = PIPELINE.paths[options.capability]
    nothing: Any = None
    model: Any = SimpleNamespace(
        pipeline=PIPELINE, stage_params=stage_params, info=SimpleNamespace(live_text=False)
    )
    prompt = pack(Prompt((1, 2)))
    request = RequestState(
        RequestId("r"),
        line,
        model,
        stages,
        prompt,
        options,
        nothing,
        0.0,
        1.0,  # type: ignore[arg-type]
    )
    asyncio.run(announce(request, shared))
    [message] = line.sent
    assert isinstance(message, Admit)
    return message


@pytest.mark.parametrize("tts_ids", [None, (3, 4)], ids=["answered", "read aloud"])
def test_owners_have_roots_of_their_own_which_do_not_name_them(
    tts_ids: tuple[int, ...] | None,
) -> None:
    owners = ["key1", "key2", "key11", "a key that should not have come here", "\udc80"]
    roots = [announced(owner, tts_ids=tts_ids).cache_root for owner in owners]
    assert len({*roots, b""}) == len(owners) + 1
    assert all(
        announced(owner, tts_ids=tts_ids).cache_root == root
        for owner, root in zip(owners, roots, strict=True)
    )
    assert not any(o.encode() in encode(announced(o, tts_ids=tts_ids)) for o in owners[:-1])
    assert announced("", tts_ids=tts_ids).cache_root == b"", "nobody in particular"
    assert {announced(owner, shared=True, tts_ids=tts_ids).cache_root for owner in owners} == {b""}


def test_hosts_learn_whose_turn_it_is_but_not_who_that_is() -> None:
    """By digests that say nothing of owners either: the same name may be both."""
    clients = ["key1", "127.0.0.1", "\udc80"]
    digests = [announced("key1", client=s).client for s in clients]
    assert len({*digests, b"", announced("key1").cache_root}) == len(clients) + 2
    assert digests == [announced("", client=s).client for s in clients]
    assert not any(s.encode() in encode(announced("", client=s)) for s in clients[:-1])
    assert announced("key1").client == b"", "nobody in particular"
