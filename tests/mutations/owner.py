"""Lines on which owners of caches, clients that leave, and numbers in `usage` depend; and for each a way to break it
with the tests that must fail then: (name, file, text, what it becomes, tests). Each text occurs once in its file."""

ROOTS = "tests/orchestrator/test_owners.py::test_each_stage_finds_rows_of_the_same_root_alone[text]"
VOICES = "tests/orchestrator/test_owners.py::test_voices_are_kept_apart_in_the_talker"
NAMELESS = "tests/orchestrator/test_owners.py::test_owners_have_roots_of_their_own_which_do_not_name_them[answered]"
GUESS = "tests/server/test_owners.py::test_a_right_guess_looks_like_a_wrong_one[text]"
GUESS_ALOUD = "tests/server/test_owners.py::test_the_talker_keeps_owners_apart_too"
SHARED = "tests/server/test_owners.py::test_caches_are_shared_on_purpose"
FLAG = "tests/server/test_owners.py::test_nobody_shares_unless_told_to"
GONE_HTTP = "tests/server/test_owners.py::test_a_connection_that_ends_frees_everything[sound]"
GONE = "tests/orchestrator/test_faults.py::test_a_client_that_goes_frees_everything_and_a_broken_link_is_mended"
LENGTHS = "tests/orchestrator/test_lengths.py::test_the_end_comes_right_after_what_must_come"
STOPS = "tests/orchestrator/test_ticket.py::test_text_ends_before_the_first_stop_string_however_it_comes"
ENDED = "tests/orchestrator/test_ticket.py::test_it_is_over_when_the_last_stage_is"
TILES = "tests/orchestrator/test_ticket.py::test_sound_that_does_not_tile_fails_once"
NUMBERS = "tests/server/test_usage.py::test_each_number_goes_where_it_belongs"
PROMPTS = "tests/server/test_usage.py::test_prompts_of_all_kinds"
LAST = "tests/server/test_usage.py::test_the_last_token_is_never_cached[16]"
LEAST = "tests/server/test_usage.py::test_min_tokens_come_before_the_end[5-6-stop]"
ALL = "tests/server/test_usage.py::test_ignore_eos_makes_as_many_as_allowed"
SPEECH = "tests/server/test_usage.py::test_speech"


def left(*states: str) -> list[str]:
    return [f"tests/orchestrator/test_leaving.py::{state}" for state in states]


def by_hand(state: str) -> list[str]:
    return left(f"test_by_hand[{state}]")


ENGINE, ADMISSION, TICKET = (f"stretto/orchestrator/{f}.py" for f in ("engine", "admission", "ticket"))
THINKER, PREFIX = (f"stretto/models/qwen3_omni/nodes/{f}.py" for f in ("thinker", "prefix"))
TALKER, CODE2WAV = (f"stretto/models/speech/{f}_node.py" for f in ("talker", "vocoder"))
CHAT, FIELDS = "stretto/server/chat.py", "stretto/server/chatparams.py"

