"""A server over HTTP: its address, its model, and streamed answers with their times of arrival."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from stretto.errors import Invalid
from stretto.loadtest.sse import EventSplitter, Piece, RequestFailed, error_message, read_event


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as the server lists it; other servers list only its name."""

    name: str
    voices: tuple[str, ...] = ()
    sample_rate: int = 24000


def api_root(url: str) -> str:
    """The address of the API, from what people write: with or without scheme, `/v1` or a slash at
    the end."""
    full = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as e:
        raise Invalid(f"{url}: not an address ({e})", "url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise Invalid(f"{url}: want http://HOST:PORT", "url")
    path = parsed.path.rstrip("/")
    return str(parsed.copy_with(path=path if path.endswith("/v1") else f"{path}/v1"))


def headers(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def timeouts(seconds: float) -> httpx.Timeout:
    """`seconds` between two signs of life; a server that cannot even be reached is given up
    sooner."""
    return httpx.Timeout(seconds, connect=min(seconds, 10.0))


@contextmanager
def failures() -> Iterator[None]:
    """Turns what httpx raises into `RequestFailed`."""
    try:
        yield
    except httpx.ConnectTimeout as e:
        raise RequestFailed("connect", "the server does not answer") from e
    except httpx.TimeoutException as e:
        raise RequestFailed("timeout", "the server fell silent") from e
    except httpx.ConnectError as e:
        raise RequestFailed("connect", f"the server cannot be reached ({e})") from e
    except httpx.TransportError as e:
        raise RequestFailed("broken", f"the connection broke ({str(e) or type(e).__name__})") from e


def raise_for(status: int, body: bytes) -> None:
    """A `RequestFailed` with the server's own words, if this was no success."""
    if status < 400:
        return
    try:
        answer: Any = httpx.Response(status, content=body).json()
    except ValueError:
        answer = body[:200].decode(errors="replace")
    raise RequestFailed(f"http {status}", error_message(answer, f"the server answered {status}"))


def read_models(status: int, body: bytes) -> ListedModel:
    """The first model of the answer to GET /models."""
    raise_for(status, body)
    try:
        first = httpx.Response(status, content=body).json()["data"][0]
        return ListedModel(
            first["id"], tuple(first.get("voices") or ()), int(first.get("sample_rate") or 24000)
        )
    except (ValueError, KeyError, IndexError, TypeError):
        raise RequestFailed("bad answer", "the server's list of models cannot be read") from None


async def answers(
    client: httpx.AsyncClient, body: Mapping[str, Any], now: Callable[[], float]
) -> AsyncIterator[tuple[float, Piece]]:
    """The pieces of a streamed answer, each with the time at which its bytes came."""
    splitter = EventSplitter()
    with failures():
        async with client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code >= 400:
                raise_for(response.status_code, await response.aread())
            async for chunk in response.aiter_bytes():
                at = now()
                for data in splitter.feed(chunk):
                    if data == b"[DONE]":
                        return
                    for piece in read_event(data):
                        yield at, piece
    raise RequestFailed("broken", "the stream ended before the answer did")


def answers_now(client: httpx.Client, body: Mapping[str, Any]) -> Iterator[Piece]:
    """The pieces of a streamed answer without asyncio, for a terminal."""
    splitter = EventSplitter()
    with failures(), client.stream("POST", "chat/completions", json=body) as response:
        if response.status_code >= 400:
            raise_for(response.status_code, response.read())
        for chunk in response.iter_bytes():
            for data in splitter.feed(chunk):
                if data == b"[DONE]":
                    return
                yield from read_event(data)
    raise RequestFailed("broken", "the stream ended before the answer did")
