"""Warm-up requests: before a host says that it is ready, its stages serve a few of them, by the
ordinary path and for nobody.

What is made on first use is made then: kernels that the device loads when they are first launched,
library handles and pools that belong to a thread, pinned memory. That is why it happens on the loop
thread. A family says what such requests are (`StageContext.warm_up`). Nothing of them is left: what
the stages say of them is dropped, and what they learn, count and keep of them is forgotten. The KV
pool and the device rows are written anew by whoever takes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch

from stretto.messages.requests import Admit, Cancel, Ended, Failed, FromHost, encode
from stretto.observe.recorder import MAX_SPANS
from stretto.preprocess.packed_prompt import pack
from stretto.preprocess.prompt import Prompt
from stretto.stage.links.links import Inlet, Links, Outlet
from stretto.stage.payload import Payload
from stretto.stage.stage import ToLink
from stretto.stage.timings import Report
from stretto.types import Mark, RequestId

if TYPE_CHECKING:
    from stretto.stage.host.host import Host

log = logging.getLogger(__name__)

LIMIT_S = 60.0
"""For one request. A host that needs longer is ready without having ended it."""
REFUSED = ("Invalid", "TooLong")
"""Errors of a request that this host has no room for."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmUpRequest:
    """A request, as its stages are told of it. Those of other hosts are left out."""

    told: Mapping[str, msgspec.Struct]  # by stage
    prompt: Prompt
    arriving: Mapping[str, Sequence[Payload]] = field(default_factory=dict)
    """By link: what its sender would send, for a host that does not have it."""


class Reports:
    """What a host reports through. While `muted`, what is said of requests does not leave."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.muted = False
        self.ended: set[str] = set()  # stages that are done with the request
        self.failed: Failed | None = None

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        if not self.muted or not hasattr(message, "request"):
            self._report(message, blob)
            return
        encode(message, blob)  # as if it left
        if isinstance(message, Ended):
            self.ended.add(message.stage)
        elif isinstance(message, Failed):
            self.failed = message

    def clear(self) -> None:
        """Of the request that comes next, nothing was said yet."""
        self.ended = set()
        self.failed = None


def warm_up(host: Host, reports: Reports, clock: Callable[[], float] = time.monotonic) -> int:
    """On the loop thread, before its first round. How many requests came to a good end."""
    requests, good = host.context.warm_up, 0
    if not requests:
        return good
    start = clock()
    reports.muted = True
    with alone(host.links):
        for number, asked in enumerate(requests):
            if asked.told.keys() & host.stages.keys():
                good += _perform(host, reports, asked, RequestId(f"warm-up-{number}"), clock)
        _settle(host)
    reports.muted = False
    for stage in host.stages.values():
        stage.forget()
    for outlet in host.links.outlets.values():
        outlet.local_payloads = 0
    host.recorder.take_spans(MAX_SPANS)
    host.context.warm_up = ()  # and the tensors in it
    log.info("served %d warm-up requests in %.3f s", good, clock() - start)
    return good


@contextmanager
def alone(links: Links) -> Iterator[None]:
    """Let links end here that lead to other hosts: what is sent is dropped."""
    ends: list[Inlet | Outlet] = [*links.outlets.values(), *links.inlets.values()]
    remote = [end for end in ends if not end.is_local]
    for end in remote:
        end.is_local = True
    try:
        yield
    finally:
        for end in remote:
            end.is_local = False


def _perform(
    host: Host, reports: Reports, asked: WarmUpRequest, id: RequestId, clock: Callable[[], float]
) -> bool:  # fmt: skip
    reports.clear()
    told = {name: params for name, params in asked.told.items() if name in host.stages}
    prompt = pack(asked.prompt)
    raw = {name: msgspec.Raw(msgspec.msgpack.encode(params)) for name, params in told.items()}
    elsewhere = tuple(name for name in asked.told if name not in host.stages)
    announced = prompt.for_host(with_features=True)
    host.handle(Admit(id, announced, raw, elsewhere=elsewhere), prompt.feature_bytes())
    for link, payloads in asked.arriving.items():
        if link in host.links.inlets and link not in host.links.outlets:
            for payload in payloads:
                host.receive(ToLink(link, id, payload))
            host.receive(ToLink(link, id, None, Mark.REQUEST_END))
    limit = clock() + LIMIT_S
    while reports.failed is None and (told.keys() - reports.ended or host.num_requests()):
        if clock() > limit:
            log.warning(
                "a warm-up request did not end in %.0f s: stages %s",
                LIMIT_S,
                sorted(told.keys() - reports.ended),
            )
            break
        if not host.loop.round():
            host.wakeup.sleep(1)
    if reports.failed is not None:
        how = logging.INFO if reports.failed.kind in REFUSED else logging.WARNING
        log.log(
            how, "a warm-up request failed: %s: %s", reports.failed.stage, reports.failed.message
        )
    host.handle(Cancel(id), b"")  # what is left, if it did not end
    return reports.failed is None and told.keys() == reports.ended


def _settle(host: Host) -> None:
    """Until nothing is in flight."""
    while host.loop.round():
        pass
    if host.device.type == "cuda":
        torch.cuda.synchronize(host.device)
        while host.loop.round():
            pass
