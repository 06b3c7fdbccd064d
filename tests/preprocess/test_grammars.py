"""Grammars: compiled within limits of time, memory and size, checked by turns of clients, followed
within a budget."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import PoolSettings
from stretto.errors import Invalid, StageDead
from stretto.models.qwen3_omni.family import open_grammars
from stretto.preprocess.grammars import (
    BURST_S,
    EACH_S,
    GrammarCompiler,
    GrammarGuide,
    GrammarVerdicts,
    StepBudget,
)
from stretto.preprocess.pool.jobs import Job
from stretto.preprocess.pool.pool import PromptPool

BUILDER = "stretto.models.qwen3_omni.prompts:open_builder"
GRAMMARS = "stretto.models.qwen3_omni.family:open_grammars"
ENDLESS = {
    "type": "integer",
    "multipleOf": 9_999_991,
}  # compiles for more than a minute, and takes gigabytes
NO_LIMIT: dict[str, Any] = {"grammar_cpu_s": 3600.0, "grammar_memory_mb": 1 << 20}


def grammar_of(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(schema)}\n"


def endless(number: int) -> str:
    return grammar_of({**ENDLESS, "title": str(number)})


def small(name: str) -> str:
    return grammar_of(
        {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    )


def references(count: int) -> dict[str, Any]:
    """A chain of them: the compiler recurses along it."""
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def with_pool(
    model: Path, test: Callable[[PromptPool], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    async def run() -> None:
        pool = PromptPool(model, BUILDER, PoolSettings(**settings), GRAMMARS)
        await pool.start()
        try:
            await test(pool)
        finally:
            await pool.close()
            assert not pool.grammar_queue.running
            assert not pool.grammar_queue.waiting

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# ---- checks


@pytest.mark.parametrize(
    ("schema", "settings", "says"),
    [
        (ENDLESS, {**NO_LIMIT, "grammar_cpu_s": 0.2}, "takes more than 0.2 s of CPU time"),
        (ENDLESS, {**NO_LIMIT, "grammar_memory_mb": 16}, "takes more than 16 MiB of memory"),
        (references(3000), {}, "refer to each other too deeply"),
        ({"type": "strang"}, {}, "strang"),
    ],
    ids=["time", "memory", "stack", "nonsense"],
)
def test_what_goes_over_a_limit_is_refused_and_others_go_on(
    tiny_dir: Path, schema: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    async def test(pool: PromptPool) -> None:
        worker = pool.worker.process
        for _ in range(2):
            with pytest.raises(Invalid, match=says) as caught:
                await pool.check(grammar_of(schema), "a")
            assert caught.value.param == "response_format"
        await pool.check(small("x"), "a")
        assert pool.worker.process is worker, "the worker itself compiles nothing"

    with_pool(tiny_dir, test, **settings)


def test_a_check_ends_with_its_caller(tiny_dir: Path) -> None:
    async def test(pool: PromptPool) -> None:
        asked = asyncio.create_task(pool.check(endless(0), "a"))
        await until(lambda: pool.grammar_queue.running == 1)
        asked.cancel()
        await until(lambda: pool.grammar_queue.running == 0)
        assert asked.cancelled()

    with_pool(tiny_dir, test, **NO_LIMIT)


def test_no_client_has_all_places_for_checks(tiny_dir: Path) -> None:
    """Nor do checks wait for prompts: those have places of their own."""

    async def test(pool: PromptPool) -> None:
        asked = [asyncio.create_task(pool.check(endless(i), "a")) for i in range(5)]
        await until(lambda: pool.grammar_queue.running == 1 and pool.grammar_queue.waiting == 4)
        await pool.queue.enter("a")
        await pool.queue.enter("b")
        for i in range(3):
            await pool.check(small(f"x{i}"), "b")
        assert pool.grammar_queue.waiting == 4
        assert not any(a.done() for a in asked)
        pool.queue.leave("a")
        pool.queue.leave("b")
        for a in asked:
            a.cancel()

    with_pool(tiny_dir, test, **NO_LIMIT)


def test_a_schema_is_checked_once_for_its_client(tiny_dir: Path) -> None:
    async def test(pool: PromptPool) -> None:
        jobs: list[object] = []
        send = pool.worker.send

        def noted(job: Job, fds: Sequence[int]) -> bool:
            jobs.append(job)
            return send(job, fds)

        pool.worker.send = noted  # type: ignore[method-assign]
        await asyncio.gather(*(pool.check(small("x"), "a") for _ in range(8)))
        await pool.check(small("x"), "a")
        await pool.check("", "a")
        assert len(jobs) == 1
        await pool.check(small("x"), "b")
        assert len(jobs) == 2, "whoever asks learns nothing of what others use"

    with_pool(tiny_dir, test)


def test_jobs_wait_for_a_new_worker_together(tiny_dir: Path) -> None:
    """Not one behind the other, for as long each: while they wait, they hold no place."""
    count = 5

    async def test(pool: PromptPool) -> None:
        callers: list[asyncio.Task[None] | None] = []
        patience_ends = asyncio.Event()

        async def wait_until_ready(_: float) -> None:
            callers.append(asyncio.current_task())
            if callers.count(callers[-1]) > 1:  # the first time, nothing was sent yet
                await patience_ends.wait()
                raise StageDead("no worker came")

        pool.worker.wait_until_ready = wait_until_ready  # type: ignore[method-assign]
        pool.worker.send = lambda job, fds: False  # type: ignore[method-assign]
        checks = [asyncio.create_task(pool.check(small(f"x{i}"), "a")) for i in range(count)]
        await until(lambda: len(callers) == 2 * count)
        assert pool.grammar_queue.running == pool.grammar_queue.waiting == 0
        patience_ends.set()
        errors = await asyncio.gather(*checks, return_exceptions=True)
        assert [type(error) for error in errors] == [StageDead] * count
        assert pool.grammar_queue.running == 0

    with_pool(tiny_dir, test, workers=1)


def test_a_model_without_grammars_checks_none(tiny_dir: Path) -> None:
    asyncio.run(PromptPool(tiny_dir, BUILDER, PoolSettings()).check("anything"))


def test_verdicts_push_out_those_of_their_own_client_alone() -> None:
    known = GrammarVerdicts(per_client=2, clients=2)
    known.store("a", b"1", "")
    for i in range(9):
        known.store("b", bytes([i]), "no")
    assert known.find("a", b"1") == ""
    assert known.find("a", b"\x08") is None
    assert [known.find("b", bytes([i])) for i in (6, 7, 8)] == [None, "no", "no"]
    known.store("c", b"1", "")
    assert known.find("b", b"\x08") == "no"
    assert known.find("a", b"1") is None, "the client that was heard of least lately"


# ---- compiling


@pytest.fixture(scope="module")
def compiler(tiny_dir: Path) -> GrammarCompiler:
    return open_grammars(tiny_dir)


def optional(count: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_a_grammar_of_too_many_symbols_is_refused(compiler: GrammarCompiler) -> None:
    compiler.compile(grammar_of(optional(400)))
    with pytest.raises(Invalid, match="too big"):
        compiler.compile(grammar_of(optional(1500)))


def test_an_answer_is_tried_where_a_grammar_is_checked(compiler: GrammarCompiler) -> None:
    """Two thousand objects may begin with the same letters: that is found out at the second
    step."""
    many = grammar_of({"anyOf": [optional(2) for _ in range(300)]})
    guide = compiler.compile(many)
    assert guide.error is None
    with pytest.raises(Invalid, match="cannot be followed"):
        compiler.check(many)


def test_the_longest_chain_of_references_does_not_end_a_host(tiny_dir: Path) -> None:
    """As a stage compiles it, without a check before: in a process of its own, in case it does."""
    program = f"""
