"""What a hop between a server's processes costs, read from its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig
from stretto.loadtest.hops import hop_line, hops, read_series
from tests.loadtest.command import run
from tests.server.real_engine import served

OUT, IN = (f'{{link="a>b",end="{end}"}}' for end in ("out", "in"))


def page(chunks: int) -> str:
    """Of a link whose chunks wait 1 µs, are put in 20, taken in 30, and wait 4."""
    lines = ['stretto_link_put_seconds_bucket{link="a>b",end="out",le="1e-05"} 3']
    lines += [f"stretto_link_{n}_total{IN} {v}" for n, v in (("chunks", chunks), ("bytes", 2048))]
    each = (("queue", OUT, 1e-6), ("put", OUT, 2e-5), ("take", IN, 3e-5), ("queue", IN, 4e-6))
    for name, end, seconds in each:
        lines.append(f"stretto_link_{name}_seconds_sum{end} {seconds * chunks}")
        lines.append(f"stretto_link_{name}_seconds_count{end} {chunks}")
    return "\n".join(["# HELP stretto_link_chunks_total ...", "other 1", *lines, ""])


def test_a_hop_is_the_sum_of_its_parts() -> None:
    [hop] = hops({}, read_series(page(10)))
    assert (hop.link, hop.chunks, hop.bytes) == ("a>b", 10, pytest.approx(204.8))
    assert hop.seconds == pytest.approx(5.5e-5)
    assert "a chunk takes 55 µs on average" in hop_line(hop)


def test_what_was_there_before_does_not_count() -> None:
    assert list(hops(read_series(page(10)), read_series(page(10)))) == []
    [hop] = hops(read_series(page(10)), read_series(page(30)))
    assert hop.chunks == 20
    assert hop.parts_s["put"] == pytest.approx(2e-5)


def test_a_split_placement_shows_in_the_metrics(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a server of three processes. Its hosts are asked once a second; this run takes that
    long."""
    out = tmp_path / "run.json"
    with served(tiny_dir, EngineConfig("processes")) as it:
        url = f"http://127.0.0.1:{it.running.port}"
        argv = ("-d", "2", "--max-tokens", "8", "--frames", "8", "--stretto-extras", "--quiet")
        assert run("bench", url, *argv, "--json", str(out)) == 0
    links = json.loads(out.read_text())["server"]["links"]
    assert {link["link"] for link in links} == {"thinker>talker", "talker>code2wav"}
    assert all(link["chunks"] > 0 and link["seconds"] > 0 for link in links)
    assert "thinker>talker: " in capsys.readouterr().out
