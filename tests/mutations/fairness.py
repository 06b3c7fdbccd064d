"""Guards of what owners share: as in `media.py`."""

from __future__ import annotations

SHARES, ACCESS = (f"stretto/server/{f}.py" for f in ("shares", "access"))
LIVE, SOCKET = (f"stretto/server/{f}.py" for f in ("livespeech", "websocket"))
SESSIONS, SESSION, CONNECTION = (f"stretto/server/realtime/{f}.py" for f in ("sessions", "session", "connection"))


def access(name: str) -> list[str]:
    return [f"tests/server/test_access.py::test_{name}"]


def fair(name: str) -> list[str]:
    return [f"tests/server/test_fairness.py::test_{name}"]


def live(name: str) -> list[str]:
    return [f"tests/server/test_live_speech.py::test_{name}"]


def kept(name: str) -> list[str]:
    return [f"tests/server/test_kept.py::test_{name}"]


MUTATIONS = [
    ("one owner takes all bytes", SHARES, "mine <= free or", "True or",
     fair("stalled_uploads_of_one_client_refuse_nobody_else")),
    ("floors take all that is left", SHARES, "free >= reserve)", "free >= 0)",
     ["tests/server/test_shares.py::test_the_largest_thing_fits_where_nothing_else_is_held"]),
    ("owners are never forgotten", SHARES, "            del self._by_owner[owner]\n", "            pass\n",
     ["tests/server/test_shares.py::test_the_whole_is_never_exceeded_and_all_comes_back"]),
    ("more places than there are", ACCESS, " and turn.weight <= self.limit - self.running:", ":",
     access("a_wide_request_takes_its_places_and_is_not_overtaken")),
    ("places in order of arrival alone", ACCESS,
     "key=lambda t: (self._places[t.owner], self._last[t.owner], t.number)", "key=lambda t: t.number",
     access("the_next_place_is_for_the_owner_with_the_fewest")),
    ("no turns between owners with as many places", ACCESS, "self._last[t.owner], t.number)", "t.number)",
     access("one_place_goes_round")),
    ("a newcomer goes before those who wait", ACCESS, "setdefault(owner, self._handed)", "setdefault(owner, 0)",
     access("one_place_goes_round")),
    ("a full queue refuses newcomers", ACCESS, "return crowd if waiting[crowd] > waiting[owner] else owner",
     "return owner", access("a_full_queue_drops_the_last_of_the_owner_with_the_most")),
    ("a place that comes to who leaves is lost", ACCESS,
     "                self.give_back(owner, weight, reading)  # it came at the same moment\n", "                pass\n",
     access("who_leaves_as_its_turn_comes_passes_the_place_on")),
    ("a place is given to who has left", ACCESS, "turn.owner in heads or turn.ready.done()", "turn.owner in heads",
     access("who_has_left_is_given_nothing")),
    ("who leaves while it gathers places keeps others waiting", ACCESS,
     "                self._waiting.remove(turn)\n                self._hand_over()\n",
     "                self._waiting.remove(turn)\n", access("a_wide_request_that_leaves_lets_others_go_on")),
    ("full servers read bodies", ACCESS, "        if waits and self._overfull(owner, 1) == owner:\n",
     "        if False:\n", access("what_would_be_refused_is_refused_before_its_body_is_read")),
    ("owners have no limit of their own", ACCESS,
     "        if self.limit_per_owner and self._requests[owner] + more > self.limit_per_owner:\n",
     "        if False:\n",
     access("an_owner_may_have_a_limit_of_its_own")),
    ("readings are not shared", ACCESS, "if not turn.reading or self.readings.fits(turn.owner, 1):", "if True:",
     live("dribbling_texts_leave_others_room")),
    ("several answers take one place", "stretto/server/answer.py", "                await place.widen(places)\n",
     "                pass\n", fair("several_answers_take_several_places")),
    ("a body belongs to nobody", "stretto/server/answer.py", "Body(self.service.bodies, visit.sender)",
     'Body(self.service.bodies, "")', fair("stalled_uploads_of_one_client_refuse_nobody_else")),
    ("a text that rests keeps its place", LIVE, "                    place.give_back()\n", "                    pass\n",
     live("a_place_goes_back_when_all_of_the_text_is_spoken")),
    ("a text that goes on takes no place", LIVE, "            await place.take()\n", "            pass\n",
     live("a_text_that_goes_on_waits_its_turn")),
    ("sound that comes does not count", LIVE, "            self._move()\n            yield piece\n",
     "            yield piece\n", live("a_text_with_speech_to_come_keeps_its_place")),
    ("a message of any size", LIVE, "        if len(data) > MAX_MESSAGE:\n", "        if False:\n",
     live("a_message_has_a_greatest_size")),
    ("messages that came together leave nobody a turn", LIVE,
     "            await asyncio.sleep(0)  # messages that came together are there without waiting: "
     "others have their turn\n",
     "", live("many_messages_at_once_leave_others_their_turn")),
    ("a listener that takes nothing", LIVE, "asyncio.timeout(self.service.config.send_timeout)",
     "asyncio.timeout(None)",
     live("a_listener_that_takes_nothing_is_dropped")),
    ("a revoked key speaks on", LIVE, "self._leave(), self._revoked())]", "self._leave())]",
     live("a_key_that_is_revoked_ends_its_text")),
    ("a revoked key's session waits for events", CONNECTION,
     "            if not self.service.keys.still_valid(self.owner):\n                return REVOKED\n"
     "            now = time.monotonic()\n", "            now = time.monotonic()\n",
     fair("a_session_ends_with_its_key")),
    ("a revoked key's event is answered", CONNECTION,
     "            if not self.service.keys.still_valid(self.owner):\n                return REVOKED\n"
     "            self.heard = time.monotonic()\n", "            self.heard = time.monotonic()\n",
     fair("a_session_ends_with_its_key")),
    ("this machine's proxies are believed", "stretto/server/run.py",
     "        proxy_headers=bool(config.trusted_proxies),  # or any client says which address it has\n"
     '        forwarded_allow_ips="*" if "*" in config.trusted_proxies else list(config.trusted_proxies),\n', "",
     fair("only_named_proxies_say_who_calls")),
    ("all proxies are believed", "stretto/server/run.py", "else list(config.trusted_proxies),", 'else "*",',
     fair("only_named_proxies_say_who_calls")),
    ("one client opens all sessions", SESSIONS, "else not self._open.fits(owner, 1):", "else False:",
     fair("one_client_opens_at_most_half_of_all_sessions")),
    ("sessions have no total", SESSION, "        if not self.held.fits(size):\n", "        if False:\n",
     fair("all_sessions_of_one_client_have_half_of_the_memory")),
    ("what a session forgets is held on", SESSION,
     "            self.held.resize(self._size if not self._closed else 0)\n",
     "            pass\n", fair("all_sessions_of_one_client_have_half_of_the_memory")),
    ("a closed session holds on", SESSION, "        finally:\n            self.held.close()\n",
     "        finally:\n            pass\n", fair("all_sessions_of_one_client_have_half_of_the_memory")),
    ("unfinished messages are free", SOCKET, "        if full and not self.close_sent:\n", "        if False:\n",
     fair("unfinished_messages_count_and_are_bounded")),
    ("fragments do not count", SOCKET, "        self.gathered += len(event.data)\n", "        pass\n",
     fair("unfinished_messages_count_and_are_bounded")),
    ("messages of a closed connection count on", SOCKET, "        super().connection_lost(exc)\n        self._drop()",
     "        super().connection_lost(exc)", fair("unfinished_messages_count_and_are_bounded")),
    ("freed memory stays", "stretto/server/heap.py", "                await asyncio.to_thread(self.trim)\n",
     "                pass\n", fair("memory_of_sessions_goes_back_to_the_system")),
    ("any number of answers", "stretto/server/memory.py", "len(self._kept) > self.max_answers or ", "",
     kept("so_many_answers_can_be_referred_to")),
    ("any number of words", "stretto/server/memory.py", " or self._chars > MAX_CHARS", "",
     kept("their_words_are_bounded_too")),
    ("a sound file stays open", "stretto/server/transcribe.py", "        sound.file.close()\n", "        pass\n",
     kept("files_of_a_transcription_go_with_it")),
    ("a decoded sound stays open", "stretto/server/transcribe.py",
     "        await (stream_text if request.stream else whole_text)(texts)\n    finally:\n        file.close()\n",
     "        await (stream_text if request.stream else whole_text)(texts)\n    finally:\n        pass\n",
     kept("files_of_a_transcription_go_with_it")),
    ("an error holds what its request held", "stretto/server/exchange.py",
     "            del task, leaving, jobs, job\n", "",
     kept("files_of_a_large_request_that_is_wrong_go_with_it")),
    ("a slow writer slows the pace", "stretto/orchestrator/ticket.py", "self.throttled or self.written or not",
     "self.throttled or not", ["tests/orchestrator/test_ticket.py::test_a_slow_writer_does_not_slow_the_pace"]),
    ("the time of a slow writer counts", "stretto/orchestrator/ticket.py",
     "        if self.paced is not None:\n            self.paced = (time.monotonic(), self.samples)\n", "",
     ["tests/orchestrator/test_ticket.py::test_a_slow_writer_does_not_slow_the_pace"]),
]  # fmt: skip
