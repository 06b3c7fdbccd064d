"""The routes, and the ASGI app that holds them: `make_app`, called by `run.py` and by replicas on
Ray.

The app's lifespan opens the engine by a function that the caller passes; tests pass one that opens
a scripted engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from stretto import __version__
from stretto.config.server import ServerConfig
from stretto.engine.protocol import EngineClient
from stretto.observe import logs
from stretto.observe.otlp import trace_metrics
from stretto.server.http.body import ON_THE_LOOP
from stretto.server.keys import Keys
from stretto.server.metrics import CONTENT_TYPE
from stretto.server.middleware import AccessMiddleware, path_of
from stretto.server.openai.chat import answer_chat, num_answers, read_chat
from stretto.server.openai.docs_page import render
from stretto.server.openai.error_body import Refused, respond
from stretto.server.openai.generating_route import GeneratingRoute
from stretto.server.openai.live_speech import PATH as LIVE_SPEECH
from stretto.server.openai.live_speech import LiveSpeech
from stretto.server.openai.openapi import document
from stretto.server.openai.responses import answer_responses, read_responses
from stretto.server.openai.schema import Health, ModelCard, ModelList, Version, VoiceDeleted
from stretto.server.openai.speech import answer_speech, read_speech
from stretto.server.openai.transcriptions import answer_sound, reader
from stretto.server.openai.voices import MAX_CLIP, answer_voice, read_voice
from stretto.server.origins import FORMS, VOICES
from stretto.server.pages import HEADERS, WEB, Pages
from stretto.server.realtime.client_secret_route import PATH as CLIENT_SECRETS
from stretto.server.realtime.client_secret_route import ClientSecretRoute
from stretto.server.realtime.endpoint import PATHS as REALTIME
from stretto.server.realtime.endpoint import Realtime
from stretto.server.request_log import REQUEST_LOG, RequestLog
from stretto.server.service import OpenEngine, Service

DEFAULTS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "repetition_penalty")},
    **{
        f"speech_{name}": f"speech_{name}"
        for name in ("temperature", "top_p", "top_k", "repetition_penalty")
    },
    "max_tokens": "max_text_tokens",
    "max_audio_frames": "max_frames",
}
"""Fields of a request whose defaults are the checkpoint's, and what `Params` calls them."""
OTHERS = dict.fromkeys(("/v1/completions", "/completions"), "/v1/chat/completions")
"""Routes of OpenAI's that are not here, and the one that does the same."""
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
        exception_handlers={
            HTTPException: routes.http_error,
            Refused: _error_response,
            Exception: _error_response,
        },
        middleware=[Middleware(AccessMiddleware, service=service)],
    )
    app.state.service = service
    return app


def make_metrics_app(service: Service) -> Starlette:
    """The metrics of a server and nothing else, for a port of their own. Its life is that of the
    server's app."""
    route = MetricsRoute(service)
    return Starlette(
        routes=[Route("/metrics", _logged("metrics", route.metrics), methods=["GET"])],
        exception_handlers={
            HTTPException: route.http_error,
            Refused: _error_response,
            Exception: _error_response,
        },
        middleware=[Middleware(AccessMiddleware, service=service)],
    )


