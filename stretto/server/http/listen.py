"""Binds the addresses that a server listens on. `run.py` calls it before the model is loaded.

A `Listener` owns its socket and, if that is a Unix socket, its file. A file that is not a socket is
never removed, nor is a socket at which another server answers."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.config.server import ServerConfig
from stretto.errors import StrettoError

BACKLOG = 2048  # connections that wait to be taken
ANSWER_S = 1.0  # in which a server takes a connection to its Unix socket


class Occupied(StrettoError):
    """A Unix socket's path belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound socket, on which clients wait from now on rather than being refused."""

    socket: socket.socket
    path: Path | None = None  # of a Unix socket
    made: tuple[int, ...] = ()  # which file that is

    @property
    def port(self) -> int:
        port: int = self.socket.getsockname()[1]
        return port

    def close(self) -> None:
        self.socket.close()
        if self.path is not None:
            with suppress(OSError):
                if _identity(self.path) == self.made:
                    self.path.unlink()


def listen(config: ServerConfig) -> Listener:
    """Where the server takes requests; a sentence if the address cannot be had."""
    if config.uds is None:
        return _listen_tcp(config.host, config.port, "--port")
    try:
        return _listen_unix(Path(config.uds))
    except (OSError, Occupied) as e:
        raise StrettoError(
            f"cannot listen on --uds {config.uds}: {getattr(e, 'strerror', None) or e}"
        ) from None


def listen_for_metrics(config: ServerConfig) -> Listener | None:
    """Where the server shows its metrics, if that is elsewhere."""
    if not config.metrics or config.metrics_port is None:
        return None
    return _listen_tcp(config.host, config.metrics_port, "--metrics-port")


def _listen_tcp(host: str, port: int, flag: str) -> Listener:
    # Only to a socket that says TCP does asyncio apply TCP_NODELAY; without it a packet waits for
    # the last one's ACK.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, UnicodeError, OverflowError) as e:  # a host's name may be no name at all
        listener.close()
        why = getattr(e, "strerror", None) or str(e)
        taken = (
            f"; {flag} N takes another, {flag} 0 any free one"
            if getattr(e, "errno", 0) == errno.EADDRINUSE
            else ""
        )
        raise StrettoError(f"cannot listen on {host}:{port}: {why}{taken}") from None
    return Listener(listener)


def _listen_unix(path: Path) -> Listener:
    with _folder_locked(
        path.parent
    ):  # else of two servers that start at once, one could remove the other's socket
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            listener.listen(BACKLOG)
            return Listener(listener, path, _identity(path))
        except OSError:
            listener.close()
            raise


def _identity(path: Path) -> tuple[int, ...]:
    """Of a file; its inode's number alone may be given to the next one."""
    there = path.lstat()
    return there.st_dev, there.st_ino, there.st_mtime_ns


@contextmanager
def _folder_locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    """The socket of a server that is gone makes room for ours; everything else stays, and is a
    reason to give up."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Occupied(
            "something that is not a socket has this path, and is not removed; name another path"
        )
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(ANSWER_S)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:  # its queue is full, or we may not ask
            pass
    raise Occupied("this socket is in use by another server; end that one, or name another path")
