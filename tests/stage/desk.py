"""Stages around the tiny model, driven by hand: submit, turn, collect."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.talker import TalkerAdapter, TalkerInput
from stretto.models.qwen3_omni.thinker import ThinkerAdapter, ThinkerInput
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import CoreOutput, StageCore
from stretto.stage.launch_timing import LaunchTimer
from stretto.stage.request import Reason, RequestSpec, Salt
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.stage.runner.runner import Runner
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.types import RequestId, Span
from tests.media import encode_media
from tests.solo import Options, media_places
from tests.stage.invariants import check_scheduler
from tests.stage.simulated import MS, Clock, Device
from tests.stage.stepping import in_flight, poll_core, wait_for_device

CONFIG = SchedulerConfig(
    num_blocks=400, block_size=8, max_rows=16, max_context=1024, prefill_chunk=32
)


class Desk:
    """One stage and what came out of it. With `hold`, on a device that takes a time that cannot be
    foretold, where every look at the clock takes time too: so steps are held back, and launched
    when due, early and late."""

    hold = False

    def __init__(
        self,
        models: Models,
        kind: str,
        config: SchedulerConfig = CONFIG,
        graphs: bool = False,
        timer: LaunchTimer | None = None,
    ) -> None:
        self.models = models
        model = models.thinker if kind == "thinker" else models.talker
        cache = model.cache(config.num_blocks + 1, config.block_size)
        adapter = (ThinkerAdapter if kind == "thinker" else TalkerAdapter)(
            model, cache, config.max_rows, config.max_context
        )
        self.adapter = adapter
        captured = None
        if graphs:
            captured = DecodeGraphs(adapter, sizes=(1, 2, 4, 8, 16))
        runner = Runner(adapter, captured)
        if captured is not None:
            assert runner.stream is not None
            captured.capture(runner.stream)
        self.clock, self.rng = Clock(tick=MS // 10), random.Random(0)
        self.device: Device | None = None  # a simulated one
        if self.hold:
            self.device = Device(self.clock, lambda batch: self.rng.randrange(2 * MS, 8 * MS))
            self.device.drive(runner)
            timer = LaunchTimer((1, 2, 4, 8, 16), MS // 5, clock=self.clock)
        self.stage = StageCore(kind, Scheduler(config), runner, timer=timer)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.rows: dict[str, list[list[int]]] = defaultdict(list)
        self.media: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self.ended: dict[str, Reason] = {}
        self.errors: dict[str, Exception] = {}

    def collect(self, o: CoreOutput) -> None:
        id = str(o.request.id)
        assert id not in self.ended, f"{id}: output after its end"
        if o.token is not None:
            self.tokens[id].append(o.token)
            self.rows[id].append(list(o.row))
        if o.media is not None:
            if o.media.event is not None:
                o.media.event.synchronize()
            for place, row in zip(o.media.places, o.media.rows.cpu().numpy(), strict=True):
                assert place not in self.media[id], f"{id}: row {place} handed out twice"
                self.media[id][place] = row
        if o.reason is not None:
            self.ended[id] = o.reason
            if o.request.error is not None:
                self.errors[id] = o.request.error

    def poll(self) -> bool:
        return poll_core(self.stage, self.collect)

    def run(self, turns: int = 100_000) -> None:
        """Until nothing more can be done without new input."""
        for _ in range(turns):
            if not self.poll():
                if not in_flight(self.stage):
                    return
                due = self.stage.due_ns
                if due is not None and self.rng.random() < 0.7:
                    self.clock.move_to(due - self.rng.randrange(MS))
                else:
                    self.wait()
            check_scheduler(self.stage.scheduler)
        raise AssertionError("no end in sight")

    def wait(self) -> None:
        """Until a step is back."""
        if self.device is None:
            wait_for_device()
        elif (end := self.device.next_end()) is not None:
            self.clock.move_to(end)

    # -- the thinker

    def think(
        self,
        id: str,
        prompt: Prompt,
        options: Options,
        bias: Sequence[tuple[int, float]] = (),
        **changes,
    ) -> None:
        c = self.models.config
        positions, first = rope_positions(
            prompt.ids, c.tokens, c.thinker.vision.merge, c.thinker.positions_per_second,
            prompt.images, prompt.videos,
            prompt.audio_in_video,
        )  # fmt: skip
        plan = talker_prompt(prompt, c) if options.speak else None
        capture = np.array(media_places(plan), dtype=np.int64) if plan else None
        with self.stage.runner.on_stream():
            media = encode_media(self.models.thinker, prompt)
        state = ThinkerInput(
            positions, first, options.text, [media] if media else [], capture, tuple(bias)
        )
        spec = RequestSpec(
            RequestId(id), options.max_text_tokens, frozenset({c.tokens.im_end}),
            needs_payload=options.speak,
        )  # fmt: skip
        self.stage.submit(
            replace(spec, **changes), state, prompt.ids, salts=salts(prompt, c.tokens.media_pads)
        )

    # -- the talker

    def speak(
        self, id: str, prompt: Prompt, options: Options, media: np.ndarray | None = None, **changes
    ) -> TalkerInput:
        """Announce a request whose text is still to come. `media`: the thinker's accept-layer rows,
        in order."""
        plan = talker_prompt(prompt, self.models.config, options.voice)
        state = TalkerInput(plan, options.code0, options.residual)
        if media is not None and len(media):
            with self.stage.runner.on_stream():
                state.media.append(torch.from_numpy(media).to(self.models.talker.device))
        eos = self.models.config.talker.codec.eos
        spec = RequestSpec(
            RequestId(id), options.max_frames + 1, frozenset({eos}), paced=True,
            cache_output=False, cache_root=str(plan.speaker).encode(),
        )  # fmt: skip
        self.stage.submit(
            replace(spec, **changes), state, len(plan) - 1, closed=False, missing=state.missing
        )
        return state

    def feed(self, id: str, token: int | None) -> None:
        """One more text token; None: the text has ended."""
        request = RequestId(id)
        state = self.stage.scheduler.request(request).input
        if token is None:
            state.text_ended = True
            if state.text:
                self.stage.scheduler.append_step_inputs(request, 0, last=True)
            else:
                self.stage.cancel(request)  # nothing to say
            return
        state.text.append(token)
        if len(state.text) == 1:
            self.stage.scheduler.append_rows(request, 1, last=True)
        else:
            self.stage.scheduler.append_step_inputs(request)


def salts(prompt: Prompt, pads: tuple[int, int, int]) -> list[Salt]:
    """One salt per run of media pads, told by the content of all media (coarse, and enough for
    tests)."""
    digest = b"".join(a.mel.tobytes()[:64] for a in prompt.audios)
    digest += b"".join(p.values.tobytes()[:64] for p in (*prompt.images, *prompt.videos))
    found, start = [], None
    for i, token in enumerate([*prompt.ids, -1]):
        if token in pads and start is None:
            start = i
        elif token not in pads and start is not None:
            found.append(Salt(Span(start, i), digest[:48]))
            start = None
    return found
