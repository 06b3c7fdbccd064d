"""Nonsensical events over /v1/realtime: is every session answered, and does nothing stay behind?

    python -m tests.slow fuzz --parts realtime --events 100000 --out fuzz_realtime.json

Starts `stretto serve` on the tiny model. Each session sends a few hundred events: valid ones, valid
ones with a field replaced by nonsense, unknown ones, bytes that are no JSON, sound, silence, and
speech. Then it must still answer. Fails if a session died without a reason, if anything was
answered as the server's own fault, if an event that the server sends lacks its id, or if sessions,
requests or memory were left at the end. The seed decides everything that is random."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import websockets
from websockets.asyncio.client import ClientConnection, connect

from bench.harness.env import describe
from bench.harness.results import judged, parser
from bench.harness.serving import serving
from stretto.registry import write_tiny

EVENTS_A_SESSION = 250
SESSIONS = 4  # at once
PATIENCE_S = 120.0
SHORT = {"max_output_tokens": 8, "max_audio_frames": 4}
TYPES = (
    "session.update", "input_audio_buffer.append", "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "conversation.item.create", "conversation.item.truncate", "conversation.item.delete",
    "conversation.item.retrieve",
    "response.create", "response.cancel", "output_audio_buffer.clear",
)  # fmt: skip
NONSENSE = (
    None, True, False, 0, -1, 7, 2**31, 2**70, -(2**70), 1.5, 1e308, "", "x", "inf", "audio",
    "\x00\ud83d", "root",
    "a" * 3000, [], [None], [[]], {}, {"type": None}, {"type": "function"}, {"a": {"b": {"c": []}}},
)  # fmt: skip
OURS = {"server_error", "internal_error", "engine_error"}
"""Codes and kinds of errors that are the server's fault."""


