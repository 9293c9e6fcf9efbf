"""The report of a chaotic run, for a person and for `docs/reliability.md`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from chaos_figures import History
from chaos_scene import Scene
from chaos_strikes import Striker

from cli.tables import table

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
SHOWN_BREACHES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What to say about a run."""

    history: History
    breaches: Mapping[str, Sequence[str]]
    facts: Mapping[str, object]
    """What else was counted."""
    replay: str
    """The command that does all of it again."""

    @property
    def has_failed(self) -> bool:
        return any(self.breaches.values())

    def lines(self) -> Iterator[str]:
        yield from table(HEADER, self._rows())
        yield ""
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
                *_percentiles(row.detected_seconds),
                *_percentiles(row.recovered_seconds),
                row.restarted,
            )


def facts_of(scene: Scene, striker: Striker, *, seconds: float) -> dict[str, object]:
    """Return what else is worth knowing of a run of so many seconds."""
    strikes = striker.strikes
    return {
        "faults": f"{len(strikes)} injected, {sum(it.observed for it in strikes)} observed, "
        f"{sum(it.inside for it in strikes)} inside a checkpoint",
        "faults that met nobody": len(striker.missed),
        "jobs": f"{len(scene.workload.trainings)} trainings, {len(scene.workload.errands)} errands",
        "submissions sent again as no answer came": scene.workload.retried,
        "answers of the API that were refusals": len(
            [*scene.workload.refusals, *scene.observer.refusals]
        ),
        "reads of the newest checkpoint": scene.reading["reads"],
        "streams of logs resumed": sum(it.resumed for it in scene.followers.values()),
        "frozen ranks that had to be woken": sum(it.woken for it in strikes),
        "decoys": len(scene.decoys),
        "time": f"{seconds:.0f} s",
    }


def _percentiles(seconds: Sequence[float]) -> tuple[str | None, str | None]:
    """Return the median and the 95th percentile, in words."""
    if not seconds:
        return None, None
    if len(seconds) == 1:
        return _shown(seconds[0]), _shown(seconds[0])
    cuts = quantiles(seconds, n=20, method="inclusive")
    return _shown(cuts[9]), _shown(cuts[18])


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s"
