"""In which order the stages of a host have their turns. Made by the host, for its loop; on the loop thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stretto.stage.loop import Turns
from stretto.stage.nodes.node import Node


class Push:
    """Lets the reports of the turns before it go."""

    due_ns: int | None = None

    def __init__(self, push: Callable[[], None]) -> None:
        self.push = push

    def turn(self) -> bool:
        self.push()
        return False


class Fresh:
    """A turn of the thinker's in rounds that brought requests."""

    due_ns: int | None = None

    def __init__(self, thinker: Node) -> None:
        self.thinker = thinker
        self.came = False  # requests were admitted in this round

    def turn(self) -> bool:
        came, self.came = self.came, False
        return came and self.thinker.turn()


def in_order(nodes: Mapping[str, Node], fresh: Fresh | None, push: Callable[[], None], links: Turns) -> list[Turns]:
    """In the order of the data's way (the loop goes through them from the end): samples that are ready leave before
    anything else is done; the talker goes before the thinker, whose launches may be long; and the vocoder comes once
    more in between, so that frames that the talker sent are launched behind its own step at once. Only a new prompt
    goes to the thinker first: the talker's part of it can be done while the thinker's runs."""
    vocoder: list[Turns] = [nodes["code2wav"]] if "code2wav" in nodes else []
    pushing = Push(push)
    order: list[Turns] = [pushing]
    if "thinker" in nodes:
        order += [nodes["thinker"], pushing]
    if "talker" in nodes:
        order += [*vocoder, nodes["talker"]]
    if fresh is not None:
        order.append(fresh)
    return [*order, pushing, *vocoder, links]
