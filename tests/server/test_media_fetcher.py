"""Remote media: from allowed hosts and public addresses alone, whatever names and redirects say,
and within limits. The network is replaced at its edge: names are resolved by a table, and a
connection to any public address ends at a server of the test's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from stretto.config.server import ServerConfig
from stretto.errors import Invalid
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.pool.fair_queue import FairQueue
from stretto.preprocess.pool.jobs import Conversation, RemoteFiles
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.pool import PoolSettings, PromptPool
from stretto.preprocess.pool.threads import InThreads
from stretto.server.http.body import Body
from stretto.server.media_fetcher import AllowedDomain, Download, MediaFetcher, is_public
from stretto.server.openai.error_body import Refused
from stretto.server.shares import Shares
from tests.preprocess.pool.workers import BUILDER
from tests.preprocess.samples import data_uri, image_file, picture
from tests.server.conftest import Reply, Running, serve
from tests.server.scripted_engine import ScriptedEngine

PUBLIC, OTHER = "93.184.216.34", "2606:2800:220:1::1"
Handler = Callable[["Request"], None]


class Request(BaseHTTPRequestHandler):
    """Answered by the handler of its path."""

    protocol_version = "HTTP/1.1"
    handlers: ClassVar[dict[str, Handler]] = {}
    seen: ClassVar[list[tuple[str, str, dict[str, str]]]] = []
    connections: ClassVar[set[int]] = set()  # by the client's port

    def do_GET(self) -> None:
        headers = {k.lower(): v for k, v in self.headers.items()}
        self.seen.append((headers["host"], self.path, headers))
        self.connections.add(self.client_address[1])
        self.handlers[self.path](self)

    def answer(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@dataclass
class Web:
    """All hosts of the test's: one server, and a table of names."""

    port: int
    names: dict[str, Sequence[str]]
    asked: list[str] = field(default_factory=list)  # names that were resolved
    connected: list[str] = field(default_factory=list)  # addresses
    verified: list[str] = field(default_factory=list)  # names that certificates must be for
    unreachable: set[str] = field(default_factory=set)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.names:
            raise socket.gaierror("no such name")
        return self.names[host]


class ToTheTest(httpx.AsyncHTTPTransport):
    """Connects to the test's server, whatever address was asked for."""

    def __init__(self, web: Web) -> None:
        super().__init__()
        self.web = web

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        address = request.url.host
        self.web.connected.append(address)
        self.web.verified.append(request.extensions.get("sni_hostname", address))
        if address in self.web.unreachable:
            raise httpx.ConnectError("unreachable")
        url = request.url.copy_with(scheme="http", host="127.0.0.1", port=self.web.port)
        sent = httpx.Request(
            request.method, url, headers=request.headers, extensions=request.extensions
        )
        return await super().handle_async_request(sent)


@pytest.fixture
def web() -> Iterator[Web]:
    Request.handlers, Request.seen, Request.connections = {}, [], set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Request) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Web(server.server_port, {"cdn.example": [PUBLIC], "a.cdn.example": [OTHER]})
        server.shutdown()
        thread.join()


