"""Small host values on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Values = Sequence[int] | Sequence[bool] | npt.NDArray[Any]


def to_device(values: Values, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Host values to the device without waiting: by way of pinned memory, which the allocator keeps
    until then."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.clone() if isinstance(values, np.ndarray) else host
    return host.pin_memory().to(device, non_blocking=True)
