"""The routes, and the ASGI app that holds them. `make_app` is all that other modules need.

The engine comes from a factory that the app's lifespan calls; tests give one that makes something smaller."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stretto import __version__
from stretto.orchestrator.api import Engine
from stretto.server.answer import Endpoint
from stretto.server.body import ON_THE_LOOP
from stretto.server.chat import answer_chat, read_chat
from stretto.server.config import ServerConfig
from stretto.server.door import Door
from stretto.server.exchange import VISIT, Visit
from stretto.server.failures import Refused, respond
from stretto.server.metrics import CONTENT_TYPE
from stretto.server.openapi import document
from stretto.server.pages import WEB, Pages
from stretto.server.schema import Health, ModelCard, ModelList, Version
from stretto.server.service import OpenEngine, Service
from stretto.server.speech import answer_speech, read_speech

POSTS = ("/v1/chat/completions", "/v1/audio/speech")
Handler = Callable[[Request], Awaitable[Response]]


def make_app(config: ServerConfig, open_engine: OpenEngine, web: Path = WEB) -> Starlette:
    service = Service.of(config, open_engine)
    routes = Routes(service, Pages(web))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = Starlette(
        routes=routes.table(),
        lifespan=lifespan,
        exception_handlers={HTTPException: routes.http_error, Refused: _tell, Exception: _tell},
        middleware=[Middleware(Door, service=service)],
    )
    app.state.service = service
    return app


class Routes:
    def __init__(self, service: Service, pages: Pages) -> None:
        self.service, self.pages = service, pages
        self.loaded_at = int(time.time())

    def table(self) -> list[Route]:
        largest = self.service.config.max_body_bytes
        chat = Endpoint(self.service, "chat", largest, read_chat, answer_chat)
        speech = Endpoint(self.service, "speech", min(largest, ON_THE_LOOP), read_speech, answer_speech)
        posts: list[ASGIApp] = [chat, speech]
        named: list[tuple[str, str, Handler]] = [
            ("/v1/models", "models", self.models),
            ("/v1/models/{name:path}", "models", self.model),
            ("/health", "health", self.health),
            ("/live", "live", self.live),
            ("/version", "version", self.version),
            ("/openapi.json", "openapi", self.openapi),
        ]
        if self.service.config.metrics:
            named.append(("/metrics", "metrics", self.metrics))
        return [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in zip(POSTS, posts, strict=True)),
            *(Route(path, _counted(route, handler), methods=["GET"]) for path, route, handler in named),
            Route("/{path:path}", _counted("page", self.page), methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        engine = self.service.engine()
        return _json(ModelList([self._card(name, engine) for name in self.service.model_names(engine)]))

    async def model(self, request: Request) -> Response:
        engine = self.service.engine()
        return _json(self._card(self.service.check_model(request.path_params["name"], engine), engine))

    def _card(self, name: str, engine: Engine) -> ModelCard:
        i = engine.info
        return ModelCard(
            id=name,
            created=self.loaded_at,
            input_modalities=i.input_modalities,
            output_modalities=i.output_modalities,
            voices=i.voices,
            default_voice=i.default_voice,
            sample_rate=i.sample_rate,
            max_model_len=i.max_positions,
            root=i.name,
        )

    async def health(self, request: Request) -> Response:
        p = self.service.progress
        return _json(Health(p.state, dict(p.stages), p.error), 200 if p.state == "ready" else 503)

    async def live(self, request: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type="application/json")

    async def version(self, request: Request) -> Response:
        return _json(Version(__version__))

    async def openapi(self, request: Request) -> Response:
        return Response(_document(), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        engine = self.service.maybe_engine
        numbers = {**(engine.metrics() if engine else {}), "stretto_body_bytes": self.service.bodies.held}
        body = self.service.metrics.render(self.service.admission.running, numbers)
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def page(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path in POSTS:
            raise HTTPException(405, headers={"allow": "POST"})
        found = self.pages.get(path)
        if found is None:
            raise HTTPException(404)
        return found

    async def http_error(self, request: Request, error: Exception) -> Response:
        """What Starlette itself turns down: unknown paths and methods."""
        assert isinstance(error, HTTPException)
        api = request.url.path.startswith("/v1")
        if error.status_code == 404 and not api and (page := self.pages.missing(request)) is not None:
            return page
        what = f"{request.method} {request.url.path[:200]}"
        words = {404: f"there is no {what}", 405: f"{what} is not possible here"}
        message = words.get(error.status_code, error.detail)
        return respond(Refused(error.status_code, message, code="not_found", headers=error.headers))


async def _tell(request: Request, error: Exception) -> Response:
    return respond(error)


def _counted(route: str, handler: Handler) -> Handler:
    async def run(request: Request) -> Response:
        visit = request.scope[VISIT]
        assert isinstance(visit, Visit)
        visit.route = route
        return await handler(request)

    return run


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


@cache
def _document() -> bytes:
    return msgspec.json.encode(document())