def fetcher(web: Web, *allowed: str, **settings: Any) -> MediaFetcher:
    config = ServerConfig(allowed_media_domains=allowed or ("cdn.example",), **settings)
    own = MediaFetcher.of(config)
    own.resolve = web.resolve
    own.transport = ToTheTest(web)
    return own


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def fetch(own: MediaFetcher, *urls: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """What came, and why the others did not."""
    shares = Shares(1 << 30)

    async def work() -> tuple[dict[str, bytes], dict[str, str]]:
        with contextlib.closing(Body(shares, "me")) as body:
            files = await own.fetch(urls, body)
            assert isinstance(files, RemoteFiles)
            assert shares.held >= files.file.size
            content = {u: files.file.read(*span) for u, span in files.spans.items()}
        await own.close()
        assert files.file.fd == -1, "it goes with the request"
        return content, files.failures

    found: tuple[dict[str, bytes], dict[str, str]] = run(work())
    assert shares.held == 0
    assert own.places.running == 0
    return found


def why(own: MediaFetcher, url: str) -> str:
    content, failures = fetch(own, url)
    assert not content
    return failures[url]


def test_files_come_whole_and_side_by_side(web: Web) -> None:
    Request.handlers["/a?x=1"] = lambda r: r.answer(b"first")
    Request.handlers["/b"] = lambda r: r.answer(bytes(200_000))
    urls = ("https://cdn.example/a?x=1#part", "https://A.CDN.example:443/b")
    content, failures = fetch(fetcher(web), *urls)
    assert content == {urls[0]: b"first", urls[1]: bytes(200_000)}
    assert failures == {}
    hosts = sorted(host for host, *_ in Request.seen)
    assert hosts == ["a.cdn.example", "cdn.example"]
    assert sorted(web.connected) == [OTHER, PUBLIC]
    assert sorted(web.verified) == ["a.cdn.example", "cdn.example"], "not the address"
    for _, _, headers in Request.seen:
        assert not {"cookie", "authorization", "referer", "proxy-authorization"} & set(headers)


def test_nothing_is_fetched_where_no_domain_is_named(web: Web) -> None:
    own = MediaFetcher.of(ServerConfig())
    own.resolve = web.resolve
    body = Body(Shares(1 << 20), "me")
    assert run(own.fetch(("https://cdn.example/a",), body)) is None
    assert run(fetcher(web).fetch((), body)) is None
    assert web.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "https://example/a",
        "https://other.example/a",
        "https://evilcdn.example/a",
        "https://cdn.example.evil.com/a",
        "https://cdn.example@evil.com/a",
        "https://evil.com\\@cdn.example/a",
        "https://evil.com#@cdn.example/a",
        "https://user:password@cdn.example/a",
        "https://cdn.example:8443/a",
        "http://cdn.example/a",
        "http://cdn.example:443/a",
        "https://93.184.216.34/a",
        "https://2130706433/a",
        "https://0x7f.1/a",
        "https://[::1]/a",
        "https:///a",
        "https://",
        "https://cdn.example:99999/a",
        "https://cdn.examp\u0131e/a",
        "https://\x00cdn.example/",
    ],
)
def test_other_hosts_ports_and_schemes_are_not_even_resolved(url: str, web: Web) -> None:
    assert why(fetcher(web), url)
    assert web.asked == web.connected == []


def test_what_the_operator_names_more_exactly(web: Web) -> None:
    Request.handlers["/a"] = lambda r: r.answer(b"x")
    own = ("http://cdn.example", "a.cdn.example:8443")
    for url in (
        "http://cdn.example/a",
        "https://cdn.example/a",
        "https://a.cdn.example:8443/a",
    ):
        assert fetch(fetcher(web, *own), url)[0] == {url: b"x"}
    assert why(fetcher(web, "a.cdn.example:8443"), "https://a.cdn.example/a")
    for stated in ("", "*", "127.0.0.1", "[::1]", "localhost", "https://cdn.example", "a.b/c"):
        with pytest.raises(Invalid, match="allowed_media_domains"):
            ServerConfig(allowed_media_domains=(stated,))
    assert AllowedDomain.of("http://CDN.example:81") == AllowedDomain("cdn.example", 81, True)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1",
        "198.18.0.1", "168.63.129.16", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:100.64.0.1", "64:ff9b::7f00:1",
        "64:ff9b:1::1", "2002:7f00:1::", "2001::1", "2001:db8::1", "::127.0.0.1", "fec0::1",
        "nonsense", "",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str, web: Web) -> None:
    assert not is_public(address)
    web.names["cdn.example"] = [PUBLIC, address]
    assert why(fetcher(web), "https://cdn.example/a") == "its host has no public address"
    assert web.connected == [], "one such address is enough"


