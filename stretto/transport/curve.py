"""CURVE for ZeroMQ sockets whose ends share a secret: encrypted, and authenticated by keys that
nobody else can make.

Used by links between machines (`zmqsocket`) and by the control channel to hosts there
(`engine/remote_host.py`)."""

from __future__ import annotations

import hmac
from typing import Any

import zmq
from zmq.utils import z85


def key_of(secret: bytes, purpose: str) -> bytes:
    """The listener's CURVE secret key, which only the two ends can derive. Any 32 bytes are a valid
    key. `purpose` holds a nonce, so that no two listeners have the same."""
    return z85.encode(hmac.digest(secret, f"stretto curve {purpose}".encode(), "sha256"))


def encrypt(socket: zmq.Socket[Any], key: bytes, *, listens: bool = False) -> None:
    """With the listener's secret key. A dialer has it too, and uses only its public half. The
    dialer's own key pair is random: its hello authenticates it."""
    if listens:
        socket.curve_server = True
        socket.curve_secretkey = key
    else:
        socket.curve_serverkey = zmq.curve_public(key)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
