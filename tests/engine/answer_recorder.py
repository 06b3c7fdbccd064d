"""An engine that keeps its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.config.engine import EngineConfig
from stretto.engine import warmup
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import Event
from stretto.engine.host_handle import Launcher
from stretto.params import RequestOptions
from tests.engine.common import Answer


class AnswerRecorder(PipelineEngine):
    """Keeps all answers but those of warm-up, and asks for codes, which clients are not sent."""

    def __init__(self, model: Path, config: EngineConfig, launcher: Launcher | None = None) -> None:
        super().__init__(model, config, launcher)
        self.answers: list[Answer] = []
        self._run = self.requests.run
        self.requests.run = self._record  # type: ignore[method-assign]

    async def _record(
        self, build: Any, options: RequestOptions, *more: Any, **named: Any
    ) -> AsyncIterator[Event]:
        answer = Answer()
        if not options.prefill_only and options.owner != warmup.OWNER:
            self.answers.append(answer)
            options = replace(options, params=replace(options.params, want_codes=True))
        async for event in self._run(build, options, *more, **named):
            answer.take(event)
            yield event
