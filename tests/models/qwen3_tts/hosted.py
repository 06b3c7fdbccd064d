"""A host with Qwen3-TTS's stages, driven by hand: requests by ids, all that it reports, no process
and no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.config.engine import HostSettings
from stretto.messages.hosts import Configure
from stretto.messages.requests import (
    Admit,
    Cancel,
    Codes,
    Ended,
    Failed,
    Pcm,
    ProductData,
    StepInputs,
)
from stretto.models.qwen3_tts.family import BUILD, LINKS
from stretto.models.qwen3_tts.params import (
    MIN_FRAMES,
    RESIDUAL,
    ClonedVoice,
    PrimedParams,
    TalkerParams,
)
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.stage.host.host import Host
from stretto.types import RequestId, SamplingParams
from tests.models.qwen3_tts.ids import ROLE, instruct_ids

CODE0 = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
"""As the released files have it."""
GREEDY = (SamplingParams(0.0, 50, 1.0, CODE0.repetition_penalty), SamplingParams(0.0, 50))


@dataclass(slots=True, eq=False)
class Answer:
    codes: list[list[int]] = field(default_factory=list)
    samples: list[np.ndarray] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    made: bytes = b""
    error: Failed | None = None

    @property
    def wave(self) -> np.ndarray:
        return np.concatenate(self.samples) if self.samples else np.zeros(0, np.float32)


class Hosted:
    def __init__(
        self, model: Path, stages: tuple[str, ...] = ("talker", "code2wav"), **settings: Any
    ) -> None:
        self.answers: dict[str, Answer] = {}
        links = tuple((link.sender, link.receiver) for link in LINKS)
        self.host = Host(
            Configure(str(model), BUILD, stages, {}, links), HostSettings(**settings), self
        )
        self.host.load()

    def push(self) -> None:
        """As the host's channel, and so the next two."""

    def send(self, message: Any) -> None:
        self.post(message)

    def post(self, message: Any, blob: bytes = b"") -> None:
        answer = self.answers.setdefault(str(getattr(message, "request", "")), Answer())
        match message:
            case Codes(width=width):
                answer.codes += np.frombuffer(blob, np.int32).reshape(-1, width).tolist()
            case Pcm(start=start):
                assert start == len(answer.wave)
                answer.samples.append(np.frombuffer(blob, np.float32))
            case Ended(stage=stage, reason=reason):
                answer.ended[stage] = reason
            case ProductData():
                answer.made = blob
            case Failed():
                answer.error = message

    def admit(
        self,
        id: str,
        case: dict[str, Any],
        *,
        live: bool = False,
        sampling: Any = GREEDY,
        min_frames: int = MIN_FRAMES,
    ) -> None:
        """A case of `cases.py`, or a part of its text if it is `live`."""
        cloned = None
        if "vector" in case:
            codes = np.array(case.get("ref_codes", []), np.int16).tobytes()
            vector = np.array(case["vector"], np.float32).tobytes()
            cloned = ClonedVoice(vector, codes, tuple(case.get("ref_text", ())))
        talker = TalkerParams(
            *sampling, case["max_new"] - 1, case.get("speaker"), min_frames, want_codes=True,
            spoken=() if live else tuple(case["text"]), live=live, language=case.get("language"),
            cloned=cloned,
            whole=case["whole"],
        )  # fmt: skip
        ids = (*(instruct_ids(case["instruct"]) if "instruct" in case else ()), *ROLE)
        stage_params = {
            "talker": talker,
            "code2wav": PrimedParams(cloned.codes if cloned is not None else b""),
        }
        raw = {
            stage: msgspec.Raw(msgspec.msgpack.encode(p))
            for stage, p in stage_params.items()
            if stage in self.host.stages
        }
        self.host.handle(Admit(RequestId(id), PackedPrompt.of_ids(ids), raw), b"")

    def add_text(self, id: str, tokens: list[int], last: bool = False) -> None:
        self.host.handle(StepInputs(RequestId(id), "talker", tuple(tokens), last), b"")

    def run(self, turns: int = 100_000) -> None:
        """Until nothing more can be done without new input. (Frames may be left that wait for their
        listener.)"""
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError("no end in sight")

    def turn(self) -> bool:
        """One round over the stages. True: something happened."""
        return any([self.host.poll_stage(stage) for stage in reversed(self.host.stages.values())])  # noqa: C419 - all of them

    def cancel(self, id: str) -> None:
        self.host.handle(Cancel(RequestId(id)), b"")

    def speak(self, case: dict[str, Any], id: str = "a", **more: Any) -> Answer:
        self.admit(id, case, **more)
        self.run()
        return self.answers.pop(id)


SAMPLED = (CODE0, RESIDUAL)
