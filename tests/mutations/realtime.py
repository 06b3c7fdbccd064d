"""Guards of sessions and realtime conversations: as in `media.py`."""

from __future__ import annotations

REALTIME, SPEAKER = "stretto/server/realtime/session.py", "stretto/server/realtime/speaker.py"
RESPONSE, LISTENER = "stretto/server/realtime/response.py", "stretto/server/realtime/listener.py"
INTERRUPTIONS = "tests/server/realtime/test_interruptions.py::test_what_is_kept_is_what_was_heard"

MUTATIONS = [
    (
        "an interruption: all that was made is remembered",
        SPEAKER,
        "        await response.forget_unheard()\n",
        "",
        [INTERRUPTIONS],
    ),
    (
        "a cancelled response: its prompt is not told",
        RESPONSE,
        "        self._asked = asked\n",
        "        pass\n",
        [INTERRUPTIONS],
    ),
    (
        "one event: any amount of sound",
        REALTIME,
        "        if len(data) > MAX_APPEND:\n",
        "        if False:\n",
        ["tests/server/realtime/test_turns_by_hand.py::test_large_sound_in_one_message"],
    ),
    (
        "a turn whose end fails: goes on",
        LISTENER,
        "                finally:\n                    self.turn = None\n",
        "                finally:\n                    pass\n",
        ["tests/server/realtime/test_listener.py::test_a_handler_that_fails_ends_the_turn_all_the_same"],
    ),
    (
        "a commit that is taken back: its sound is gone",
        "stretto/orchestrator/session.py",
        "        self._hearing, self._whole = self._before\n",
        "",
        ["tests/orchestrator/test_sessions.py::test_an_answer_that_is_closed_leaves_nothing_and_the_next_is_the_same"],
    ),
]
