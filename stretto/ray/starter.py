"""Starts agents as Ray actors, each in its own bundle of the replica's placement group. On the
replica's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stretto.config.cluster import ClusterConfig
from stretto.engine.host_handle import Unusable
from stretto.engine.invitation import Invitation
from stretto.errors import StageDead
from stretto.ray.agent import HostAgent

log = logging.getLogger(__name__)

FIRST_CHECK_S, CHECK_S = 8.0, 60.0
"""Time for an actor to be placed and to answer. One placed on a node that died a moment ago may
never answer: so the first try is given up soon, and each that follows has twice the time, since a
busy node is slow."""
CALLS = 4  # at once, in an actor: one of them is `run`


class RayAgent:
    """`remote.Started`"""

    def __init__(self, actor: Any, over: Any) -> None:
        self._actor = actor
        self._over = over
        self._tasks: list[asyncio.Task[None]] = []

    def on_end(self, callback: Callable[[StageDead], None]) -> None:
        async def wait() -> None:
            try:
                again, reason = await self._over
                callback(StageDead(reason) if again else Unusable(reason))
            except RayError as e:
                callback(StageDead(f"its actor died: {first_line(e)}"))
            finally:
                self.kill()

        self._tasks.append(asyncio.create_task(wait()))

    def kill(self) -> None:
        actor = self._actor
        self._actor = None
        if (
            actor is not None
        ):  # in a thread: it asks the cluster's head, which may be slow to answer
            asyncio.get_running_loop().run_in_executor(None, end, actor)


class RayStarter:
    """`remote.Starter`. Bundle 0 of the group is the replica's own; host number i has bundle i +
    1."""

    def __init__(self, group: PlacementGroup, model: str, config: ClusterConfig) -> None:
        assert config.cluster_secret_file is not None
        self._group = group
        self._model = model
        self._config = config
        self._secret_file = config.cluster_secret_file
        self._silent: Counter[int] = Counter()  # actors in a row that never answered, by host

    def patience(self, number: int) -> float:
        return min(FIRST_CHECK_S * 2.0 ** self._silent[number], CHECK_S)

    def _actor(self, number: int) -> Any:
        return (
            ray.remote(HostAgent)
            .options(
                num_cpus=self._config.host_cpus,
                num_gpus=self._config.host_gpus,
                max_restarts=0,
                max_concurrency=CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number + 1),
            )
            .remote()
        )

    async def start(self, invitation: Invitation, number: int) -> RayAgent:
        actor = None
        try:
            # In a thread: Ray asks the cluster's head for it, which may be slow to answer. An actor
            # that nobody waits for any more ends with its handle.
            actor = await asyncio.to_thread(self._actor, number)
            check = actor.check.remote(self._model, self._secret_file)
            lacks = await asyncio.wait_for(_answer(check), self.patience(number))
            del self._silent[number]
            if lacks is not None:
                raise Unusable(lacks)
            arguments = (invitation.address, invitation.nonce, invitation.name, self._secret_file)
            return RayAgent(actor, actor.run.remote(*arguments))
        except (RayError, TimeoutError) as e:
            self._silent[number] += isinstance(e, TimeoutError)
            _end_soon(actor)
            raise OSError(
                f"no agent could be started: {first_line(e) or 'its node does not answer'}"
            ) from e
        except BaseException:
            _end_soon(actor)
            raise


async def _answer(reference: Any) -> Any:
    return await reference


def _end_soon(actor: Any) -> None:
    if actor is not None:
        asyncio.get_running_loop().run_in_executor(None, end, actor)


def end(actor: Any) -> None:
    try:
        ray.kill(actor)
    except (RayError, ValueError) as e:  # it is gone already
        log.debug("%s", first_line(e))


def first_line(error: BaseException) -> str:
    """Ray's errors tell stories."""
    return str(error).strip().partition("\n")[0]
