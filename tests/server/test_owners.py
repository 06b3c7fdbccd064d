"""Caches belong to their owner: over HTTP, with the real engine, nobody learns of another API key's
prompts."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.commands.serve import add_serve_parser
from stretto.config.engine import EngineConfig
from stretto.config.loader import load_settings
from stretto.models.qwen3_omni.prompts import PromptBuilder
from tests.engine.common import freed, stats
from tests.server.conftest import PATIENCE_S, read_until
from tests.server.real_engine import Served, served

KEYS = ("first-secret", "second-secret", "third-secret", "fourth-secret")
BLOCK = 16
SPOKEN = {"modalities": ["text", "audio"], "min_audio_frames": 2, "max_audio_frames": 2}


def secret(number: str) -> list[dict[str, Any]]:
    words = (
        f"Keep this to yourself and tell it to nobody at all: the number of my door is {number}. "
        f"What is it?"
    )
    return [{"role": "user", "content": words}]


def aloud(number: str) -> str:
    return f"Dear all, the number of my door is {number}, and you may come at any time of the day."


@pytest.fixture(scope="module")
def apart(tiny_dir: Path) -> Iterator[Served]:
    with served(tiny_dir, EngineConfig(), api_key=KEYS) as it:
        yield it


@pytest.fixture(scope="module")
def together(tiny_dir: Path) -> Iterator[Served]:
    with served(tiny_dir, EngineConfig(share_prefix_cache=True), api_key=KEYS) as it:
        yield it


def cached(it: Served, key: int, number: str, **body: Any) -> int:
    usage = it.chat(secret(number), key, max_tokens=2, ignore_eos=True, **body)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def common(builder: PromptBuilder, a: str, b: str) -> int:
    """Rows in whole blocks that two prompts share, but for the last token."""
    one, other = builder.build(secret(a)).ids, builder.build(secret(b)).ids
    same = next(
        (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y),
        min(len(one), len(other)),
    )
    return min(same, len(other) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("how", [{}, SPOKEN], ids=["text", "spoken"])
def test_a_right_guess_looks_like_a_wrong_one(
    apart: Served, builder: PromptBuilder, how: dict[str, Any]
) -> None:
    numbers = ("4815", "4816") if how else ("9115", "9116")
    right, wrong = numbers
    before = {key: cached(apart, key, "0000", **how) for key in (1, 2, 3)}
    assert len(set(before.values())) == 1
    whole, part = common(builder, right, right), common(builder, right, "0000")
    assert whole > part > 0
    assert cached(apart, 1, right, **how) == part, "of its own, up to the number"
    assert cached(apart, 2, right, **how) == cached(apart, 3, wrong, **how) == part
    assert [cached(apart, key, right, **how) for key in (1, 2)] == [whole, whole], (
        "its own it finds again"
    )


def test_the_talker_keeps_owners_apart_too(apart: Served) -> None:
    """Told by the rows that it computes, as a stopwatch would."""

    def rows(key: int, number: str) -> float:
        name = 'stretto_stage_rows_total{stage="talker"}'
        before = apart.do(stats(apart.engine))[name]
        apart.post(
            "/v1/audio/speech", key, input=aloud(number), min_audio_frames=2, max_audio_frames=2
        )
        return apart.do(stats(apart.engine))[name] - before

    cold = rows(1, "4815")
    assert rows(1, "4815") < cold
    assert rows(2, "4815") == rows(3, "4816") == cold


def test_caches_are_shared_on_purpose(together: Served, builder: PromptBuilder) -> None:
    assert cached(together, 1, "4815") == 0
    assert cached(together, 2, "4815") == common(builder, "4815", "4815")
    assert cached(together, 3, "4816") == common(builder, "4815", "4816")


def settled(flags: list[str], environ: dict[str, str]) -> bool:
    parser = argparse.ArgumentParser()
    add_serve_parser(parser.add_subparsers())
    settings = load_settings(vars(parser.parse_args(["serve", *flags])), environ)
    return settings.engine.share_prefix_cache


def test_nobody_shares_unless_told_to() -> None:
    assert not settled([], {})
    assert settled(["--share-prefix-cache"], {})
    assert settled([], {"STRETTO_SHARE_PREFIX_CACHE": "1"})
    assert not settled(["--no-share-prefix-cache"], {"STRETTO_SHARE_PREFIX_CACHE": "1"})


@pytest.mark.parametrize("wanted", [b'"role"', b'"data"'], ids=["text", "sound"])
def test_a_connection_that_ends_frees_everything(apart: Served, wanted: bytes) -> None:
    """In the middle of an answer that would go on for minutes."""
    endless = {
        "ignore_eos": True,
        "max_tokens": 6000,
        "min_audio_frames": 6000,
        "max_audio_frames": 6000,
    }
    ask = {"messages": secret("1"), "stream": True, "modalities": ["text", "audio"], **endless}
    body = json.dumps({**ask, "audio": {"format": "pcm16"}}).encode()
    head = (
        f"Host: 127.0.0.1\r\nAuthorization: Bearer {KEYS[3]}\r\nContent-Type: application/json\r\n"
    )
    with socket.create_connection(("127.0.0.1", apart.running.port), timeout=PATIENCE_S) as s:
        s.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()  # noqa: E501
            + body
        )
        read_until(s, wanted)
    apart.do(apart.running.server.service.admission.idle.wait())
    apart.do(freed(apart.engine))
