"""Engine settings against the model that they are for."""

from __future__ import annotations

import pytest

from stretto.config.engine import EngineConfig, check_model
from stretto.errors import Invalid


def test_a_stated_context_is_not_shortened() -> None:
    check_model(EngineConfig(), ("a",), 4096)  # the default follows the model
    with pytest.raises(
        Invalid, match="max_model_len is 8192, but the model has only 4096 positions"
    ):
        check_model(EngineConfig(), ("a",), 4096, {"max_model_len"})
