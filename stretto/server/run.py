"""Runs the app on uvicorn until a signal, and stops it in order. Called by `stretto serve`.

The first SIGTERM or SIGINT drains: `/health` says so, new requests are refused, running answers may
finish within the drain timeout, and the process ends with status 0. A second signal ends it at
once. The port stays open all the while, so that a load balancer sees `draining` rather than a
refused connection."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.applications import Starlette

from stretto.config.server import LogFormat, LogLevel, ServerConfig
from stretto.errors import StrettoError
from stretto.observe import logs
from stretto.server.app import make_app, make_metrics_app
from stretto.server.http.connection import Connection, ConnectionLimits
from stretto.server.http.exchange import CutConnection
from stretto.server.http.listen import BACKLOG, Listener, listen, listen_for_metrics
from stretto.server.http.websocket import Socket
from stretto.server.pages import WEB
from stretto.server.service import OpenEngine, Service
from stretto.server.shares import Shares

log = logging.getLogger("stretto.server")

CLOSE_TIMEOUT_S = 2.0  # seconds for connections to close once everything is answered
WS_MAX_BYTES = 21 << 20  # of a message: 15 MiB of sound in base64, and some
AT_ONCE = 16  # connections that are taken before others have their turn
OTHER_FILES = 1024  # links, hosts, the listener: generous
FEWEST_FILES = 256  # with which a server can work at all
POLL_SECONDS = 0.1


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn would close the port first and end with the signal's own
    status. And makes our kind of connections, with a limit to the time that TLS may take before one
    of them is there."""

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionLimits,
        others: Sequence[uvicorn.Config] = (),
    ) -> None:
        """`others`: what is served on further sockets, in their order."""
        super().__init__(config)
        self.limits = limits
        self.others = others

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise StrettoError("the server's own start failed; the log says why")
        loop = asyncio.get_running_loop()
        limit = self.limits.header_timeout if self.config.ssl else None
        self.servers = []
        for s, config in zip(sockets or (), (self.config, *self.others), strict=True):
            connect = partial(
                Connection, self.limits, config, self.server_state, self.lifespan.state, loop
            )
            server = await loop.create_server(
                connect, sock=s, ssl=config.ssl, backlog=AT_ONCE, ssl_handshake_timeout=limit
            )
            self.servers.append(server)
            s.listen(BACKLOG)  # asyncio takes as many at once as it lets wait
        self.started = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@dataclass(slots=True)
