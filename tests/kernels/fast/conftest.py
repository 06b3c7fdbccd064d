"""Kernels run for real on a CUDA device, and in Triton's interpreter on the CPU elsewhere.

The interpreter is chosen when a kernel is defined, so this must come before any of them is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


def _mend_interpreter() -> None:
    """Three things it cannot do by itself. It keeps scalars as arrays of one element, which newer versions of numpy no
    longer take for an int, so no loop's bounds could depend on an argument; it keeps bfloat16 as its bits, which a dot
    would multiply as integers; and it cuts float32 to bfloat16 where the hardware rounds to nearest."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

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

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = create_dot, cast_impl


if not torch.cuda.is_available():
    _mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
