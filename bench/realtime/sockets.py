"""The part `http`: clients of a server of its own, over WebSockets, in this process. Imports no
torch."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import soundfile
from websockets.asyncio.client import ClientConnection, connect

from bench.harness.listener import Job, ask
from bench.harness.results import quantile
from bench.harness.serving import Server
from bench.realtime.numbers import Found, by_length, listened, ms, show
from bench.realtime.sounds import Clips, Samples
from bench.realtime.turns import LARGE_PIECE_S, PIECE_S, clock, real_time_factor
from stretto.engine.session import INPUT_RATE
from stretto.loadtest.player import Packet, play
from tests.server.realtime.sounds import pcm

RATE = 24_000
PATIENCE_S = 60.0
QUIET_S = 0.3  # nothing comes for so long: it is over
SMALL_PIECE_S = 0.02  # where the moment of an interruption matters
SILENCE = b"\0" * (2 * round(RATE * PIECE_S))


class Broken(Exception):
    """The server sent an error."""


@dataclass(slots=True)
class Client:
    socket: ClientConnection
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def send(self, type: str, **fields: Any) -> str:
        id = f"e{next(self.numbers)}"
        await self.socket.send(json.dumps({"type": type, "event_id": id, **fields}))
        return id

    async def next(self) -> tuple[float, dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            data = await self.socket.recv()
        now = clock()
        event: dict[str, Any] = json.loads(data)
        if event["type"] == "response.done" and event["response"]["status"] == "failed":
            raise Broken(str(event["response"]["status_details"])[:400])
        return now, event

    async def until(self, *types: str) -> tuple[float, dict[str, Any]]:
        while True:
            at, event = await self.next()
            if event["type"] in types:
                return at, event
            if event["type"] == "error":
                raise Broken(str(event["error"])[:400])

    async def configure(self, vad: bool, tokens: int, frames: int) -> None:
        turns = {"type": "server_vad"} if vad else None
        audio = {"input": {"turn_detection": turns}}
        session = {
            "type": "realtime",
            "audio": audio,
            "max_output_tokens": tokens,
            "max_audio_frames": frames,
        }
        await self.send("session.update", session=session)
        await self.until("session.updated")

    async def append(self, data: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    async def speak(self, data: bytes, pace: float, piece_s: float = PIECE_S) -> None:
        size = 2 * round((piece_s if pace else LARGE_PIECE_S) * RATE)
        start = clock()
        for at in range(0, len(data), size):
            if pace:
                await asyncio.sleep(max(0.0, start + (at + size) / 2 / RATE / pace - clock()))
            await self.append(data[at : at + size])

    async def sync(self) -> None:
        """Until the server has handled all that was sent."""
        id = await self.send("conversation.item.retrieve", item_id="-")
        while True:
            _, event = await self.next()
            if event["type"] == "error" and event["error"]["event_id"] == id:
                return


@dataclass(slots=True)
class Sockets:
    args: argparse.Namespace
    server: Server
    until: float  # no measurement begins after that
    clips: Clips = field(default_factory=lambda: Clips(1))
    random: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def late(self) -> bool:
        return clock() > self.until

    async def run(self) -> AsyncIterator[Found]:
        await self.turn(5.0)  # warm
        yield await self.turns("socket", self.turn)
        yield await self.turns("http whole", self.whole)
        for work in (self.cancels, self.detected, self.live):
            if self.late:
                yield {"kind": work.__name__, "skipped": "no time was left"}
            else:
                yield await work()

    @asynccontextmanager
    async def client(
        self, vad: bool = False, tokens: int = 0, frames: int = 0
    ) -> AsyncIterator[Client]:
        url = f"ws://127.0.0.1:{self.server.port}/v1/realtime"
        async with connect(url, max_size=1 << 20, max_queue=None, compression=None) as socket:
            client = Client(socket)
            await client.until("session.created")
            frames = frames or self.args.frames
            await client.configure(vad, tokens or max(2, frames // 2), frames)
            yield client

    # ---- first audio

    async def turns(self, kind: str, one: Any) -> Found:
        samples: list[Found] = []
        for _ in range(max(2, self.args.turns // 2)):
            for seconds in self.args.lengths:
                if self.late and samples:
                    break
                samples.append({"seconds": seconds, **await one(seconds)})
        found: Found = {
            "kind": kind,
            "sessions": 1,
            "by_length": by_length(samples),
            "samples": samples,
        }
        show(found)
        return found

    async def turn(self, seconds: float) -> Found:
        """Commit and response.create in one go → the first packet; all of the turn was sent and
        read before."""
        async with self.client() as client:
            await client.speak(pcm(self.clips.clip(seconds)), 0.0)
            await client.sync()
            await self.idle()
            return await self.finish(client)

    async def idle(self) -> None:
        """Until the server's engine has read all that it was given; with speech in real time this
        is always so."""
        for _ in range(400):
            values = await asyncio.to_thread(self.server.metrics)
            if not values["stretto_engine_running"]:
                return
            await asyncio.sleep(0.025)

    async def finish(self, client: Client) -> Found:
        start = clock()
        await client.send("input_audio_buffer.commit")
        await client.send("response.create")
        return await self.listen(client, start)

    async def listen(self, client: Client, start: float) -> Found:
        """An answer, to its end."""
        packets: list[list[float]] = []
        try:
            while True:
                at, event = await client.until("response.output_audio.delta", "response.done")
                if event["type"] == "response.done":
                    break
                packets.append([at - start, len(event["delta"]) * 3 / 4 / 2 / RATE])
        except (Broken, TimeoutError) as e:
            return {"error": f"{type(e).__name__}: {e}", "packets": packets}
        usage, told = event["response"]["usage"], event["response"]["stretto"]
        cached = usage["input_token_details"]["cached_tokens"]
        return {
            "error": None if packets else "no audio",
            "first_audio": packets[0][0] if packets else None,
            "server_first_audio": told["first_audio_s"],
            "new_tokens": usage["input_tokens"] - cached,
            "rtf": real_time_factor([Packet(*p) for p in packets]),
            "packets": packets,
        }

    async def whole(self, seconds: float) -> Found:
        """The same as a chat request with all of the sound in it, sent when the speaker stops."""
        out = io.BytesIO()
        soundfile.write(out, self.clips.clip(seconds), INPUT_RATE, format="WAV", subtype="PCM_16")
        sound = {"data": base64.b64encode(out.getvalue()).decode(), "format": "wav"}
        frames = self.args.frames
        body = {
            "messages": [{"role": "user", "content": [{"type": "input_audio",
            "input_audio": sound}]}],
            "stream": True, "modalities": ["text", "audio"], "audio": {"format": "pcm16"},
            "ignore_eos": True,
            "max_tokens": max(2, frames // 2), "min_audio_frames": frames,
            "max_audio_frames": frames,
        }  # fmt: skip
        heard = await ask(Job(self.server.port, "", "", 1), json.dumps(body).encode(), 0, clock())
        return {"error": heard.sample.message, "first_audio": heard.sample.first_audio}

    # ---- barge-in

    async def cancels(self) -> Found:
        """`response.cancel` at a random packet → the last packet that still comes, and
        `response.done`."""
        samples: list[Found] = []
        async with self.client(tokens=400, frames=500) as client:
            for _ in range(self.args.turns * 2):
                if self.late and samples:
                    break
                await client.speak(pcm(self.clips.clip(2.0)), 0.0)
                await client.send("input_audio_buffer.commit")
                await client.send("response.create")
                samples.append(await self._cancel(client))
        return self.barged("socket cancel", samples)

    async def _cancel(self, client: Client) -> Found:
        over = False
        for _ in range(self.random.randrange(1, 6)):
            _, event = await client.until("response.output_audio.delta", "response.done")
            over = over or event["type"] == "response.done"
            if over:
                return {"over": True}
        start, last = clock(), 0.0
        await client.send("response.cancel")
        while True:
            at, event = await client.until("response.output_audio.delta", "response.done")
            if event["type"] == "response.done":
                break
            last = at - start
        done, usage = at - start, event["response"]["usage"]
        return {
            "over": event["response"]["status"] != "cancelled", "last_packet": last,
            "confirmed": done,
            "after": await self._after(client), "usage": usage,
        }  # fmt: skip

    async def _after(self, client: Client) -> int:
        """Packets that come after the end was confirmed: none may."""
        late = 0
        try:
            async with asyncio.timeout(QUIET_S):
                while True:
                    event = json.loads(await client.socket.recv())
                    late += event["type"] == "response.output_audio.delta"
        except TimeoutError:
            return late

    def barged(self, kind: str, samples: list[Found]) -> Found:
        good = [s for s in samples if not s.get("over") and not s.get("error")]
        if good:
            last, done = ([s[k] for s in good] for k in ("last_packet", "confirmed"))
            print(
                f"  {kind}: {len(good)} times; last packet p50 {ms(quantile(last, 0.5))}, max "
                f"{ms(max(last))}; "
                f"confirmed p50 {ms(quantile(done, 0.5))}, max {ms(max(done))}; packets after it: "
                f"{sum(s['after'] for s in good)}",
                flush=True,
            )
        return {"kind": kind, "samples": samples}

    # ---- turns that the server finds

    async def detected(self) -> Found:
        """Speech and silence in real time, turns found by the server: end of speech → first packet,
        then speech over the answer → its last packet and its end."""
        found = await asyncio.gather(*(self._detected(i) for i in range(4)), return_exceptions=True)
        samples: list[Found] = [f if isinstance(f, dict) else {"error": repr(f)} for f in found]
        firsts = [s["first_audio"] for s in samples if s.get("first_audio") is not None]
        for s in samples:
            if s.get("error"):
                print(f"  vad: {s['error']}", flush=True)
        if firsts:
            waited = ms(quantile([s["vad_wait"] for s in samples if s.get("vad_wait")], 0.5))
            print(
                f"  vad: end of speech -> first packet p50 {ms(quantile(firsts, 0.5))}, pause "
                f"{waited}",
                flush=True,
            )
        found_s = [
            s["confirmed"] - s["started"]
            for s in samples
            if s.get("started") is not None and not s["over"]
        ]
        if found_s:
            print(
                f"  vad: speech found -> answer over p50 {ms(quantile(found_s, 0.5))}", flush=True
            )
        return self.barged("vad barge-in", samples) | {"sessions": 4}

    async def _detected(self, place: int) -> Found:
        async with self.client(vad=True, tokens=400, frames=500) as client:
            await asyncio.sleep(0.2 * place)
            await client.speak(pcm(self.clips.clip(3.0)), 1.0, SMALL_PIECE_S)
            ended = clock()
            quiet = asyncio.create_task(self._quiet(client))
            try:
                at, _ = await client.until("response.output_audio.delta")
            finally:
                quiet.cancel()
                await asyncio.gather(quiet, return_exceptions=True)
            first, said = at - ended, pcm(self.clips.clip(1.5))
            talking = asyncio.create_task(client.speak(said, 1.0, SMALL_PIECE_S))
            start, last, started = clock(), 0.0, None
            while True:
                kinds = (
                    "response.output_audio.delta",
                    "response.done",
                    "input_audio_buffer.speech_started",
                )
                at, event = await client.until(*kinds)
                if event["type"] == "response.done":
                    break
                if event["type"] == "input_audio_buffer.speech_started":
                    started = at - start
                else:
                    last = at - start
            response = event["response"]
            confirmed = at - start
            await talking
            return {
                "first_audio": first, "vad_wait": response["stretto"].get("vad_wait_s"),
                "over": response["status"] != "cancelled", "started": started, "last_packet": last,
                "confirmed": confirmed, "after": 0, "usage": response["usage"],
            }  # fmt: skip

    async def _quiet(self, client: Client) -> None:
        while True:
            await client.append(SILENCE)
            await asyncio.sleep(PIECE_S)

    # ---- live

    async def live(self) -> Found:
        """As `live` of the engine, over WebSockets; the client ends its turns."""
        args, samples = self.args, []
        start = clock()
        stop = start + args.live_seconds
        clips: list[Samples] = [self.clips.clip(args.live_turn) for _ in range(args.http_live)]

        async def one(place: int) -> None:
            await asyncio.sleep(2 * args.live_turn * place / args.http_live)
            frames = args.live_frames
            async with self.client(tokens=frames // 2, frames=frames) as client:
                said = await asyncio.to_thread(pcm, clips[place])
                while clock() < stop:
                    await client.speak(said, 1.0)
                    at, found = clock() - start, await self.finish(client)
                    heard = play([Packet(*p) for p in found["packets"]])
                    more = (
                        {"underruns": heard.underruns, "wait": heard.wait}
                        if heard is not None
                        else {}
                    )
                    samples.append(
                        {"session": place, "seconds": args.live_turn, "at": at, **found, **more}
                    )
                    if heard is None:
                        return
                    await asyncio.sleep(max(0.0, start + at + heard.stop - clock()))

        await asyncio.gather(*(one(i) for i in range(args.http_live)))
        found: Found = {
            "kind": "socket live",
            "sessions": args.http_live,
            "by_length": by_length(samples),
        }
        show(found)
        return found | listened(samples) | {"samples": samples}
