"""``muster series``: tables, CSV, and a run for TensorBoard."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest

from cli.errors import Misuse
from cli.jobs.series import csv_rows, write_events
from muster.contracts.views.history import SeriesColumns, SeriesList, SeriesView


class Events(ModuleType):
    """A tensorboardX that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("tensorboardX")
        self.added: list[tuple[str, float, int]] = []
        self.SummaryWriter = self.writer

    def writer(self, place: str, filename_suffix: str) -> "Events":
        Path(place).mkdir(parents=True, exist_ok=True)
        (Path(place) / f"events.out.tfevents.new{filename_suffix}").touch()
        return self

    def add_scalar(self, tag: str, value: float, step: int, _at: float) -> None:
        self.added.append((tag, value, step))

    def close(self) -> None:
        pass


def columns(*points: tuple[int, float | None, int]) -> SeriesColumns:
    """Return points with a step, a value and a count."""
    steps, values, counts = map(list, zip(*points, strict=True)) if points else ([], [], [])
    return SeriesColumns(
        step=steps, seconds=[float(step) for step in steps], first=values, least=values,
        greatest=values, last=values, count=counts, not_finite=[0] * len(steps),
    )  # fmt: skip


@pytest.fixture
def found() -> SeriesList:
    loss = SeriesView(live=columns((1, 0.5, 1), (3, None, 0)), abandoned=columns((2, 9.0, 1)))
    rate = SeriesView(live=columns((8, 2.5, 8)), abandoned=columns())
    began = datetime(2026, 3, 1, tzinfo=UTC)
    names = {"loss": loss, "rate": rate}
    return SeriesList(job_id="a", began_at=began, names=list(names), series=names)


def test_csv_has_a_row_for_each_point(found: SeriesList) -> None:
    header, *rows = csv_rows(found)
    assert header[:5] == ("name", "is_abandoned", "step", "seconds", "first")
    assert [row[:5] for row in rows] == [
        ("loss", 0, 1, 1.0, 0.5),
        ("loss", 0, 3, 3.0, None),
        ("loss", 1, 2, 2.0, 9.0),
        ("rate", 0, 8, 8.0, 2.5),
    ]


def test_tensorboard_gets_one_run_of_the_live_points(
    found: SeriesList, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", events := Events())
    earlier = tmp_path / "a/events.out.tfevents.old.muster"
    earlier.parent.mkdir()
    earlier.touch()
    assert write_events(found, tmp_path).startswith(f"wrote {tmp_path}/a")
    assert events.added == [
        ("loss", 0.5, 1), ("rate", 2.5, 8), ("rate/least", 2.5, 8), ("rate/greatest", 2.5, 8),
    ]  # fmt: skip
    assert [it.name for it in earlier.parent.iterdir()] == ["events.out.tfevents.new.muster"]


def test_without_tensorboard_the_pip_command_is_named(
    found: SeriesList, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(Misuse, match="-m pip install tensorboardX"):
        write_events(found, tmp_path)