@pytest.mark.parametrize("address", [PUBLIC, OTHER, "8.8.8.8", "::ffff:8.8.8.8", "1.1.1.1"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


def test_a_name_that_changes_is_not_resolved_again(web: Web) -> None:
    """Rebinding: public when it is checked, the loopback a moment later."""
    answers = [[PUBLIC], ["127.0.0.1"]]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    Request.handlers["/a"] = lambda r: r.answer(b"x")
    Request.handlers["/b"] = lambda r: r.answer(b"", 302, location="/a")
    own = fetcher(web)
    own.resolve = resolve
    assert fetch(own, "https://cdn.example/a")[0]
    assert web.connected == [PUBLIC], "to the address that was checked"
    answers[:] = [[PUBLIC], ["127.0.0.1"]]
    own = fetcher(web)
    own.resolve = resolve
    assert why(own, "https://cdn.example/b") == "its host has no public address"
    assert web.connected == [PUBLIC, PUBLIC], "each redirect is checked as the first address was"


@pytest.mark.parametrize(
    "location",
    [
        "https://evil.com/a",
        "http://cdn.example/a",
        "http://169.254.169.254/latest",
        "https://user@cdn.example/a",
        "file:///etc/passwd",
        "gopher://cdn.example/a",
        "//evil.com/a",
        "https://[::1",
    ],
)
def test_redirects_lead_nowhere_else(location: str, web: Web) -> None:
    Request.handlers["/a"] = lambda r: r.answer(b"", 302, location=location)
    assert why(fetcher(web), "https://cdn.example/a")
    assert web.connected == [PUBLIC]


def test_redirects_are_few(web: Web) -> None:
    for i in range(6):
        Request.handlers[f"/{i}"] = lambda r: r.answer(
            b"", 307, location=f"https://a.cdn.example/{int(r.path[1:]) + 1}"
        )
    Request.handlers["/6"] = lambda r: r.answer(b"end")
    assert fetch(fetcher(web), "https://cdn.example/3")[0] == {"https://cdn.example/3": b"end"}
    assert "more than 3 times" in why(fetcher(web), "https://cdn.example/2")


def test_sizes(web: Web) -> None:
    def endless(r: Request) -> None:
        r.send_response(200)
        r.send_header("connection", "close")
        r.end_headers()
        with contextlib.suppress(OSError):
            while True:
                r.wfile.write(bytes(10_000))

    Request.handlers["/stated"] = lambda r: r.answer(b"", content_length=str(1 << 40))
    Request.handlers["/endless"] = endless
    Request.handlers["/half"] = lambda r: r.answer(bytes(600_000))
    small = {"max_body_mb": 1.0}
    for path in ("stated", "endless"):
        assert "at most 1 MiB" in why(fetcher(web, **small), f"https://cdn.example/{path}")
    urls = "https://cdn.example/half", "https://a.cdn.example/half"
    content, failures = fetch(fetcher(web, **small), *urls)
    assert len(content) < 2
    assert failures, "together"


def test_files_count_among_the_bodies_of_their_client(web: Web) -> None:
    Request.handlers["/a"] = lambda r: r.answer(bytes(600_000))
    shares = Shares(1_000_000)

    async def work() -> None:
        with contextlib.closing(Body(shares, "me")) as body, pytest.raises(Refused) as e:
            await fetcher(web).fetch(("https://cdn.example/a",), body)
        assert e.value.status == 429

    run(work())
    assert shares.held == 0


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        (404, {}, "its server answered 404"),
        (206, {}, "its server answered 206"),
        (200, {"content_encoding": "gzip"}, "compressed"),
        (302, {}, "redirects more than 3"),
    ],
)
def test_answers_that_are_no_file(
    status: int, headers: dict[str, str], says: str, web: Web
) -> None:
    Request.handlers["/a"] = lambda r: r.answer(b"data", status, **headers)
    assert says in why(fetcher(web), "https://cdn.example/a")


def test_servers_that_break_off(web: Web) -> None:
    def short(r: Request) -> None:
        r.answer(b"half", content_length="8")
        r.connection.shutdown(socket.SHUT_RDWR)

    Request.handlers["/a"] = short
    Request.handlers["/b"] = lambda r: r.connection.shutdown(socket.SHUT_RDWR)
    assert "broke off" in why(fetcher(web), "https://cdn.example/a")
    assert "cannot be reached" in why(fetcher(web), "https://cdn.example/b")


