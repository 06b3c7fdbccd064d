"""Lines by which frames give way to prompts, each with what must fail without it.

(name, file, text that occurs once, text in its place, tests that must fail)."""

from __future__ import annotations

WAY = "stretto/stage/giveway.py"
STAGE = "stretto/stage/stage.py"
TESTS = "tests/stage/test_giveway.py::test_"

MUTATIONS: list[tuple[str, str, str, str, list[str]]] = [
    (
        "newcomers without a first packet wait too",
        WAY,
        "        if voice.pace.begun is None:\n            return 0.0\n",
        "        if voice.pace.begun is None:\n            continue\n",
        [TESTS + "who_has_heard_nothing_yet_can_spare_nothing"],
    ),
    (
        "listeners may run dry",
        WAY,
        "voice.pace.lead(now) - SPARE_S",
        "voice.pace.lead(now) + MOST_S",
        [TESTS + "the_one_with_the_least_in_hand_counts"],
    ),
    (
        "requests that wait for text count",
        WAY,
        "        if voice.request.state is not State.RUNNING or not voice.request.closed:\n            continue\n",
        "",
        [TESTS + "those_that_could_have_no_frame_now_do_not_count"],
    ),
    (
        "frames wait though nobody reads",
        WAY,
        "        if not self.to.reading:\n            return None\n",
        "",
        [TESTS + "it_does_not_wait_without_prompts_nor_for_less_than_a_tick"],
    ),
    (
        "a wait is shorter than the loop can sleep",
        WAY,
        "        if wait_ns < TICK_NS:\n            return None\n",
        "",
        [TESTS + "it_does_not_wait_without_prompts_nor_for_less_than_a_tick"],
    ),
    (
        "frames that were held back count as slow",
        "stretto/stage/pace.py",
        "            if self.last >= self.rhythm.rested:\n                self.rhythm.took(took, now)\n",
        "            self.rhythm.took(took, now)\n",
        [TESTS + "a_frame_that_was_held_back_says_nothing_of_the_device"],
    ),
    (
        "a stage does not wait",
        STAGE,
        "        way = self.gives_way() if due is None else None\n",
        "        way = None\n",
        [TESTS + "a_stage_launches_nothing_that_can_wait_and_is_woken_when_it_is_due"],
    ),
    (
        "prompts of its own wait too",
        STAGE,
        "due or way if (due or way) and self.scheduler.only_decodes_wait else None",
        "due or way",
        [TESTS + "a_prompt_of_its_own_is_not_held_back"],
    ),
    (
        "a launch that gave way counts as late",
        STAGE,
        "        if held and self._gave_way:\n",
        "        if False:\n",
        [TESTS + "a_stage_launches_nothing_that_can_wait_and_is_woken_when_it_is_due"],
    ),
    (
        "the switch is not looked at",
        "stretto/models/qwen3_omni/host.py",
        " and c.switches.give_way:",
        ":",
        [TESTS + "a_talker_gives_way_to_the_thinker_of_its_host[switches1-False]"],
    ),
]
