"""Metrics explain themselves, and the dashboard in docs/ asks for metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from stretto.server.metrics import HELP
from tests.server.conftest import Running

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def scrape(running: Running) -> str:
    reply = running.ask(
        "/v1/chat/completions", {**ASK, "modalities": ["text", "audio"], "max_audio_frames": 2}
    )
    assert reply.status == 200
    return running.ask("/metrics").body.decode()


def test_every_number_has_a_help_text_and_a_unit(real_server: Running) -> None:
    told = scrape(real_server)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)", told, re.M))
    helped = dict(re.findall(r"^# HELP (\S+) (\S.*)$", told, re.M))
    assert set(kinds) == set(helped)
    for name, kind in kinds.items():
        if kind == "histogram":
            assert name.endswith(("_seconds", "_rtf")), name  # a share has no unit
        if kind == "counter":
            assert name.endswith("_total"), name
    engine = {
        n
        for n in kinds
        if n.startswith(("stretto_stage_", "stretto_host_", "stretto_engine_", "stretto_link_"))
    }
    assert engine <= set(HELP)


def test_what_operators_ask_for_is_there(real_server: Running) -> None:
    told = scrape(real_server)
    values = dict(re.findall(r"^(\S+?)(?:\{.*\})? (\S+)$", told, re.M))
    for name in (
        "stretto_prompt_tokens_total", "stretto_generation_tokens_total",
        "stretto_inter_token_seconds_count",
        "stretto_queue_wait_seconds_count", "stretto_build_info", "process_resident_memory_bytes",
        "stretto_host_memory_bytes",
    ):  # fmt: skip
        assert float(values[name]) > 0, name
    for name in (
        "stretto_prompt_cached_tokens_total",
        "stretto_host_restarts_total",
        "stretto_num_requests_waiting",
    ):
        assert name in values


def test_the_dashboard_asks_for_numbers_that_exist(real_server: Running) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    exprs = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    asked = {m for e in exprs for m in re.findall(r"(?:stretto|process)_\w+", e)}
    told = set(re.findall(r"^((?:stretto|process)_\w+)", scrape(real_server), re.M))
    assert asked <= told
    assert {
        "stretto_stage_blocks_available",
        "stretto_stage_waiting",
        "stretto_stage_device_seconds_bucket",
    } <= asked
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
