"""Tables of bench/notes/faults.md: kills, the soak, damaged input, attacks. They stand in
tables.py."""

from __future__ import annotations

import textwrap
from typing import Any

from bench.harness.markdown import markdown
from bench.report.measured import Results


def kills(results: Results) -> str:
    if (r := results.file("faults")) is None:
        return ""
    callers = ", ".join(f"{n:,} {what}" for what, n in sorted(r["outcomes"].items()))
    head = textwrap.fill(
        f"{r['kills']} kills -9 over the three hosts at {r['env']['commit']}, "
        f"{r['followed_by_a_second']} of them "
        f"followed by a second; callers: {callers}; problems: {len(r['problems'])}.", 120
    )  # fmt: skip
    lines = []
    for what, name in (
        ("to the last error", "seconds_to_last_error"),
        ("to ready again", "seconds_to_ready"),
    ):
        lines.append(
            (f"from the kill {what}", *(f"{r[name][key]:.2f}" for key in ("median", "p99", "most")))
        )
    m = r["orchestrator_mib"]
    memory = (
        f"Orchestrator: {m['start']:.1f} MiB before the first kill, {m['end']:.1f} MiB after the "
        f"last; in the second "
        f"half {m['slope']:.2f} ± {m['margin']:.2f} KiB per kill."
    )
    return "\n\n".join([head, markdown(("seconds", "median", "99 %", "most"), lines), memory])


def soak(results: Results) -> str:
    if (r := results.file("soak")) is None:
        return ""
    kinds = r["kinds"]
    head = textwrap.fill(
        f"{r['requests']:,} requests, {r['at_once']} at a time, in {r['seconds']:.0f} s at "
        f"{r['env']['commit']}: "
        f"{kinds['whole']:,} read to the end, {kinds['slow']:,} by a slow listener, "
        f"{kinds['closed'] + kinds['cancelled']:,} to be closed or cancelled on the way. "
        f"{r['exact']:,} answers "
        f"were exact, {r['cut_by_the_caller']:,} were cut by their caller; problems: "
        f"{len(r['problems'])}.", 120
    )  # fmt: skip
    lines = [
        (
            name, *(f"{m[when]:.1f}" for when in ("start", "middle", "end")),
            f"{m['slope']:.3f} ± {m['margin']:.3f}", "yes" if m["flat"] else "no",
        )
        for name, m in r["memory_mib"].items()
    ]  # fmt: skip
    return f"{head}\n\n{markdown(('MiB', 'start', 'middle', 'end', 'second half, KiB per request', 'flat'), lines)}"  # noqa: E501


def fuzz(results: Results) -> str:
    if (r := results.file("fuzz_wire")) is None:
        return ""
    head = (
        f"{r['inputs']:,} inputs at {r['env']['commit']}, seed {r['seed']}; problems: "
        f"{len(r['problems'])}."
    )
    lines = [
        (name, f"{p['inputs']:,}", f"{p['read']:,}", f"{p['seconds']:.0f}")
        for name, p in r["parts"].items()
    ]
    return f"{head}\n\n{markdown(('', 'inputs', 'could be read', 'seconds'), lines)}"


def attacks(results: Results) -> str:
    """Each attack on the version before its guards, where that was run, and on a later one."""
    if (after := results.file("attacks")) is None:
        return ""
    head = ("worst /live (quiet), ms", "longest gap", "refused or failed", "memory not back, MiB")
    if (before := results.file("attacks_before")) is None:
        return markdown(("attack", *head), [(a["attack"], *_noticed(a)) for a in after["attacks"]])
    earlier = {a["attack"]: a for a in before["attacks"]}
    lines = [
        (a["attack"], *map(" / ".join, zip(_noticed(earlier.get(a["attack"])), _noticed(a))))
        for a in after["attacks"]
    ]
    return markdown(("before / after", *head), lines)


def _noticed(attack: dict[str, Any] | None) -> tuple[str, str, str, str]:
    if attack is None:
        return "-", "-", "-", "-"
    quiet, attacked, held = attack["quiet"], attack["attacked"], attack["held"]
    live, calm = attacked["live_s"]["max"], quiet["live_s"]["max"]
    more = held["after"]["anonymous"] - held["before"]["anonymous"]
    ratio = attack["gap_ratio"]
    return (
        "-" if live is None else f"{1e3 * live:,.0f} ({1e3 * calm:,.0f})",
        "no stream" if ratio is None else f"{ratio:.1f}",
        f"{attacked['refusals']} of {sum(attacked['asked'].values())}",
        f"{max(0, more) >> 20}",
    )
