"""``muster demo``: train one model while ranks come, die and go; compare its bits with a quiet run.

Everything is real: the services of `muster up` with a database and a port of their own, the
handwritten digits, processes, SIGKILL. The files stay in ``<data_dir>/demo`` until the next demo.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec

from cli.output import plural
from cli.services.record import service_settings
from cli.services.signals import interrupt_at_signals
from cli.services.up import temporary_services
from muster.contracts.errors import MusterError
from muster.contracts.job.status import TERMINAL, JobStatus
from muster.contracts.settings.paths import checkpoints_of_job
from muster.contracts.views.job import SummaryView
from muster.datasets.schema import LabelledSample
from muster.datasets.source import HELD_OUT_NAME
from muster.host.containment import tagged_processes
from muster.host.extras import require_server
from muster.host.private import make_private

if TYPE_CHECKING:
    from rich.progress import Progress

    from muster.client import Client, Job

RANKS: Final = 4
"""What the elastic job grows to. It begins with two ranks and ends with three."""

VICTIM: Final = 1
EPOCHS: Final = 12
SHARDS: Final = 8
STEP_PAUSE_SECONDS: Final = 0.02
"""After each step of the elastic job, so that a person can follow."""

ACCURACY_WANTED: Final = 0.95
POLL_SECONDS: Final = 0.1
JOB_SECONDS: Final = 120.0


class Act(NamedTuple):
    """Something that happens to a job once `ranks` train and `share` of the steps are done."""

    share: float
    ranks: int
    run: Callable[[Job, SummaryView], str]
    """Makes it happen, and returns a message about it."""


@click.command()
def demo() -> None:
    """Kill ranks while a model trains; the bits stay the same."""
    require_server("demo")
    print("Ranks come, die and go while one model is trained, and the result stays the same.\n")
    interrupt_at_signals()
    stage = service_settings().data_dir / "demo"
    shutil.rmtree(stage, ignore_errors=True)
    make_private(stage.parent)
    make_private(stage)
    _write_data(stage)
    with temporary_services(stage, RANKS) as client:
        print(f"2. Services: API and coordinator on SQLite at {client.url}")
        print('3. Job "alone": one rank trains the whole model by itself')
        alone = _train(client, stage, "alone", (), world_size=1)
        print('4. Job "elastic": the same model and data; ranks come, die and go meanwhile')
        fields = {"world_size": 2, "max_workers": RANKS, "sleep_sec": STEP_PAUSE_SECONDS}
        elastic = _train(client, stage, "elastic", ELASTIC_ACTS, **fields)
        _compare(client, stage)
    left = [record.pid for uid in (alone, elastic) for record in tagged_processes(f"{uid}/")]
    if left:
        raise MusterError(f"processes are left running: {left}")
    print("\nNext: `make up`, then submit a script of your own; the README shows how.")


def _write_data(stage: Path) -> None:
    from muster.datasets.synthetic import digits  # noqa: PLC0415  slow
    from muster.datasets.writer import write_dataset  # noqa: PLC0415

    contents = digits(shards=SHARDS, seed=0)
    write_dataset(stage / "digits", contents)
    facts = contents.facts
    print(
        f"1. Data: {facts.samples} handwritten digits in {SHARDS} shards, "
        f"{facts.held_out} held out for the test"
    )


def _train(client: Client, stage: Path, job_id: str, acts: Sequence[Act], **fields: object) -> str:
    """Train the model once while `acts` happen; return the uid of the job."""
    job = client.submit(
        job_id=job_id,
        epochs=EPOCHS,
        dataset_dir=str(stage / "digits"),
        checkpoint_dir=str(stage / "checkpoints"),
        **fields,
    )
    print(f"   its page: {client.url}/ui/jobs/{job_id}")
    remaining, printed = list(acts), 0
    deadline = time.monotonic() + JOB_SECONDS
    with _bars() as bars:
        while (summary := job.summary()).status not in TERMINAL:
            _draw(bars, summary)
            events = job.events() if acts else []
            for event in events[printed:]:
                _say(bars, f"{event.at:%H:%M:%S.%f}"[:12] + f"  {event.message}")
            printed = len(events)
            if time.monotonic() > deadline:
                raise MusterError(f"the job {job_id} was not over after {JOB_SECONDS:g} s")
            if remaining and _is_due(summary, remaining[0]):
                _say(bars, remaining.pop(0).run(job, summary))
            time.sleep(POLL_SECONDS)
        _draw(bars, summary)
    if summary.status != JobStatus.COMPLETED:
        raise MusterError(f"the job {job_id} is {summary.status}: {summary.message}")
    if remaining:
        raise MusterError(f"the job {job_id} was over before everything had happened to it")
    print(
        f"   completed: {summary.step} steps, {summary.checkpoints_saved} durable checkpoints, "
        f"{plural(summary.restarts, 'restart')}"
    )
    return job.view.job_uid


def _is_due(summary: SummaryView, act: Act) -> bool:
    training = [worker for worker in summary.workers if worker.pid and worker.step]
    total = summary.total_steps or 0
    return len(training) >= act.ranks and summary.step >= act.share * total > 0


def _grow(job: Job, _: SummaryView) -> str:
    job.scale(RANKS)
    return f"PATCH /jobs/elastic  world_size {RANKS}"


def _kill(job: Job, _: SummaryView) -> str:
    (struck,) = job.inject_fault("kill", rank=VICTIM).processes
    return f"POST /jobs/elastic/faults  kill rank {VICTIM} (pid {struck.pid})"


def _shrink(job: Job, summary: SummaryView) -> str:
    if any(worker.restarts for worker in summary.workers if worker.rank != VICTIM):
        raise MusterError("a rank was restarted that had not been killed")
    job.scale(RANKS - 1)
    return f"PATCH /jobs/elastic  world_size {RANKS - 1}"


ELASTIC_ACTS: Final = (Act(0.2, 2, _grow), Act(0.45, RANKS, _kill), Act(0.7, RANKS, _shrink))


def _compare(client: Client, stage: Path) -> None:
    from muster.checkpoints.comparison import identity_of  # noqa: PLC0415
    from muster.checkpoints.listing import checkpoint_dirs  # noqa: PLC0415
    from muster.training.classifier import accuracy  # noqa: PLC0415

    print("5. Compared: the last checkpoint of each, weights and position to the last bit")
    directories = [checkpoints_of_job(stage / "checkpoints", job) for job in ("alone", "elastic")]
    alone, elastic = (checkpoint_dirs(directory)[0].newest() for directory in directories)
    digests = [identity_of(checkpoint) for checkpoint in (alone, elastic)]
    lines = (stage / "digits" / HELD_OUT_NAME).read_bytes().splitlines()
    held_out = [msgspec.json.decode(line, type=LabelledSample) for line in lines]
    reached = accuracy(elastic.state, held_out)
    audit = client.job("elastic").audit()
    once = sum(epoch.exactly_once is True for epoch in audit.epochs)
    print(f"   sha256, alone     {digests[0]}")
    print(f"   sha256, elastic   {digests[1]}")
    print(f"   accuracy          {reached:.3f} on the held-out digits")
    print(f"   audit             every sample exactly once in {once} of {EPOCHS} epochs")
    if digests[0] != digests[1]:
        raise MusterError("the elastic job has another result than the job of one rank")
    if reached < ACCURACY_WANTED:
        raise MusterError(f"the model names only {reached:.1%} of the held-out digits")
    if not audit.exactly_once:
        raise MusterError("the audit does not prove that every sample was counted exactly once")
    print("\nOne rank alone, and ranks that came, died and went: the same bits.")


def _bars() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415

    note = TextColumn("{task.fields[note]}")
    return Progress(TextColumn("   {task.description}"), BarColumn(24), MofNCompleteColumn(), note)


def _draw(bars: Progress, summary: SummaryView) -> None:
    for task in bars.task_ids:
        bars.update(task, visible=False)
    for worker in summary.workers:
        if worker.rank not in bars.task_ids:  # ranks are added in order, and ids count from 0
            bars.add_task(f"rank {worker.rank}", note="")
        loss = "" if worker.loss is None else f"loss {worker.loss:.4f}"
        saved = worker.last_checkpoint_step
        checkpoint = "" if saved is None else f"checkpoint {saved}"
        bars.update(
            bars.task_ids[worker.rank],
            visible=True,
            completed=worker.step,
            total=worker.total_steps,
            note=f"{loss:<12}  {checkpoint:<16}{worker.process}",
        )


def _say(bars: Progress, message: str) -> None:
    bars.console.print(f"   {message}", markup=False, highlight=False, soft_wrap=True)