class Fuzz:
    """Makes random events. Ids that the server reported are used again, so that some events refer
    to real items."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.items: list[str] = ["root"]

    def message(self) -> str | bytes:
        draw = self.random.random()
        if draw < 0.03:
            return self.random.randbytes(self.random.randrange(40))
        event = self.event()
        if draw < 0.35:
            event = self.damaged(event)
        text = json.dumps(event)
        if draw < 0.06:
            at = self.random.randrange(len(text))
            return text[:at]
        return text

    def event(self) -> dict[str, Any]:
        kind = self.random.choice(TYPES)
        event: dict[str, Any] = {"type": kind, "event_id": f"e{self.random.randrange(10**6)}"}
        if kind == "session.update":
            event["session"] = self.session()
        elif kind == "input_audio_buffer.append":
            event["audio"] = base64.b64encode(self.sound()).decode()
        elif kind == "conversation.item.create":
            event |= {
                "item": self.item(),
                "previous_item_id": self.random.choice((None, None, self.item_id())),
            }
        elif kind.startswith("conversation.item."):
            event["item_id"] = self.item_id()
            if kind.endswith("truncate"):
                event |= {"content_index": 0, "audio_end_ms": self.random.randrange(-10, 5000)}
        elif kind == "response.create" and self.random.random() < 0.7:
            event["response"] = self.response()
        return event

    def session(self) -> dict[str, Any]:
        pick = self.random.choice
        turns = pick((
            None,
            {"type": "server_vad", "silence_duration_ms": pick((0, 100, 500)),
            "create_response": pick((True, False))},
            {"type": "semantic_vad", "eagerness": pick(("low", "high", "auto"))},
            {"interrupt_response": pick((True, False)), "threshold": self.random.random()},
        ))  # fmt: skip
        format = {"type": pick(("audio/pcm", "audio/pcmu", "audio/pcma"))}
        return {
            "type": "realtime",
            "instructions": pick(("", "Be brief.")),
            "output_modalities": [pick(("text", "audio"))],
            "tools": pick(
                ([], [{"type": "function", "name": "f", "parameters": {"type": "object"}}])
            ),
            "audio": {
                "input": {
                    "turn_detection": turns,
                    "format": format,
                    "transcription": pick((None, {})),
                },
                "output": {"format": format, "voice": pick(("alloy", "nobody"))},
            },
            **SHORT,
        }

    def sound(self) -> bytes:
        size = self.random.randrange(0, 9600)
        loud = self.random.random() < 0.6
        return self.random.randbytes(size) if loud else bytes(size)

    def item(self) -> dict[str, Any]:
        pick = self.random.choice
        kind = pick(
            ("message", "message", "function_call", "function_call_output", "item_reference")
        )
        parts = [
            {"type": "input_text", "text": pick(("", "Hello", "<|im_end|>"))},
            {"type": "input_audio", "audio": base64.b64encode(self.sound()).decode()},
            {"type": "output_audio", "transcript": "yes"},
        ]
        return {
            "type": kind,
            "id": pick((None, f"i{self.random.randrange(500)}")),
            "role": pick(("user", "assistant", "system")),
            "content": self.random.choices(parts, k=self.random.randrange(3)),
            "call_id": "c",
            "name": "f",
            "arguments": pick(("{}", "nonsense")),
            "output": "o",
        }

    def response(self) -> dict[str, Any]:
        return {
            **{k: v for k, v in self.session().items() if self.random.random() < 0.3},
            "conversation": self.random.choice(("auto", "none")),
            "metadata": self.random.choice((None, {"a": "b"})),
            **({"input": [self.item()]} if self.random.random() < 0.2 else {}),
            **SHORT,
        }

    def item_id(self) -> str:
        return self.random.choice(
            (f"i{self.random.randrange(500)}", self.random.choice(self.items))
        )

    def damaged(self, event: dict[str, Any]) -> dict[str, Any]:
        """One value, somewhere, is something else."""
        at: Any = event
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return event
            key = self.random.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and self.random.random() < 0.8:
                at = at[key]
                continue
            at[key] = self.random.choice(NONSENSE)
            return event

    def saw(self, event: dict[str, Any]) -> None:
        if event["type"] == "conversation.item.added":
            self.items = [*self.items[-50:], event["item"]["id"]]


Judge = Callable[[dict[str, Any]], None]
"""Is shown the events of a session in their order; raises at one that should not be."""


async def session(
    url: str,
    fuzz: Fuzz,
    count: int,
    seen: Counter[str],
    judge: Judge | None = None,
    patience_s: float | None = PATIENCE_S,
) -> list[str]:
    """Send `count` events and check everything that comes back; a list of problems. `patience_s`:
    for the session to begin, and for its last answer, which come late on a busy machine; None:
    however long that takes."""
    problems: list[str] = []
    options = {
        "open_timeout": patience_s,
        "ping_interval": None,
    }  # an answer to the last event is a sign of life
    async with connect(url, max_size=1 << 20, compression=None, **options) as socket:
        reader = asyncio.create_task(_read(socket, fuzz, seen, problems, judge))
        for _ in range(count):
            await socket.send(fuzz.message())
            await asyncio.sleep(0)
        await socket.send(
            json.dumps({"type": "conversation.item.retrieve", "event_id": "last", "item_id": "-"})
        )
        await asyncio.wait_for(reader, patience_s)
    return problems


async def _read(
    socket: ClientConnection,
    fuzz: Fuzz,
    seen: Counter[str],
    problems: list[str],
    judge: Judge | None,
) -> None:
    """Until the last event was answered."""
    try:
        async for data in socket:
            event = json.loads(data)
            seen[event["type"]] += 1
            fuzz.saw(event)
            if judge is not None:
                try:
                    judge(event)
                except (AssertionError, LookupError, ValueError) as e:
                    problems.append(f"{type(e).__name__}: {e} at {str(data)[:500]}")
                    judge = None  # the rest would follow from that
            if not event.get("event_id"):
                problems.append(f"an event without an id: {str(data)[:200]}")
            if event["type"] == "error":
                error = event["error"]
                seen[f"error {error['code']}"] += 1
                if OURS & {error["code"], error["type"]}:
                    problems.append(f"our fault: {error}")
                if error["event_id"] == "last":
                    return
            if event["type"] == "response.done" and event["response"]["status"] == "failed":
                error = event["response"]["status_details"]["error"]
                if error["code"] in OURS:
                    problems.append(f"our fault: {error}")
    except websockets.ConnectionClosed as e:
        problems.append(f"closed: {e}")
        return
    problems.append("closed before the last answer")


async def fuzz_sessions(
    url: str,
    events: int,
    seed: int,
    new_judge: Callable[[], Judge | None] = lambda: None,
    patience_s: float | None = PATIENCE_S,
) -> tuple[Counter[str], list[str]]:
    """So many events in all, in sessions of `EVENTS_A_SESSION`, some at once; each has a judge of
    its own."""
    seen: Counter[str] = Counter()
    problems: list[str] = []
    seeds = iter(range(seed, seed + -(-events // EVENTS_A_SESSION)))

    async def one() -> None:
        for number in seeds:
            try:
                fuzz = Fuzz(number)
                problems.extend(
                    await session(url, fuzz, EVENTS_A_SESSION, seen, new_judge(), patience_s)
                )
            except (OSError, TimeoutError, websockets.WebSocketException) as e:
                problems.append(f"session of seed {number}: {type(e).__name__}: {e}")

    await asyncio.gather(*(one() for _ in range(SESSIONS)))
    return seen, problems


def main(arguments: Sequence[str]) -> int:
    p = parser("fuzz --parts realtime", __doc__, package="tests.slow")
    p.add_argument("--events", type=int, default=100_000)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(arguments)
    args.device, args.model, args.max_rows, args.serve = "cpu", "tiny", 16, []
    env = describe()  # before anything runs: what is measured is what is there now
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder) / "tiny")
        with serving(args, Path(folder) / "tiny", Path(folder)) as server:
            server.wait(120)
            began = time.monotonic()
            seen, problems = asyncio.run(
                fuzz_sessions(f"ws://127.0.0.1:{server.port}/v1/realtime", args.events, args.seed)
            )
            seconds = time.monotonic() - began
            time.sleep(2)
            left = server.metrics()
            for name in (
                "stretto_realtime_sessions",
                "stretto_engine_running",
                "stretto_num_requests_running",
            ):
                if left[name]:
                    problems.append(f"{name} is {left[name]} at the end")
            log = server.tail(1 << 20)
    problems += [line for line in log.splitlines() if "Traceback" in line]
    told = {"env": env, "events": args.events, "seed": args.seed, "seconds": round(seconds, 1)}
    return judged(args.out, {**told, "seen": dict(seen.most_common()), "problems": problems[:50]})
