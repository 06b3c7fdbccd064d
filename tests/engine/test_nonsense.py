"""A host that talks nonsense is a dead host, and leaves nothing behind in the engine.
`tests/slow/fuzz/control.py` looks for more of it."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.host_handle import StagesLost
from stretto.engine.pipeline import Pipeline
from stretto.errors import WireError
from stretto.messages.hosts import Linked, Loading, Ready
from stretto.messages.requests import (
    PREFIX,
    Ended,
    FromHost,
    Text,
    decode_from_host,
    decode_to_host,
    encode,
)
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.types import RequestId
from tests.engine.common import run
from tests.engine.scripted import ScriptedLauncher, read_reports, rest
from tests.pipeline import PROCESSES, STAGES, configure

R = RequestId("r")


def header(message: Any) -> bytes:
    return encode(message)[PREFIX.size :]


DEEP = header(configure("", (), {"": None}))[:-1] + b"\x81\xa0" * 5000 + b"\xc0"


@pytest.mark.parametrize(
    "bad", [b"", b"\xc1", header(Loading("xx", "y")).replace(b"xx", b"\xff\xfe"), DEEP]
)
def test_what_is_no_message_is_one_error(bad: bytes) -> None:
    for decode in (decode_to_host, decode_from_host):
        with pytest.raises(WireError):
            decode(bad)


@pytest.mark.parametrize("id", [-1, 2**31, 2**40])
def test_a_token_that_no_tokenizer_has_is_no_message(id: int) -> None:
    with pytest.raises(WireError):
        decode_from_host(header(Text(R, (1, id))))


@pytest.mark.parametrize(
    "message",
    [
        Loading("kitchen", "cooking"),
        Ended(R, "kitchen", "stop", 0.0),
        Ready(("thinker", "kitchen"), 1.0),
        Ready(("thinker",), 1.0, {"kitchen": 1}),
        Linked("thinker>kitchen", 0),
    ],
)
def test_a_stage_that_there_is_not_ends_the_host(message: FromHost) -> None:

    async def work() -> None:
        launcher = ScriptedLauncher()
        config = EngineConfig(placement=PROCESSES, restart=False)
        pipeline = Pipeline("p", "", PIPELINE, config, launcher=launcher)
        pipeline.supervisor.make_hosts()
        host = launcher.hosts[0]
        async with read_reports(pipeline) as reports:
            host.say(message)
            await rest()
            assert host.state == "dead"
            assert "kitchen" in host.reason
            assert [type(r) for r in reports] == [StagesLost]
            await pipeline.close()
        assert set(pipeline.supervisor.progress) == set(STAGES)
        assert not pipeline.supervisor.memory

    run(work())


def test_what_is_meant_well_is_passed_on() -> None:
    message = Text(R, (0, 2**31 - 1))
    assert decode_from_host(header(message)) == message
