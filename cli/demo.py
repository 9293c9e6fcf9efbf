"""``muster demo``: kill a rank in the middle of a real training, and compare the bits.

Everything is real: the services of `muster up` on a database and a port of their own, the
handwritten digits, processes, SIGKILL. What it leaves in ``<data_dir>/demo`` can be looked at, and
is cleared by the next demo.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.board import Board
from cli.digest import digests, newest_checkpoint
from cli.server import Server, ServerUnreachable
from muster.contracts.environ import ServiceSettings
from muster.contracts.errors import MusterError
from muster.contracts.layout import checkpoints_of_job
from muster.datasets.contents import HELD_OUT_NAME
from muster.datasets.samples import LabelledSample
from muster.ports import free_port
from muster.processes import marked

RANKS: Final = 4
VICTIM: Final = 2
EPOCHS: Final = 25
SHARDS: Final = 8
KILL_AT: Final = 0.4
"""Share of its steps after which the victim is killed."""

ACCURACY_WANTED: Final = 0.90
LOOK_SECONDS: Final = 0.1
START_SECONDS: Final = 30.0
JOB_SECONDS: Final = 120.0


class DemoFailed(MusterError):
    """The demonstration did not show what it is there to show."""


def show(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Play all acts; return 0, or raise a `MusterError` that says which act failed."""
    print("A rank is killed in the middle of its training, and nobody can tell from the result.\n")
    stage = settings.data_dir / "demo"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    _act_of_data(stage)
    with _services(stage, environ) as server:
        calm = _calm_run(server, stage)
        killed = _killed_run(server, stage)
    _act_of_comparison(stage)
    _nothing_is_left([calm, killed])
    print("\nNext: `make up`, then submit a script of your own; the README shows how.")
    return 0


def _act_of_data(stage: Path) -> None:
    from muster.datasets.digits import digits  # noqa: PLC0415  brings in scikit-learn
    from muster.datasets.writer import write_dataset  # noqa: PLC0415

    contents = digits(shards=SHARDS, seed=0)
    write_dataset(stage / "digits", contents)
    facts = contents.facts
    print(
        f"1. Data: {facts.samples} handwritten digits in {SHARDS} shards, "
        f"{facts.held_out} held out for the test"
    )


@contextmanager
def _services(stage: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    """Run `muster up` on a port and a database of its own."""
    url = f"http://127.0.0.1:{free_port()}"
    print(f"2. Services: API and coordinator on SQLite at {url}")
    with (stage / "services.log").open("wb") as log:
        services = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", "up"],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **environ,
                "MUSTER_DATA_DIR": str(stage),
                "MUSTER_DATABASE_URL": f"sqlite:///{stage}/muster.db",
                "MUSTER_HOST": "127.0.0.1",
                "MUSTER_PORT": url.rpartition(":")[2],
                "MUSTER_SLOTS": str(RANKS),
            },
        )
    try:
        with Server(url) as server:
            _wait_for_health(server, services, stage)
            yield server
    finally:
        services.send_signal(signal.SIGINT)
        services.wait()


