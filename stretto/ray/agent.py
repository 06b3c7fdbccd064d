"""The Ray actor that runs an agent: it starts a host on its node, on the card that Ray gave it.

A new actor for each start, never restarted by Ray: links, keys and `Configure` need the
engine anyway, which has its own back-off. Runs in a Ray worker; imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import ray

from stretto.engine.agent import Agent
from stretto.engine.host_handle import Unusable
from stretto.engine.invitation import Invitation
from stretto.errors import Invalid, StageDead
from stretto.ray.secret import read_secret


class HostAgent:
    """Errors are returned as text: an exception class of ours may not be the other side's."""

    def check(self, model: str, secret_file: str) -> str | None:
        """What this node lacks, if anything."""
        address = ray.util.get_node_ip_address()
        if not (Path(model) / "config.json").is_file():
            return f"the node {address} has no model at {model}"
        try:
            read_secret(secret_file)
        except Invalid as e:
            return f"the node {address}: {e}"
        return None

    def run(self, address: str, nonce: str, name: str, secret_file: str) -> tuple[bool, str]:
        """Serve until the host is over; returns whether another one could do better, and why it
        ended."""
        invitation = Invitation(address, nonce, name)
        try:
            # A worker's parent is its node's raylet. Ray ends workers two or three seconds after
            # that has died.
            keeper, secret = os.getppid(), read_secret(secret_file)
            agent = Agent(invitation, secret, ray.util.get_node_ip_address(), keeper=keeper)
            return True, agent.run()
        except Unusable as e:
            return False, str(e)
        except (StageDead, Invalid, OSError) as e:
            return True, str(e)
