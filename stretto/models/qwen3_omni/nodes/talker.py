"""The talker's node: the thinker's rows in, frames of speech out.

Called by the host and driven by the loop, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from stretto.connector.contract import Corrupt
from stretto.control.messages import Admit
from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.config import OPENING_S
from stretto.models.qwen3_omni.lanes.talker import TalkerInput
from stretto.models.qwen3_omni.nodes.prefix import row_ids, talker_salts, thinker_salts
from stretto.models.qwen3_omni.params import TalkerParams
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.qwen3_omni.pieces import media_pieces
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.speech.given import check_ids
from stretto.models.speech.talker_node import FrameNode, Known, Speaking
from stretto.prompt.prompt import Prompt
from stretto.stage.context import StageContext
from stretto.stage.links import Arrival, Inlet
from stretto.stage.pace import Pace
from stretto.stage.report import Clock, Journal
from stretto.stage.request import RequestSpec
from stretto.stage.stage import Emit, Stage
from stretto.types import Mark, RequestId


class TalkerNode(FrameNode):
    params = TalkerParams

    def __init__(
        self,
        stage: Callable[[Emit], Stage],
        model: Talker,
        context: StageContext,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(stage, model, context, OPENING_S, clock)
        self.talker, self.config = model, model.config
        self.inlet = Inlet("thinker>talker", ThinkerRows, self._read, self._fail)
        self.inlets = (self.inlet,)

    def plan(self, a: Admit, params: TalkerParams, prompt: Prompt) -> Known:
        plan = talker_prompt(prompt, self.config, params.voice, ahead=params.ahead)
        given = TalkerInput(plan, params.code0, params.residual, min_frames=params.min_frames)
        salts = talker_salts(prompt.ids, thinker_salts(media_pieces(prompt, self.config)), plan)
        rows = row_ids(given, 0, len(plan.ids) if params.ahead else len(plan) - 1)
        return Known(given, rows, a.cache_root, salts, given.missing)

    def admit(self, a: Admit, params: TalkerParams, prompt: Prompt) -> None:
        if params.ahead:
            check_ids(a.request, len(self.model.text_table), prompt.ids)
            self._read_ahead(a, self.plan(a, params, prompt), len(prompt.ids))
        else:
            super().admit(a, params, prompt)

    def _read_ahead(self, a: Admit, known: Known, num_prompt: int) -> None:
        """Rows of the user's turns for the prefix cache. One frame is picked behind them, which nobody hears: it shows
        that they are numbers."""
        id, given = a.request, known.given
        spec = RequestSpec(id, 1, sampling=given.code0, priority=a.priority, cache_output=False, cache_root=known.root)
        request = self.stage.submit(spec, given, known.rows, salts=known.salts, missing=known.missing)
        pace = Pace(1, 1, None, self.rhythm)
        self.voices[id] = Speaking(request, num_prompt, False, Journal(self.clock()), pace, ahead=True)
        self.inlet.open(id)

    def last_row(self, given: TalkerInput) -> list[int]:
        last = len(given.prompt)
        return row_ids(given, last - 1, last)

    def _read(self, id: RequestId, arrival: Arrival[ThinkerRows]) -> None:
        given: TalkerInput = self.stage.runner.lane.inputs[id]
        rows = arrival.payload
        if rows is not None:
            if rows.media:
                if rows.hidden.shape[1] != self.config.talker.thinker_hidden_size:
                    raise Corrupt(f"media rows {tuple(rows.hidden.shape)} are not the thinker's", request=id)
                with self.stage.runner.on_stream():
                    arrival.adopt()
                    given.media.append(rows.hidden.to(self.model.device))
                self.stage.scheduler.set_missing(id, given.missing)
            first = max(self.voices[id].num_prompt - rows.span.start, 0)
            if first < len(rows.span):
                tokens: list[int] = rows.ids[first:].tolist()
                # On the device they are looked up unseen: one that is not in the table would end all requests.
                if min(tokens) < 0 or max(tokens) >= len(self.model.text_table):
                    raise Corrupt(f"text {tokens} is not of this vocabulary", request=id)
                self._text(id, given, tokens)
        if arrival.mark is not Mark.MORE:
            self._end_text(id, given)
