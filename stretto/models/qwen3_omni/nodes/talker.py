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
from stretto.models.qwen3_omni.nodes.prefix import row_ids, talker_root, talker_salts
from stretto.models.qwen3_omni.params import TalkerParams
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.speech.talker_node import FrameNode, Known
from stretto.prompt.prompt import Prompt
from stretto.stage.context import StageContext
from stretto.stage.links import Arrival, Inlet
from stretto.stage.report import Clock
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
        plan = talker_prompt(prompt, self.config, params.voice)
        given = TalkerInput(plan, params.code0.params(), params.residual.params(), min_frames=params.min_frames)
        rows = row_ids(given, 0, given.num_rows)
        return Known(given, rows, talker_root(a, plan), talker_salts(a, prompt, plan))

    def last_row(self, given: TalkerInput) -> list[int]:
        last = given.num_rows
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
                known = self.stage.scheduler.request(id).cursor.prompt
                self.stage.scheduler.append_rows(id, row_ids(given, known, given.num_rows))
            first = max(self.voices[id].num_prompt - rows.span.start, 0)
            if first < len(rows.span):
                tokens: list[int] = rows.ids[first:].tolist()
                # On the device they are looked up unseen: one that is not in the table would end all requests.
                if min(tokens) < 0 or max(tokens) >= len(self.model.text_table):
                    raise Corrupt(f"text {tokens} is not of this vocabulary", request=id)
                self._text(id, given, tokens)
        if arrival.mark is not Mark.MORE:
            self._end_text(id, given)
