"""What the rule for first packets (`stretto.stage.pacing.Rhythm`) would have done in a recorded
run.

Run by `python -m bench report --first-packets`. Replays the packets of runs of `serve`: with what
the pace of all streams was just before, each first packet is held back as the rule says (or until
the second came), and a player starts then. Printed for each number of streams: players that had to
wait, for how long in all, and the median of the first sound, without and with it. A replay does not
show how later packets would have changed, only the size of the gain and of the cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.results import read
from stretto.loadtest.player import Packet, play
from stretto.models.qwen3_omni.config import OPENING_S
from stretto.models.speech.talker_stage import FRAME_S
from stretto.stage.pacing import Rhythm


def paces(samples: list[Any]) -> list[tuple[float, float]]:
    """(when, seconds per frame) of all packets but the first ones, of all streams."""
    found = []
    for s in samples:
        for (before, _), (now, sound) in zip(s["packets"], s["packets"][1:], strict=False):
            found.append((s["sent"] + now, (now - before) / max(1, round(sound / FRAME_S))))
    return sorted(found)


def replay(samples: list[Any]) -> dict[str, list[float]]:
    """By answer, in seconds: wait and first sound as they were, and with the rule."""
    seen, rhythm, at = paces(samples), Rhythm(FRAME_S, OPENING_S), 0
    found: dict[str, list[float]] = {"wait": [], "first": [], "wait, held": [], "first, held": []}
    for s in sorted(samples, key=lambda s: s["sent"] + s["packets"][0][0]):
        (first, sound), *others = s["packets"]
        begun = s["sent"] + first
        while at < len(seen) and seen[at][0] <= begun:
            rhythm.took(seen[at][1], seen[at][0])
            at += 1
        start = min(first + rhythm.hold(sound, begun), others[0][0] if others else first)
        for name, when in (("", first), (", held", start)):
            heard = play([Packet(max(t, when), seconds) for t, seconds in s["packets"]])
            assert heard is not None
            found[f"wait{name}"].append(heard.wait)
            found[f"first{name}"].append(when)
    return found


def show(files: Sequence[Path]) -> None:
    print(f"{'':28} waited      in all ms         first sound p50 ms")
    for file in files:
        parts = read(file)["parts"]
        for level in [*parts["latency"]["found"], *parts.get("realtime", {"found": []})["found"]]:
            found = replay([s for s in level["samples"] if s["packets"]])
            waited = [sum(w > 1e-9 for w in found[name]) for name in ("wait", "wait, held")]
            total = [1e3 * sum(found[name]) for name in ("wait", "wait, held")]
            first = [1e3 * statistics.median(found[name]) for name in ("first", "first, held")]
            print(
                f"{file.stem} {level['workload']:>9} x {level['streams']:<4} {waited[0]:4} -> "
                f"{waited[1]:<4}"
                f" {total[0]:7.1f} -> {total[1]:<7.1f} {first[0]:7.1f} -> {first[1]:.1f}"
            )