OWNERS = [
    ("no owner in the thinker's cache", THINKER, "            cache_root=a.cache_root,\n", "", [ROOTS]),
    (
        "no owner in the talker's cache",
        "stretto/models/qwen3_omni/nodes/talker.py",
        "rows, a.cache_root, salts",
        'rows, b"", salts',
        [ROOTS],
    ),
    ("no voice in the talker's cache", PREFIX, "SPEAKER_ID + given.prompt.speaker", "SPEAKER_ID", [VOICES]),
    (
        "a chain of keys without its root",
        "stretto/stage/scheduler/blocks.py",
        "else _root(request.spec.cache_root)",
        'else _root(b"")',
        [ROOTS],
    ),
    (
        "stages are not told the root",
        ADMISSION,
        "t.params.priority, root, sender)",
        't.params.priority, b"", sender)',
        [NAMELESS],
    ),
    ("all share", ADMISSION, 'b"" if shared else cache_root(ask.owner)', 'b""', [NAMELESS]),
    ("none can share", ADMISSION, 'b"" if shared else cache_root(ask.owner)', "cache_root(ask.owner)", [NAMELESS]),
    (
        "the owner as it was given",
        ADMISSION,
        "blake2b(words, digest_size=16, person=use).digest() if words",
        "words if words",
        [NAMELESS],
    ),
    (
        "the engine does not pass the owner on",
        ENGINE,
        "session=session, owner=owner, sender",
        "session=session, sender",
        [GUESS],
    ),
    ("nor of what is read aloud", ENGINE, "manner=manner, owner=owner)", "manner=manner)", [GUESS_ALOUD]),
    (
        "the engine's setting has no effect",
        ENGINE,
        "announce(ticket, ask, self.config.share_prefix_cache)",
        "announce(ticket, ask, False)",
        [SHARED],
    ),
    ("the server does not name the owner", CHAT, "        owner=visit.owner,\n", "", [GUESS]),
    (
        "nor of what is read aloud, over HTTP",
        "stretto/server/speech.py",
        "        owner=visit.owner,\n",
        "",
        [GUESS_ALOUD],
    ),
    (
        "the flag has no effect",
        "stretto/server/engine.py",
        "    config = read(EngineConfig, flags, environ, file, **fixed)\n",
        "    config = EngineConfig(**fixed)\n",
        [FLAG],
    ),
    (
        "shared by default",
        "stretto/control/settings.py",
        '        False, "memory", "one prefix cache for all API keys',
        '        True, "memory", "one prefix cache for all API keys',
        [FLAG],
    ),
]

STATES = [
    *left("test_queued[one]", "test_prefill[one]", "test_decode[one-task]", "test_decode[one-rest]"),
    *left("test_decode[one-close]", "test_throttled[one-rest]", "test_throttled[one-close]"),
    *left("test_queued[processes]", "test_prefill[processes]", "test_decode[processes-task]"),
    *left("test_decode[processes-rest]", "test_decode[processes-close]", "test_throttled[processes-rest]"),
    *left("test_throttled[processes-close]", "test_last_packets[processes]"),
]
"""Each by itself: what one leaves behind would hold up the next."""
CANCEL = ENGINE, "            t.pipeline.send(t.stages, Cancel(t.id))\n", "            pass\n"

LEAVING = [
    *((f"no Cancel for a client that leaves: {test.rpartition('::')[2]}", *CANCEL, [test]) for test in STATES),
    ("no Cancel for clients that leave together", *CANCEL, [GONE]),
    ("no Cancel for a connection that ends", *CANCEL, [GONE_HTTP]),
    (
        "Cancel to the first stage alone",
        ENGINE,
        "send(t.stages, Cancel(t.id))",
        "send(t.stages[:1], Cancel(t.id))",
        left("test_last_packets[processes]"),
    ),
    (
        "a ticket that stays",
        ENGINE,
        "if self._tickets.pop(t.id, None) is None:",
        "if t.id not in self._tickets:",
        left("test_all_made_and_not_taken[one-close]"),
    ),
    (
        "a pipeline that counts it still",
        ENGINE,
        "        t.pipeline.active -= 1\n",
        "",
        left("test_all_made_and_not_taken[one-close]"),
    ),
    (
        "no Cancel for a request that fails",
        TICKET,
        "        self.pipeline.send(self.stages, Cancel(self.id))\n",
        "",
        [TILES],
    ),
    (
        "a host does not heed it",
        "stretto/stage/host.py",
        "                self._cancel(id)\n",
        "                pass\n",
        by_hand("decode"),
    ),
    (
        "the thinker goes on",
        THINKER,
        "        self.stage.cancel(id)\n        self.outlet.close",
        "        self.outlet.close",
        by_hand("prefill"),
    ),
    (
        "the thinker keeps its box",
        THINKER,
        "        self.outlet.close(id, purge=True)\n        self.tellings.pop(id, None)\n",
        "        self.tellings.pop(id, None)\n",
        by_hand("throttled"),
    ),
    ("the thinker keeps its record", THINKER, "        self.tellings.pop(id, None)\n", "", by_hand("announced")),
    (
        "the talker goes on",
        TALKER,
        "    def cancel(self, id: RequestId) -> None:\n        self.stage.cancel(id)\n",
        "    def cancel(self, id: RequestId) -> None:\n",
        by_hand("announced"),
    ),
    (
        "the talker keeps what it has for it",
        TALKER,
        "        self.stage.cancel(id)\n        self._close(id, purge=True)\n",
        "        self.stage.cancel(id)\n",
        by_hand("announced"),
    ),
    (
        "the talker keeps its inbox",
        TALKER,
        "            inlet.close(id, purge)\n",
        "            pass\n",
        by_hand("announced"),
    ),
    ("the talker keeps its outbox", TALKER, "        self.outlet.close(id, purge)\n", "", by_hand("decode")),
    ("the vocoder goes on", CODE2WAV, "        self.stage.cancel(id)\n", "", by_hand("last packet")),
    ("the vocoder keeps its inbox", CODE2WAV, "        self.inlet.close(id, purge)\n", "", by_hand("decode")),
    ("the vocoder keeps its record", CODE2WAV, "        self.journals.pop(id, None)\n", "", by_hand("decode")),
]

