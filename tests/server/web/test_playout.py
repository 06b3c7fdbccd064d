"""The player's queue, pulled block by block without a clock: nothing lost, nothing clicks, gaps are
counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.scripted_server import ScriptedServer
from tests.server.web.tab import Browser, Tab

# The audio thread's module, loaded in the page with stand-ins for what only that thread has.
LOAD = """(async () => {
  globalThis.AudioWorkletProcessor ??= class {};
  globalThis.registerProcessor ??= () => {};
  globalThis.sampleRate ??= 24000;
  globalThis.Playout = (await import("./player-worklet.js")).Playout;
})()"""

# Runs a list of steps and gives all that came out: ["push", [samples]], ["pull", blocks], ["end"],
# ["stop"].
PLAY = """((lead, steps) => {
  const playout = new Playout(24000);
  playout.begin(lead);
  const out = [], events = [];
  const block = new Float32Array(128);
  for (const [what, value] of steps) {
    if (what === "push") playout.push(Float32Array.from(value));
    else if (what === "pull") for (let i = 0; i < value; i++) {
      const event = playout.pull(block);
      if (event) events.push(event);
      out.push(...block);
    }
    else playout[what]();
  }
  const { underruns, starved, played, buffered, state } = playout;
  return { out, events, underruns, starved, played, buffered, state };
})"""


@pytest.fixture(scope="module")
def tab(browser: Browser, running: ScriptedServer) -> Iterator[Tab]:
    tab = browser.open(running.url)
    tab.eval(LOAD)
    yield tab
    tab.close()


def play(tab: Tab, lead: int, steps: list[list[Any]]) -> dict[str, Any]:
    got: dict[str, Any] = tab.eval(f"{PLAY}({lead}, {json.dumps(steps)})")
    return got


def largest_jump(out: list[float]) -> float:
    return max(abs(b - a) for a, b in zip([0.0, *out], out))


def test_every_sample_is_played_once_in_order(tab: Tab) -> None:
    ramp = [i / 4000 for i in range(1000)]
    got = play(
        tab,
        0,
        [["push", ramp[:7]], ["push", ramp[7:700]], ["push", ramp[700:]], ["end"], ["pull", 12]],
    )
    assert got["events"] == ["started", "drained"]
    assert got["out"][120:1000] == pytest.approx(ramp[120:], abs=1e-6)  # after the fade-in
    assert (got["played"], got["underruns"], got["starved"], got["buffered"]) == (1000, 0, 0, 0)
    assert got["state"] == "idle"


def test_waits_for_its_lead(tab: Tab) -> None:
    got = play(tab, 500, [["push", [0.5] * 499], ["pull", 4]])
    assert (got["out"], got["events"]) == ([0.0] * 512, [])
    got = play(tab, 500, [["push", [0.5] * 499], ["pull", 4], ["push", [0.5]], ["pull", 1]])
    assert got["events"] == ["started"]


def test_short_stream_need_not_fill_the_lead(tab: Tab) -> None:
    got = play(tab, 5000, [["push", [0.5] * 300], ["pull", 1], ["end"], ["pull", 3]])
    assert got["events"] == ["started", "drained"]
    assert got["played"] == 300


def test_gap_is_counted_and_does_not_click(tab: Tab) -> None:
    steps = [
        ["push", [0.8] * 600],
        ["pull", 8],
        ["push", [0.8] * 3000],
        ["pull", 20],
        ["end"],
        ["pull", 20],
    ]
    got = play(tab, 0, steps)
    assert got["events"] == ["started", "underrun", "drained"]
    assert got["underruns"] == 1
    assert got["starved"] == 8 * 128 - 600
    assert got["played"] == 3600
    assert largest_jump(got["out"]) < 0.05, "a jump of the full 0.8 would be a click"


def test_gap_at_a_block_boundary_does_not_click(tab: Tab) -> None:
    got = play(tab, 0, [["push", [0.8] * 512], ["pull", 9]])
    assert got["events"] == ["started", "underrun"]
    assert largest_jump(got["out"]) < 0.05
    assert got["out"][-1] == pytest.approx(0.0, abs=1e-4)


def test_lead_grows_after_a_gap(tab: Tab) -> None:
    steps = [["push", [0.5] * 600], ["pull", 8], ["push", [0.5] * 1199], ["pull", 4]]
    assert play(tab, 600, steps)["played"] == 600, "twice the lead is wanted now"
    steps[2] = ["push", [0.5] * 1200]
    assert play(tab, 600, steps)["played"] == 600 + 512


def test_running_dry_at_the_end_is_no_gap(tab: Tab) -> None:
    """The end is told only after the last packet may have been played out."""
    got = play(tab, 0, [["push", [0.5] * 600], ["pull", 9], ["end"], ["pull", 1]])
    assert (got["underruns"], got["starved"]) == (0, 0)
    assert got["state"] == "idle"


def test_stop_is_at_once_and_does_not_click(tab: Tab) -> None:
    got = play(tab, 0, [["push", [0.8] * 24000], ["pull", 8], ["stop"], ["pull", 4]])
    assert got["played"] == 8 * 128
    assert got["buffered"] == 0
    assert largest_jump(got["out"]) < 0.05
    assert got["out"][-1] == pytest.approx(0.0, abs=1e-4)
