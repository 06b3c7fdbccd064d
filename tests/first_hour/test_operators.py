"""What operators look at: metrics that explain themselves, a dashboard without holes, logs for
machines, keys."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from stretto.commands.serve import settle
from stretto.errors import Invalid
from stretto.observe import logs
from stretto.server.keys import Keys
from stretto.server.metric_help import HELP
from stretto.server.openai.error_body import Refused
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def scrape(running: Running) -> str:
    reply = running.ask(
        "/v1/chat/completions", {**ASK, "modalities": ["text", "audio"], "max_audio_frames": 2}
    )
    assert reply.status == 200
    return running.ask("/metrics").body.decode()


def test_every_number_has_a_help_text_and_a_unit(real: Running) -> None:
    told = scrape(real)
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


def test_what_operators_ask_for_is_there(real: Running) -> None:
    told = scrape(real)
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


def test_the_dashboard_asks_for_numbers_that_exist(real: Running) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    exprs = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    asked = {m for e in exprs for m in re.findall(r"(?:stretto|process)_\w+", e)}
    told = set(re.findall(r"^((?:stretto|process)_\w+)", scrape(real), re.M))
    assert asked <= told
    assert {
        "stretto_stage_blocks_available",
        "stretto_stage_waiting",
        "stretto_stage_device_seconds_bucket",
    } <= asked
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])


# ---- logs


def test_serve_without_the_gpu_it_names_ends_with_one_sentence_and_json_in_every_line(
    tiny_dir: Path,
) -> None:
    """Server and host, log lines and banners alike."""
    command = [
        sys.executable,
        "-m",
        "stretto",
        "serve",
        str(tiny_dir),
        "--port",
        "0",
        "--log-format",
        "json",
    ]
    env = {**os.environ, "STRETTO_LOG": "INFO"}
    done = subprocess.run(
        [*command, "--device", "cuda:77"], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert sum("is placed on cuda:77" in line["message"] for line in lines) == 1
    assert not any("stack" in line for line in lines)


def test_lines_have_dates_and_warnings_are_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logs.set_up("text", "info")
    logging.getLogger("stretto.x").info("hello")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    stretto.x: hello", out.getvalue())
    logs.set_up("json", "info")
    out.truncate(0)
    out.seek(0)
    warnings.warn("careful", stacklevel=1)
    try:
        raise ValueError("the end")
    except ValueError:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert "careful" in first["message"]
    assert "the end" in second["stack"]


def test_the_settings_of_the_documented_service(tmp_path: Path) -> None:
    """What docs/serve.md tells operators to put into a file."""
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (tmp_path / "stretto.yaml").write_text(block)
    model, _, server = settle({"config": tmp_path / "stretto.yaml"}, {})
    assert model == "Qwen/Qwen3-Omni-30B-A3B-Instruct"
    assert (server.api_key_file, server.log_format, server.drain_timeout) == (
        "/etc/stretto.keys",
        "json",
        30,
    )


# ---- keys


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_keys_are_exchanged_while_the_server_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = tmp_path / "keys", [0.0]
    file.write_text("# ours\nold-key\nsteady\n")
    keys = Keys.of(("fixed",), str(file), lambda: now[0])
    steady = keys.owner(bearer("steady"))
    assert keys.owner(bearer("fixed")) == "key1"
    assert keys.owner(bearer("old-key")) != steady

    file.write_text("steady\nnew-key, though\n".replace(", though", ""))
    assert keys.owner(bearer("old-key"))  # it is looked at once a second
    now[0] += 2
    with pytest.raises(Refused, match="not valid"):
        keys.owner(bearer("old-key"))
    assert keys.owner(bearer("new-key"))
    assert keys.owner(bearer("steady")) == steady  # the same, in another line

    file.write_text(
        ""
    )  # half written, or a mistake: nobody gets in by it, and nobody is locked out
    now[0] += 2
    assert keys.owner(bearer("new-key"))
    with pytest.raises(Refused):
        keys.owner(Headers({}))
    assert "API keys stay as they were" in caplog.text
    with pytest.raises(Invalid, match="has no keys"):
        Keys.of((), str(file))
    with pytest.raises(Invalid, match="cannot be read"):
        Keys.of((), str(tmp_path / "none"))


def test_a_server_with_a_file_of_keys_is_closed(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with serve(ScriptedEngine(), api_key_file=str(tmp_path / "keys")) as running:
        assert running.ask("/v1/models").status == 401
        assert running.ask("/v1/models", headers={"Authorization": "Bearer secret"}).status == 200
