"""Runs the app on uvicorn until told to stop, and stops it with care.

The first SIGTERM or SIGINT drains: health says so, nothing new is taken, running answers finish within the time
allowed, and the process ends with 0. A second one ends it at once. The port is open all the while, so that a load
balancer sees `draining` rather than a refused connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.applications import Starlette

from stretto.errors import StrettoError
from stretto.server.app import make_app
from stretto.server.config import ServerConfig
from stretto.server.floods import Floods
from stretto.server.pages import WEB
from stretto.server.protocol import Connection, Front
from stretto.server.service import OpenEngine, Service
from stretto.server.shares import Shares
from stretto.server.websocket import Socket

log = logging.getLogger("stretto.server")

LAST_WORDS = 2.0  # seconds for connections to close once everything is answered
WS_MAX_BYTES = 21 << 20  # of a message: 15 MiB of sound in base64, and some
BACKLOG, AT_ONCE = 2048, 16  # connections that wait to be taken; those taken before others have their turn
OTHER_FILES = 1024  # links, hosts, the listener: generous
POLL_SECONDS = 0.1


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn would close the port first and end with the signal's own status. And makes our
    kind of connections, with a limit to the time that TLS may take before one of them is there."""

    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config)
        self.front = front

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise StrettoError("the server's own start failed; the log says why")
        loop, config = asyncio.get_running_loop(), self.config

        def connect() -> Connection:
            return Connection(self.front, config, self.server_state, self.lifespan.state, loop)

        limit = self.front.header_timeout if config.ssl else None
        self.servers = [
            await loop.create_server(
                connect, sock=s, ssl=config.ssl, backlog=AT_ONCE, ssl_handshake_timeout=limit
            )
            for s in sockets or ()
        ]  # fmt: skip
        for s in sockets or ():
            s.listen(BACKLOG)  # asyncio takes as many at once as it lets wait
        self.started = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@dataclass(slots=True)
class Server:
    """A server on a bound socket; `config` holds the port that was found."""

    config: ServerConfig
    app: Starlette
    sockets: list[socket.socket]
    _uvicorn: _Uvicorn
    _stopping: asyncio.Task[None] | None = None
    _urgent: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def bind(cls, config: ServerConfig, open_engine: OpenEngine, web: Path = WEB) -> Server:
        """Takes the address, so that whoever asked knows the port before anything is loaded."""
        listener = listen(config)
        if not config.uds:
            config = replace(config, port=listener.getsockname()[1])
        app = make_app(config, open_engine, web)
        metrics = app.state.service.metrics
        front = Front.of(config, lambda reason: metrics.refused.labels(reason).inc())
        server = _Uvicorn(_with_tls(_settings(config, app, front.floods, app.state.service.sessions.memory)), front)
        metrics.connections.set_function(lambda: len(server.server_state.connections))
        return cls(config, app, [listener], server)

    @property
    def service(self) -> Service:
        service = self.app.state.service
        assert isinstance(service, Service)
        return service

    async def serve(self) -> int:
        """Until it is told to stop. The process's exit status: 1 if the engine never came up."""
        await self._uvicorn.serve(self.sockets)
        if self._stopping is not None:
            await self._stopping
        if self.config.uds:
            Path(self.config.uds).unlink(missing_ok=True)
        return 1 if self.service.failure is not None else 0

    def catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Once: drain, then end. Twice: end now."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        else:
            self._urgent.set()

    async def _stop(self) -> None:
        if self.service.failure is None:
            log.info("draining: %d running, at most %g s", self.service.admission.running, self.config.drain_timeout)
        drain = asyncio.ensure_future(self._drain(self.config.drain_timeout))
        urgent = asyncio.ensure_future(self._urgent.wait())
        await asyncio.wait((drain, urgent), return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()
        urgent.cancel()
        await asyncio.wait((drain, urgent))
        if cut := self.service.admission.running:
            log.warning("ending with %d requests unfinished", cut)
            self.service.cut.set_result(None)
        self._uvicorn.should_exit = True

    async def _drain(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self.service.drain(timeout)
                await self.service.admission.idle.wait()  # the engine is done; the last bytes may not be
                await self.service.sessions.idle.wait()
        except TimeoutError:
            return


def listen(config: ServerConfig) -> socket.socket:
    """The server's own socket; a sentence if it cannot be had."""
    where = f"--uds {config.uds}" if config.uds else f"{config.host}:{config.port}"
    try:
        return _listen(config)
    except (OSError, UnicodeError) as e:  # a host's name may be no name at all
        why = getattr(e, "strerror", None) or str(e)
        taken = "; --port N takes another, --port 0 any free one" if getattr(e, "errno", 0) == errno.EADDRINUSE else ""
        raise StrettoError(f"cannot listen on {where}: {why}{taken}") from None


def _listen(config: ServerConfig) -> socket.socket:
    if config.uds:
        Path(config.uds).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(config.uds)
        return listener
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Only to a socket that says TCP does asyncio apply TCP_NODELAY; without it a packet waits for the last one's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.host, config.port))
    listener.listen(BACKLOG)  # from now on clients wait rather than being refused
    return listener


def _raise_file_limit(connections: int) -> None:
    """Let the process open a file for each connection and some for itself; many systems begin with 1024 in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _settings(config: ServerConfig, app: Starlette, floods: Floods, memory: Shares) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        root_path=config.root_path,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        proxy_headers=bool(config.trusted_proxies),  # or any client says which address it has
        forwarded_allow_ips="*" if "*" in config.trusted_proxies else list(config.trusted_proxies),
        http="httptools",
        ws=cast(type[asyncio.Protocol], partial(Socket, floods, memory)),
        ws_max_size=WS_MAX_BYTES,
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(LAST_WORDS),
    )


def _with_tls(settings: uvicorn.Config) -> uvicorn.Config:
    """Reads the certificate now: what is wrong with it should be told before anything is loaded."""
    try:
        settings.load()
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        raise StrettoError(f"TLS cannot be set up with {settings.ssl_certfile}: {e}") from None
    return settings


async def run(
    config: ServerConfig, open_engine: OpenEngine, announce: Callable[[Server], Awaitable[None]] | None = None
) -> int:
    """Serve until a signal, or until the engine turns out never to come. `announce` accompanies the start."""
    _raise_file_limit(config.max_connections)
    server = Server.bind(config, open_engine)
    server.catch_signals()

    async def accompany() -> None:
        if announce is not None:
            await announce(server)
        await server.service.opened.wait()
        while (progress := server.service.progress).state == "loading":
            await asyncio.sleep(POLL_SECONDS)
        if progress.state == "dead":
            server.service.failure = progress.error or "the engine died while it was loading"
            server.stop()

    task = asyncio.ensure_future(accompany())
    try:
        return await server.serve()
    finally:
        task.cancel()
