"""The talker's stage: the thinker's rows in, frames of speech out. Driven by the host, on the loop
thread."""

from __future__ import annotations

import time
from collections.abc import Mapping

from stretto.messages.requests import Admit
from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.config import OPENING_S
from stretto.models.qwen3_omni.params import TalkerParams
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.qwen3_omni.pieces import media_pieces
from stretto.models.qwen3_omni.stages.prefix import row_ids, talker_salts, thinker_salts
from stretto.models.qwen3_omni.talker import Talker, TalkerInput
from stretto.models.speech.pacing import PacketPacing
from stretto.models.speech.talker_stage import PromptPlan, SpeechOutput, SpeechStage
from stretto.models.speech.token_ids import check_ids
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import StageCore
from stretto.stage.host.context import StageContext
from stretto.stage.payload import Payload
from stretto.stage.request import RequestSpec
from stretto.stage.stage import Transfer
from stretto.stage.timings import Clock, StageTimings
from stretto.transport.contract import Corrupt
from stretto.types import Mark


class TalkerStage(SpeechStage):
    params = TalkerParams
    receives: Mapping[str, type[Payload]] = {"thinker>talker": ThinkerRows}

    def __init__(
        self,
        core: StageCore,
        model: Talker,
        context: StageContext,
        prefill: StageCore | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(core, model, context, OPENING_S, prefill, clock)
        self.talker = model
        self.config = model.config

    def plan(self, a: Admit, params: TalkerParams, prompt: Prompt) -> PromptPlan:
        plan = talker_prompt(prompt, self.config, params.voice, prefill_only=params.prefill_only)
        state = TalkerInput(plan, params.code0, params.residual, min_frames=params.min_frames)
        salts = talker_salts(prompt.ids, thinker_salts(media_pieces(prompt, self.config)), plan)
        rows = row_ids(state, 0, len(plan.ids) if params.prefill_only else len(plan) - 1)
        return PromptPlan(state, rows, a.cache_root, salts, state.missing)

    def admit(self, a: Admit, params: TalkerParams, prompt: Prompt) -> None:
        if params.prefill_only:
            check_ids(a.request, len(self.model.text_table), prompt.ids)
            self._read_ahead(a, self.plan(a, params, prompt), len(prompt.ids))
        else:
            super().admit(a, params, prompt)

    def _read_ahead(self, a: Admit, plan: PromptPlan, num_prompt: int) -> None:
        """Rows of the user's turns for the prefix cache. One frame is picked behind them, which
        nobody hears: it shows that they are numbers."""
        id, state = a.request, plan.state
        spec = RequestSpec(
            id,
            1,
            priority=a.priority,
            cache_output=False,
            cache_root=plan.root,
        )
        request = self.core.submit(spec, state, plan.rows, salts=plan.salts, missing=plan.missing)
        pace = PacketPacing(1, 1, None, self.frame_timing)
        self.requests[id] = SpeechOutput(
            request, num_prompt, False, StageTimings(self.clock()), pace, prefill_only=True
        )

    def last_row(self, state: TalkerInput) -> list[int]:
        last = len(state.prompt)
        return row_ids(state, last - 1, last)

    def accept(self, transfer: Transfer) -> None:
        id = transfer.request
        speech = self.requests.get(id)
        if speech is None:
            return  # it is over
        state: TalkerInput = speech.request.input
        rows: ThinkerRows | None = transfer.payload
        tokens: list[int] = []
        if rows is not None:
            if rows.media:
                if rows.hidden.shape[1] != self.config.talker.thinker_hidden_size:
                    raise Corrupt(
                        f"media rows {tuple(rows.hidden.shape)} are not the thinker's", request=id
                    )
                with self.core.runner.on_stream():
                    transfer.adopt()
                    state.media.append(rows.hidden.to(self.model.device))
                self.core.scheduler.set_missing(id, state.missing)
            first = max(speech.num_prompt - rows.span.start, 0)
            if first < len(rows.span):
                tokens = rows.ids[first:].tolist()
                # On the device they are looked up unseen: one that is not in the table would end
                # all requests.
                if min(tokens) < 0 or max(tokens) >= len(self.model.text_table):
                    raise Corrupt(f"text {tokens} is not of this vocabulary", request=id)
        self.add_text(id, state, tokens, last=transfer.mark is not Mark.MORE)
