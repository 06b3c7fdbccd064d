"""POST /v1/realtime/client_secrets: makes a client secret, with the settings of the sessions that
it opens. These are checked here, so that a page never meets a mistake of its server's."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct
from starlette.types import Receive, Scope, Send

from stretto.errors import Invalid
from stretto.server.http.body import ON_THE_LOOP, Body
from stretto.server.http.exchange import ClientLeft, Exchange, decode
from stretto.server.realtime import client_events as c
from stretto.server.realtime.items import new_id
from stretto.server.realtime.options import Kind, SessionState
from stretto.server.realtime.tools import ToolReader
from stretto.server.realtime.transcribe import check_transcribes
from stretto.server.request_log import REQUEST_LOG, RequestLog
from stretto.server.service import Service

PATH = "/v1/realtime/client_secrets"
LIFETIME_S = 600


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=10, le=7200)] = LIFETIME_S


class ClientSecretRequest(Struct, frozen=True, forbid_unknown_fields=True):
    expires_after: ExpiresAfter | None = None
    session: Raw = msgspec.field(default_factory=lambda: Raw(b"{}"))


class ClientSecretAnswer(Struct, frozen=True):
    value: str
    expires_at: int
    session: dict[str, Any]


class SessionHead(Struct, frozen=True):
    """The settings of a session that a WebSocket has in its address instead."""

    type: Kind | None = None
    model: c.Name | None = None


_decoder = msgspec.json.Decoder(ClientSecretRequest)
_head = msgspec.json.Decoder(SessionHead)


class ClientSecretRoute:
    """The endpoint. It needs no place in the admission queue: nothing is generated."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self.service
        request_log: RequestLog = scope[REQUEST_LOG]
        exchange = Exchange(scope, receive, send, service.config, request_log)
        request_log.route = "client_secrets"
        try:
            service.engine()
            with closing(Body(service.bodies, request_log.client)) as body:
                most = min(ON_THE_LOOP, service.config.max_body_bytes)
                await exchange.read_body(body, most, service.body_turns)
                data = body.data
            await exchange.reply(await make_secret(service, data, request_log))
        except ClientLeft:
            request_log.ended = "left"
            request_log.status = 499
        except Exception as e:  # noqa: BLE001 - the server's boundary: no request may take it down
            request_log.ended = type(e).__name__
            await exchange.fail(e)


async def make_secret(service: Service, data: bytes, request_log: RequestLog) -> ClientSecretAnswer:
    request = decode(data, _decoder)
    session = bytes(request.session)
    if session == b"null":
        session = b"{}"
    fields = read_session(session)
    head = decode(session, _head)
    engine = service.engine()
    kind = head.type or "realtime"
    if kind == "transcription":
        check_transcribes(engine.info)
        model = service.model_names(engine)[0]
    else:
        model = service.check_model(head.model, engine)
    tools = await ToolReader(service.turns).read(fields)
    state = SessionState.default(engine.info, kind, new_id("sess"), model, 0)
    state = state.updated(fields, engine.info, tools)
    seconds = (request.expires_after or ExpiresAfter()).seconds
    value, expires_at = service.secrets.make(
        request_log.owner, request_log.client, kind, session, seconds
    )
    return ClientSecretAnswer(value, expires_at, state.to_wire())


def read_session(session: bytes) -> c.SessionFields:
    """Settings, within the limits of those that come over a WebSocket."""
    try:
        event = c.decode(b'{"type":"session.update","session":' + session + b"}")
    except c.EventError as e:
        raise Invalid(str(e), e.param) from None
    assert isinstance(event, c.SessionUpdate)
    return event.session
