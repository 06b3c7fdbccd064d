"""Lines of the log probabilities, each with what must fail without it.

(name, file, text that occurs once, text in its place, tests that must fail)."""

from __future__ import annotations

RUNNER = "stretto/stage/runner/"
STAGE = "tests/stage/test_logprobs.py::"
HTTP = "tests/first_hour/test_logprobs.py::"

MUTATIONS: list[tuple[str, str, str, str, list[str]]] = [
    (
        "nobody is found to ask",
        RUNNER + "runner.py",
        " | asks << 2",
        "",
        [STAGE + "test_as_the_reference_has_it[batched]"],
    ),
    (
        "the first rows are taken, not those that ask",
        RUNNER + "logprobs.py",
        "head(hidden[some])",
        "head(hidden[: len(some)])",
        [STAGE + "test_as_the_reference_has_it[batched]"],
    ),
    (
        "the padding of a captured step is taken for its rows",
        RUNNER + "graphs.py",
        "picked.hidden[:rows]",
        "picked.hidden[-rows:]",
        [STAGE + "test_from_captured_steps"],
    ),
    (
        "who does not ask pays too",
        RUNNER + "runner.py",
        "        wanted = [(at, count) for at, count in asked if count is not None]\n",
        "        wanted = [(at, count or 0) for at, count in asked]\n",
        [STAGE + "test_nobody_who_does_not_ask_pays"],
    ),
    (
        "the end token is told as if it were said",
        "stretto/server/chat.py",
        "            if t.said is not None\n",
        "",
        [HTTP + "test_the_end_token_is_not_told"],
    ),
    (
        "tokens whose words were held back are never told",
        "stretto/server/chat.py",
        "answer.reason(end), answer.index, self._take_told())]",
        "answer.reason(end), answer.index)]",
        [HTTP + "test_words_that_are_dropped_have_tokens_all_the_same"],
    ),
]
