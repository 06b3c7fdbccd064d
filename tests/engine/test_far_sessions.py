"""Sessions and `/v1/realtime` with stages behind agents, as on other machines: exactly the answers
of one process."""

from __future__ import annotations

from pathlib import Path

from stretto.config.engine import EngineConfig
from stretto.engine.remote_host import RemoteLauncher
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from tests.engine.agents import SECRET, ProcessStarter
from tests.engine.answer_recorder import AnswerRecorder
from tests.engine.spoken import Plain, check_realtime, check_session
from tests.server.real_engine import served


def test_turns_in_pieces_are_answered_exactly(tiny_dir: Path, models: Models) -> None:
    plain = Plain(models, PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)))
    config, starter = EngineConfig(placement="processes", connector="tcp"), ProcessStarter()
    it = AnswerRecorder(tiny_dir, config, RemoteLauncher(starter, SECRET, "127.0.0.1"))
    it.answers = []
    with served(it) as server:
        assert len(starter.agents) == 3, "a host for each stage"
        server.do(check_session(it, plain))
        check_realtime(server.running, it, plain)
        server.do(it.close())
        server.do(starter.ended())
