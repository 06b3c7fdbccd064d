"""What a request is admitted with: limits that fit the model, an id that no stage has heard of, and the announcement
to its stages. Called by the engine on the event loop; imports no torch."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count

from stretto.errors import Invalid, TooLong
from stretto.orchestrator.api import Params
from stretto.orchestrator.messages import (
    Admit,
    Sampling,
)
from stretto.orchestrator.pipeline import PIECE
from stretto.orchestrator.settings import STAGES
from stretto.orchestrator.ticket import Ticket
from stretto.types import CODE0, RESIDUAL, RequestId, SamplingParams, stage_seed

_GIVEN = re.compile(r"[A-Za-z0-9_.:-]{1,48}")  # what a link carries as a request's name, less room for a number


@dataclass(frozen=True, slots=True)
class Ask:
    """What a caller wants, but for the prompt."""

    speak: bool
    voice: str | None
    params: Params
    id: RequestId | None
    spoken: tuple[int, ...] | None = None  # tokens to be read aloud: there is no answer of the thinker's
    session: str | None = None
    owner: str = ""  # whose prompts its own may be found among; all that name none share theirs

    @property
    def stages(self) -> tuple[str, ...]:
        if not self.speak:
            return STAGES[:1]
        return STAGES if self.spoken is None else STAGES[1:]


def fitted(ask: Ask, num_prompt: int, max_positions: int, vocab: int) -> Params:
    """The parameters, with limits that the model has room for beside a prompt of so many tokens."""
    params = ask.params
    room = max_positions - num_prompt
    if ask.spoken is None and params.max_text_tokens > room:
        if room < 1:
            raise TooLong(f"the prompt has {num_prompt} tokens; the limit is {max_positions - 1}", "messages")
        params = replace(params, max_text_tokens=room, min_text_tokens=min(params.min_text_tokens, room))
    longest = max(1, room - 16)
    params = replace(params, max_frames=min(params.max_frames, longest), min_frames=min(params.min_frames, longest))
    if unknown := [i for i in params.logit_bias if not 0 <= i < vocab]:
        raise Invalid(f"logit_bias names token {unknown[0]}; the vocabulary has {vocab}", "logit_bias")
    return params


class Names:
    """The ids that all stages know requests by. None comes twice: stages remember those of requests that are over, and
    ignore what comes for them."""

    def __init__(self) -> None:
        self._numbers = count()

    def new(self, given: RequestId | None, running: Iterable[Ticket]) -> RequestId:
        """What the caller gave, and a number that makes it new, so that nothing need be remembered of those before."""
        if given is None:
            return RequestId(f"r-{secrets.token_hex(8)}")
        if not _GIVEN.fullmatch(given):
            raise Invalid("request_id must be 1 to 48 letters, digits, _ . : or -", "request_id")
        if any(t.given == given for t in running):
            raise Invalid(f"request {given} is running already", "request_id")
        return RequestId(f"{given}.{next(self._numbers)}")


async def announce(t: Ticket, ask: Ask, shared: bool) -> None:
    """Tell all stages of a request at once, so that each is ready before its first input comes. Features go to the
    thinker's host alone, large ones ahead and piece by piece. `shared`: prompts of all owners are one in the prefix
    caches."""
    p = t.params
    text, code0, residual = _sampling(p, t.seed)
    root = b"" if shared else cache_root(ask.owner)
    bare, blob = t.prompt.without_features(), t.prompt.features
    if ask.spoken is None and len(blob) > PIECE:
        await t.pipeline.send_features(("thinker",), t.id, blob)
        blob = b""
    for stages in t.pipeline.hosts_of(t.stages):
        encodes = "thinker" in stages and ask.spoken is None
        message = Admit(
            request=t.id,
            prompt=t.prompt.meta if encodes else bare.meta,
            speak=ask.speak,
            voice=ask.voice,
            text=text,
            code0=code0,
            residual=residual,
            max_text_tokens=p.max_text_tokens,
            max_frames=p.max_frames,
            min_text_tokens=p.max_text_tokens if p.ignore_eos else p.min_text_tokens,
            min_frames=p.min_frames,
            first_frames=p.packets.first,
            each_frames=p.packets.each,
            ramp=p.packets.ramp,
            priority=p.priority,
            want_codes=p.want_codes,
            logit_bias=tuple(p.logit_bias.items()),
            spoken=ask.spoken,
            media=t.prompt.media,
            cache_root=root,
        )
        t.pipeline.send(stages[:1], message, blob if encodes else b"")
    t.prompt = bare  # nobody needs the features any more


def cache_root(owner: str) -> bytes:
    """What sets an owner's prompts apart in the prefix caches. A digest: hosts need not know who it is."""
    return (
        blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache owner").digest()
        if owner
        else b""
    )


def _sampling(p: Params, seed: int) -> tuple[Sampling, Sampling, Sampling]:
    """Of text, code 0 and the other codes: each stage has draws of its own from the request's one seed."""
    text = SamplingParams(p.temperature, p.top_k, p.top_p, p.repetition_penalty, stage_seed(seed, "thinker"))
    speech = stage_seed(seed, "talker")
    code0, residual = replace(CODE0, seed=speech), replace(RESIDUAL, seed=speech)
    if p.greedy_speech:
        code0, residual = replace(code0, temperature=0.0), replace(residual, temperature=0.0)
    return Sampling.of(text), Sampling.of(code0), Sampling.of(residual)