class MetricsRoute:
    """/metrics, with a key of its own if one is configured."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.keys = Keys.of(service.config.metrics_key)

    async def metrics(self, request: Request) -> Response:
        self.keys.owner(request.headers)
        return Response(metrics_of(self.service), headers={"content-type": CONTENT_TYPE})

    async def http_error(self, request: Request, error: Exception) -> Response:
        """The answer to any other path, on a port for metrics alone."""
        return respond(Refused(404, "on this port there is only GET /metrics", code="not_found"))


class Routes:
    def __init__(self, service: Service, pages: Pages) -> None:
        self.service = service
        self.pages = pages
        self.loaded_at = int(time.time())
        self.posts = self._posts()
        self.gets = self._gets()

    @property
    def methods(self) -> dict[str, str]:
        """Paths that a client may have meant, and their methods."""
        posts = dict.fromkeys(self.posts, "POST")
        return posts | {path: "GET" for path, *_ in self.gets if "{" not in path}

    def _posts(self) -> dict[str, ASGIApp]:
        """The routes that take bodies, by path."""
        largest = self.service.config.max_body_bytes
        chat = GeneratingRoute(self.service, "chat", largest, read_chat, answer_chat, num_answers)
        speech = GeneratingRoute(
            self.service, "speech", min(largest, ON_THE_LOOP), read_speech, answer_speech
        )
        voices = GeneratingRoute(
            self.service, "voices", min(largest, MAX_CLIP), read_voice, answer_voice
        )
        transcriptions = [
            GeneratingRoute(self.service, route, largest, reader(translate), answer_sound)
            for route, translate in (("transcriptions", False), ("translations", True))
        ]
        responses = GeneratingRoute(
            self.service, "responses", largest, read_responses, answer_responses
        )
        return {
            "/v1/chat/completions": chat,
            "/v1/responses": responses,
            "/v1/audio/speech": speech,
            VOICES: voices,
            **dict(zip(FORMS, transcriptions, strict=True)),
            CLIENT_SECRETS: ClientSecretRoute(self.service),
        }

    def _gets(self) -> list[tuple[str, str, Handler]]:
        """Paths, the names of their routes in logs and metrics, and who answers."""
        gets: list[tuple[str, str, Handler]] = [
            ("/v1/models", "models", self.models),
            ("/v1/models/{name:path}", "models", self.model),
            ("/health", "health", self.health),
            ("/live", "live", self.live),
            ("/version", "version", self.version),
            ("/openapi.json", "openapi", self.openapi),
            ("/docs", "docs", self.docs),
        ]
        if self.service.config.metrics and self.service.config.metrics_port is None:
            gets.append(("/metrics", "metrics", MetricsRoute(self.service).metrics))
        return gets

    def table(self) -> list[BaseRoute]:
        realtime: ASGIApp = Realtime(self.service)
        live: ASGIApp = LiveSpeech(self.service)
        return [
            *(WebSocketRoute(path, realtime) for path in REALTIME),
            WebSocketRoute(LIVE_SPEECH, live),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in self.posts.items()),
            *(
                Route(path, _logged(route, handler), methods=["GET"])
                for path, route, handler in self.gets
            ),
            Route(VOICES, _logged("voices", self.voices), methods=["GET"]),
            Route(f"{VOICES}/{{name}}", _logged("voices", self.delete_voice), methods=["DELETE"]),
            Route("/{path:path}", _logged("page", self.page), methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        engine = self.service.engine()
        return _json(
            ModelList([self._card(name, engine) for name in self.service.model_names(engine)])
        )

    async def model(self, request: Request) -> Response:
        engine = self.service.engine()
        return _json(
            self._card(self.service.check_model(request.path_params["name"], engine), engine)
        )

    async def voices(self, request: Request) -> Response:
        request_log: RequestLog = request.scope[REQUEST_LOG]
        return _json(self.service.voices.listed(request_log.owner, self.service.engine().info))

    async def delete_voice(self, request: Request) -> Response:
        request_log: RequestLog = request.scope[REQUEST_LOG]
        return _json(
            VoiceDeleted(self.service.voices.forget(request_log.owner, request.path_params["name"]))
        )

    def _card(self, name: str, engine: EngineClient) -> ModelCard:
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
            description=i.description,
            ideas=i.example_prompts,
            defaults={name: getattr(i.defaults, field) for name, field in DEFAULTS.items()},
            languages=i.languages,
            instructions=i.instructions,
            cloning=i.cloning,
            transcribes=i.transcription is not None,
            weights=i.weights,
            random_weights=i.random_weights,
            stages=dict(i.stages),
            max_body_bytes=self.service.config.max_body_bytes,
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

    async def docs(self, request: Request) -> Response:
        return Response(_docs_page(), headers=HEADERS, media_type="text/html")

    async def page(self, request: Request) -> Response:
        path = path_of(request.scope)
        if path in self.posts:
            raise HTTPException(405, headers={"allow": "POST"})
        if path in (*REALTIME, LIVE_SPEECH):
            raise HTTPException(
                426, "a WebSocket is expected here", headers={"upgrade": "websocket"}
            )
        found = self.pages.get(path)
        if found is None:
            raise HTTPException(404)
        return found

    async def http_error(self, request: Request, error: Exception) -> Response:
        """What Starlette itself turns down: unknown paths and methods."""
        assert isinstance(error, HTTPException)
        api = request.url.path.startswith("/v1")
        if (
            error.status_code == 404
            and not api
            and (page := self.pages.missing(request)) is not None
        ):
            return page
        path = path_of(request.scope)
        status = error.status_code
        headers = error.headers
        if status == 405 and request.method not in ("GET", "HEAD") and path not in self.methods:
            # It met the route of the pages, which takes whatever is left.
            status = 404
            headers = None
        what = f"{request.method} {request.url.path[:200]}"
        near = nearest(path, self.methods)
        hint = f"; did you mean {near}?" if near else "; GET /openapi.json tells what there is"
        words = {404: f"there is no {what}{hint}", 405: f"{what} is not possible here"}
        return respond(
            Refused(status, words.get(status, error.detail), code="not_found", headers=headers)
        )


def nearest(path: str, known: Mapping[str, str]) -> str | None:
    """What someone who asked for this path most likely wants: most forget /v1, or know a newer
    route of OpenAI's."""
    if path in OTHERS:
        return f"POST {OTHERS[path]}"
    for candidate in (
        f"/v1{path}",
        path.removeprefix("/v1"),
        path.replace("/v1/v1/", "/v1/"),
        path.rstrip("/"),
    ):
        if candidate in known and candidate != path:
            return f"{known[candidate]} {candidate}"
    close = get_close_matches(path[:200], known, 1, 0.75)
    return f"{known[close[0]]} {close[0]}" if close else None


def metrics_of(service: Service) -> bytes:
    """All metrics of a server, as Prometheus reads them; at most a second old."""

    def render() -> bytes:
        engine = service.maybe_engine
        values = {
            **(engine.metrics() if engine else {}),
            "stretto_body_bytes": service.bodies.held,
        }
        values |= service.tracer.metrics() if service.tracer is not None else trace_metrics()
        values["stretto_log_lines_dropped_total"] = logs.dropped()
        return service.metrics.render(service.admission.running, values)

    return service.metrics.page(render)


async def _error_response(request: Request, error: Exception) -> Response:
    return respond(error)


def _logged(route: str, handler: Handler) -> Handler:
    async def run(request: Request) -> Response:
        request_log = request.scope[REQUEST_LOG]
        assert isinstance(request_log, RequestLog)
        request_log.route = route
        return await handler(request)

    return run


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


@cache
def _document() -> bytes:
    return msgspec.json.encode(document())


@cache
def _docs_page() -> str:
    return render(document())
