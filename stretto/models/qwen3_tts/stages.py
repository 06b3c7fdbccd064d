"""The stages on the path of speech, driven by the host on the loop thread. The talker: text in, all
at once or as it is written, frames of speech out. The vocoder: the shared one, whose streams may
have heard a cloned voice's reference before."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from stretto.errors import Invalid
from stretto.messages.requests import Admit
from stretto.models.qwen3_tts.params import PrimedParams, TalkerParams, reference
from stretto.models.qwen3_tts.rows import speech_prompt
from stretto.models.qwen3_tts.talker import Talker, TalkerInput
from stretto.models.speech.params import VocoderParams
from stretto.models.speech.talker_stage import PromptPlan, SpeechStage
from stretto.models.speech.vocoder_stage import VocoderStage
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import StageCore
from stretto.stage.host.context import StageContext
from stretto.stage.vocoder import Primer
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
        state = TalkerInput(rows, p.code0, p.residual, min_frames=p.min_frames)
        root = (cloned.digest if cloned is not None else b"") + a.cache_root
        return PromptPlan(
            state, rows.cache_ids(0, rows.num_known), root, length=rows.length(len(p.spoken))
        )

    def add_text(
        self, id: RequestId, state: TalkerInput, tokens: Sequence[int], last: bool
    ) -> None:
        """Rows of the prompt become known, then tokens wait for their frames."""
        state.num_text += len(tokens)
        if last and not state.num_text:
            raise Invalid("there is nothing to say", "input")
        prompt, scheduler = state.prompt, self.core.scheduler
        before = prompt.num_known
        prompt.take(tokens)
        if last:
            state.text_ended = True
            prompt.end()
        state.end = prompt.after
        more = prompt.spoken[len(state.text) :]
        state.text.extend(more)
        if not state.closed:
            state.closed = prompt.complete and bool(prompt.spoken or prompt.ended)
            rows = prompt.cache_ids(before, prompt.num_known + state.closed)
            if rows:
                scheduler.append_rows(id, rows, last=state.closed)
            more = more[1:]  # the first is in the prompt's last row
        if more or last:
            scheduler.append_step_inputs(id, len(more), last=last)


class PrimedVocoderStage(VocoderStage):
    params = PrimedParams

    def primer(self, params: VocoderParams) -> Primer | None:
        assert isinstance(params, PrimedParams)
        if not params.codes:
            return None
        groups = self.core.model.config.num_quantizers
        if len(params.codes) % (2 * groups):
            raise Invalid("this voice was made by another model", "voice")
        codes = np.frombuffer(params.codes, np.int16).astype(np.int64).reshape(-1, groups)
        return Primer(blake2b(params.codes, digest_size=16).digest(), codes)
