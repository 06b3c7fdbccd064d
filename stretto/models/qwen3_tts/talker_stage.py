"""The talker's stage: text in, all at once or as it is written, frames of speech out. Driven by the
host, on the loop thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stretto.errors import Invalid
from stretto.messages.requests import Admit
from stretto.models.qwen3_tts.adapter import TalkerInput
from stretto.models.qwen3_tts.params import TalkerParams, reference
from stretto.models.qwen3_tts.rows import speech_prompt
from stretto.models.qwen3_tts.talker import Talker
from stretto.models.speech.talker_stage import PromptPlan, SpeechStage
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import StageCore
from stretto.stage.host.context import StageContext
from stretto.types import RequestId


class TalkerStage(SpeechStage):
    params = TalkerParams

    def __init__(self, core: StageCore, model: Talker, context: StageContext) -> None:
        super().__init__(core, model, context, opening_s=0.0)
        self.config = model.config

    def plan(self, a: Admit, params: TalkerParams, prompt: Prompt) -> PromptPlan:
        config, p = self.config, params
        if p.spoken is None:
            raise Invalid("there is no text to be spoken", "input")
        cloned = reference(config, p.cloned) if p.cloned is not None else None
        rows = speech_prompt(config, prompt.ids, p.voice, p.language, cloned, p.whole)
        given = TalkerInput(rows, p.code0, p.residual, min_frames=p.min_frames)
        root = (cloned.digest if cloned is not None else b"") + a.cache_root
        return PromptPlan(
            given, rows.told(0, rows.num_known), root, length=rows.length(len(p.spoken))
        )

    def _text(self, id: RequestId, given: TalkerInput, tokens: Sequence[int]) -> None:
        given.said += len(tokens)
        self._grow(id, given, lambda: given.prompt.take(tokens))

    def _end_text(self, id: RequestId, given: TalkerInput) -> None:
        if not given.said:
            raise Invalid("there is nothing to say", "input")
        given.text_ended = True
        self._grow(id, given, given.prompt.end)
        self.core.scheduler.end_step_inputs(id)

    def _grow(self, id: RequestId, given: TalkerInput, change: Callable[[], Any]) -> None:
        """Text came, or its end: rows of the prompt that are known now, then tokens that wait for
        their frames."""
        p, scheduler = given.prompt, self.core.scheduler
        before = p.num_known
        change()
        given.end = p.after
        fresh = p.spoken[len(given.text) :]
        if not given.closed:
            closes = p.complete and bool(p.spoken or p.ended)
            rows = p.told(before, p.num_known + closes)
            given.text.extend(fresh)
            if rows:
                scheduler.append_rows(id, rows, last=closes)
            given.closed = closes
            fresh = fresh[1:]  # the first is in the prompt's last row
        else:
            given.text.extend(fresh)
        if fresh:
            scheduler.append_step_inputs(id, len(fresh))