import sys
from functools import partial
from pathlib import Path
from stretto.models.qwen3_omni.family import open_grammars
from stretto.stage.guide import Grammars
grammars = Grammars(partial(open_grammars, Path({str(tiny_dir)!r})))
assert len(grammars.compile(sys.stdin.read(), lambda: None).result().mask())
"""
    longest = grammar_of(references(4000))
    assert len(longest) > 120_000
    subprocess.run([sys.executable, "-c", program], input=longest, text=True, check=True)


# ---- following


class Clock:
    """Each look at it takes some time."""

    def __init__(self, each: float) -> None:
        self.each, self.now = each, 0.0

    def __call__(self) -> float:
        self.now += self.each
        return self.now


def follow(guide: GrammarGuide, compiler: GrammarCompiler, text: str) -> int:
    """How many tokens of a text could be accepted."""
    for i, token in enumerate(compiler.tokenizer.tokenize_str(text)):
        guide.mask()
        if guide.error is not None:
            return i
        guide.accept(token)
    return i + 1


def test_a_mask_has_fuel(compiler: GrammarCompiler) -> None:
    """A pattern with more states than anybody could compute fails its request, however much time is
    left."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pattern = "|".join(f"(.*{letters[i % 26]}.{{{5 * i}}})" for i in range(60))
    guide = compiler.compile(
        grammar_of({"type": "string", "pattern": f"^({pattern})$"}), StepBudget(Clock(0.0))
    )
    follow(guide, compiler, '"' + 3 * letters)
    assert "lexer error" in str(guide.error)
    assert isinstance(guide.error, Invalid)


@pytest.mark.parametrize(
    ("each", "fine"), [(0.9 * EACH_S / 2, True), (1.1 * EACH_S / 2 + BURST_S / 40, False)]
)
def test_steps_have_a_budget(compiler: GrammarCompiler, each: float, fine: bool) -> None:
    """Steps that take what each adds go on for ever; slower ones use up what there is, and the
    answer ends."""
    guide = compiler.compile(grammar_of({"type": "string"}), StepBudget(Clock(each)))
    follow(guide, compiler, '"' + "a b c d e f g h " * 10)
    if fine:
        assert guide.error is None
    else:
        assert "its steps take too long" in str(guide.error)
        bits = guide.mask()
        assert [
            32 * w + b
            for w, word in enumerate(bits.tolist())
            if word
            for b in range(32)
            if word >> b & 1
        ] == [compiler.end]


def test_one_long_step_is_one_too_many(compiler: GrammarCompiler) -> None:
    clock = Clock(0.0)
    guide = compiler.compile(grammar_of({"type": "string"}), StepBudget(clock))
    follow(guide, compiler, '"a')
    clock.each = BURST_S + 2 * EACH_S
    guide.mask()
    assert "its steps take too long" in str(guide.error)


def test_the_first_mask_is_there_when_the_grammar_is(compiler: GrammarCompiler) -> None:
    """It was computed beside the loop, so it costs the loop nothing."""
    clock = Clock(1.0)
    guide = compiler.compile(small("x"), StepBudget(clock))
    assert guide.mask().any()
    assert clock.now == 0.0
    assert guide.error is None