FLOOR = "stretto/stage/runner/rows.py", "early = positions + 1 < self.floor[rows]"
MIN_NEW = "stretto/models/qwen3_omni/adapters/thinker.py", "request.cursor.prompt + given.min_new)"
MIN_FRAMES = "stretto/models/speech/adapter.py", "len(given.prompt) + given.min_frames\n"
SEARCH, UPTO = "stretto/stage/scheduler/prefix.py", "islice(request.keys, (cursor.known - 1) // size)"
FOUND = f"""chain_keys(request, cursor.known - 1, size)
    # Rows that were confirmed before need no payload: it has been published.
    needs = request.spec.needs_payload
    # A generator, because most searches end early and one that finds no room is repeated at every step.
    wanted = (
        (key, needs and media and (i + 1) * size > cursor.confirmed)
        for i, (key, media) in enumerate({UPTO})"""
CACHED = "stretto/stage/stage.py", "cached += join.filled - join.reused_from"

LENGTH = [
    ("an end one too late", *FLOOR, "early = positions + 1 <= self.floor[rows]", [f"{LENGTHS}[3-2]"]),
    ("an end one too soon", *FLOOR, "early = positions + 2 < self.floor[rows]", [f"{LENGTHS}[3-2]"]),
    ("a token too few", *MIN_NEW, "request.cursor.prompt + given.min_new - 1)", [f"{LENGTHS}[3-2]", LEAST]),
    ("a token too many", *MIN_NEW, "request.cursor.prompt + given.min_new + 1)", [f"{LENGTHS}[3-2]", LEAST]),
    ("a frame too few", *MIN_FRAMES, "len(given.prompt) + given.min_frames - 1\n", [f"{LENGTHS}[3-2]"]),
    ("a frame too many", *MIN_FRAMES, "len(given.prompt) + given.min_frames + 1\n", [f"{LENGTHS}[3-2]"]),
    ("min_tokens not read", FIELDS, '        "min_text_tokens": r.min_tokens,\n', "", [LEAST]),
    (
        "ignore_eos not heeded",
        "stretto/models/qwen3_omni/params.py",
        "p.max_text_tokens if p.ignore_eos else p.min_text_tokens",
        "p.min_text_tokens",
        [ALL],
    ),
    (
        "a stop string one too soon",
        TICKET,
        "if self.ids <= self.params.min_text_tokens:",
        "if self.ids < self.params.min_text_tokens:",
        [STOPS],
    ),
    (
        "a stop string among the first tokens",
        TICKET,
        "max(self.shown, self.least + 1 - len(stop))",
        "self.shown",
        [STOPS],
    ),
    ("a stop string at the last of them", TICKET, "self.least + 1 - len(stop)", "self.least - len(stop)", [STOPS]),
    ("tokens beyond the stop string", TICKET, "            if self.stopped:\n                break\n", "", [STOPS]),
    ("tokens looked at together", TICKET, "[(i,) for i in ids] if self.params.stop else [ids]", "[ids]", [STOPS]),
    ("an end that the surplus told", TICKET, " is not None and not self.stopped else", " is not None else", [STOPS]),
]