class Server:
    """A server on bound sockets; `config` holds the ports that were found."""

    config: ServerConfig
    app: Starlette
    listeners: list[Listener]
    uvicorn: _Uvicorn
    _stopping: asyncio.Task[None] | None = None
    _urgent: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def bind(cls, config: ServerConfig, open_engine: OpenEngine, web: Path = WEB) -> Server:
        """Bind the addresses, so that the caller knows the ports before anything is loaded."""
        with ExitStack() as taken:
            listeners = [listen(config)]
            taken.callback(listeners[0].close)
            if not config.uds:
                config = replace(config, port=listeners[0].port)
            if (for_metrics := listen_for_metrics(config)) is not None:
                listeners.append(for_metrics)
                taken.callback(for_metrics.close)
                config = replace(config, metrics_port=for_metrics.port)
            app = make_app(config, open_engine, web)
            metrics = app.state.service.metrics
            limits = ConnectionLimits.of(
                config, lambda reason: metrics.refused.labels(reason).inc()
            )
            apps = [app, *([make_metrics_app(app.state.service)] if for_metrics else [])]
            memory = app.state.service.sessions.memory
            first, *others = (_with_tls(_settings(config, a, limits, memory)) for a in apps)
            server = _Uvicorn(first, limits, others)
            metrics.connections.set_function(lambda: len(server.server_state.connections))
            taken.pop_all()
            return cls(config, app, listeners, server)

    @property
    def service(self) -> Service:
        service = self.app.state.service
        assert isinstance(service, Service)
        return service

    async def serve(self) -> int:
        """Serve until `stop`. Returns the process's exit status: 1 if the engine never came up."""
        try:
            await self.uvicorn.serve([x.socket for x in self.listeners])
            if self._stopping is not None:
                await self._stopping
        finally:
            for listener in self.listeners:
                listener.close()
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
            log.info(
                "draining: %d running, at most %g s",
                self.service.admission.running,
                self.config.drain_timeout,
            )
        drain = asyncio.ensure_future(self._drain(self.config.drain_timeout))
        urgent = asyncio.ensure_future(self._urgent.wait())
        await asyncio.wait((drain, urgent), return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()
        urgent.cancel()
        await asyncio.wait((drain, urgent))
        if cut := self.service.admission.running:
            log.warning("ending with %d requests unfinished", cut)
            self.service.cut.set_result(None)
        self.uvicorn.should_exit = True

    async def _drain(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self.service.drain(timeout)
                # The engine is done; the last bytes may not have been sent.
                await self.service.admission.idle.wait()
                await self.service.sessions.idle.wait()
        except TimeoutError:
            return


def raise_file_limit(connections: int) -> int:
    """Let the process open a file for each connection and some for itself; many systems begin with
    1024 in all. How many connections it can take: fewer than wished where the system allows fewer
    files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = resource.RLIM_INFINITY if hard == resource.RLIM_INFINITY else hard
    needed_files = (
        connections + OTHER_FILES
        if most == resource.RLIM_INFINITY
        else min(connections + OTHER_FILES, most)
    )
    if needed_files < FEWEST_FILES:
        raise StrettoError(
            f"this process may open {most} files, and a server needs {FEWEST_FILES}: raise `ulimit "
            f"-n`"
        )
    if soft != resource.RLIM_INFINITY and soft < needed_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files, hard))
    if needed_files == connections + OTHER_FILES:
        return connections
    fewer = min(connections, needed_files // 2)
    if fewer < connections:
        log.warning(
            "this process may open %d files: it takes %d connections, not %d; `ulimit -n %d` would "
            "do",
            needed_files,
            fewer,
            connections,
            connections + OTHER_FILES,
        )
    return fewer


def _settings(
    config: ServerConfig, app: Starlette, limits: ConnectionLimits, memory: Shares
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        root_path=config.root_path,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        proxy_headers=bool(config.trusted_proxies),  # or any client says which address it has
        forwarded_allow_ips="*" if "*" in config.trusted_proxies else list(config.trusted_proxies),
        http="httptools",
        ws=cast(type[asyncio.Protocol], partial(Socket, limits.floods, limits.large_reads, memory)),
        ws_max_size=WS_MAX_BYTES,
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
    )


def _with_tls(settings: uvicorn.Config) -> uvicorn.Config:
    """Read the certificate now, so that an error in it ends the start before anything is loaded."""
    try:
        settings.load()
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        raise StrettoError(f"TLS cannot be set up with {settings.ssl_certfile}: {e}") from None
    return settings


async def run(
    config: ServerConfig,
    open_engine: OpenEngine,
    announce: Callable[[Server], Awaitable[None]] | None = None,
) -> int:
    """Serve until a signal, or until the engine turns out never to come. `announce` runs
    while the model is loaded."""
    config = replace(config, max_connections=raise_file_limit(config.max_connections))
    server = Server.bind(config, open_engine)
    server.catch_signals()

    async def watch_start() -> None:
        if announce is not None:
            await announce(server)
        await server.service.opened.wait()
        while (progress := server.service.progress).state == "loading":
            await asyncio.sleep(POLL_SECONDS)
        if progress.state == "dead":
            server.service.fail(progress.error or "the engine died while it was loading")
            server.stop()

    task = asyncio.ensure_future(watch_start())
    try:
        return await server.serve()
    finally:
        task.cancel()


class CutConnectionFilter(logging.Filter):
    """Drops uvicorn's errors about connections that we cut on purpose: these have been logged
    already."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], CutConnection))


def set_up_logs(format: LogFormat, level: LogLevel) -> None:
    """The server's logs and uvicorn's, in one format. Called by the command, once."""
    logs.set_up(format, level)
    os.environ[logs.FORMAT] = format  # hosts and prompt workers write the same
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(CutConnectionFilter())
