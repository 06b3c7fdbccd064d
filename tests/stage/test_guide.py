"""Grammars are compiled by turns of clients, beside the loop; whoever waits for one says so, and
may leave."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import HostSettings
from stretto.errors import Bug, Invalid
from stretto.messages.requests import Admit, FromHost, Text, Working
from stretto.models.qwen3_omni.family import open_grammars
from stretto.models.qwen3_omni.params import ThinkerParams
from stretto.models.qwen3_omni.stages.guided import WORKING_NS, Compiling, PendingRequest
from stretto.preprocess.grammars import GrammarCompiler
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.prompt import Prompt
from stretto.stage.guide import Grammars
from stretto.types import RequestId, SamplingParams
from tests.engine.common import HandDriven


class HeldGrammars:
    """Grammars whose compiler is not there before `open`: until then all wait."""

    def __init__(self, model: Path) -> None:
        self.open = threading.Event()
        self.order: list[str] = []
        self.grammars = Grammars(lambda: self.compiler(model))

    def compiler(self, model: Path) -> GrammarCompiler:
        assert self.open.wait()
        return open_grammars(model)

    def start(self, client: str, name: str = "") -> Any:
        grammar = f"start: /{name or client}[0-9]/\n"
        return self.grammars.compile(
            grammar, lambda: self.order.append(name or client), client.encode()
        )

    def __enter__(self) -> HeldGrammars:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self.grammars.close()


def test_clients_take_turns(tiny_dir: Path) -> None:
    with HeldGrammars(tiny_dir) as blocked:
        futures = [blocked.start(client) for client in "aaabbc"]
        blocked.open.set()
        assert all(a.result().mask().any() for a in futures)
    assert "".join(blocked.order) == "abcaba"


def test_what_nobody_waits_for_any_more_is_not_compiled(tiny_dir: Path) -> None:
    with HeldGrammars(tiny_dir) as blocked:
        first, left, last = (blocked.start("a", name) for name in ("first", "left", "last"))
        assert left.cancel()
        blocked.open.set()
        assert first.result()
        assert last.result()
    assert blocked.order == ["left", "first", "last"], "who left heard of it at once"


def test_what_breaks_the_compiler_is_its_request_s_alone(tiny_dir: Path) -> None:
    class Broken(GrammarCompiler):
        def compile(self, grammar: str, budget: Any = None) -> Any:
            if "broken" in grammar:
                raise ZeroDivisionError
            return super().compile(grammar, budget)

    def open_broken() -> GrammarCompiler:
        good = open_grammars(tiny_dir)
        return Broken(good.tokenizer, good.vocab, good.end)

    grammars = Grammars(open_broken)
    with pytest.raises(Bug, match="cannot be compiled"):
        grammars.compile("start: /broken/\n", lambda: None).result()
    with pytest.raises(Invalid):
        grammars.compile("start: nothing\n", lambda: None).result()
    assert grammars.compile("start: /a/\n", lambda: None).result().mask().any()
    grammars.close()


# ---- requests that wait


def request(name: str, client: str) -> PendingRequest:
    params = ThinkerParams(SamplingParams(0.0, 0, 1.0, 1.0, 0), 5, grammar="start: /a/\n")
    admit = Admit(RequestId(name), PackedPrompt.of_ids((1,)), {}, client=client.encode())
    return PendingRequest(admit, params, Prompt((1,)), None, 0.0)  # type: ignore[arg-type]


def test_who_waits_for_a_grammar_says_so_and_may_leave(tiny_dir: Path) -> None:
    """Else the engine would take a stage for dead that compiles the grammars of others."""
    now, rung = [0], threading.Semaphore(0)
    with HeldGrammars(tiny_dir) as blocked:
        compiling = Compiling(blocked.grammars, rung.release, lambda: now[0])
        assert compiling.due_ns is None
        for name, client in (("r1", "a"), ("r2", "a"), ("r3", "a"), ("r4", "b")):
            compiling.add(request(name, client))
        assert compiling.due_ns == WORKING_NS
        assert compiling.working() == []
        now[0] = WORKING_NS
        assert compiling.working() == ["r1", "r2", "r3", "r4"]
        assert compiling.working() == [], "once each time"
        assert compiling.due_ns == 2 * WORKING_NS
        compiling.drop(RequestId("r1"))
        compiling.drop(RequestId("r1"))
        assert rung.acquire()
        blocked.open.set()
        done = []
        while len(done) < 3:
            assert rung.acquire()
            done += [
                known.admit.request
                for known, made in compiling.done()
                if made.result().error is None
            ]
        assert sorted(done) == ["r2", "r3", "r4"]  # those that are ready together come in any order
        assert compiling.due_ns is None


def test_a_stage_says_which_requests_wait_for_their_grammars(tiny_dir: Path) -> None:
    now = [0]
    with HeldGrammars(tiny_dir) as blocked:
        driven = HandDriven(tiny_dir, HostSettings())
        stage: Any = driven.host.stages["thinker"]
        stage.compiling = Compiling(blocked.grammars, lambda: None, lambda: now[0])
        waits = request("r1", "a")
        stage.admit(waits.admit, waits.params, waits.prompt)
        assert stage.poll() == []
        assert stage.due_ns == WORKING_NS
        now[0] = WORKING_NS
        assert [output.message for output in stage.poll()] == [Working(RequestId("r1"), "thinker")]
        blocked.open.set()
        while not any(isinstance(m, Text) for m in posted(driven)):
            driven.host.loop.round()
        stage.compiling.add(request("r2", "a"))
        assert len(stage) == 2
        stage.cancel(RequestId("r2"))
        stage.cancel(RequestId("r1"))
        assert len(stage) == 0
        driven.host.close()


def posted(driven: HandDriven) -> list[FromHost]:
    return [message for message, _ in driven.reports]
