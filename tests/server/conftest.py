"""A server on a free port of the loopback, in a thread of its own, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import soundfile
import uvicorn.server

from stretto.config.server import ServerConfig
from stretto.engine.protocol import EngineClient
from stretto.server.run import Server

if TYPE_CHECKING:
    import openai

T = TypeVar("T")
# what hangs is ended by pytest: how long anything may take depends on the machine
PATIENCE_S = None
# of a request sent by hand
HEAD = "HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class _Asyncio:
    """asyncio for uvicorn, which looks ten times a second whether it is to stop, and sleeps as long
    when it does: with hundreds of servers in a run, that is a minute."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 10)


uvicorn.server.asyncio = _Asyncio()  # type: ignore[assignment]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after checking that it has OpenAI's shape and no stack trace."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "Traceback" not in error["message"]
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The data of a stream of events; the last may be "[DONE]"."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        return [
            p if (p := part.removeprefix("data: ")) == "[DONE]" else json.loads(p) for part in parts
        ]


class Running:
    """A live server. `do` runs a coroutine on its loop, where its state may be looked at."""

    def __init__(self, open_engine: Callable[[], Awaitable[EngineClient]], **settings: Any) -> None:
        self.open_engine, self.settings = open_engine, settings
        self.loop = asyncio.new_event_loop()
        self.bound = threading.Event()
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run, name="server")

    def _run(self) -> None:
        async def main() -> int:
            self.server = Server.bind(ServerConfig(port=0, **self.settings), self.open_engine)
            self.server.service.metrics.page_s = 0.0  # tests read what holds now
            self.bound.set()
            return await self.server.serve()

        with contextlib.closing(self.loop):
            self.status = self.loop.run_until_complete(main())

    def __enter__(self) -> Running:
        self.thread.start()
        assert self.bound.wait(PATIENCE_S)
        self.do(self.server.service.opened.wait())
        return self

    def __exit__(self, *_: object) -> None:
        if "_client" in self.__dict__:
            self._client.close()
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    @property
    def url(self) -> str:
        return self.server.config.url

    @property
    def port(self) -> int:
        return self.server.config.port

    @cached_property
    def _client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request on a connection of its own; a body that is not bytes is sent as JSON, and any
        is called that."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
            answer = connection.getresponse()
            return Reply(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            )

    def client(self, **options: Any) -> openai.OpenAI:
        return self._client.with_options(**options) if options else self._client


def read_until(s: socket.socket, wanted: bytes) -> bytes:
    """What comes until `wanted` has come."""
    got = b""
    while wanted not in got:
        part = s.recv(65536)
        assert part, f"the connection ended before {wanted!r} came: {got!r}"
        got += part
    return got


def read_file(data: bytes) -> tuple[npt.NDArray[np.int16], int]:
    """Samples and rate of a sound file, by libsndfile."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    return samples, rate


def read_open(data: bytes) -> tuple[npt.NDArray[np.int16], int]:
    """The same by FFmpeg, which takes files that do not say how long they are."""
    import av

    with av.open(io.BytesIO(data)) as file:
        rate = file.streams.audio[0].rate
        return np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)]), rate


def serve(engine: EngineClient, **settings: Any) -> Running:
    async def open_engine() -> EngineClient:
        return engine

    return Running(open_engine, **settings)
