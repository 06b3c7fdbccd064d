"""The order of a server's events, as clients are built for it. `Order` is shown every event of a
connection and fails at the first that may not come where it does: each response from its beginning
to its end, the conversation's items as a client mirrors them, turns, transcriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
PIECES = {"output_audio_transcript": "transcript", "output_text": "text"}


@dataclass
class Item:
    """An item that a response is making."""

    id: str
    kind: str
    part: bool = False  # it has one
    text: str = ""
    ended: list[str] = field(default_factory=list)  # what of it is over


@dataclass
class Response:
    beside: bool
    items: list[Item] = field(default_factory=list)
    closed: int = 0  # of them
    over: bool = False

    @property
    def open(self) -> Item:
        assert len(self.items) == self.closed + 1, "one item is open"
        return self.items[-1]


@dataclass
class Order:
    responses: dict[str, Response] = field(default_factory=dict)
    items: list[str] = field(default_factory=list)  # the conversation
    making: list[str] = field(default_factory=list)  # of them, those without their `done`
    turn: str | None = None  # that is being spoken
    expected: tuple[str, str] | None = None  # the very next event of the conversation, and its item
    transcripts: dict[str, str] = field(default_factory=dict)  # transcriptions so far
    transcribes: bool = False  # words come while they are spoken, and no item is in a conversation

    def see(self, event: Json) -> None:
        kind = event["type"]
        if self.expected is not None:
            named = event.get("item", {}).get("id")
            assert (kind, named) == self.expected, f"{self.expected} was due, and not {event}"
        self.expected = None
        area, _, what = kind.partition(".")
        if area == "response":
            self._response(what, event)
        elif area == "input_audio_buffer":
            self._sound(what, event)
        elif kind.startswith("conversation.item.input_audio_transcription."):
            self._words(what.rpartition(".")[2], event)
        elif kind.startswith("conversation.item."):
            self._item(what.removeprefix("item."), event)

    # -- responses

    def _response(self, what: str, event: Json) -> None:
        if what == "created":
            fields = event["response"]
            assert fields["id"] not in self.responses
            assert (fields["status"], fields["output"]) == ("in_progress", [])
            self.responses[fields["id"]] = Response(fields["conversation_id"] is None)
            return
        if what == "done":
            self._done(event["response"])
            return
        response = self.responses[event["response_id"]]
        assert not response.over, f"after its end: {event}"
        if what == "output_item.added":
            assert event["output_index"] == len(response.items) == response.closed
            response.items.append(Item(event["item"]["id"], event["item"]["type"]))
            assert event["item"]["status"] == "in_progress"
            if not response.beside:
                self.expected = ("conversation.item.added", event["item"]["id"])
            return
        item = response.open
        assert event["output_index"] == response.closed
        if what == "output_item.done":
            assert event["item"]["id"] == item.id
            assert event["item"]["status"] in ("completed", "incomplete")
            assert item.id not in self.making, "the conversation's own end comes first"
            assert "content_part.done" in item.ended if item.part else item.kind == "function_call"
            response.closed += 1
            return
        assert event["item_id"] == item.id
        self._piece(what, event, item)

    def _piece(self, what: str, event: Json, item: Item) -> None:
        kind, _, phase = what.rpartition(".")
        assert what not in item.ended, f"twice: {event}"
        assert f"{kind}.done" not in item.ended, f"after its end: {event}"
        if kind == "function_call_arguments":
            assert item.kind == "function_call"
        elif what == "content_part.added":
            assert not item.part
            item.part = True
        else:
            assert item.part, f"before its part: {event}"
            assert "content_part.done" not in item.ended
        if phase == "delta" and kind in PIECES:
            item.text += event["delta"]
        if phase == "done":
            item.ended.append(what)
            if kind in PIECES:
                assert event[PIECES[kind]] == item.text, "the pieces are the whole"

    def _done(self, fields: Json) -> None:
        response = self.responses[fields["id"]]
        assert not response.over
        response.over = True
        assert response.closed == len(response.items), "an item is open"
        assert [i["id"] for i in fields["output"]] == [i.id for i in response.items]
        assert fields["status"] in ("completed", "cancelled", "incomplete", "failed")
        assert (
            fields["usage"]["total_tokens"]
            == fields["usage"]["input_tokens"] + fields["usage"]["output_tokens"]
        )

    # -- the conversation

    def _item(self, what: str, event: Json) -> None:
        if what == "added":
            id, previous = event["item"]["id"], event["previous_item_id"]
            assert id not in self.items
            self.items.insert(0 if previous is None else self.items.index(previous) + 1, id)
            self.making.append(id)
        elif what == "done":
            at = self.items.index(event["item"]["id"])
            assert event["previous_item_id"] == (self.items[at - 1] if at else None)
            self.making.remove(event["item"]["id"])
        elif what == "deleted":
            self.items.remove(event["item_id"])
            if event["item_id"] in self.making:
                self.making.remove(event["item_id"])
        elif what == "truncated":
            assert event["item_id"] in self.items
        elif what == "retrieved":
            assert event["item"]["id"] in self.items

    # -- what is heard

    def _sound(self, what: str, event: Json) -> None:
        if what == "speech_started":
            self.turn = event["item_id"]
        elif what == "speech_stopped":
            assert event["item_id"] == self.turn
        elif what == "committed":
            assert event["previous_item_id"] == (self.items[-1] if self.items else None)
            self.expected = ("conversation.item.added", event["item_id"])

    def _words(self, what: str, event: Json) -> None:
        id = event["item_id"]
        if self.transcribes:
            return
        assert id in self.items
        if what == "delta":
            self.transcripts[id] = self.transcripts.get(id, "") + event["delta"]
        elif what == "completed":
            assert event["transcript"] == self.transcripts.pop(id, "")
