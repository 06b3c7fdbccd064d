"""What a request is admitted with: limits that fit the model, an id that no stage has heard of, and
the announcement to its stages. Called by the engine on the event loop; imports no torch."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count

import msgspec

from stretto.engine.pipeline import PIECE
from stretto.engine.request import Ticket
from stretto.errors import Bug, Invalid, TooLong
from stretto.family import Capability, Wanted
from stretto.messages.requests import Admit
from stretto.params import DEFAULT_STYLE, Params, SpeechStyle
from stretto.types import RequestId

_GIVEN = re.compile(
    r"[A-Za-z0-9_.:-]{1,48}"
)  # what a link carries as a request's name, less room for a number


@dataclass(frozen=True, slots=True)
class Ask:
    """What a caller wants, but for the prompt."""

    speak: bool
    voice: str | None
    params: Params
    id: RequestId | None
    spoken: tuple[int, ...] | None = None  # tokens to be read aloud: there is no answer to be made
    session: str | None = None
    manner: SpeechStyle = DEFAULT_STYLE  # of reading aloud
    live: bool = False  # the text that is read aloud is still being written
    enrols: bool = False  # wants a voice, not an answer
    sender: str = ""  # whose turn it is when many ask at once
    owner: str = ""  # whose prompts its own may be found among; all that name none share theirs
    # the beginning of a prompt, to be read ahead of its end: there is no answer yet
    prefill_only: bool = False

    @property
    def capability(self) -> Capability:
        """What its stages have to do."""
        if self.prefill_only:
            return "speech_ahead" if self.speak else "text_ahead"
        if self.enrols:
            return "enrolment"
        if not self.speak:
            return "text"
        return "speech" if self.spoken is None else "reading"


def fitted(ask: Ask, num_prompt: int, max_positions: int, vocab: int) -> Params:
    """The parameters, with limits that the model has room for beside a prompt of `num_prompt`
    tokens."""
    params = ask.params
    room = max_positions - num_prompt
    if ask.spoken is None and not ask.enrols and params.max_text_tokens > room:
        if room < 1:
            raise TooLong(
                f"the prompt has {num_prompt} tokens; the limit is {max_positions - 1}", "messages"
            )
        params = replace(
            params, max_text_tokens=room, min_text_tokens=min(params.min_text_tokens, room)
        )
    longest = max(1, room - 16)
    params = replace(
        params,
        max_frames=min(params.max_frames, longest),
        min_frames=min(params.min_frames, longest),
    )
    if unknown := [i for i in params.logit_bias if not 0 <= i < vocab]:
        raise Invalid(
            f"logit_bias names token {unknown[0]}; the vocabulary has {vocab}", "logit_bias"
        )
    return params


def seed_of(params: Params) -> int:
    return params.seed if params.seed is not None else fresh_seed()


def fresh_seed() -> int:
    """For a request that names none. As many bits as are exact in any language."""
    return secrets.randbits(53)


class Names:
    """The ids that all stages know requests by. None comes twice: stages remember those of requests
    that are over, and ignore what comes for them."""

    def __init__(self) -> None:
        self._numbers = count()

    def new(self, given: RequestId | None, running: Iterable[Ticket]) -> RequestId:
        """The caller's id and a number that makes it unique, so that earlier ids need not be
        remembered."""
        if given is None:
            return RequestId(f"r-{secrets.token_hex(8)}")
        if not _GIVEN.fullmatch(given):
            raise Invalid("request_id must be 1 to 48 letters, digits, _ . : or -", "request_id")
        if any(t.given == given for t in running):
            raise Invalid(f"request {given} is running already", "request_id")
        return RequestId(f"{given}.{next(self._numbers)}")


async def announce(t: Ticket, ask: Ask, shared: bool) -> None:
    """Tell all stages of a request at once, so that each is ready before its first input comes.
    Features go only to hosts whose stages encode them, large ones ahead and piece by piece.
    `shared`: prompts of all owners are one in the prefix caches."""
    wanted = Wanted(ask.capability, t.params, t.seed, ask.voice, ask.spoken, ask.manner, ask.live)
    told = {
        stage: msgspec.Raw(_encode(params))
        for stage, params in t.model.stage_params(wanted).items()
    }
    if set(told) != set(t.stages):
        raise Bug(
            f"a request for {ask.capability} tells stages {sorted(told)} and needs {t.stages}"
        )
    root, sender = b"" if shared else cache_root(ask.owner), digest_of(ask.sender, b"sender")
    features = t.prompt.features.data if t.prompt.features is not None else b""
    encoding = [s.name for s in t.model.pipeline.stages if s.encodes_media and s.name in t.stages]
    blob = b""
    if encoding and len(features) <= PIECE:
        blob = bytes(features)
    elif encoding:
        await t.pipeline.send_features(encoding, t.id, features)
    for host in t.pipeline.hosts_of(t.stages):
        encodes = any(stage in host for stage in encoding)
        here = {stage: params for stage, params in told.items() if stage in host}
        prompt = t.prompt.for_host(with_features=encodes)
        elsewhere = tuple(stage for stage in t.stages if stage not in here)
        message = Admit(t.id, prompt, here, t.params.priority, root, sender, elsewhere)
        t.pipeline.send(host[:1], message, blob if encodes else b"")
    t.prompt = t.prompt.for_host(with_features=False)  # nobody needs the features any more


_encode = msgspec.msgpack.Encoder().encode


def cache_root(owner: str) -> bytes:
    """What sets an owner's prompts apart in the prefix caches."""
    return digest_of(owner, b"cache owner")


def digest_of(name: str, use: bytes) -> bytes:
    """Hosts need not know who it is. Of nobody: nothing."""
    words = name.encode("utf-8", "surrogatepass")
    return blake2b(words, digest_size=16, person=use).digest() if words else b""