USAGE = [
    ("prompt_tokens", TICKET, "prompt_tokens=len(ids)", "prompt_tokens=len(ids) - 1", [ENDED]),
    ("text_tokens", TICKET, "text_tokens=self.ids", "text_tokens=self.ids - 1", [ENDED]),
    (
        "frames",
        TICKET,
        "frames=self.frames,\n            samples",
        "frames=self.frames - 1,\n            samples",
        [ENDED],
    ),
    ("cached_tokens", TICKET, "text.cached if text is not None else 0", "0", [ENDED]),
    ("audio in the prompt", TICKET, "ids.count(i) for i in media.audio", "1 for i in media.audio", [ENDED]),
    ("images in the prompt", TICKET, "ids.count(i) for i in media.image", "1 for i in media.image", [ENDED]),
    (
        "prompt text with media in it",
        CHAT,
        "text_tokens=usage.prompt_tokens - media",
        "text_tokens=usage.prompt_tokens",
        [NUMBERS],
    ),
    (
        "media without images",
        CHAT,
        "media = usage.audio_prompt_tokens + usage.image_prompt_tokens",
        "media = usage.audio_prompt_tokens",
        [NUMBERS],
    ),
    (
        "completion without speech",
        CHAT,
        "completion = text + frames",
        "completion = text",
        [NUMBERS],
    ),
    (
        "completion without text",
        CHAT,
        "completion = text + frames",
        "completion = frames",
        [NUMBERS],
    ),
    (
        "all as text",
        CHAT,
        "CompletionDetails(text_tokens=text",
        "CompletionDetails(text_tokens=completion",
        [NUMBERS],
    ),
    ("no speech told", CHAT, "audio_tokens=frames)", "audio_tokens=0)", [NUMBERS]),
    (
        "a total of the answer alone",
        CHAT,
        "total_tokens=usage.prompt_tokens + completion",
        "total_tokens=completion",
        [NUMBERS],
    ),
    ("nothing cached, over HTTP", CHAT, "cached_tokens=usage.cached_tokens", "cached_tokens=0", [NUMBERS]),
    ("audio of the prompt, over HTTP", CHAT, "audio_tokens=usage.audio_prompt_tokens", "audio_tokens=0", [NUMBERS]),
    ("images of the prompt, over HTTP", CHAT, "image_tokens=usage.image_prompt_tokens", "image_tokens=0", [NUMBERS]),
    (
        "a speech's total",
        "stretto/server/speech.py",
        "usage.frames, usage.prompt_tokens + usage.frames, made",
        "usage.frames, usage.frames, made",
        [SPEECH],
    ),
    ("nothing cached", THINKER, "journal.cached = self.stage.num_cached(id)", "pass", [f"{PROMPTS}[text]"]),
    ("all of what is filled", *CACHED, "cached += join.filled + 1", [f"{PROMPTS}[text]"]),
    ("a block too few", SEARCH, UPTO, "islice(request.keys, (cursor.known - 1) // size - 1)", [LAST]),
    ("the last token from the cache", SEARCH, FOUND, FOUND.replace("cursor.known - 1", "cursor.known"), [LAST]),
]

MUTATIONS = OWNERS + LEAVING + LENGTH + USAGE
