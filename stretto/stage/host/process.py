"""A host's process: started by the engine, or by an agent, with one end of a socket pair.
When the channel closes, the host is over: it exits, whatever it was doing."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time

import torch

from stretto._process import die_with_parent
from stretto.config.engine import HostSettings
from stretto.errors import Busy, StrettoError
from stretto.messages.hosts import Broken, Configure, Ready
from stretto.observe import logs
from stretto.stage.host.channel import Channel
from stretto.stage.host.device_check import check_device, one_line
from stretto.stage.host.host import Host, take_messages

log = logging.getLogger(__name__)

SWITCH_S = 0.001


def serve(sock: socket.socket) -> int:
    channel = Channel(sock)
    first = channel.read()
    if first is None:
        return 0
    configure = first[0]
    assert isinstance(configure, Configure), configure
    start = time.perf_counter()
    try:
        settings = HostSettings.from_dict(configure.settings)
        check_device(settings.device)
        host = Host(configure, settings, channel)
        host.load()
    except Exception as e:
        if not isinstance(e, (StrettoError, RuntimeError, OSError)):
            log.error("the stages cannot be built", exc_info=e)
        channel.send(Broken(type(e).__name__, one_line(e)))
        channel.flush()
        return 1
    if host.device.type == "cuda":
        host.context.memory["allocated"] = torch.cuda.memory_allocated(host.device)
    settle_down()
    # Its failure wakes the reader below, so that the engine learns of it now and not with its
    # next message.
    host.loop.start(lambda: sock.shutdown(socket.SHUT_RD))
    channel.send(Ready(configure.stages, time.perf_counter() - start, host.context.memory))
    try:
        take_messages(host, channel)
    except Busy as e:
        channel.send(Broken("StageDead", f"the stage loop takes no messages: {e}"))
        channel.flush()
        # without `close`, which would wait for the loop
        return 1
    code = 0
    if host.loop.failure is not None:
        channel.send(Broken("StageDead", f"the stage loop died: {host.loop.failure!r}"))
        code = 1
    host.close()
    channel.flush()
    return code


def settle_down() -> None:
    """Freeze what was made so far: otherwise each full garbage collection would scan all of it in
    the middle of a step. And let waiting threads have the GIL soon: they bring messages."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--fd", type=int, required=True)
    args = p.parse_args()
    die_with_parent()
    # a Ctrl-C in the terminal is the engine's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.set_up(os.environ.get(logs.FORMAT, "text"), os.environ.get("STRETTO_LOG", "WARNING"))
    sock = socket.socket(fileno=args.fd)
    code = serve(sock)
    sys.stdout.flush()
    logs.drain()
    # threads in driver calls must not hold us up
    os._exit(code)


if __name__ == "__main__":
    main()
