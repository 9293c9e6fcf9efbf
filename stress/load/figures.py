"""The figures of a load test, with their goals."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from cli.output import table
from stress.runner import Report

HEADER = ("what", "found", "goal", "")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a report; without a goal it serves as comparison."""

    what: str
    found: str
    goal: str = ""
    is_met: bool = True


def at_most(what: str, found: float, goal: float, unit: str) -> Figure:
    return Figure(what, _said(found, unit), f"≤ {_said(goal, unit)}", found <= goal)


def at_least(what: str, found: float, goal: float, unit: str) -> Figure:
    return Figure(what, _said(found, unit), f"≥ {_said(goal, unit)}", found >= goal)


def none_of(what: str, found: Sequence[str]) -> Figure:
    """Count the faults, and show the first one; the goal is 0."""
    said = f"{len(found)}: {found[0]}" if found else "0"
    return Figure(what, said, "0", not found)


def p99_ms(seconds: Sequence[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1000 * percentile(seconds, 99)


def percentile(numbers: Sequence[float], hundredth: int) -> float:
    """Return the percentile of the values."""
    return quantiles(numbers, n=100, method="inclusive")[hundredth - 1]


def report_of(figures: Sequence[Figure]) -> Report:
    """Return a table of the figures; a missed goal is a fault."""
    rows = [(it.what, it.found, it.goal, "" if it.is_met else "MISSED") for it in figures]
    missed = [f"{it.what}: {it.found}, goal {it.goal}" for it in figures if not it.is_met]
    return Report(list(table(HEADER, rows)), missed)


def _said(number: float, unit: str) -> str:
    return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"
