"""The runner of the harnesses: a run that fails says so, and how to run it again."""

import runpy
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from stress.runner import Report, command, main, parse


def run(_directory: Path, trials: int = 500, seed: int = 0, *, minutes: float = 20.0) -> Report:
    return Report([f"{trials} trials in {minutes:g} minutes"], ["one is left"] if seed else [])


@pytest.mark.parametrize(
    "asked", [{"trials": 500, "seed": 0, "minutes": 20.0}, {"trials": 3, "seed": 9, "minutes": 2.5}]
)
def test_the_command_of_a_run_repeats_it(asked: Mapping[str, object]) -> None:
    python, flag, _module, *words = shlex.split(command(run, asked))
    assert (python, flag) == ("python", "-m")
    assert parse(run, words) == asked


@pytest.mark.parametrize(("seed", "code"), [(0, 0), (9, 1)])
def test_a_run_with_a_fault_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int, code: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "3", str(seed)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(run)
    assert ended.value.code == code
    printed = capsys.readouterr().out
    assert "3 trials in 20 minutes" in printed
    assert ("FAILED  one is left" in printed, "again: " in printed) == (seed > 0, seed > 0)


def test_a_benchmark_that_measured_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = Path(__file__).parents[3] / "bench"
    monkeypatch.syspath_prepend(benchmarks)
    recovery = runpy.run_path(str(benchmarks / "recovery.py"))
    with pytest.raises(SystemExit, match=r"^nothing was measured, .* machine: no step"):
        recovery["kill_ranks"](None, 0)
