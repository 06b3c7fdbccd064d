"""In which order the stages of a host have their turns. Made by the host, for its loop; on the loop thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.stage.loop import Turns
from stretto.stage.node import Node


class PushReports:
    """Lets the reports of the turns before it go."""

    due_ns: int | None = None

    def __init__(self, push: Callable[[], None]) -> None:
        self.push = push

    def turn(self) -> bool:
        self.push()
        return False


class Fresh:
    """A turn of the node that takes prompts, in rounds that brought requests."""

    due_ns: int | None = None

    def __init__(self, node: Node) -> None:
        self.node = node
        self.came = False  # requests were admitted in this round

    def turn(self) -> bool:
        came, self.came = self.came, False
        return came and self.node.turn()


def in_order(nodes: Sequence[Node], fresh: Fresh | None, push: Callable[[], None], links: Turns) -> list[Turns]:
    """In data-flow order (the loop goes through them from the end): what is ready leaves before anything
    else is done, and a stage goes before the one that feeds it, whose launches may be long. The last one, if its turns
    are short, comes once more behind each stage but the first, so that what these sent is launched behind their own
    steps at once. Only a new prompt goes to the first stage before the others: their part of it can be done while the
    first one's runs."""
    pushing = PushReports(push)
    last = [nodes[-1]] if len(nodes) > 1 and nodes[-1].cheap else []
    body = nodes[: len(nodes) - len(last)]
    order: list[Turns] = [pushing]
    for i, node in enumerate(body):
        order += [*last, node] if i or fresh is None else [node, pushing]
    if fresh is not None and len(nodes) > 1:
        order.append(fresh)
    return [*order, pushing, *last, links]
