"""Fetches media that messages name by address, from hosts that the operator has named and from no
others. Routes call `MediaFetcher.fetch` before they hand a conversation to the engine; one per
server, on the event loop.

A client could make a server that fetches addresses reach what only the server can: its own ports,
its network, the metadata of its cloud. So an address must be https (http where the operator says
so), its host one of `--allowed-media-domains` or below one, its port the one named there; all
addresses that the host resolves to must be public; and the connection goes to one of those that
were checked, so that a name which resolves to something else a moment later (rebinding) changes
nothing. A redirect is checked like the first address. No cookies, credentials or proxies of the
environment are used. Files have limits of size and time; only the decoders say what they are."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from stretto.config.server import MEDIA_DOMAIN, ServerConfig
from stretto.preprocess.media import MediaLimits
from stretto.preprocess.pool.fair_queue import FairQueue
from stretto.preprocess.pool.jobs import RemoteFiles
from stretto.preprocess.pool.memfile import MemFile
from stretto.server.http.body import Body
from stretto.server.tasks import run_all

MAX_REDIRECTS = 3
MAX_TRIES = 3  # addresses of a host that are connected to, one after the other
CONNECT_S = 3.0
PIECE = 64 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {
    "user-agent": "stretto",
    "accept": "image/*, audio/*, video/*",
    "accept-encoding": "identity",
    "connection": "close",
}
_PORTS = {"http": 80, "https": 443}
# what Python's versions do not agree on, or call global: addresses by which a cloud's machines
# reach its own services, and networks whose addresses stand for others
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        ("168.63.129.16/32", "192.0.0.0/24", "100.64.0.0/10", "192.88.99.0/24", "::/96",
         "64:ff9b::/96", "64:ff9b:1::/48", "2001::/23", "2002::/16", "fec0::/10"),
    )
)  # fmt: skip
_RESOLVING = ThreadPoolExecutor(4, "resolver")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class NotFetched(Exception):
    """Why a file could not be fetched, in words for the client."""


@dataclass(frozen=True, slots=True)
class AllowedDomain:
    """A host, and all below it."""

    name: str
    port: int | None = None  # None: the usual one
    http: bool = False  # without TLS, too

    @classmethod
    def of(cls, setting: str) -> AllowedDomain:
        match = MEDIA_DOMAIN.fullmatch(setting.lower())
        assert match is not None, "the configuration was checked"
        return cls(match[2], int(match[3]) if match[3] else None, bool(match[1]))

    def allows(self, url: httpx.URL, host: str) -> bool:
        named = host == self.name or host.endswith(f".{self.name}")
        port = url.port or _PORTS[url.scheme]
        return (
            named
            and (url.scheme == "https" or self.http)
            and port == (self.port or _PORTS[url.scheme])
        )


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """On threads of its own: a name server that does not answer holds them for long."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    return await asyncio.get_running_loop().run_in_executor(_RESOLVING, ask)


