"""Kernels run for real on a CUDA device, and in Triton's interpreter on the CPU elsewhere.

The interpreter is chosen when a kernel is defined, so this must come before any of them is
imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.kernels.reference import quantized

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


def _mend_interpreter() -> None:
    """Four things it cannot do by itself. It keeps scalars as arrays of one element, which newer
    versions of numpy no longer take for an int, so no loop's bounds could depend on an argument; it
    keeps bfloat16 as its bits, which a dot would multiply as integers; and it cuts float32 to
    bfloat16 and float8 where the hardware rounds to nearest."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl
    convert = builder.create_fp_to_fp

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def cast_impl(self: Any, src: Any, to: Any) -> Any:
        if src.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, src, to)
        values = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return interpreter.TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)

    def to_float8(self: Any, src: Any, to: Any, rounding: Any) -> Any:
        if src.dtype.scalar != tl.float32 or to.scalar != tl.float8e4nv:
            return convert(self, src, to, rounding)
        values = torch.from_numpy(np.ascontiguousarray(src.data)).to(quantized.FLOAT8)
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), tl.float8e4nv)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_to_fp = to_float8


if not torch.cuda.is_available():
    _mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def narrow() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Weights [experts, outputs, inputs] as float8 with their scales. Rows differ much in size, so
    that a scale at the wrong place shows, and one is all zeros."""

    def narrowed(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = 2.0 ** (torch.arange(wide.shape[1], device=wide.device) % 3)
        wide = wide * sizes[:, None].to(wide.dtype)
        wide[1, 0] = 0
        weight = torch.empty_like(wide, dtype=quantized.FLOAT8)
        scale = torch.empty(wide.shape[:2], dtype=torch.float32, device=wide.device)
        quantized.quantize(wide, weight, scale)
        return weight, scale

    return narrowed
