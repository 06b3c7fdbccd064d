"""The thinker: a multimodal mixture-of-experts language model.

Weights only. `embed` makes input rows from ids and encoder rows, `forward` runs any mix of prompt
chunks and decoding rows over the paged cache, `logits` heads the rows that sample. A pass can also
hand out the accept layer's residual stream at chosen rows: the talker needs it at media positions
of the prompt, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.linear import Embedding, Linear
from stretto.layers.upload import to_device
from stretto.models.parts import run_through
from stretto.models.qwen3_omni.audio_encoder import AudioEncoder
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.vision_encoder import VisionEncoder
from stretto.preprocess.prompt import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class MediaRows:
    """Encoder output of one prompt, row by row for its pads, in prompt order."""

    places: torch.Tensor  # [media] int64: prompt positions of the pads
    rows: torch.Tensor  # [media, hidden]: what replaces the pads' embeddings
    visual_places: torch.Tensor  # [visual] int64: the image and video pads among them
    deep: torch.Tensor  # [levels, visual, hidden]: DeepStack additions

    def within(self, start: int, stop: int) -> MediaRows:
        """The part that falls into prompt positions [start, stop), with places counted from
        `start`."""
        if not len(self.places) or start > self.places[-1] or stop <= self.places[0]:
            none = self.places[:0]
            return MediaRows(none, self.rows[:0], none, self.deep[:, :0])
        a, b = torch.searchsorted(self.places, torch.tensor([start, stop])).tolist()
        c, d = torch.searchsorted(self.visual_places, torch.tensor([start, stop])).tolist()
        return MediaRows(
            self.places[a:b] - start,
            self.rows[a:b],
            self.visual_places[c:d] - start,
            self.deep[:, c:d],
        )

    @staticmethod
    def joined(parts: Sequence[MediaRows]) -> MediaRows | None:
        """Several as one, None if there is nothing in them. Their order is theirs: places need not
        rise."""
        parts = [p for p in parts if len(p.places)]
        if len(parts) < 2:
            return parts[0] if parts else None
        visual = [p for p in parts if len(p.visual_places)] or parts[:1]
        return MediaRows(
            torch.cat([p.places for p in parts]),
            torch.cat([p.rows for p in parts]),
            torch.cat([p.visual_places for p in visual]),
            torch.cat([p.deep for p in visual], 1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Deep:
    """DeepStack additions of one pass."""

    rows: torch.Tensor  # [visual] int64: rows of the pass
    levels: torch.Tensor  # [levels, visual, hidden]


class TextModel(Decoder):
    """The decoder with its embedding beside the layers, as the checkpoint names them."""

    def __init__(self, config: OmniConfig) -> None:
        c = config.thinker.text
        super().__init__(c)
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)


class Thinker(nn.Module):
    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        self.config = config
        self.accept_layer = config.talker.accept_layer
        self.audio_tower = AudioEncoder(config.thinker.audio)
        self.visual = VisionEncoder(config.thinker.vision)
        self.model = TextModel(config)
        self.lm_head = Linear(config.thinker.text.hidden_size, config.thinker.text.vocab_size)

    def prepare(self) -> None:
        """Derived constants; once, after the weights are in place."""
        self.model.prepare(self.device)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def cache(self, num_blocks: int, block_size: int = 16) -> KVCache:
        return self.model.cache(num_blocks, block_size, self.device, self.dtype)

    def encode(self, prompt: Prompt) -> MediaRows | None:
        """Run the encoders over all of a prompt's media. None if it has none."""
        if not prompt.has_media:
            return None
        tokens, device, dtype = self.config.tokens, self.device, self.dtype
        ids = np.asarray(prompt.ids)
        media, visual = (
            np.flatnonzero(np.isin(ids, tokens.media_pads)),
            np.flatnonzero(np.isin(ids, tokens.media_pads[1:])),
        )
        hidden = self.config.thinker.text.hidden_size
        rows = torch.zeros(len(media), hidden, device=device, dtype=dtype)
        levels = len(self.config.thinker.vision.deepstack_layers)
        deep = torch.zeros(levels, len(visual), hidden, device=device, dtype=dtype)

        def among(pad: int, places: npt.NDArray[np.int64]) -> torch.Tensor:
            """Which of `places` hold this pad."""
            return to_device(np.flatnonzero(ids[places] == pad), device, torch.int64)

        heard: list[torch.Tensor] = []
        for clip in prompt.audios:
            heard.append(
                self.audio_tower.encode(to_device(clip.mel, device, torch.float32).to(dtype))
            )
        if heard:
            rows.index_copy_(0, among(tokens.audio_pad, media), torch.cat(heard))
        for pad, pictures in ((tokens.image_pad, prompt.images), (tokens.video_pad, prompt.videos)):
            if pictures:
                seen = run_through(
                    self.visual.encoding([m.values for m in pictures], [m.grid for m in pictures])
                )
                rows.index_copy_(0, among(pad, media), seen.main)
                deep.index_copy_(1, among(pad, visual), torch.stack(list(seen.deep)))
        return MediaRows(torch.from_numpy(media), rows, torch.from_numpy(visual), deep)

    def embed(self, ids: torch.Tensor, media: MediaRows | None = None) -> torch.Tensor:
        """Input rows of a run of ids; `media` holds the encoder rows that fall into the run."""
        x: torch.Tensor = self.model.embed_tokens(ids)
        if media is not None and len(media.places):
            x.index_copy_(0, to_device(media.places.numpy(), x.device, torch.int64), media.rows)
        return x

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        paging: Paging,
        deep: Deep | None = None,
        capture: torch.Tensor | Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One pass: rows x [rows, hidden], positions [3, rows].

        Returns the final-normed rows, and the accept layer's residual stream at the rows named by
        `capture`."""
        taken: list[torch.Tensor] = []
        wanted = None if capture is None else torch.as_tensor(capture, device=x.device)
        if wanted is not None and self.accept_layer == 0:
            taken.append(x[wanted])

        def after(layer: int, stream: torch.Tensor) -> torch.Tensor:
            if (
                wanted is not None
                and layer + 1 == self.accept_layer < self.config.thinker.text.num_layers
            ):
                taken.append(stream[wanted])  # before this layer's DeepStack addition
            if deep is not None and layer < len(deep.levels):
                stream = stream.index_add(0, deep.rows, deep.levels[layer])
            return stream

        watch = after if wanted is not None or deep is not None else None
        hidden: torch.Tensor = self.model(x, positions, PagedPass(cache, paging), watch)
        if wanted is not None and not taken:  # the last state a model reports is the normed one
            taken.append(hidden[wanted])
        return hidden, taken[0] if taken else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(hidden)
        return out