def is_public(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # with a zone, which no public one has
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    special = ip.is_multicast or ip.is_reserved or any(ip in network for network in _NOT_PUBLIC)
    return ip.is_global and not special


@dataclass(slots=True, eq=False)
class Download:
    """One file while it comes. Its bytes count among those of its request's body."""

    url: str
    body: Body
    failure: str = ""
    _pieces: deque[bytes] = field(default_factory=deque)

    def add(self, piece: bytes) -> None:
        self.body.reserve(len(piece))
        self._pieces.append(piece)

    def fail(self, why: str) -> None:
        self.failure = why
        self._pieces.clear()

    async def write(self, file: MemFile) -> None:
        """Append it to a file; others have their turn in between."""
        while self._pieces:
            file.append(self._pieces.popleft())
            await asyncio.sleep(0)


@dataclass(slots=True)
class MediaFetcher:
    allowed: tuple[AllowedDomain, ...]
    timeout: float  # seconds for all files of a request
    max_bytes: int  # of a file, and of all of a request
    places: FairQueue
    resolve: Resolve = resolve_host
    transport: httpx.AsyncBaseTransport | None = None  # connects to an address
    _client: httpx.AsyncClient | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> MediaFetcher:
        return cls(
            tuple(map(AllowedDomain.of, config.allowed_media_domains)),
            config.media_timeout,
            min(config.max_body_bytes, MediaLimits().file_bytes),
            FairQueue(config.media_fetches),
            # made at the start: reading the certificates takes 20 ms
            transport=httpx.AsyncHTTPTransport(
                trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
            )
            if config.allowed_media_domains
            else None,
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def fetch(self, urls: Sequence[str], body: Body) -> RemoteFiles | None:
        """What a request names, whose body holds the files from here on. What cannot be fetched
        does not fail here: whether it is a medium is known where the messages are read."""
        if not urls or not self.allowed:
            return None
        downloads = [Download(url, body) for url in urls]
        left = [self.max_bytes]
        await run_all([self._fetch(download, left) for download in downloads])
        file = MemFile.new()
        body.attach(file)
        spans = {}
        for download in downloads:
            start = file.size
            await download.write(file)
            spans[download.url] = (start, file.size)
        failures = {d.url: d.failure for d in downloads if d.failure}
        return RemoteFiles(file, {u: s for u, s in spans.items() if u not in failures}, failures)

    async def _fetch(self, download: Download, left: list[int]) -> None:
        client = download.body.client
        try:
            async with asyncio.timeout(self.timeout):
                await self.places.enter(client)
                try:
                    await self._follow(download, left)
                finally:
                    self.places.leave(client)
        except TimeoutError:
            download.fail(f"the file did not come within {self.timeout:g} s")
        except NotFetched as e:
            download.fail(str(e))

    async def _follow(self, download: Download, left: list[int]) -> None:
        """The content behind an address and its redirects."""
        try:
            url = httpx.URL(download.url)
            for _ in range(MAX_REDIRECTS + 1):
                redirect = await self._get(url, download, left)
                if redirect is None:
                    return
                url = url.join(redirect)
        except httpx.InvalidURL:
            raise NotFetched("this is no address") from None
        raise NotFetched(f"its server redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: httpx.URL, download: Download, left: list[int]) -> str | None:
        """Write the content, or say where it redirects to."""
        host = self._checked(url)
        for address in (await self._addresses(host, url))[:MAX_TRIES]:
            request = self._open().build_request(
                "GET",
                url.copy_with(host=address),
                headers={**_HEADERS, "host": url.netloc.decode("ascii")},
                timeout=httpx.Timeout(self.timeout, connect=CONNECT_S),
                extensions={"sni_hostname": host},
            )
            try:
                response = await self._open().send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except httpx.HTTPError:
                break
            try:
                return await self._read(response, download, left)
            except httpx.HTTPError:
                raise NotFetched("its server broke off") from None
            finally:
                await response.aclose()
        raise NotFetched("its server cannot be reached")

    def _checked(self, url: httpx.URL) -> str:
        """The host of an address that may be asked for."""
        if url.userinfo:
            raise NotFetched("an address with a user's name or password is not fetched")
        host = url.raw_host.decode("ascii").lower().removesuffix(".")
        known = url.scheme in _PORTS and any(d.allows(url, host) for d in self.allowed)
        if not known:
            raise NotFetched(
                "its host, port or scheme is none of those that --allowed-media-domains names"
            )
        return host

    async def _addresses(self, host: str, url: httpx.URL) -> Sequence[str]:
        """Of a host, all of them public. They are connected to as they are: its name is not
        resolved again."""
        try:
            found = await self.resolve(host, url.port or _PORTS[url.scheme])
        except (OSError, UnicodeError):
            found = []
        if not found or not all(map(is_public, found)):
            raise NotFetched("its host has no public address")
        return found

    async def _read(
        self, response: httpx.Response, download: Download, left: list[int]
    ) -> str | None:
        if response.status_code in _REDIRECTS:
            return str(response.headers.get("location", ""))
        if response.status_code != 200:
            raise NotFetched(f"its server answered {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise NotFetched("its server sends it compressed")
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > left[0]:
            raise self._too_large()
        async for piece in response.aiter_raw(PIECE):
            if len(piece) > left[0]:
                raise self._too_large()
            left[0] -= len(piece)
            download.add(piece)
        return None

    def _too_large(self) -> NotFetched:
        most = self.max_bytes / (1 << 20)
        return NotFetched(f"the remote files of a request have at most {most:g} MiB together")

    def _open(self) -> httpx.AsyncClient:
        """Connections and cookies are not kept: a connection that was checked for a host serves no
        other, and a cookie of one client's request would go along with the next client's."""
        if self._client is None:
            no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
            self._client = httpx.AsyncClient(
                transport=self.transport,
                trust_env=False,
                follow_redirects=False,
                cookies=no_cookies,
            )
        return self._client
