"""The talker's adapter: a prompt of user turns, their text by id and their media by the thinker's
rows, and the nine rows that open the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from stretto.layers.upload import to_device
from stretto.models.qwen3_omni.bridge import TalkerPrompt, first_text_row, opening_rows, user_rows
from stretto.models.qwen3_omni.pieces import runs_of
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.speech.adapter import FrameInput, SpeechAdapter
from stretto.types import Span


@dataclass(slots=True, eq=False)
class TalkerInput(FrameInput[TalkerPrompt]):
    """What a request brings, and what came for it since."""

    media: list[torch.Tensor] = field(
        default_factory=list
    )  # accept-layer rows on the device, in order

    @property
    def missing(self) -> list[Span]:
        """Media rows of the prompt that have not come."""
        return runs_of(np.flatnonzero(self.prompt.is_media)[sum(map(len, self.media)) :])


class TalkerAdapter(SpeechAdapter[Talker, TalkerInput]):
    def prompt_input(
        self, given: TalkerInput, start: int, stop: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
        p, device = given.prompt, self.model.device
        users, length = len(p.ids), len(p)
        parts = []
        if start < users:
            end = min(stop, users)
            before, upto = int(p.is_media[:start].sum()), int(p.is_media[:end].sum())
            hidden = self.model.config.talker.thinker_hidden_size
            media = torch.cat(given.media) if given.media else torch.empty(0, hidden, device=device)
            parts.append(
                user_rows(self.model, p.ids[start:end], p.is_media[start:end], media[before:upto])
            )
        if start < length - 1 and stop > users:
            parts.append(opening_rows(self.model, p)[max(0, start - users) : stop - users])
        if stop == length:
            parts.append(first_text_row(self.model, to_device(given.text[:1], device, torch.int64)))
        return torch.cat(parts), p.positions[:, start:stop]
