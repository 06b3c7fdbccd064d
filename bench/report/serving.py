"""Tables about a server: listeners, start-up, memory, its host; and which file each measurement
comes from. Used by tables.py."""

from __future__ import annotations

import statistics
from typing import Any

from bench.harness.markdown import Line, both, count_of, many, markdown
from bench.report.measured import Results, found_in

PROVENANCE = (  # file, what it holds
    ("steps_h200", "steps"),
    ("steps_h200_float8", "steps, experts in 8 bits"),
    ("code2wav_h200", "vocoder"),
    ("vision_h200", "pictures"),
    ("tune_h200", "kernels by themselves"),
    ("together_h200", "thinker and talker at once"),
    ("prefill_h200", "prompts as passes by themselves"),
    ("copies_h200", "copies of links beside decode steps"),
    ("split_h200", "one process and two on one card"),
    ("beside_h200", "beside other servers on the card"),
    ("before_after_h200", "two versions side by side"),
    ("prefill_priority_off_h200", "over HTTP, prefill_priority off"),
    ("realtime_h200", "conversations"),
    ("tts_h200", "Qwen3-TTS"),
    ("ablation_h200", "overlaps switched off"),
    ("gaps_h200", "launch gaps"),
    ("trees_h200", "two checkouts by turns"),
    ("long_prompts_h200", "long prompts, conversations over HTTP"),
    ("links_h200", "overlaps of links between three processes"),
)


def sources(results: Results) -> str:
    """What was measured at which commit. Says so where the tree was not clean, or where that is not
    known."""
    lines = []
    for name in ("h200", "h200_again"):
        file = results.file(name)
        for part, held in (file or {"parts": {}})["parts"].items():
            # the program `host` tells its own
            inner = next((f["env"] for f in held["found"] if "env" in f), None)
            lines.append(
                source(
                    f"over HTTP: {part}" if part != "host" else part,
                    name,
                    inner or held.get("env") or file["env"],
                )
            )
    for name, what in PROVENANCE:
        if (file := results.file(name)) is not None:
            envs = [file["env"]] if "env" in file else [run["env"] for run in file["runs"]]
            lines += dict.fromkeys(source(what, name, env) for env in envs)
    return markdown(("what", "file", "date", "commit", "tree"), lines)


def source(what: str, name: str, env: Any) -> Line:
    env = env if isinstance(env, dict) else {}
    tree = {True: "clean", False: "changed", None: "not recorded"}[env.get("clean")]
    date, commit = (
        str(env.get("date") or "not recorded")[:10],
        str(env.get("commit") or "not recorded"),
    )
    return what, f"`{name}.json`", date if env.get("date") else "not recorded", commit, tree


def latency(results: Results) -> str:
    lines = []
    for serving in results.serving():
        levels = sorted(found_in(serving, "latency"), key=lambda f: int(f["streams"]))
        for f in (*levels, *found_in(serving, "prompts")):
            s = f["summary"]
            if "first_audio_s" not in s:
                continue
            first, text = s["first_audio_s"], s["first_text_s"]
            lines.append(
                (
                    f["workload"], str(f["streams"]), str(f["answers"]), f"{1e3 * text['p50']:.1f}",
                    f"{1e3 * first['p50']:.1f}", f"{1e3 * first['p99']:.1f}",
                    f"{s['rtf']['p50']:.3f}",
                    f"{1e3 * s['gap_s']['p99']:.0f}", f"{1e3 * s['wait_0ms_s']['max']:.0f}",
                    f"{f['rates']['audio_s_per_s']:.0f}", f"{f['gpu'].get('busy_percent', 0):.0f} "
                                                          f"%",
                )
            )  # fmt: skip
    return markdown(
        ("workload", "streams", "answers", "first text p50, ms", "first audio p50, ms", "p99",
        "RTF p50",
         "between packets p99, ms", "longest wait, ms", "speech made, s/s", "GPU busy"), lines,
    )  # fmt: skip


