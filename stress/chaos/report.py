"""The report of a chaos run, for a terminal and for `docs/reliability.md`."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from cli.output import table
from stress.chaos.figures import History
from stress.chaos.scene import Scene
from stress.chaos.strikes import Striker

HEADER = (
    "victim",
    "fault",
    "injected",
    "observed",
    "in a save",
    "detected p50",
    "p95",
    "recovered p50",
    "p95",
    "ranks restarted",
)
ADOPTED_HEADER = (
    "adopted again after",
    "fault",
    "injected",
    "timed",
    "p50",
    "p95",
    "p99",
    "longest",
    "ranks restarted",
)
SHOWN_BREACHES = 5
SHOWN_RESTARTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a run."""

    history: History
    breaches: Mapping[str, Sequence[str]]
    facts: Mapping[str, object]
    """Other counts."""
    replay: str
    """The command that repeats the run."""

    @property
    def has_failed(self) -> bool:
        return any(self.breaches.values())

    def lines(self) -> Iterator[str]:
        yield from table(HEADER, self._rows())
        yield ""
        if adoptions := list(self._adoptions()):
            yield from table(ADOPTED_HEADER, adoptions)
            yield ""
        yield from list(self.history.collateral())[:SHOWN_RESTARTS]
        yield f"run: {self.replay}"
        yield f"machine: {machine()}"
        for name, fact in self.facts.items():
            yield f"{name}: {fact}"
        yield ""
        for name, found in self.breaches.items():
            yield f"{'FAILED' if found else 'holds '}  {name}"
            yield from (f"        {sentence}" for sentence in found[:SHOWN_BREACHES])
        if self.has_failed:
            yield f"again:  {self.replay}"

    def _rows(self) -> Iterator[Sequence[str | int | None]]:
        for (victim, kind), row in sorted(self.history.rows().items()):
            yield (
                victim,
                kind,
                row.injected,
                row.observed,
                row.inside,
                *_percentiles(row.detected_seconds, 50, 95),
                *_percentiles(row.recovered_seconds, 50, 95),
                row.restarted,
            )

    def _adoptions(self) -> Iterator[Sequence[str | int | None]]:
        for (victim, kind), row in sorted(self.history.rows().items()):
            if row.adopted_seconds:
                yield (
                    victim,
                    kind,
                    row.injected,
                    len(row.adopted_seconds),
                    *_percentiles(row.adopted_seconds, 50, 95, 99),
                    _shown(max(row.adopted_seconds)),
                    row.restarted,
                )


def machine() -> str:
    """Return a description of the machine."""
    return (
        f"{os.cpu_count()} CPUs, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def facts_of(scene: Scene, striker: Striker, *, seconds: float) -> dict[str, object]:
    """Return further counts of a run of `seconds` seconds."""
    strikes = striker.strikes
    return {
        "faults": f"{len(strikes)} injected, {sum(it.observed for it in strikes)} observed, "
        f"{sum(it.inside for it in strikes)} inside a checkpoint",
        "faults without a process to hit": len(striker.missed),
        "jobs": f"{len(scene.workload.trainings)} trainings, {len(scene.workload.errands)} errands",
        "submissions repeated because the response was lost": scene.workload.retried,
        "answers of the API that were refusals": len(
            [*scene.workload.refusals, *scene.observer.refusals]
        ),
        "reads of the newest checkpoint": f"{scene.reading['reads']}, "
        f"of {scene.reading['checkpoints']} checkpoints",
        "terms of coordinators": len(scene.office.terms),
        "streams of logs resumed": sum(it.resumed for it in scene.followers.values()),
        "frozen ranks that had to be resumed": sum(it.woken for it in strikes),
        "decoys": len(scene.decoys),
        "time": f"{seconds:.0f} s",
    }


def _percentiles(seconds: Sequence[float], *percents: int) -> tuple[str | None, ...]:
    """Return the percentiles as text."""
    if not seconds:
        return (None,) * len(percents)
    # quantiles() needs two values.
    cuts = quantiles([*seconds, *seconds[: 2 - len(seconds)]], n=100, method="inclusive")
    return tuple(_shown(cuts[percent - 1]) for percent in percents)


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s"
