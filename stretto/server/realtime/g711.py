"""G.711, the sound of telephones: eight bits a sample, as μ-law or A-law (ITU-T G.711). Tables,
made once.

Both ways are a look-up: 256 codes to samples, 65,536 samples to codes."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Law = Literal["mu", "a"]
Samples = npt.NDArray[np.int16]
_BIAS, _MU_CLIP = 0x84, 8158


def decode(data: bytes, law: Law) -> Samples:
    return _samples(law)[np.frombuffer(data, np.uint8)]


def encode(samples: Samples, law: Law) -> bytes:
    return _codes(law)[samples.view(np.uint16)].tobytes()


@cache
def _samples(law: Law) -> Samples:
    code = np.arange(256)
    if law == "mu":
        code = ~code & 0xFF
        size = ((((code & 0xF) << 3) + _BIAS) << ((code >> 4) & 7)) - _BIAS
        return np.where(code & 0x80, -size, size).astype(np.int16)
    code ^= 0x55
    exponent, mantissa = (code >> 4) & 7, (code & 0xF) << 4
    size = np.where(exponent == 0, mantissa + 8, (mantissa + 0x108) << np.maximum(exponent - 1, 0))
    return np.where(code & 0x80, size, -size).astype(np.int16)


@cache
def _codes(law: Law) -> npt.NDArray[np.uint8]:
    """By the sample's bits, read as an unsigned number."""
    x = np.arange(65536).astype(np.uint16).view(np.int16).astype(np.int64)
    if law == "mu":
        size = np.minimum(np.abs(x >> 2), _MU_CLIP) + (
            _BIAS >> 2
        )  # fourteen bits, as the standard has them
        exponent = np.floor(np.log2(size)).astype(np.int64) - 5
        mantissa = (size >> (exponent + 1)) & 0xF
        code: npt.NDArray[np.int64] = (
            ~(np.where(x < 0, 0x80, 0) | (exponent << 4) | mantissa) & 0xFF
        )
        return code.astype(np.uint8)
    size = np.where(x < 0, ~x, x) >> 3  # thirteen bits
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 1))).astype(np.int64) - 4, 0)
    mantissa = np.where(exponent == 0, size >> 1, size >> exponent) & 0xF
    code = (np.where(x < 0, 0, 0x80) | (exponent << 4) | mantissa) ^ 0x55
    return code.astype(np.uint8)
