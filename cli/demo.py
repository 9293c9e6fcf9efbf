"""``muster demo``: one model, trained while ranks come, die and go; then the bits are compared.

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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.board import Board
from cli.connected import PERSON_SECONDS
from cli.serving import serves
from muster.checkpoints.identity import identity_of
from muster.checkpoints.reader import Checkpoint
from muster.checkpoints.shelves import shelves
from muster.client import Client
from muster.contracts.environ import ServiceSettings
from muster.contracts.errors import MusterError
from muster.contracts.layout import checkpoints_of_job
from muster.datasets.contents import HELD_OUT_NAME
from muster.datasets.samples import LabelledSample
from muster.ports import free_port
from muster.processes import marked
from muster.remarks import remark

RANKS: Final = 4
"""What the elastic job grows to; it begins with two and ends with one less."""

VICTIM: Final = 1
EPOCHS: Final = 12
SHARDS: Final = 8
PAUSE_SECONDS: Final = 0.02
"""After each step of the elastic job, so that a person sees what happens to it."""

ACCURACY_WANTED: Final = 0.95
LOOK_SECONDS: Final = 0.1
START_SECONDS: Final = 30.0
JOB_SECONDS: Final = 120.0


class DemoFailed(MusterError):
    """The demonstration did not show what it is there to show."""


def show(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Play all acts; return 0, or raise a `MusterError` that says which act failed."""
    print("Ranks come, die and go while one model is trained, and the result does not know.\n")
    stage = settings.data_dir / "demo"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    _act_of_data(stage)
    with _services(stage, environ) as client:
        uids = [_lonely_run(client, stage), _elastic_run(client, stage)]
        _act_of_comparison(client, stage)
    _nothing_is_left(uids)
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
def _services(stage: Path, environ: Mapping[str, str]) -> Iterator[Client]:
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
        _await_service(url, services, stage)
        with Client(url, retry_seconds=PERSON_SECONDS) as client:
            yield client
    except KeyboardInterrupt:
        remark("\nmuster: interrupted; ranks save, and the services of the demo end …")
        raise
    finally:
        services.send_signal(signal.SIGINT)
        services.wait()


