"""The programs of this folder at small sizes: each must find no problem. `python -m tests.slow NAME
--help` tells of larger ones, whose results are in bench/results."""

from __future__ import annotations

import shlex

import pytest

from tests.slow.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    "command",
    [
        "fuzz --parts wire --inputs 50000",
        "fuzz --parts realtime --events 5000",
        "faults --parts kills --kills 20",
        "faults --parts soak --requests 1000",
        "faults --parts server --requests 9000 --sessions 2100",  # about 300 of each kind
        "hostile --parts attacks",
        "hostile --parts floods --together 20",
        pytest.param("cluster --kills 10", marks=pytest.mark.ray),
    ],
)
def test_program_finds_no_problem(command: str) -> None:
    if command.startswith("cluster"):
        pytest.importorskip("ray")
    assert main(shlex.split(command)) == 0
