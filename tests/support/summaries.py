"""Summaries of jobs for tests: as the API says them, and as the client holds them."""

from typing import Any

import msgspec

from muster.contracts.views.job import JobView, SummaryView, WorkerView

HEADING: dict[str, Any] = {
    "job_id": "a",
    "name": None,
    "status": "RUNNING",
    "reason": None,
    "message": None,
    "world_size": 2,
    "created_at": "2026-03-01T12:00:00Z",
    "started_at": None,
    "finished_at": None,
}
JOB: dict[str, Any] = {
    **HEADING,
    "job_uid": "u",
    "exit_code": None,
    "is_terminal": False,
    "stop_requested": False,
    "pause_requested": False,
    "checkpoint_requested": False,
    "spec": {"mode": "synchronous"},
}
COUNTERS: dict[str, Any] = {
    "step": 5,
    "total_steps": 20,
    "throughput_steps_per_sec": 2.5,
    "loss": 0.25,
    "checkpoints_saved": 0,
    "last_checkpoint_step": None,
    "restarts": 1,
    "endings": {},
}
SUMMARY: dict[str, Any] = {**HEADING, **COUNTERS, "eta_seconds": 75.2, "workers": []}
RANK: dict[str, Any] = {
    **COUNTERS,
    "worker_id": "0",
    "rank": 0,
    "state": "live",
    "attempt": 0,
    "process": "live",
    "pid": 7,
    "node": None,
    "epoch": 0,
    "shard_idx": 0,
    "line_idx": 0,
    "metrics": {},
    "metric_steps": {},
    "last_heartbeat_age_seconds": None,
    "exit_code": None,
    "exit_signal": None,
}


def job(**changes: object) -> JobView:
    return msgspec.convert({**JOB, **changes}, JobView)


def summary(**changes: object) -> SummaryView:
    return msgspec.convert({**SUMMARY, **changes}, SummaryView)


def rank(**changes: object) -> WorkerView:
    return msgspec.convert({**RANK, **changes}, WorkerView)
