from __future__ import annotations

import pytest
import torch

from stretto.kernels.triton.vision import rotate_qk
from stretto.models.qwen3_omni.vision_encoder import rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (3, 12)])
def test_turns_q_and_k_in_place_and_leaves_v(
    heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    g = torch.Generator().manual_seed(heads)
    qkv = torch.randn(5, 3, heads, dim, generator=g).to(device, dtype)
    angle = torch.randn(5, 1, dim // 2, generator=g).to(device)
    rope = angle.cos(), angle.sin()
    q, k, v = qkv.clone().unbind(1)
    rotate_qk(qkv, *rope)
    for ours, plain in ((qkv[:, 0], rotate(q, rope)), (qkv[:, 1], rotate(k, rope))):
        torch.testing.assert_close(
            ours, plain, rtol=2e-7 if dtype == torch.float32 else 8e-3, atol=1e-6
        )
    assert torch.equal(qkv[:, 2], v)


@pytest.mark.gpu
def test_real_size(device: torch.device) -> None:
    qkv = torch.randn(1600, 3, 16, 72, device=device).bfloat16()
    angle = torch.randn(1600, 1, 36, device=device)
    rope = angle.cos(), angle.sin()
    q, k, _ = qkv.clone().unbind(1)
    rotate_qk(qkv, *rope)
    assert float((qkv[:, 0] - rotate(q, rope)).float().norm() / q.float().norm()) < 1e-3
    assert float((qkv[:, 1] - rotate(k, rope)).float().norm() / k.float().norm()) < 1e-3