def realtime(results: Results) -> str:
    """Listeners of a minute each: all at once, and one by one."""
    lines = []
    for serving in results.serving():
        for f in (*found_in(serving, "realtime"), *found_in(serving, "players")):
            s, within, lead = f["summary"], f.get("within_s", 2.0), f.get("lead_s")
            lines.append(
                (
                    str(f["streams"]), f"within {within:g} s" if within else "at random moments",
                    "as fast as it comes" if lead is None else f"{lead:g} s ahead",
                    str(f.get("most_at_once", f["streams"])), str(f["answers"]),
                    str(f["stuttered"]),
                    f"{f['waited_s']:.3f} s",
                    f"{1e3 * s['first_audio_s']['p50']:.0f} ms" if "first_audio_s" in s else "",
                    f"{f['rates']['audio_s_per_s']:.0f}",
                )
            )  # fmt: skip
    head = (
        "listeners", "come", "read", "at once", "whole answers", "that stuttered", "waited in all",
        "first audio p50",
        "speech made, s/s",
    )  # fmt: skip
    return markdown(head, lines)


def open_loop(results: Results) -> str:
    """Requests at random moments."""
    lines = []
    runs = [f for serving in results.serving() for f in found_in(serving, "open")]
    for f in sorted(runs, key=lambda f: float(f["rate"])):
        s = f["summary"]
        first, failed = s.get("first_audio_s"), sum(f["errors"].values())
        lines.append(
            (
                f"{f['rate']:g}", str(f["answers"]), str(failed), str(f["most_at_once"]),
                *((f"{1e3 * first[q]:.1f}" for q in ("p50", "p90", "p99")) if first else ("", "",
                "")),
                f"{s['rtf']['p50']:.3f}" if "rtf" in s else "", str(f["stuttered"]),
                f"{f['rates']['audio_s_per_s']:.0f}",
            )
        )  # fmt: skip
    head = (
        "requests a second", "answers", "failed", "at once, at most", "first audio p50, ms", "p90",
        "p99", "RTF p50",
        "that stuttered", "speech made, s/s",
    )  # fmt: skip
    return markdown(head, lines)


def before_after(results: Results) -> str:
    """Closed and open loops of two versions, two runs of each."""
    runs = (results.file("before_after_h200") or {}).get("runs", [])
    loads = [(found["streams"], found["rate"]) for found in (runs[0]["found"] if runs else [])]
    lines = []
    for streams, rate in loads:
        for which in ("before", "after"):
            mine = [run for run in runs if run["which"] == which]
            levels = [
                f
                for run in mine
                for f in run["found"]
                if (f["streams"], f["rate"]) == (streams, rate)
            ]
            names = ("first_text_s", "first_audio_s", "rtf")
            text, first, rtf = ([f["summary"][name]["p50"] for f in levels] for name in names)
            busy, idle = (
                [f["host"][f"stretto_host_{k}_seconds_total"] for f in levels]
                for k in ("busy", "idle")
            )
            lines.append(
                (
                    many(streams) if streams else f"{rate:g} requests a second",
                    f"{which}, {mine[0]['env']['commit'][:7]}", both([f["answers"] for f in levels],
                    0),
                    both([1e3 * v for v in text], 1), both([1e3 * v for v in first], 1), both(rtf,
                    3),
                    " / ".join(f"{100 * b / (b + w):.0f} %" for b, w in zip(busy, idle,
                    strict=True)),
                )
            )  # fmt: skip
    head = (
        "load", "version", "answers", "first text p50, ms", "first audio p50, ms", "RTF p50",
        "loop thread busy",
    )  # fmt: skip
    return markdown(head, lines)


def prefill_priority(results: Results) -> str:
    """Loads that were run with and without it."""
    runs = {"on": results.file("h200_again"), "off": results.file("prefill_priority_off_h200")}
    levels = {
        which: [f for part in ("open", "latency") for f in found_in(run or {"parts": {}}, part)]
        for which, run in runs.items()
    }
    lines = []
    for off in levels["off"]:
        load = off["streams"], off["rate"]
        for which, f in [("on", f) for f in levels["on"] if (f["streams"], f["rate"]) == load] + [
            ("off", off)
        ]:
            s = f["summary"]
            lines.append(
                (
                    many(f["streams"]) if f["streams"] else f"{f['rate']:g} requests a second",
                    which,
                    str(f["answers"]),
                    *(f"{1e3 * s['first_audio_s'][q]:.1f}" for q in ("p50", "p90", "p99")),
                    f"{s['rtf']['p50']:.3f}",
                    f"{1e3 * s['wait_0ms_s']['max']:.0f}",
                )
            )  # fmt: skip
    head = (
        "load",
        "`prefill_priority`",
        "answers",
        "first audio p50, ms",
        "p90",
        "p99",
        "RTF p50",
        "longest wait, ms",
    )
    return markdown(head, lines) if lines else ""