def _await_service(url: str, services: subprocess.Popen[bytes], stage: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and services.poll() is None:
        if serves(url):
            return
        time.sleep(LOOK_SECONDS)
    raise DemoFailed(f"the services did not come up: see {stage / 'services.log'}")


def _lonely_run(client: Client, stage: Path) -> str:
    print('3. Job "alone": one rank trains the whole model by itself')
    uid = _submit(client, stage, "alone", world_size=1)
    board = Board()
    for summary in _summaries(client, "alone"):
        board.draw(summary)
    _conclude(client, "alone", board)
    return uid


def _elastic_run(client: Client, stage: Path) -> str:
    print('4. Job "elastic": the same model and data; ranks come, die and go while it trains')
    uid = _submit(
        client, stage, "elastic", world_size=2, max_workers=RANKS, sleep_sec=PAUSE_SECONDS
    )
    board, script = Board(), deque(_script(client))
    told = 0
    for summary in _summaries(client, "elastic"):
        board.draw(summary)
        told = _tell_events(client, board, told)
        if script and _has_reached(summary, script[0]):
            board.say(script.popleft().act(summary))
    _tell_events(client, board, told)
    _conclude(client, "elastic", board)
    if script:
        raise DemoFailed("the job was over before its script was")
    return uid


@dataclass(frozen=True, slots=True)
class _Turn:
    """Something done to the job, once so many ranks have come so far."""

    at: float
    """Share of the steps."""
    ranks: int
    act: Callable[[Mapping[str, Any]], str]
    """Does it to the job of a summary, and says what it did."""


def _script(client: Client) -> Iterator[_Turn]:
    survivors: dict[int, int] = {}

    def scale(world_size: int) -> str:
        client.job("elastic").scale(world_size)
        return f"PATCH /jobs/elastic  world_size {world_size}"

    def kill(summary: Mapping[str, Any]) -> str:
        survivors.update(_pids(summary))
        pid = survivors.pop(VICTIM)
        os.kill(pid, signal.SIGKILL)
        return f"kill -9 {pid}  (rank {VICTIM})"

    def shrink(summary: Mapping[str, Any]) -> str:
        for rank, pid in _pids(summary).items():
            if survivors.get(rank, pid) != pid:
                raise DemoFailed(f"rank {rank} lost its process, though nobody had touched it")
        return scale(RANKS - 1)

    yield _Turn(0.2, 2, lambda _summary: scale(RANKS))
    yield _Turn(0.45, RANKS, kill)
    yield _Turn(0.7, RANKS, shrink)


def _has_reached(summary: Mapping[str, Any], turn: _Turn) -> bool:
    """Whether the ranks that the turn needs are all training, and far enough."""
    training = [w for w in summary["workers"] if w["pid"] and w["step"]]
    total = summary["total_steps"] or 0
    return len(training) >= turn.ranks and summary["step"] >= turn.at * total > 0


def _submit(client: Client, stage: Path, job_id: str, **fields: object) -> str:
    job = client.submit(
        job_id=job_id,
        epochs=EPOCHS,
        dataset_dir=str(stage / "digits"),
        checkpoint_dir=str(stage / "checkpoints"),
        **fields,
    )
    return job.view.job_uid


def _summaries(client: Client, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield summaries until the job is over."""
    deadline = time.monotonic() + JOB_SECONDS
    while time.monotonic() < deadline:
        summary = client.connection.get(f"/jobs/{job_id}/summary")
        if summary["status"] in {"COMPLETED", "FAILED", "STOPPED"}:
            return
        yield summary
        time.sleep(LOOK_SECONDS)
    raise DemoFailed(f"the job {job_id} was not over after {JOB_SECONDS:g} s")


def _conclude(client: Client, job_id: str, board: Board) -> None:
    summary = client.connection.get(f"/jobs/{job_id}/summary")
    board.close(summary)
    if summary["status"] != "COMPLETED":
        raise DemoFailed(f"the job {job_id} is {summary['status']}: {summary['message']}")
    restarts = summary["restarts"]
    print(
        f"   completed: {summary['step']} steps, {summary['checkpoints_saved']} durable "
        f"checkpoints, {restarts} restart{'' if restarts == 1 else 's'}"
    )


def _pids(summary: Mapping[str, Any]) -> dict[int, int]:
    return {worker["rank"]: worker["pid"] for worker in summary["workers"] if worker["pid"]}


def _tell_events(client: Client, board: Board, told: int) -> int:
    """Print what has happened to the elastic job since the last look; return how much there is."""
    events = client.connection.get("/jobs/elastic/events")["events"]
    for event in events[told:]:
        board.say(f"{event['at'][11:23]}  {event['message']}")
    return len(events)


def _act_of_comparison(client: Client, stage: Path) -> None:
    print("5. Compared: the last checkpoint of each, weights and position to the last bit")
    directories = [checkpoints_of_job(stage / "checkpoints", job) for job in ("alone", "elastic")]
    alone, elastic = (shelves(directory)[0].newest() for directory in directories)
    digests = [identity_of(checkpoint) for checkpoint in (alone, elastic)]
    reached = _accuracy(stage, elastic)
    audit = client.connection.get("/jobs/elastic/audit")
    once = sum(epoch["exactly_once"] is True for epoch in audit["epochs"])
    print(f"   sha256, alone     {digests[0]}")
    print(f"   sha256, elastic   {digests[1]}")
    print(f"   accuracy          {reached:.3f} on the held-out digits")
    print(f"   audit             every sample exactly once in {once} of {EPOCHS} epochs")
    if digests[0] != digests[1]:
        raise DemoFailed("the elastic job has another result than the lonely one")
    if reached < ACCURACY_WANTED:
        raise DemoFailed(f"the model names only {reached:.1%} of the held-out digits")
    if not audit["exactly_once"]:
        raise DemoFailed("the audit does not prove that every sample was counted exactly once")
    print("\nOne rank alone, and ranks that came, died and went: the same bits.")


def _accuracy(stage: Path, checkpoint: Checkpoint) -> float:
    from muster.classifier import accuracy  # noqa: PLC0415  brings in numpy

    lines = (stage / "digits" / HELD_OUT_NAME).read_bytes().splitlines()
    held_out = [msgspec.json.decode(line, type=LabelledSample) for line in lines]
    return accuracy(checkpoint.state, held_out)


def _nothing_is_left(uids: list[str]) -> None:
    left = [record.pid for uid in uids for record in marked(f"{uid}/")]
    if left:
        raise DemoFailed(f"processes are left running: {left}")
