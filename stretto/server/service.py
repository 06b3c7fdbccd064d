"""What all routes share: the engine and its state, the limits, stored answers and voices, the
metrics. `app.py` makes one `Service` per app, and the app's lifespan starts and closes it.

The engine is opened in the background while the port is already bound, so that probes and people
see `loading` rather than a refused connection. States go loading -> ready -> draining; `dead` can
follow any of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from stretto import __version__
from stretto.config.server import ServerConfig
from stretto.engine.events import Progress
from stretto.engine.protocol import EngineClient
from stretto.errors import StrettoError
from stretto.observe.otlp import TraceExporter
from stretto.server.admission import Admission
from stretto.server.heap import Trimmer, map_large_blocks
from stretto.server.http.body import TURN_REST_S
from stretto.server.keys import Keys
from stretto.server.loop_time import LoopTurns, ThreadTurns
from stretto.server.media_fetcher import MediaFetcher
from stretto.server.metrics import Metrics
from stretto.server.openai.answer_store import AnswerStore
from stretto.server.openai.error_body import Refused
from stretto.server.openai.voice_store import VoiceStore
from stretto.server.realtime.client_secrets import ClientSecrets
from stretto.server.realtime.session_slots import SessionSlots
from stretto.server.shares import Shares

log = logging.getLogger("stretto.server")

OpenEngine = Callable[[], Awaitable[EngineClient]]


@dataclass(slots=True)
class Service:
    config: ServerConfig
    open_engine: OpenEngine
    keys: Keys
    admission: Admission
    answers: AnswerStore
    metrics: Metrics
    voices: VoiceStore
    bodies: Shares  # bytes
    sessions: SessionSlots
    media: MediaFetcher
    tracer: TraceExporter | None = None  # None: nothing is traced
    secrets: ClientSecrets = field(default_factory=ClientSecrets)
    turns: LoopTurns = field(default_factory=LoopTurns)
    body_turns: LoopTurns = field(default_factory=lambda: LoopTurns(TURN_REST_S))
    thread_turns: ThreadTurns = field(default_factory=ThreadTurns)
    draining: bool = False
    failure: str | None = None  # why the engine could not be opened
    # the engine is open, or cannot be opened
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    _engine: EngineClient | None = None
    _loading: asyncio.Task[None] | None = None
    _trimming: asyncio.Task[None] | None = None
    _cut: asyncio.Future[None] | None = None

    @classmethod
    def of(cls, config: ServerConfig, open_engine: OpenEngine) -> Service:
        admission = Admission(
            max_places=config.max_concurrent,
            places_per_client=config.places_per_client,
            requests_per_client=config.max_concurrent_per_key,
            max_queue=config.max_queue,
            queue_timeout=config.queue_timeout,
            max_live=config.max_live,
        )
        tracer = TraceExporter(config.otlp_endpoint, __version__) if config.otlp_endpoint else None
        metrics = Metrics()
        metrics.waiting.set_function(lambda: admission.waiting)
        return cls(
            config=config,
            open_engine=open_engine,
            keys=Keys.of(config.api_key, config.api_key_file),
            admission=admission,
            answers=AnswerStore(config.audio_kept, config.audio_lifetime),
            metrics=metrics,
            voices=VoiceStore(),
            tracer=tracer,
            bodies=Shares(config.max_bodies_bytes, floor=config.max_body_bytes),
            sessions=SessionSlots(
                config.realtime_sessions,
                config.realtime_sessions_per_key,
                Shares(config.realtime_total_bytes, floor=config.realtime_held_bytes),
            ),
            media=MediaFetcher.of(config),
        )

    @property
    def cut(self) -> asyncio.Future[None]:
        """Done when running requests must end now."""
        assert self._cut is not None, "the app's lifespan has not begun"
        return self._cut

    def start(self) -> None:
        self._cut = asyncio.get_running_loop().create_future()
        self._loading = asyncio.create_task(self._open(), name="open engine")
        map_large_blocks()
        trimmer = Trimmer(lambda: self.bodies.returned + self.sessions.memory.returned)
        self._trimming = asyncio.create_task(trimmer.run(), name="trim the heap")

    async def _open(self) -> None:
        try:
            self._engine = await self.open_engine()
        except (StrettoError, OSError, ValueError, RuntimeError, MemoryError, ImportError) as e:
            log.error(
                "the model cannot be served: %s",
                e,
                exc_info=None if isinstance(e, StrettoError) else e,
            )
            self.fail(str(e) or type(e).__name__)
        finally:
            self.opened.set()

    def fail(self, reason: str) -> None:
        """Its engine will not come up: requests are refused from now on."""
        self.failure = reason

    @property
    def progress(self) -> Progress:
        if self.failure is not None:
            return Progress("dead", error=self.failure)
        known = self._engine.progress if self._engine is not None else Progress("loading")
        if self.draining and known.state != "dead":
            return Progress("draining", known.stages, known.error)
        return known

    @property
    def maybe_engine(self) -> EngineClient | None:
        return self._engine

    def engine(self) -> EngineClient:
        """The engine, if it takes requests now."""
        progress = self.progress
        state = progress.state
        if state == "ready" or progress.accepts:
            assert self._engine is not None
            return self._engine
        words = {
            "loading": "the model is still loading",
            "draining": "the server is shutting down",
            "dead": "the engine has failed",
        }
        # The next connection may reach another server; this one is about to go.
        headers = {"connection": "close"} if state == "draining" else {}
        raise Refused(503, words[state], kind="server_error", code=state, headers=headers)

    def model_names(self, engine: EngineClient) -> tuple[str, ...]:
        return self.config.served_model_name or (engine.info.name,)

    def check_model(self, name: str | None, engine: EngineClient) -> str:
        """The name to answer with."""
        names = self.model_names(engine)
        if name in names:
            return name
        if name in (None, "default"):
            return names[0]
        message = f"the model {name!r} does not exist; this server has {', '.join(names)}"
        raise Refused(404, message, code="model_not_found", param="model")

    def cut_off(self) -> None:
        """Refuse new requests, and end those that run with an error."""
        self.draining = True
        if not self.cut.done():
            self.cut.set_result(None)

    async def drain(self, timeout: float) -> None:
        """Take nothing new and let what runs finish, for at most the drain timeout."""
        self.draining = True
        self.admission.drain()
        self.sessions.drain()
        if self._engine is not None:
            await self._engine.drain(timeout)

    async def close(self) -> None:
        self.draining = True
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.wait([self._loading])
        if self._trimming is not None:
            self._trimming.cancel()
            await asyncio.wait([self._trimming])
        self.sessions.close()
        await self.media.close()
        if self._engine is not None:
            await self._engine.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
