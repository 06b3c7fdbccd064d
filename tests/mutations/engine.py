"""The engine: who is taken for dead, what a death ends, and that nothing that was made is lost on its way."""

WATCH, UPKEEP, ENGINE = (f"stretto/orchestrator/{name}.py" for name in ("watch", "upkeep", "engine"))
CODEC, LINKS, MESSAGES = "stretto/stage/codec/stage.py", "stretto/stage/links.py", "stretto/control/messages.py"
SCHEDULER = "stretto/stage/scheduler/scheduler.py"
THINKER = "stretto/models/qwen3_omni/nodes/thinker.py"
WATCHING = "tests/orchestrator/test_watch.py"
KEEPING = "tests/orchestrator/test_supervisor.py"
FAULTS = "tests/orchestrator/test_faults.py::test_a_host_that_talks_nonsense_is_a_dead_one"
ANNOUNCING = "tests/orchestrator/test_announcing.py"
STREAMS = "tests/stage/test_codec.py::"
FULL_LINKS = "tests/stage/test_link.py::test_a_request_that_"
STARVED = "tests/stage/scheduler/test_scheduler.py::test_who_"
ROWS = "tests/orchestrator/test_media_rows.py"

MUTATIONS = [
    (
        "a loop that stood still judges what it has not read",
        WATCH,
        "            if late:\n",
        "            if False:\n",
        [WATCHING],
    ),
    ("silent hosts stay", WATCH, "p.end_silent(self._config.stall_s)", "pass", [WATCHING]),
    (
        "hosts that die young are started again at once",
        UPKEEP,
        "RESTART_DELAYS = (0.0, 0.2, 1.0, 5.0, 15.0)",
        "RESTART_DELAYS = (0.0,)",
        [KEEPING],
    ),
    (
        "a host that came back waits like one that did not",
        UPKEEP,
        "            self._deaths[index] = 0\n",
        "",
        [KEEPING],
    ),
    ("a host that never comes up is tried for ever", UPKEEP, "FIRST_STARTS = 3", "FIRST_STARTS = 30", [KEEPING]),
    ("control headers of any size", MESSAGES, "header > MAX_HEADER or ", "", [FAULTS]),
    ("control blobs of any size", MESSAGES, " or blob > MAX_BLOB:\n", ":\n", [FAULTS]),
    ("a death ends everything", ENGINE, " and stages & t.unfinished", "", [ANNOUNCING]),
    ("a death ends what others' replicas do", ENGINE, "t.pipeline is pipeline and ", "", [ANNOUNCING]),
    (
        "a request that ends is forgotten with what waits for room",
        LINKS,
        "(purge or id not in self.away.full)",
        "True",
        [f"{FULL_LINKS}ends_while_its_link_is_full_loses_nothing"],
    ),
    (
        "a cancelled request that waits for room stays",
        LINKS,
        "(purge or id not in self.away.full)",
        "id not in self.away.full",
        [f"{FULL_LINKS}is_cancelled_while_its_link_is_full_leaves_nothing"],
    ),
    (
        "an end alone overtakes a step in flight",
        CODEC,
        "        if last is not None and not stream.num_pending and not stream.in_flight:\n",
        "        if last is not None and not stream.num_pending:\n",
        [f"{STREAMS}test_an_end_that_comes_alone_comes_behind_the_steps_in_flight"],
    ),
    (
        "the first of two steps in flight is the last",
        CODEC,
        "last = stream.ended is not None and not stream.num_pending and not stream.in_flight",
        "last = stream.ended is not None and not stream.num_pending",
        [f"{STREAMS}test_an_end_that_comes_alone_comes_behind_the_steps_in_flight"],
    ),
    (
        "a slot is free while a step writes to it",
        CODEC,
        "                if not stream.in_flight:\n",
        "                if True:\n",
        [f"{STREAMS}test_a_slot_is_free_when_the_last_step_that_writes_to_it_is_back"],
    ),
    (
        "any number of vocoder steps in flight",
        CODEC,
        "if len(self._steps) < self.config.overlap_depth",
        "if True",
        [f"{STREAMS}test_whatever_the_device_takes_its_time_for"],
    ),
    (
        "who is starved takes a share of the step",
        SCHEDULER,
        "            if request.state is not running:\n                continue\n            start, known",
        "            start, known",
        [f"{STARVED}has_no_credit_takes_no_share_of_a_step"],
    ),
    (
        "who is starved holds up those behind",
        SCHEDULER,
        "            if request.state is not running:\n                continue\n            start, known",
        "            if request.state is not running:\n                break\n            start, known",
        [f"{STARVED}waits_for_text_holds_nobody_up"],
    ),
    (
        "media rows are made for those that are not spoken",
        THINKER,
        "if params.speak and pieces else None",
        "if pieces else None",
        [ROWS],
    ),
    (
        "media are read again for those that are not spoken",
        THINKER,
        "needs_payload=params.speak",
        "needs_payload=True",
        [ROWS],
    ),
]
