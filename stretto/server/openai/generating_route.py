"""`GeneratingRoute`, the ASGI app of the routes that generate: it reads a request's body, waits for
a place in the admission queue, decodes the request, answers it, and records how it ended. `app.py`
makes one for each such route, from a function that decodes and one that answers.

The functions below the class are shared by these routes. Everything runs on the event loop; only
decoders of long fields and encoders of audio use threads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, closing
from typing import Any, Generic, TypeVar, cast

import msgspec
from starlette.types import Receive, Scope, Send

from stretto.engine.events import Event, Finished
from stretto.errors import Bug
from stretto.server.http.body import Body
from stretto.server.http.exchange import ClientLeft, Exchange
from stretto.server.loop_time import HEAVY
from stretto.server.openai.schema import Report, TimelineEntry
from stretto.server.request_log import REQUEST_LOG, RequestLog
from stretto.server.service import Service
from stretto.server.tasks import run_until_one_ends

R = TypeVar("R")
# bytes of audio in one event: clients take messages of up to a MiB, and base64 adds a third
MAX_PIECE = 6 << 16


class GeneratingRoute(Generic[R]):
    """One POST route that generates: `decode` makes a request of a body, `work` answers it."""

    def __init__(
        self,
        service: Service,
        route: str,
        max_bytes: int,
        decode: Callable[[Service, Body, RequestLog], Awaitable[R]],
        work: Callable[[Service, R, Exchange], Awaitable[None]],
        places: Callable[[R], int] = lambda _: 1,
    ) -> None:
        """`places`: how many a request takes of those for requests that are answered at once."""
        self.service = service
        self.route = route
        self.max_bytes = max_bytes
        self.decode = decode
        self.work = work
        self.places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_log: RequestLog = scope[REQUEST_LOG]
        exchange = Exchange(scope, receive, send, self.service.config, request_log)
        request_log.route = self.route
        try:
            self.service.engine()  # before a long body is read for nothing
            self.service.admission.check(request_log.client)
            with closing(Body(self.service.bodies, request_log.client)) as body:
                await exchange.read_body(body, self.max_bytes, self.service.body_turns)
                work = self._work(body, exchange), exchange.watch_client()
                await run_until_one_ends(work, self.service.cut)
        except ClientLeft:
            # nobody listens: there is nothing to say
            request_log.ended = "left"
            request_log.status = 499
        except Exception as e:  # noqa: BLE001 - the server's boundary: no request may take it down
            request_log.fail(e)
            await exchange.fail(e)

    async def _work(self, body: Body, exchange: Exchange) -> None:
        request_log = exchange.request_log
        # Only now that all of it is there: clients that send slowly hold nobody else's slot.
        async with self.service.admission.place(request_log.client) as place:
            request_log.queued = place.waited
            if body.size > HEAVY:
                await self.service.turns.take()
            request = await self.decode(self.service, body, request_log)
            if (places := self.places(request)) > 1:
                await place.widen(places)
                request_log.queued = place.waited
            await self.work(self.service, request, exchange)


def closing_events(
    events: AsyncIterator[Event],
) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
    """Closes the engine's iterator on the way out, which cancels the request if it still runs."""
    return aclosing(cast(AsyncGenerator[Event, None], events))


def report(end: Finished, request_log: RequestLog, timeline: bool) -> Report:
    r = request_log
    spans = [
        TimelineEntry(s.lane, s.name, round(s.start, 6), round(s.stop, 6))
        for s in (end.timeline if timeline else ())
    ]
    return Report(
        seed=end.seed,
        total_s=round(r.elapsed(), 6),
        audio_s=round(r.audio_seconds, 6),
        first_text_s=_rounded(r.first_text),
        first_audio_s=_rounded(r.first_audio),
        rtf=_rounded(r.rtf),
        underrun_s=round(r.underrun, 6),
        timeline=spans if timeline else msgspec.UNSET,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def unfinished() -> Bug:
    return Bug("the engine ended an answer without saying how")


def slices(data: bytes) -> list[bytes]:
    """Audio for one event each."""
    return [data[i : i + MAX_PIECE] for i in range(0, len(data), MAX_PIECE)]


def drop_none(values: dict[str, Any]) -> dict[str, Any]:
    """Leave what the client did not state at its default."""
    return {k: v for k, v in values.items() if v is not None}
