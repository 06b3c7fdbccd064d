"""Tables of the proofs (`bench proofs`): launch gaps, two checkouts by turns, the ladder of the
links, long prompts, conversations; the record of the GPU tests; and what each promise of the design
came to. They stand in tables.py."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness.markdown import Line, markdown
from bench.report.measured import Results

WAY = {"on": "two", "off": "one", "retire all": "two, all that are done retired first"}
STAGES = ("thinker", "talker", "code2wav")
LINK_OVERLAPS = {
    "no payload_stream": "payload copies on a stream of their own",
    "no async_h2d": "the receiver's copy ahead",
    "no async_d2h": "couriers wait for copies, not the loop",
    "no zero_copy_encode": "chunks encoded in place",
}


def gaps(results: Results) -> str:
    return gap_table(results.file("gaps_h200") or {})


def gap_table(record: Any) -> str:
    """A line for each cell and stage; a cell that was cut has none."""
    lines = []
    for cell in record.get("cells", []):
        idle = cell["device_idle"]
        for stage in STAGES:
            if (s := cell["stages"].get(stage)) is None:
                continue
            lines.append(
                (
                    cell["kind"], str(cell["rows"]), stage, WAY[cell["way"]], str(s["steps"]),
                    f"{s['step_us']['p50'] / 1e3:.2f} ms",
                    f"{s['gap_us']['p50']:.0f} / {s['gap_us']['p99']:.0f} µs",
                    f"{100 * s['stage_idle']:.1f} %",
                    "" if idle is None else f"{100 * idle:.1f} %",
                )
            )  # fmt: skip
    head = (
        "answer", "rows", "stage", "steps in flight", "steps", "step p50", "gap p50 / p99",
        "no step of this stage runs", "no step of any stage runs",
    )  # fmt: skip
    return markdown(head, lines)


def retired(results: Results) -> str:
    """One step retired before a launch, and all that are done: requests that come one by one."""
    ways = (results.file("gaps_h200") or {}).get("arrivals", {}).get("ways", {})
    lines = []
    for way, samples in ways.items():
        first, rtf = (
            sorted(s[what] for s in samples if s[what] is not None)
            for what in ("first_audio", "rtf")
        )
        if first:
            at = min(len(first) - 1, int(0.99 * len(first)))
            lines.append(
                (
                    WAY[way], str(len(first)), f"{1e3 * statistics.median(first):.1f} ms",
                    f"{1e3 * first[at]:.0f} ms", f"{statistics.median(rtf):.3f}",
                )
            )  # fmt: skip
    return markdown(("steps in flight", "answers", "first audio p50", "p99", "RTF p50"), lines)


def trees(results: Results) -> str:
    record = results.file("trees_h200")
    return "" if record is None else tree_table(record)


def tree_table(record: Any) -> str:
    """A line for each level and checkout, a number for each of its servers."""
    lines: list[Line] = []
    for streams in record["arguments"]["levels"]:
        for name, source in record["trees"].items():
            cells = [
                cell
                for run in record["runs"]
                for cell in run["cells"]
                if run["tree"] == name and cell["streams"] == streams and cell["answers"]
            ]
            if cells:
                lines.append((str(streams), f"{name}, {short(source)}", *summary_columns(cells)))
    return markdown(("streams", "checkout", *HEARD), lines)


def long_prompts(results: Results) -> str:
    """Without loads that did not end: fewer answers than streams."""
    lines: list[Line] = []
    for name in ("long_prompts_h200", "prompts_h200"):
        cells = (results.file(name) or {}).get("prompts", [])
        lines += [
            (c["workload"], str(c["streams"]), *summary_columns([c]), commit(results, name))
            for c in cells
            if c["answers"] >= c["streams"]
        ]
    lines.sort(key=lambda line: PROMPTS.index(line[0]))
    return markdown(("prompt", "streams", *HEARD, "commit"), lines)


PROMPTS = ("text-2000", "audio-10s", "image")
HEARD = (
    "answers", "first audio p50", "p99", "RTF p50", "longest wait", "speech made, s/s", "failed",
)  # fmt: skip


def summary_columns(cells: Sequence[Any]) -> Line:
    """Of one load on each of several servers."""

    def each(what: str, q: str, scale: float, digits: int) -> str:
        return " / ".join(f"{scale * c['summary'][what][q]:.{digits}f}" for c in cells)

    return (
        " / ".join(str(c["answers"]) for c in cells),
        f"{each('first_audio_s', 'p50', 1e3, 1)} ms",
        f"{each('first_audio_s', 'p99', 1e3, 0)} ms",
        each("rtf", "p50", 1, 3),
        f"{each('wait_0ms_s', 'max', 1e3, 0)} ms",
        " / ".join(f"{c['rates']['audio_s_per_s']:.0f}" for c in cells),
        " / ".join(str(sum(c["errors"].values())) for c in cells),
    )


def conversations(results: Results) -> str:
    """RTF of answers in conversations, from the commit of the turn."""
    lines = []
    for found in (results.file("long_prompts_h200") or {}).get("live", []):
        for seconds, one in found["by_length"].items():
            if not one.get("rtf"):
                continue
            first, rtf = one["first_audio_s"], one["rtf"]
            lines.append(
                (
                    str(found["sessions"]), f"{seconds} s", str(first["count"]),
                    f"{1e3 * first['p50']:.1f} ms", f"{1e3 * first['p99']:.0f} ms",
                    f"{rtf['p50']:.3f}", f"{rtf['p99']:.3f}", str(found["underruns"]),
                    str(found["failed"]),
                )
            )  # fmt: skip
    head = (
        "conversations", "turn", "answers", "first audio p50", "p99", "RTF p50", "p99",
        "underruns", "failed",
    )  # fmt: skip
    return markdown(head, lines)


# ---- the ladder of the links


def middle(cells: Sequence[Any], what: str) -> float | None:
    values = [s[what] for c in cells for s in c["samples"] if s["error"] is None and s[what]]
    return statistics.median(values) if values else None


def whole(cells: Sequence[Any], what: str) -> list[float]:
    """Of whole answers."""
    return [s[what] for c in cells for s in c["samples"] if s["error"] is None and s[what]]


def rungs(record: Any, streams: int) -> dict[str, list[Any]]:
    """The cells of each variant, in the order of the first round."""
    cells = [c for c in record.get("cells", []) if c["streams"] == streams]
    cells.sort(key=lambda c: c["round"])
    found: dict[str, list[Any]] = {}
    for cell in cells:
        if middle([cell], "first_audio") and middle([cell], "rtf"):
            found.setdefault(cell["variant"], []).append(cell)
    return found


def paired(cells: Sequence[Any], base: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those of the rounds that both have."""
    rounds = {c["round"] for c in cells} & {c["round"] for c in base}
    mine, theirs = ([c for c in which if c["round"] in rounds] for which in (cells, base))
    return mine, theirs


