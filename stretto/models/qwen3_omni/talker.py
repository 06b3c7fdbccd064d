"""Qwen3-Omni's talker and its adapter. Its text table is made of the thinker's word embedding, and
it is given the thinker's rows where the prompt has media. A prompt is user turns, their text by id
and their media by those rows, and the nine rows that open the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from stretto.layers.mlp import ResizeMLP
from stretto.layers.upload import to_device
from stretto.models.qwen3_omni.bridge import TalkerPrompt
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.pieces import runs_of
from stretto.models.speech.adapter import FrameInput, SpeechAdapter
from stretto.models.speech.talker import FrameTalker, TalkerModel
from stretto.types import Span


class Talker(FrameTalker):
    def __init__(self, config: OmniConfig) -> None:
        t = config.talker
        super().__init__(config.frames, TalkerModel(t.text))
        self.config = config
        self.text_projection = ResizeMLP(
            t.thinker_hidden_size, t.projection_size, t.text.hidden_size
        )
        self.hidden_projection = ResizeMLP(
            t.thinker_hidden_size, t.projection_size, t.text.hidden_size
        )

    def prepare(self, thinker_embedding: torch.Tensor) -> None:
        """Derived constants; once, after the weights are in place. The embedding is not kept."""
        self.prepare_frames()
        self.make_table(thinker_embedding, self.text_projection)

    def media_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input rows from the thinker's accept-layer rows."""
        out: torch.Tensor = self.hidden_projection(hidden)
        return out


def user_rows(
    talker: Talker, ids: Sequence[int], is_media: npt.NDArray[np.bool_], media: torch.Tensor
) -> torch.Tensor:
    """Talker rows of a run of user tokens; `media` holds the accept-layer rows of those that are
    media."""
    rows = talker.text_rows(to_device(ids, talker.device, torch.int64))
    places = np.flatnonzero(is_media)
    if len(places):
        rows.index_copy_(0, to_device(places, talker.device, torch.int64), talker.media_rows(media))
    return rows


def opening_rows(talker: Talker, prompt: TalkerPrompt) -> torch.Tensor:
    """The first eight of the nine opening rows; they need no thinker output."""
    t, codec, device = talker.config.tokens, talker.config.talker.codec, talker.device
    text = [*prompt.role, t.tts_pad, t.tts_pad, t.tts_pad, t.tts_pad, t.tts_bos]
    marks = [codec.nothink, codec.think_bos, codec.think_eos, prompt.speaker, codec.pad]
    rows = talker.text_rows(to_device(text, device, torch.int64))
    rows[3:] += talker.codec_rows(to_device(marks, device, torch.int64))
    return rows


def first_text_row(talker: Talker, token: torch.Tensor) -> torch.Tensor:
    """The last opening row: the first text token(s) [n] with the codec's begin mark."""
    begin = torch.full_like(token, talker.config.talker.codec.bos)
    return talker.text_rows(token) + talker.codec_rows(begin)


@dataclass(slots=True, eq=False)
class TalkerInput(FrameInput[TalkerPrompt]):
    """What a request brings, and what came for it since."""

    # accept-layer rows on the device, in order
    media: list[torch.Tensor] = field(default_factory=list)

    @property
    def missing(self) -> list[Span]:
        """Media rows of the prompt that have not come."""
        return runs_of(np.flatnonzero(self.prompt.is_media)[sum(map(len, self.media)) :])


class TalkerAdapter(SpeechAdapter[Talker, TalkerInput]):
    def prompt_input(
        self, state: TalkerInput, start: int, stop: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
        p, device = state.prompt, self.model.device
        users, length = len(p.ids), len(p)
        parts = []
        if start < users:
            end = min(stop, users)
            before, upto = int(p.is_media[:start].sum()), int(p.is_media[:end].sum())
            hidden = self.model.config.talker.thinker_hidden_size
            media = torch.cat(state.media) if state.media else torch.empty(0, hidden, device=device)
            parts.append(
                user_rows(self.model, p.ids[start:end], p.is_media[start:end], media[before:upto])
            )
        if start < length - 1 and stop > users:
            parts.append(opening_rows(self.model, p)[max(0, start - users) : stop - users])
        if stop == length:
            parts.append(first_text_row(self.model, to_device(state.text[:1], device, torch.int64)))
        return torch.cat(parts), p.positions[:, start:stop]
