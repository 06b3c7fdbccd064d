"""The ends of links in a host: what the engine says of a link reaches its connector, and a
link that cannot be laid is an error of that link, never the end of the stages here."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec
import pytest
import torch

from stretto.config.engine import HostSettings
from stretto.errors import StrettoError, WireError
from stretto.messages.hosts import Connect, LinkDown, Listen
from stretto.stage.links.endpoints import LinkEndpoint, LinkEndpoints, RequestFault
from stretto.stage.links.links import Links
from stretto.transport.contract import Endpoint, LinkOptions, PeerDead
from stretto.transport.registry import Registry, connectors
from stretto.types import SECRET_BYTES, RequestId

LINK = "talker>code2wav"
SECRET = bytes(range(SECRET_BYTES))


class Stop(Exception):
    pass


class RecordingConnector:
    """A connector that notes what it is asked for, and goes no further."""

    name = "asked"

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.options: list[LinkOptions] = []

    def listen(self, link: str, options: LinkOptions) -> NoReturn:
        self.options.append(options)
        raise self.error

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> NoReturn:
        self.options.append(options)
        raise self.error


def nothing(*args: Any) -> None:
    raise AssertionError(f"called with {args}")


def ends_with(connector: RecordingConnector) -> LinkEndpoints:
    registry = Registry()
    registry.register("asked", lambda: connector)
    return LinkEndpoints(Links({}), HostSettings(), torch.device("cpu"), nothing, registry)


def test_both_ends_get_the_secret_and_the_generation() -> None:
    options_seen = RecordingConnector(Stop())
    ends = ends_with(options_seen)
    endpoint = Endpoint("asked", "a-b", "here", 7, "", 1, 1)
    with pytest.raises(Stop):
        ends.listen(Listen(LINK, "asked", 7, SECRET))
    with pytest.raises(Stop):
        ends.connect(Connect(LINK, "asked", msgspec.msgpack.encode(endpoint), 7, SECRET))
    assert [(o.secret, o.generation) for o in options_seen.options] == [(SECRET, 7)] * 2


@pytest.mark.parametrize("endpoint", [b"", b"\xc1", b"\x93", b"\x81\xa1x\x01"], ids=repr)
def test_nonsense_from_another_host_is_an_error_of_the_link(endpoint: bytes) -> None:
    with pytest.raises(WireError, match="not an endpoint"):
        ends_with(RecordingConnector(Stop())).connect(Connect(LINK, "asked", endpoint, 1, SECRET))


def test_a_machine_that_has_no_more_of_something_is_an_error_of_the_link() -> None:
    with pytest.raises(StrettoError, match="Too many open files"):
        ends_with(RecordingConnector(OSError(24, "Too many open files"))).listen(
            Listen(LINK, "asked", 1, SECRET)
        )


def test_connectors_that_were_registered_in_this_process_are_found() -> None:
    assert (
        LinkEndpoints(Links({}), HostSettings(), torch.device("cpu"), nothing).registry
        is connectors
    )


class EndingCourier:
    """Ends right after its faults were taken for the first time, as a thread may."""

    def __init__(self) -> None:
        self.ended = False
        self._faults: list[StrettoError] = []

    def faults(self) -> list[StrettoError]:
        taken, self._faults = self._faults, []
        if not self.ended:
            self.ended = True
            self._faults = [PeerDead("the peer is gone", link=LINK)]
        return taken


def test_a_link_that_ends_among_its_faults_is_reported_with_them() -> None:
    ends = LinkEndpoints(Links({}), HostSettings(), torch.device("cpu"), nothing)
    courier: Any = EndingCourier()
    ends.ends[LINK] = LinkEndpoint(generation=3, incoming=courier)
    assert not ends.poll()
    faults = ends.poll()
    assert [type(fault) for fault in faults] == [LinkDown, LinkDown]
    assert all("the peer is gone" in str(fault) for fault in faults)


class FaultyCourier(EndingCourier):
    def faults(self) -> list[StrettoError]:
        return [PeerDead("refused", link=LINK, request=RequestId("r"))]


def test_a_fault_that_names_a_request_is_not_the_link_s() -> None:
    ends = LinkEndpoints(Links({}), HostSettings(), torch.device("cpu"), nothing)
    courier: Any = FaultyCourier()
    ends.ends[LINK] = LinkEndpoint(generation=3, outgoing=courier)
    [fault] = ends.poll()
    assert isinstance(fault, RequestFault)
    assert (fault.request, fault.link) == (RequestId("r"), LINK)
