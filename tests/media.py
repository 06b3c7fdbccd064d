"""All media of a prompt encoded at once: an oracle for stages, which encode piece by piece."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stretto.layers.upload import to_device
from stretto.models.parts import run_through
from stretto.models.qwen3_omni.thinker import MediaRows, Thinker
from stretto.models.qwen3_omni.vision_encoder import ReplayFrame
from stretto.preprocess.prompt import Prompt


def encode_media(
    thinker: Thinker, prompt: Prompt, replay: ReplayFrame | None = None
) -> MediaRows | None:
    """None if the prompt has none. Single frames are encoded by `replay`."""
    if not prompt.has_media:
        return None
    config, device, dtype = thinker.config, thinker.device, thinker.dtype
    tokens = config.tokens
    ids = np.asarray(prompt.ids)
    media = np.flatnonzero(np.isin(ids, tokens.media_pads))
    visual = np.flatnonzero(np.isin(ids, tokens.media_pads[1:]))
    hidden = config.thinker.text.hidden_size
    rows = torch.zeros(len(media), hidden, device=device, dtype=dtype)
    levels = len(config.thinker.vision.deepstack_layers)
    deep = torch.zeros(levels, len(visual), hidden, device=device, dtype=dtype)

    def among(pad: int, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Which of `places` hold this pad."""
        return to_device(np.flatnonzero(ids[places] == pad), device, torch.int64)

    if prompt.audios:
        mels = [to_device(clip.mel, device, torch.float32).to(dtype) for clip in prompt.audios]
        clips = [thinker.audio_tower.encode(mel) for mel in mels]
        rows.index_copy_(0, among(tokens.audio_pad, media), torch.cat(clips))
    for pad, pictures in ((tokens.image_pad, prompt.images), (tokens.video_pad, prompt.videos)):
        if pictures:
            values, grids = [m.values for m in pictures], [m.grid for m in pictures]
            seen = run_through(thinker.visual.encoding(values, grids, replay))
            rows.index_copy_(0, among(pad, media), seen.main)
            deep.index_copy_(1, among(pad, visual), torch.stack(list(seen.deep)))
    return MediaRows(torch.from_numpy(media), rows, torch.from_numpy(visual), deep)
