"""Host memory of a vocoder's steps."""

import torch

from stretto.stage.vocoder import CodecConfig
from stretto.stage.vocoder.staging import Staging, numbers, split

CONFIG = CodecConfig(slots=3, overlap_depth=2, frame_sizes=(1, 2))
GROUPS = 4


def staging() -> Staging:
    return Staging(CONFIG, GROUPS, rate=10, device=torch.device("cpu"))


def test_a_step_reads_what_was_filled_in_as_one_piece() -> None:
    made = staging()
    codes, counts, slots = made.inputs(2, 2)
    assert (codes.shape, counts.tolist(), slots.tolist()) == ((2, GROUPS, 2), [0, 0], [-1, -1])
    codes[:] = 7
    counts[:] = 1, 2
    slots[:] = 2, 0
    whole = made.host(2, 2)
    assert len(whole) == numbers(2, GROUPS, 2)
    views = split(whole, 2, 2)
    assert [view.tolist() for view in views] == [codes.tolist(), [1, 2], [2, 0]]


def test_steps_in_flight_and_the_next_one_have_memory_of_their_own() -> None:
    made = staging()
    seen = []
    for i in range(CONFIG.overlap_depth + 1):
        codes, _, _ = made.inputs(1, 1)
        codes[:] = i
        seen.append(made.host(1, 1))
    assert [int(memory[0]) for memory in seen] == [0, 1, 2]