def _wait_for_health(server: Server, services: subprocess.Popen[bytes], stage: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and services.poll() is None:
        try:
            if server.get("/health")["status"] == "ok":
                return
        except ServerUnreachable:
            pass
        time.sleep(LOOK_SECONDS)
    raise DemoFailed(f"the services did not come up: see {stage / 'services.log'}")


def _calm_run(server: Server, stage: Path) -> str:
    print(f'3. Job "undisturbed": {RANKS} ranks, each with a classifier and shards of its own')
    uid = _submit(server, stage, "undisturbed")
    board = Board()
    for summary in _summaries(server, "undisturbed"):
        board.draw(summary)
    _conclude(server, "undisturbed", board)
    return uid


def _killed_run(server: Server, stage: Path) -> str:
    print(f'4. Job "killed": the same, but rank {VICTIM} is killed in the middle')
    uid = _submit(server, stage, "killed")
    board = Board()
    before: dict[int, int] = {}
    told = 0
    for summary in _summaries(server, "killed"):
        board.draw(summary)
        if not before and _is_time(summary):
            before = _pids(summary)
            os.kill(before[VICTIM], signal.SIGKILL)
            step = summary["workers"][VICTIM]["step"]
            board.say(f"kill -9 {before[VICTIM]}  (rank {VICTIM}, just after step {step})")
        if before:
            told = _tell_recovery(server, board, told)
            _same_processes(before, _pids(summary))
    _conclude(server, "killed", board)
    if not before:
        raise DemoFailed("the job was over before its rank could be killed")
    print(f"   {_resumption(server)}")
    others = ", ".join(str(rank) for rank in range(RANKS) if rank != VICTIM)
    print(f"   ranks {others} kept their processes")
    return uid


def _submit(server: Server, stage: Path, job_id: str) -> str:
    job = server.post(
        "/jobs",
        {
            "job_id": job_id,
            "world_size": RANKS,
            "epochs": EPOCHS,
            "sleep_sec": 0.01,
            "dataset_dir": str(stage / "digits"),
            "checkpoint_dir": str(stage / "checkpoints"),
        },
    )
    return str(job["job_uid"])


def _summaries(server: Server, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield summaries until the job is over."""
    deadline = time.monotonic() + JOB_SECONDS
    while time.monotonic() < deadline:
        summary = server.get(f"/jobs/{job_id}/summary")
        if summary["status"] in {"COMPLETED", "FAILED", "STOPPED"}:
            return
        yield summary
        time.sleep(LOOK_SECONDS)
    raise DemoFailed(f"the job {job_id} was not over after {JOB_SECONDS:g} s")


def _conclude(server: Server, job_id: str, board: Board) -> None:
    summary = server.get(f"/jobs/{job_id}/summary")
    board.close(summary)
    if summary["status"] != "COMPLETED":
        raise DemoFailed(f"the job {job_id} is {summary['status']}: {summary['message']}")
    restarts = summary["restarts"]
    print(
        f"   completed: {summary['step']} steps, {summary['checkpoints_saved']} durable "
        f"checkpoints, {restarts} restart{'' if restarts == 1 else 's'}"
    )


def _is_time(summary: Mapping[str, Any]) -> bool:
    return any(
        worker["rank"] == VICTIM
        and worker["pid"] is not None
        and worker["step"] >= KILL_AT * (worker["total_steps"] or float("inf"))
        for worker in summary["workers"]
    )


def _pids(summary: Mapping[str, Any]) -> dict[int, int]:
    return {worker["rank"]: worker["pid"] for worker in summary["workers"] if worker["pid"]}


def _same_processes(before: Mapping[int, int], now: Mapping[int, int]) -> None:
    for rank, pid in now.items():
        if rank != VICTIM and pid != before.get(rank):
            raise DemoFailed(f"rank {rank} lost its process, though nobody had touched it")


def _tell_recovery(server: Server, board: Board, told: int) -> int:
    """Print what the job's events say of the victim since it was killed."""
    events = server.get("/jobs/killed/events")["events"]
    exits = [i for i, event in enumerate(events) if event["kind"] == "rank_exited"]
    news = events[exits[0] :] if exits else []
    for event in news[told:]:
        if event["rank"] in {VICTIM, None} and "exited with code 0" not in event["message"]:
            board.say(f"{event['at'][11:23]}  {event['message']}")
    return len(news)


def _resumption(server: Server) -> str:
    """Return the victim's own words about where its new process went on."""
    logs = server.get(f"/jobs/killed/logs?rank={VICTIM}&tail=1000")
    words = "goes on from its checkpoint of step"
    line = next((entry["line"] for entry in logs["lines"] if words in entry["line"]), None)
    if line is None:
        raise DemoFailed(f"rank {VICTIM} began afresh and not from its checkpoint")
    return f"rank {VICTIM} {line[line.index(words) :]}"


def _act_of_comparison(stage: Path) -> None:
    print("5. Compared: the newest checkpoint of every rank, weights and position to the last bit")
    from muster.classifier import accuracy  # noqa: PLC0415  brings in numpy

    lines = (stage / "digits" / HELD_OUT_NAME).read_bytes().splitlines()
    held_out = [msgspec.json.decode(line, type=LabelledSample) for line in lines]
    checkpoints = stage / "checkpoints"
    calm = list(digests(checkpoints_of_job(checkpoints, "undisturbed")))
    killed = list(digests(checkpoints_of_job(checkpoints, "killed")))
    print("   rank  accuracy  sha256, undisturbed  sha256, killed")
    for (rank, _, of_calm), (_, _, of_killed) in zip(calm, killed, strict=True):
        directory = checkpoints_of_job(checkpoints, "killed") / f"worker_{rank}"
        reached = accuracy(newest_checkpoint(directory, rank).state, held_out)
        verdict = "equal" if of_calm == of_killed else "DIFFERENT"
        print(f"   {rank:>4}  {reached:>8.3f}  {of_calm[:16]}     {of_killed[:16]}  {verdict}")
        if reached < ACCURACY_WANTED:
            raise DemoFailed(f"rank {rank} names only {reached:.1%} of the held-out digits")
    if calm != killed:
        raise DemoFailed("the killed job has another result than the undisturbed one")
    print(f"\nThe killed job has the same bits as the undisturbed one, on all {RANKS} ranks.")


def _nothing_is_left(uids: list[str]) -> None:
    left = [record.pid for uid in uids for record in marked(f"{uid}/")]
    if left:
        raise DemoFailed(f"processes are left running: {left}")