def test_the_next_address_is_tried(web: Web) -> None:
    Request.handlers["/a"] = lambda r: r.answer(b"x")
    web.names["cdn.example"] = [OTHER, PUBLIC]
    web.unreachable = {OTHER}
    assert fetch(fetcher(web), "https://cdn.example/a")[0]
    assert web.connected == [OTHER, PUBLIC]
    web.unreachable = {OTHER, PUBLIC}
    assert "cannot be reached" in why(fetcher(web), "https://cdn.example/a")
    assert "no public address" in why(fetcher(web), "https://nowhere.cdn.example/a")


def test_addresses_that_are_tried_are_few(web: Web) -> None:
    web.names["cdn.example"] = [f"93.184.216.{i}" for i in range(8)]
    web.unreachable = set(web.names["cdn.example"])
    assert "cannot be reached" in why(fetcher(web), "https://cdn.example/a")
    assert web.connected == web.names["cdn.example"][:3]


def test_nothing_of_a_server_is_held_for_the_next_request(web: Web) -> None:
    """No cookie, by which a server would know the next client's request, and no connection, whose
    certificate was checked for one host alone."""
    Request.handlers["/a"] = lambda r: r.answer(b"x", set_cookie="id=5; Path=/")
    Request.handlers["/b"] = lambda r: r.answer(b"", 302, location="/a", set_cookie="id=6; Path=/")
    own, shares = fetcher(web), Shares(1 << 20)

    async def work() -> None:
        for path in ("a", "b", "a"):
            with contextlib.closing(Body(shares, "me")) as body:
                files = await own.fetch((f"https://cdn.example/{path}",), body)
            assert files is not None
            assert files.failures == {}
        await own.close()

    run(work())
    assert len(Request.seen) == len(Request.connections) == 4
    assert not any("cookie" in headers for _, _, headers in Request.seen)


def test_a_response_that_is_not_read_is_closed_at_once(web: Web) -> None:
    left = threading.Event()

    def endless(r: Request) -> None:
        r.send_response(302)
        r.send_header("location", "/b")
        r.end_headers()
        with contextlib.suppress(OSError):
            while True:
                r.wfile.write(bytes(10_000))
        left.set()

    def answer_when_left(r: Request) -> None:
        left.wait()
        r.answer(b"x")

    Request.handlers |= {"/a": endless, "/b": answer_when_left}
    try:
        assert fetch(fetcher(web), "https://cdn.example/a")[0] == {"https://cdn.example/a": b"x"}
    finally:
        left.set()


def test_others_have_their_turn_while_a_file_is_written() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        with contextlib.closing(Body(Shares(1 << 20), "me")) as body:
            download = Download("https://cdn.example/a", body)
            for _ in range(20):
                download.add(bytes(1000))
            file = MemFile.new()
            body.attach(file)
            writing = asyncio.ensure_future(download.write(file))
            while not writing.done():
                await asyncio.sleep(0)
                turns += 1
            assert file.size == 20_000

    run(work())
    assert turns >= 20


def test_a_request_that_is_refused_waits_for_none_of_its_files(web: Web) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stuck(r: Request) -> None:
        begun.set()
        go_on.wait()

    def large(r: Request) -> None:
        begun.wait()
        r.answer(bytes(600_000))

    Request.handlers |= {"/stuck": stuck, "/large": large}
    own = fetcher(web, media_timeout=1000.0)
    urls = "https://cdn.example/stuck", "https://cdn.example/large"

    async def work() -> None:
        with contextlib.closing(Body(Shares(1_000_000), "me")) as body, pytest.raises(Refused):
            await own.fetch(urls, body)
        assert own.places.running == 0
        await own.close()

    try:
        run(work())
    finally:
        go_on.set()