@dataclass(frozen=True, slots=True)
class Change:
    """What switching something off changes of a median, and where 95 % of such changes would lie
    if the answers had been drawn anew."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], base: Sequence[float]) -> Change:
        rng = np.random.default_rng(0)

        def medians(values: Sequence[float]) -> Any:
            drawn = rng.choice(np.asarray(values), (RESAMPLES, len(values)))
            return np.median(drawn, axis=1)

        ratios = np.sort(medians(mine) / medians(base) - 1)
        low, high = (float(ratios[int(q * RESAMPLES)]) for q in (0.025, 0.975))
        return cls(statistics.median(mine) / statistics.median(base) - 1, low, high)

    def __str__(self) -> str:
        return f"{100 * self.share:+.1f} % ({100 * self.low:+.0f} to {100 * self.high:+.0f})"


RESAMPLES = 2000
BASE = "all on"


def ladder(results: Results) -> str:
    return ladder_table(results.file("links_h200") or {})


def ladder_table(record: Any) -> str:
    """Medians over all rounds, and what switching an overlap off changes in the rounds that have
    both."""
    lines: list[Line] = []
    for streams in sorted({c["streams"] for c in record.get("cells", [])}):
        found = rungs(record, streams)
        for variant, cells in sorted(found.items(), key=lambda pair: pair[0] != BASE):
            first, rtf = (whole(cells, what) for what in ("first_audio", "rtf"))
            mine, base = paired(cells, found.get(BASE, []))
            changes = [
                str(Change.of(whole(mine, what), whole(base, what)))
                if mine and variant != BASE
                else ""
                for what in ("first_audio", "rtf")
            ]
            medians = f"{1e3 * statistics.median(first):.1f} ms", f"{statistics.median(rtf):.3f}"
            lines.append(
                (str(streams), variant, str(len(first)), medians[0], changes[0], medians[1],
                 changes[1])
            )  # fmt: skip
    head = ("streams", "overlaps of the links", "answers", "first audio p50", "change", "RTF p50",
            "change")  # fmt: skip
    return markdown(head, lines)


# ---- the GPU tests


def suite_record(results: Results) -> dict[str, str]:
    """`name: value` lines of the record, and its counts."""
    path = results.folder / "gpu_tests_h200.txt"
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    told = dict(line.split(": ", 1) for line in lines if ": " in line and line[0].isalpha())
    counts = next((line.split()[1:6] for line in lines if line.startswith("all ")), None)
    if counts is not None:
        names = ("passed", "failed", "errors", "skipped", "seconds")
        told |= dict(zip(names, counts, strict=True))
    return told


def gpu_suite(results: Results) -> str:
    told = suite_record(results)
    if "passed" not in told:
        return ""
    clean = {"True": "clean", "False": "changed"}.get(told["clean"], "not recorded")
    versions = ", ".join(f"{name} {told[name]}" for name in ("torch", "triton", "transformers"))
    card = ast.literal_eval(told["gpu"])["name"]
    head = (
        "commit", "tree", "date", "card", "versions", "passed", "failed", "skipped", "seconds",
        "result",
    )  # fmt: skip
    failed = str(int(told["failed"]) + int(told["errors"]))
    line = (
        told["commit"], clean, told["date"][:10], card, versions, told["passed"], failed,
        told["skipped"], told["seconds"], told["result"],
    )  # fmt: skip
    return markdown(head, [line])


# ---- what the promises came to


def promises(results: Results) -> str:
    """A line for each measurement that there is."""
    lines = [
        *chunk_promises(results),
        *launch_promises(results),
        *link_promises(results),
        *input_promises(results),
        *hop_promises(results),
    ]
    head = ("promise", "measured", "without it", "with it", "commit")
    return markdown(head, lines)


def commit(results: Results, name: str) -> str:
    """At which a record was made."""
    file = results.file(name) or {}
    env = file.get("env") or next((run["env"] for run in file.get("runs", ())), {})
    return short(env)


def short(env: Any) -> str:
    return str(env["commit"])[:7] if env.get("commit") else "commit not recorded"


def chunk_promises(results: Results) -> list[Line]:
    lines: list[Line] = []
    runs = (results.file("ablation_h200") or {}).get("runs", [])
    for streams in (1, 8):
        pick = {r["variant"]: r for r in runs if r["streams"] == streams}
        if {"all on", "stage by stage"} <= pick.keys():
            without, with_it = (
                f"{1e3 * pick[name]['seconds']['first_audio']:.0f} ms"
                for name in ("stage by stage", "all on")
            )
            what = f"first audio, {streams} at once"
            source = commit(results, "ablation_h200")
            lines.append(("asynchronous chunks between stages", what, without, with_it, source))
    return lines


def launch_promises(results: Results) -> list[Line]:
    cells = (results.file("gaps_h200") or {}).get("cells", [])
    lines: list[Line] = []
    for stage in STAGES:
        found = {
            c["way"]: c["stages"][stage]
            for c in cells
            if (c["kind"], c["rows"]) == ("speech", 8) and stage in c["stages"]
        }
        if {"on", "off"} <= found.keys():
            without, with_it = (f"{found[way]['gap_us']['p50']:.0f} µs" for way in ("off", "on"))
            what = f"gap between steps of the {stage}, 8 rows, p50"
            source = commit(results, "gaps_h200")
            lines.append(("overlapping decode launches", what, without, with_it, source))
    return lines


def link_promises(results: Results) -> list[Line]:
    found = rungs(results.file("links_h200") or {}, 32)
    lines: list[Line] = []
    for variant, overlap in LINK_OVERLAPS.items():
        pair = paired(found.get(variant, []), found.get(BASE, []))
        if all(pair):
            without, with_it = (
                f"{1e3 * statistics.median(whole(cells, 'first_audio')):.1f} ms" for cells in pair
            )
            what = f"first audio, three processes, 32 streams: {overlap}"
            source = commit(results, "links_h200")
            lines.append(("asynchronous copies and transfer", what, without, with_it, source))
    return lines


def input_promises(results: Results) -> list[Line]:
    parts = (results.file("realtime_h200") or {"parts": {}})["parts"]
    found = {
        (f["kind"], f["sessions"]): f["by_length"]
        for f in parts.get("first", {}).get("found", [])
        if "by_length" in f
    }
    lines: list[Line] = []
    for seconds in ("5", "197"):
        pair = [
            found.get((kind, 1), {}).get(seconds, {}).get("first_audio_s")
            for kind in ("whole", "session")
        ]
        if all(pair):
            without, with_it = (f"{1e3 * one['p50']:.0f} ms" for one in pair)
            what = f"first audio after a turn of {seconds} s"
            lines.append(
                ("streaming audio input", what, without, with_it, commit(results, "realtime_h200"))
            )
    return lines


def hop_promises(results: Results) -> list[Line]:
    lines: list[Line] = []
    for level in zip(
        *(run["levels"] for run in (results.file("split_h200") or {}).get("runs", [])), strict=False
    ):
        if len(level) == 2 and level[0]["load"]["streams"] in (1, 8):
            one, two = (f"{1e3 * f['summary']['first_audio_s']['p50']:.1f} ms" for f in level)
            what = f"first audio in two processes and in one, {level[0]['load']['streams']} streams"
            lines.append(("one communication layer", what, two, one, commit(results, "split_h200")))
    return lines
