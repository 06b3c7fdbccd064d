"""How far a table's replay is from the measured runs, in words. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stretto.planner.table import Check, Table

CLOSE = 0.1
"""A replay shall be no farther from what was measured."""


def error_lines(table: Table) -> list[str]:
    """Run by run, and those of a load together; then which are farther off than they should be, and whether chance
    could explain that."""
    if not table.checks:
        return ["of the replay against measured runs: not known"]
    measures = list(table.checks[0].error)
    told = [f"{m} {_percent(table.error[m])} (worst {_percent(table.worst[m])})" for m in measures]
    lines = [
        f"of the replay against measured runs, on average: {', '.join(told)}",
        "by run, in %, with the 90 % sampling interval of what was measured:",
        _row("", measures),
    ]
    together = {check.load: check for check in table.pooled}
    for load, runs in _by_load(table.checks).items():
        lines += [_row(f"{load}{', fitted' * run.fitted}", [_off(run, m) for m in measures]) for run in runs]
        if load in together:
            lines.append(_row("  not fitted, all", [_off(together[load], m) for m in measures]))
        if load in table.between:
            lines.append(_row("  runs apart", [f"{100 * table.between[load][m]:3.0f}" for m in measures]))
    for m in measures:
        lines += verdict(table.checks, m)
        lines += verdict(table.pooled, m, "loads, of the runs that were not fitted") if table.pooled else []
    return lines


def verdict(checks: Sequence[Check], measure: str, what: str = "runs") -> list[str]:
    """In how many runs a measure is as near as it should be, and in which it is not."""
    far = [c for c in checks if abs(c.error[measure]) > CLOSE]
    chance = [c for c in far if c.interval[measure][0] <= c.error[measure] <= c.interval[measure][1]]
    lines = [f"{measure} is within {_percent(CLOSE)} in {len(checks) - len(far)} of {len(checks)} {what}"]
    for runs, where in ((chance, "but inside"), ([c for c in far if c not in chance], "and outside")):
        if runs:
            loads = ", ".join(f"{c.load} ({100 * c.error[measure]:+.1f} %)" for c in runs)
            lines.append(f"  not within, {where} the measured value's own 90 % sampling interval: {loads}")
    return lines


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:20}{''.join(f'{cell:20}' for cell in cells)}".rstrip()


def _off(run: Check, measure: str) -> str:
    off, low, high = (round(100 * share) for share in (run.error[measure], *run.interval[measure]))
    return f"{off:+3d} [{low:+d} to {high:+d}]"


def _by_load(checks: Iterable[Check]) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in checks:
        found.setdefault(check.load, []).append(check)
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
