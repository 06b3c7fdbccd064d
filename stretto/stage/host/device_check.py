"""Checks whether a host's device can be used at all; an error is one sentence. Called by the host's
process before it builds anything."""

from __future__ import annotations

import torch

from stretto.errors import Invalid

CPU = "--device cpu runs without a GPU"


def check_device(name: str) -> None:
    """Refuse a device that will not be there however often it is tried."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Invalid(f"there is no device {name!r}: use cpu, cuda or cuda:N", "device") from None
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise Invalid(f"{name}: only cpu and cuda devices are supported", "device")
    if torch.version.cuda is None:
        raise Invalid(
            f"{name} cannot be used: PyTorch {torch.__version__} was built without CUDA; install a "
            f"build with CUDA "
            f'(pip install "torch=={torch.__version__.partition("+")[0]}"); {CPU}', "device"
        )  # fmt: skip
    if not torch.cuda.is_available():
        raise Invalid(
            f"{name} cannot be used: PyTorch finds no CUDA device (nvidia-smi says why); {CPU}",
            "device",
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise Invalid(
            f"{name} cannot be used: there are {torch.cuda.device_count()} CUDA devices, from 0",
            "device",
        )


def one_line(error: BaseException) -> str:
    """An error's words without line breaks: libraries write whole paragraphs."""
    return " ".join(str(error).split()) or type(error).__name__
