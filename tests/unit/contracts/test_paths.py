from pathlib import Path

import pytest

from muster.contracts.settings.paths import (
    DataDir,
    JobFiles,
    LogName,
    checkpoints_of_job,
    checkpoints_of_rank,
    size_text,
)

ROOT = Path("/state")


def test_paths_of_an_installation() -> None:
    data = DataDir(ROOT)
    files = data.job("job-1")
    assert data.coordinator_address == ROOT / "coordinator.json"
    assert data.synthetic_dataset == ROOT / "datasets" / "synthetic"
    assert files == JobFiles(ROOT / "jobs" / "job-1")
    assert files.agent_log == ROOT / "jobs/job-1/run/agent.log"
    assert files.log(3, 12) == ROOT / "jobs/job-1/logs/rank_00003.012.log"
    assert files.times(3, 12) == ROOT / "jobs/job-1/logs/rank_00003.012.times"
    assert files.exit_record(3, 12) == ROOT / "jobs/job-1/run/exits/rank_00003.012.exit"
    assert checkpoints_of_job(ROOT, "job") == ROOT / "job"
    assert checkpoints_of_rank(ROOT, "job", 3) == ROOT / "job" / "worker_3"


@pytest.mark.parametrize(("rank", "attempt"), [(0, 0), (3, 12), (4095, 999), (0, 1_000_050)])
def test_log_name_round_trips(rank: int, attempt: int) -> None:
    log = JobFiles(ROOT).log(rank, attempt)
    assert LogName.parse(log.name) == LogName(rank, attempt)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "agent.log",
        "rank_00000.000.times",
        "rank_0.0.log",
        "rank_00000.log",
        "rank_00000.00.log",
        "rank_-0001.000.log",
        "rank_00000.000.log.gz",
        "xrank_00000.000.log",
        "rank_00000.000.log\n",
        "rank_00000x000.log",
    ],
)
def test_other_names_are_no_logs(name: str) -> None:
    assert LogName.parse(name) is None


def test_logs_sort_by_rank_then_attempt() -> None:
    names = [LogName(1, 0), LogName(0, 1000), LogName(0, 999), LogName(0, 2)]
    assert sorted(names) == [LogName(0, 2), LogName(0, 999), LogName(0, 1000), LogName(1, 0)]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (512 << 20, "512 MiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes_have_binary_units(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