def phases(results: Results) -> str:
    """Medians of the parts, which need not add up to the median of the whole: that one is of the
    same answers."""
    columns = [f for s in results.serving()[:1] for f in found_in(s, "timeline") if f["phases_s"]]
    if not columns:
        return ""
    lines = [
        (name, *(f"{1e3 * f['phases_s'][name]:.1f} ms" for f in columns))
        for name in columns[0]["phases_s"]
    ]
    whole = [
        1e3 * statistics.median(sum(answer.values()) for answer in f["phases_raw"]) for f in columns
    ]
    lines.append(("**first audio, of the same answers**", *(f"**{ms:.1f} ms**" for ms in whole)))
    heads = (f"{many(f['streams'])}, {count_of(len(f['phases_raw']), 'answer')}" for f in columns)
    return markdown(("median", *heads), lines)


def start(results: Results) -> str:
    """What was said while starting. Stages load one after the other, so a phase lasts until the
    next report of any stage."""
    starts = results.starts()
    if not starts:
        return ""
    told, lines = starts[0], []
    before: dict[str, str] = {}
    said = told["phases"]
    for i, phase in enumerate(said[:-1]):
        now = phase["stages"] or {"server": phase["state"]}
        news = [
            f"{stage}: {what}"
            for stage, what in now.items()
            if before.get(stage, "starting") != what
        ]
        before = now
        until = said[i + 1]["at_s"]
        lines.append(
            (
                f"{phase['at_s']:.1f} s",
                f"{until - phase['at_s']:.1f} s",
                "; ".join(news) or "server: loading",
            )
        )
    ready = ", ".join(f"{s['ready_s']:.0f} s ({kernels(s)})" for s in starts)
    return (
        markdown(("from", "took", ""), lines)
        + f"\n\n{count_of(len(starts), 'start').capitalize()} measured: {ready}."
    )


def kernels(told: Any) -> str:
    """Whether it had to compile; the first results did not record that."""
    known = told.get("kernels_cached")
    return (
        "not recorded what was compiled before"
        if known is None
        else f"{known} kernels compiled before"
    )


def memory(results: Results) -> str:
    """What the plan left for the KV pools, as the stages said it, and what is in use while it
    serves."""
    for serving in results.serving():
        said = [
            w
            for start in results.starts()[:1]
            for p in start["phases"]
            for w in p["stages"].items()
        ]
        room = dict.fromkeys(f"{stage}: {what}" for stage, what in said if "room" in what)
        used = [f["gpu"]["memory.used"] for f in found_in(serving, "latency") if f.get("gpu")]
        lines = [f"- {line.replace('loading, with', '')}" for line in room]
        if used:
            lines.append(f"- in use while serving: {max(used) / 1024:.0f} GiB")
        if lines:
            return "\n".join(lines).replace(":  ", ": ")
    return ""


def host(results: Results) -> str:
    lines = []
    for found in (h for s in results.serving() for h in found_in(s, "host")):
        for r in found["runs"]:
            d = r["device"] or {}
            idle = f"{100 * d['idle_share']:.1f} %" if d else ""
            steps = ", ".join(f"{n} {v:.2f}" for n, v in d.get("step_ms_p50", {}).items())
            lines.append(
                (
                    str(r["streams"]), f"{r['wall_ms_per_frame']:.2f} ms",
                    f"{r['busy_us_per_frame'] / 1e3:.2f} ms",
                    f"{100 * r['busy_share']:.0f} %", idle, steps,
                )
            )  # fmt: skip
    return markdown(
        (
            "streams",
            "a frame takes",
            "of it the loop thread works",
            "share",
            "GPU idle",
            "steps p50, ms",
        ),
        lines,
    )
