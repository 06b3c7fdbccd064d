"""The plain driver against the reference, without chance."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from stretto.models.qwen3_omni.load import Models
from tests.oracle import generate
from tests.prompts import make
from tests.solo import Audio, Done, Event, Frame, Options, Solo, TextToken

TEXT, FRAMES = 10, 14


def texts(events: Iterable[Event], request: int = 0) -> list[int]:
    return [e.id for e in events if isinstance(e, TextToken) and e.request == request]


def codes(events: Iterable[Event], request: int = 0) -> np.ndarray:
    rows = [e.codes for e in events if isinstance(e, Frame) and e.request == request]
    return np.array(rows).reshape(-1, 16)


def wave(events: Iterable[Event], request: int = 0) -> np.ndarray:
    """All samples, after checking that the packets tile the stream."""
    parts, at = [np.zeros(0, np.float32)], 0
    for e in events:
        if isinstance(e, Audio) and e.request == request:
            assert e.start == at
            at += len(e.samples)
            parts.append(e.samples)
    return np.concatenate(parts)


def done(events: Iterable[Event], request: int = 0) -> Done:
    [end] = [e for e in events if isinstance(e, Done) and e.request == request]
    return end


LIMITS = Options(max_text_tokens=TEXT, max_frames=FRAMES)


def check_greedy(kind: str, models: Models, oracle: Any) -> None:
    """Text, codes and sound are the reference's."""
    prompt = make(kind, models.config)
    want = generate(oracle, prompt, max_text=TEXT, max_frames=FRAMES + 1)
    got = list(Solo(models).run(prompt, LIMITS.greedy()))
    assert texts(got) == want.text
    np.testing.assert_array_equal(codes(got), want.codes.cpu().numpy())
    np.testing.assert_allclose(wave(got), want.waveform.cpu().numpy(), atol=1e-5)


class LibraryNoise:
    """Draws in the reference's order: all of the thinker's, then the talker's, from one generator.

    Our stages interleave, so the talker's share starts from the state that the thinker's leaves
    behind."""

    def __init__(self, seed: int, vocab: int, text_draws: int) -> None:
        self.vocab = vocab
        self.text = torch.Generator().manual_seed(seed)
        self.speech = torch.Generator().manual_seed(seed)
        for _ in range(text_draws):
            torch.empty(1, vocab).exponential_(1, generator=self.speech)

    def __call__(self, seeds: torch.Tensor, draw: torch.Tensor, size: int) -> torch.Tensor:
        g = self.text if size == self.vocab else self.speech
        return torch.empty(len(seeds), size).exponential_(1, generator=g).to(seeds.device)
