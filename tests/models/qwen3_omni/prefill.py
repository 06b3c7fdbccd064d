"""A thinker's pass over a prompt."""

import torch

from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.thinker import Deep
from stretto.preprocess.prompt import Prompt
from tests.media import encode_media


def run(
    models: Models, prompts: list[Prompt], chunk: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and accept-layer rows of all positions; the prompts advance together, `chunk` rows at
    a time."""
    thinker, c = models.thinker, models.config.thinker
    cache = thinker.cache(200, block_size=8)
    tables, free = [], iter(range(1, 200))
    for p in prompts:
        tables.append([next(free) for _ in range(-(-len(p.ids) // 8))])
    media = [encode_media(thinker, p) for p in prompts]
    positions = [
        torch.from_numpy(
            rope_positions(
                p.ids,
                models.config.tokens,
                c.vision.merge,
                c.positions_per_second,
                p.images,
                p.videos,
                p.audio_in_video,
            )[0]
        )
        for p in prompts
    ]
    done = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    accept: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(d < len(p.ids) for d, p in zip(done, prompts, strict=True)):
        todo = {
            i: min(chunk, len(p.ids) - done[i])
            for i, p in enumerate(prompts)
            if done[i] < len(p.ids)
        }
        order = sorted(todo, key=lambda i: todo[i] != 1)
        xs, places, deep_rows, levels, row = [], [], [], [], 0
        for i in order:
            start, stop = done[i], done[i] + todo[i]
            part = media[i].within(start, stop) if media[i] is not None else None
            ids = torch.tensor(prompts[i].ids[start:stop], device=thinker.device)
            xs.append(thinker.embed(ids, part))
            places.append(positions[i][:, start:stop])
            if part is not None:
                deep_rows.append(part.visual_places + row)
                levels.append(part.deep)
            row += stop - start
        deep = (
            Deep(torch.cat(deep_rows).to(thinker.device), torch.cat(levels, 1))
            if deep_rows
            else None
        )
        paging = cache.page([(tables[i], done[i], todo[i]) for i in order])
        hidden, rows = thinker(
            torch.cat(xs),
            torch.cat(places, 1).to(thinker.device),
            cache,
            paging,
            deep,
            torch.arange(row),
        )
        assert rows is not None
        sizes = [todo[i] for i in order]
        for i, a, b in zip(
            order, thinker.logits(hidden).split(sizes), rows.split(sizes), strict=True
        ):
            logits[i].append(a)
            accept[i].append(b)
            done[i] += todo[i]
    return [(torch.cat(a), torch.cat(b)) for a, b in zip(logits, accept, strict=True)]