def test_a_silent_server_is_left_and_so_is_one_whose_client_leaves(web: Web) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def stuck(r: Request) -> None:
        begun.set()
        go_on.wait()

    Request.handlers["/a"] = stuck
    assert "within 0.05 s" in why(fetcher(web, media_timeout=0.05), "https://cdn.example/a")
    own, shares = fetcher(web, media_timeout=1000.0), Shares(1 << 20)
    begun.clear()

    async def leave() -> None:
        with contextlib.closing(Body(shares, "me")) as body:
            task = asyncio.create_task(own.fetch(("https://cdn.example/a",), body))
            await asyncio.to_thread(begun.wait)
            assert own.places.running == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert own.places.running == 0
        await own.close()

    run(leave())
    go_on.set()


def test_no_client_has_all_places(web: Web) -> None:
    own = fetcher(web, media_fetches=2)
    assert isinstance(own.places, FairQueue)
    assert own.places.places == 2


# ---- through the server


@pytest.fixture
def running(web: Web, tiny_dir: Path) -> Iterator[Running]:
    engine = ScriptedEngine()

    async def open_engine() -> ScriptedEngine:
        engine.prompts = PromptPool(tiny_dir, BUILDER, PoolSettings())
        await engine.prompts.start()
        return engine

    with Running(open_engine, allowed_media_domains=("cdn.example",)) as it:
        own = it.server.service.media
        own.resolve, own.transport = web.resolve, ToTheTest(web)
        yield it


@pytest.mark.parametrize("size", [0, 300_000])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_picture_is_looked_at(path: str, size: int, running: Running, web: Web) -> None:
    """In a short request and in a long one, whose body another process looks at."""
    Request.handlers["/a.png"] = lambda r: r.answer(image_file(picture(64, 64)))
    url = "https://cdn.example/a.png"
    words = "What is this?"
    if path == "responses":
        parts: list[Any] = [
            {"type": "input_text", "text": words},
            {"type": "input_image", "image_url": url},
        ]
        body: dict[str, Any] = {"input": [{"role": "user", "content": parts}]}
        at = "input[0].content[1].image_url.url"
    else:
        parts = [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": parts}]}
        at = "messages[0].content[1].image_url.url"
    written = json.dumps(body).replace('"role"', size * " " + '"role"').encode()
    form = {"Content-Type": "application/json"}

    def ask(host: str = "cdn.example") -> Reply:
        named = written.replace(b"cdn.example", host.encode())
        return running.ask(f"/v1/{path}", named, headers=form)

    reply = ask()
    assert reply.status == 200, reply.body
    assert len(Request.seen) == 1
    reply = ask("evil.example")
    assert (reply.status, len(Request.seen)) == (400, 1)
    assert "--allowed-media-domains" in reply.error["message"]
    assert reply.error["param"] == at
    Request.handlers["/a.png"] = lambda r: r.answer(b"<html>no picture</html>")
    reply = ask()
    assert reply.status == 400
    assert "cannot be decoded" in reply.error["message"]
    assert running.server.service.bodies.held == 0


def test_in_threads_it_is_the_same_prompt(tiny_dir: Path) -> None:
    """As the Python API's engine builds it, and as a data URI says it."""
    prompts = InThreads(PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)))
    data = image_file(picture(64, 64))

    def messages(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}}
        return json.dumps([{"role": "user", "content": [part]}]).encode()

    async def build() -> tuple[PackedPrompt, PackedPrompt]:
        with MemFile.of(b"before", data) as file:
            remote = RemoteFiles(file, {"https://a": (6, file.size)}, {})
            fetched = Conversation.of(messages("https://a"), remote=remote)
            sent = Conversation.of(messages(data_uri(data, "image/png")))
            return await prompts.build(fetched), await prompts.build(sent)

    fetched, sent = run(build())
    assert fetched.ids == sent.ids
    assert fetched.features is not None
    assert sent.features is not None
    assert bytes(fetched.features.data) == bytes(sent.features.data)


def test_without_the_setting_the_refusal_names_it() -> None:
    with serve(ScriptedEngine()) as it:
        assert it.server.service.media.allowed == ()
