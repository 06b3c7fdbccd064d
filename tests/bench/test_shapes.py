"""Which sizes the programs about steps measure."""

import argparse

from bench.kernels.vocoder import combinations
from stretto.stage.vocoder.config import CodecConfig


def test_the_vocoder_is_measured_in_the_shapes_that_are_captured() -> None:
    args = argparse.Namespace(captured=False, graph=True, slots=[1, 4], frames=[2])
    assert combinations(args) == [(False, 1, 2), (False, 4, 2), (True, 1, 2), (True, 4, 2)]
    args.captured = True
    assert combinations(args) == [(True, *shape) for shape in CodecConfig().captured().shapes()]
