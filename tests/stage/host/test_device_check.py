"""Devices that PyTorch cannot use are refused with a sentence that says what to do."""

from __future__ import annotations

import pytest
import torch

from stretto.errors import Invalid
from stretto.stage.host.device_check import check_device


def test_a_build_of_torch_without_cuda_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        Invalid,
        match=r"was built without CUDA; install a build with CUDA \(pip install .*--device cpu",
    ):
        check_device("cuda")


@pytest.mark.parametrize(
    ("name", "says"), [("gpu", "there is no device 'gpu'"), ("meta", "only cpu and cuda")]
)
def test_a_device_that_is_none(name: str, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        check_device(name)
