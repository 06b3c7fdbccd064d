"""What a request is admitted with: limits that fit the model, an id that no stage has heard of, and
the announcement to its stages. Called by the engine on the event loop; imports no torch."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from itertools import count

import msgspec

from stretto.engine.pipeline import PIECE
from stretto.engine.request import Ticket
from stretto.errors import Bug, Invalid, TooLong
from stretto.messages.requests import Admit
from stretto.params import Params, RequestOptions
from stretto.types import RequestId

# what a link carries as a request's id, less room for a number
_CALLERS_ID = re.compile(r"[A-Za-z0-9_.:-]{1,48}")


def clamp_params(
    options: RequestOptions, num_prompt: int, max_positions: int, vocab: int
) -> Params:
    """The request's parameters, with limits that the model has room for beside a prompt of
    `num_prompt` tokens, and with a seed."""
    params = options.params
    room = max_positions - num_prompt
    writes_text = options.capability not in ("tts", "enrolment")
    if writes_text and params.max_text_tokens > room:
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
        seed=seed_of(params),
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


class RequestIds:
    """Makes the ids that all stages know requests by. None comes twice: stages remember those of
    requests that are over, and ignore what comes for them."""

    def __init__(self) -> None:
        self._numbers = count()

    def mint(self, callers_id: RequestId | None, running: Iterable[Ticket]) -> RequestId:
        """The caller's id and a number that makes it unique, so that earlier ids need not be
        remembered."""
        if callers_id is None:
            return RequestId(f"r-{secrets.token_hex(8)}")
        if not _CALLERS_ID.fullmatch(callers_id):
            raise Invalid("request_id must be 1 to 48 letters, digits, _ . : or -", "request_id")
        if any(t.callers_id == callers_id for t in running):
            raise Invalid(f"request {callers_id} is running already", "request_id")
        return RequestId(f"{callers_id}.{next(self._numbers)}")


async def announce(t: Ticket, options: RequestOptions, shared: bool) -> None:
    """Tell all stages of a request at once, so that each is ready before its first input comes.
    Features go only to hosts whose stages encode them, large ones ahead and piece by piece.
    `shared`: prompts of all owners are one in the prefix caches."""
    stage_params = {
        stage: msgspec.Raw(_encode(params))
        for stage, params in t.model.stage_params(options).items()
    }
    if set(stage_params) != set(t.stages):
        raise Bug(
            f"a request for {options.capability} has parameters for stages {sorted(stage_params)} "
            f"and needs {t.stages}"
        )
    root = b"" if shared else cache_root(options.owner)
    sender = digest_of(options.sender, b"sender")
    features = t.prompt.features.data if t.prompt.features is not None else b""
    encoding = [s.name for s in t.model.pipeline.stages if s.encodes_media and s.name in t.stages]
    blob = b""
    if encoding and len(features) <= PIECE:
        blob = bytes(features)
    elif encoding:
        await t.pipeline.send_features(encoding, t.id, features)
    for host in t.pipeline.hosts_of(t.stages):
        encodes = any(stage in host for stage in encoding)
        here = {stage: params for stage, params in stage_params.items() if stage in host}
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
