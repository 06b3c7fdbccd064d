"""How many bytes a session holds, and what it may hold."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.server.realtime.audio_input import AudioInput
from stretto.server.realtime.client_events import EventError
from stretto.server.realtime.items import Conversation, Entry
from stretto.server.realtime.options import TurnSettings
from stretto.server.realtime.server_events import Item
from stretto.server.realtime.session_memory import SessionMemory
from stretto.server.realtime.vad import Batcher
from stretto.server.shares import Holding, Shares
from tests.server.realtime.loudness_vad import LoudnessVad
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import ScriptedSession

LIMIT = 2 << 20


def memory(shares: Shares) -> SessionMemory:
    session: Any = ScriptedSession(ScriptedEngine())
    audio_input = AudioInput(session, Batcher(LoudnessVad), TurnSettings(), "audio/pcm")
    return SessionMemory(Holding(shares, "me"), LIMIT, Conversation(session), audio_input, 100)


def test_a_session_has_a_limit() -> None:
    held = memory(Shares(1 << 30))
    held.reserve(LIMIT - 100, "full", "item")
    with pytest.raises(EventError, match="at most 2 MiB") as e:
        held.reserve(LIMIT - 99, "full", "item")
    assert (e.value.code, e.value.param) == ("full", "item")


def test_sessions_of_a_client_share_the_memory() -> None:
    shares = Shares(1000)
    held = memory(shares)
    held.reserve(400, "full", "item")
    assert shares.held == 500
    with pytest.raises(EventError, match="your sessions"):
        held.reserve(401, "full", "item")


def test_all_parts_are_counted_and_given_back() -> None:
    shares = Shares(1 << 30)
    held = memory(shares)
    held.resize_settings(300)
    held.conversation.append(Entry(Item("item_1", "message"), size=40))
    held.add_task(5)
    held.recount()
    assert shares.held == held.num_bytes == 345
    held.remove_task(5)
    assert shares.held == 340


def test_settings_without_room_stay_as_they_are() -> None:
    held = memory(Shares(1 << 30))
    with pytest.raises(EventError, match="at most"):
        held.resize_settings(LIMIT + 1)
    assert held.settings_bytes == 100


def test_a_task_that_ends_after_its_session_counts_nothing() -> None:
    shares = Shares(1 << 30)
    held = memory(shares)
    held.add_task(5)
    held.recount()
    held.close()
    held.remove_task(5)
    assert shares.held == 0
