import signal
import subprocess
import sys
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointMismatch, RestoreDamaged
from muster.checkpoints.manifest import ARITHMETIC
from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import (
    Heartbeat,
    Hello,
    PermanentFailure,
    RankMessage,
    RestoreFailed,
    Warned,
)
from muster.contracts.rank import Phase, RankProgress
from tests.support.ranks import Ear, run_of, write_shards

PATIENCE_SECONDS = 30
NAN = float("nan")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", [0, 1, 2, 3], [4, 5, 6], [7])
    return tmp_path


def script(place: Path, text: str, ear: Ear | None = None) -> subprocess.Popen[str]:
    """Start a training script."""
    environ = {"DATASET_DIR": f"{place}/data", "CHECKPOINT_DIR": f"{place}/checkpoints"}
    if ear is not None:
        environ["MUSTER_AGENT_FD"] = str(ear.descriptor)
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env=environ,
        pass_fds=[] if ear is None else [ear.descriptor],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Without an agent


def test_a_run_works_without_services(place: Path) -> None:
    run = run_of(place)
    assert (run.rank, run.world_size, run.restart_count, run.steps_done) == (0, 1, 0, 0)
    assert run.restore() is None
    assert list(run.samples()) == list(range(8))
    assert not run.should_stop


def test_each_rank_reads_its_own_shards(place: Path) -> None:
    read = [list(run_of(place, RANK=rank, WORLD_SIZE=2).samples()) for rank in (0, 1)]
    assert read == [[0, 1, 2, 3, 7], [4, 5, 6]]


def test_the_jobs_batch_size_is_the_default(place: Path) -> None:
    run = run_of(place, MUSTER_BATCH_SIZE=5)
    assert list(run.batches()) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert list(islice(run.batches(size=3), 1)) == [[0, 1, 2]]


def test_the_epoch_is_that_of_the_present_batch(place: Path) -> None:
    run, epochs = run_of(place, MUSTER_EPOCHS=2), []
    for _ in run.batches(size=5):
        before = run.epoch
        run.step()
        epochs.append((before, run.epoch))
    assert epochs == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert run.epoch == 1


def test_a_checkpoint_is_due_every_n_steps(place: Path) -> None:
    run = run_of(place, CHECKPOINT_EVERY=3)
    due = []
    for _ in range(7):
        run.step()
        due.append(run.should_checkpoint)
    assert due == [False, False, True, False, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", range(1, 16))
def test_a_resumed_run_reads_the_samples_of_an_undisturbed_one(
    place: Path, killed_after: int
) -> None:
    def train(steps: int | None) -> tuple[list[int], int]:
        run = run_of(place, MUSTER_EPOCHS=2, CHECKPOINT_EVERY=4)
        state = run.restore() or {"seen": np.zeros(0, np.int64)}
        for sample in islice(run.samples(), steps):
            state["seen"] = np.append(state["seen"], sample)
            run.step()
            if run.should_checkpoint:
                run.checkpoint(state)
        return state["seen"].tolist(), run.steps_done

    train(killed_after)
    assert train(None) == (list(range(8)) * 2, 16)


class Part:
    """What a model is to a run."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = np.array(numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]


def test_objects_are_saved_and_loaded_under_their_names(place: Path) -> None:
    run = run_of(place)
    run.step()
    run.checkpoint({"seen": 3}, model=Part(1, 2), best=0.5)
    resumed, model = run_of(place), Part(0, 0)
    state = resumed.restore(into={"model": model})
    assert state is not None
    assert (state["seen"], state["best"], model.numbers.tolist()) == (3, 0.5, [1, 2])
    assert resumed.steps_done == 1


def test_an_object_that_the_checkpoint_lacks_is_refused_by_name(place: Path) -> None:
    run = run_of(place)
    assert run.restore(into={"model": Part()}) is None
    run.step()
    run.checkpoint(model=Part(1))
    resumed, model = run_of(place), Part(0)
    with pytest.raises(CheckpointMismatch, match="does not fit 'ema': it has only model"):
        resumed.restore(into={"model": model, "ema": Part(0)})
    assert (resumed.steps_done, model.numbers.tolist()) == (0, [0])


def test_another_jobs_checkpoint_needs_resume_from(place: Path) -> None:
    first = run_of(place, JOB_ID="first")
    first.step()
    first.checkpoint({"weights": np.ones(1)})
    assert run_of(place, JOB_ID="second").restore() is None
    second = run_of(place, JOB_ID="second", MUSTER_RESUME_FROM="first")
    assert second.restore() is not None
    assert second.steps_done == 1
    second.step()
    second.checkpoint({"weights": np.zeros(1)})
    again = run_of(place, JOB_ID="second", MUSTER_RESUME_FROM="first")
    again.restore()
    assert again.steps_done == 2, "its own checkpoint comes first"
    assert run_of(place, JOB_ID="first").restore() == {"weights": np.ones(1)}


def test_a_checkpoint_of_another_world_size_is_refused(place: Path) -> None:
    first = run_of(place)
    first.step()
    first.checkpoint({})
    with pytest.raises(CheckpointMismatch):
        run_of(place, WORLD_SIZE=2).restore()


# With an agent


@pytest.mark.parametrize(("bits", "is_told"), [("same", True), ("any", False)])
def test_other_arithmetic_is_told_and_the_run_goes_on(
    place: Path, ear: Ear, bits: str, *, is_told: bool
) -> None:
    made_by = {"digest": "other", "facts": {"numpy": "0.9"}}
    first = run_of(place, MUSTER_BITS="any")  # it adds nothing about itself
    first.step()
    first.checkpoint({"weights": np.ones(1), ARITHMETIC: made_by})
    later = run_of(place, ear.voice, MUSTER_BITS=bits)
    assert later.restore() == {"weights": np.ones(1)}
    told = [message.message for message in ear.received() if isinstance(message, Warned)]
    assert bool(told) is is_told
    assert all(f"numpy is {np.__version__} here and 0.9 there" in each for each in told)
    later.checkpoint({"weights": np.ones(1)})
    run_of(place, ear.voice).restore()
    assert not any(isinstance(message, Warned) for message in ear.received()), "saved with its own"


def last_beat(ear: Ear) -> Heartbeat:
    beats = [message for message in ear.received() if isinstance(message, Heartbeat)]
    return beats[-1]


def test_steps_that_a_program_counts_itself_are_reported(place: Path, ear: Ear) -> None:
    run = run_of(place, ear.voice)
    run.steps_done = 40
    run.step(loss=0.5)
    run.report(loss=0.25, accuracy=0.75)
    run._supervision.report_exit()  # noqa: SLF001  sends the final state
    progress = last_beat(ear).progress
    assert (progress.step, progress.loss, progress.metrics) == (41, 0.25, {"accuracy": 0.75})


def test_a_heartbeat_reports_progress(place: Path, ear: Ear) -> None:
    run = run_of(place, ear.voice)
    run.total_steps = 16
    for _ in islice(run.samples(), 5):
        run.step(loss=np.float32(0.5), accuracy=0.75)
    began = datetime.now(UTC)
    run.checkpoint({"weights": np.ones(100)})
    run._supervision.report_exit()  # noqa: SLF001  sends the final state
    beat = last_beat(ear)
    saved = beat.progress.last_checkpoint_bytes
    assert (saved, beat.progress.last_checkpoint_at) >= (800, began)
    assert beat == Heartbeat(
        progress=RankProgress(
            step=5,
            total_steps=16,
            epoch=0,
            shard_idx=1,
            line_idx=1,
            loss=0.5,
            metrics={"accuracy": 0.75},
            last_checkpoint_step=5,
            last_checkpoint_bytes=saved,
            last_checkpoint_at=beat.progress.last_checkpoint_at,
        ),
        checkpoints_saved=1,
        stopping=False,
        waiting=False,
        window=beat.window,
        phase=Phase.EXITING,
    )


@pytest.mark.parametrize("loss", [NAN, float("inf"), -float("inf"), np.float32("nan")])
def test_losses_and_metrics_that_are_not_finite_are_dropped(
    place: Path, ear: Ear, loss: float
) -> None:
    run = run_of(place, ear.voice)
    run.step(loss=loss, good=1.0, bad=loss)
    at = last_beat(ear).progress
    assert (at.loss, at.metrics) == (None, {"good": 1.0})


def test_a_step_without_values_keeps_the_last_ones(place: Path, ear: Ear) -> None:
    run = run_of(place, ear.voice)
    run.step(loss=0.25, accuracy=0.5)
    run.step()
    run._supervision.report_exit()  # noqa: SLF001  sends the final state
    at = last_beat(ear).progress
    assert (at.step, at.loss, at.metrics) == (2, 0.25, {"accuracy": 0.5})


def test_a_metric_stays_until_it_is_reported_again(place: Path, ear: Ear) -> None:
    run = run_of(place, ear.voice)
    run.report(val_loss=0.5, accuracy=0.5)
    run.step(loss=0.25, accuracy=0.75)
    run._supervision.report_exit()  # noqa: SLF001  sends the final state
    assert last_beat(ear).progress.metrics == {"val_loss": 0.5, "accuracy": 0.75}


def test_a_restored_run_reports_the_restored_step(place: Path, ear: Ear) -> None:
    first = run_of(place)
    first.step()
    first.checkpoint({})
    second = run_of(place, ear.voice)
    second.restore()
    second._supervision.report_exit()  # noqa: SLF001  sends the final state
    beat = last_beat(ear)
    at = beat.progress
    assert (at.step, beat.checkpoints_saved, at.last_checkpoint_step) == (1, 0, 1)


def test_a_damaged_checkpoint_of_a_gang_is_reported(place: Path, ear: Ear) -> None:
    first = run_of(place, MUSTER_GENERATION=0)
    first.step()
    first.checkpoint({"weights": np.ones(1)})
    (state,) = place.glob("checkpoints/*/worker_0/step_*/state.safetensors")
    state.write_bytes(b"")
    point = state.parent.name
    run = run_of(place, ear.voice, MUSTER_GENERATION=1, MUSTER_RESTORE_FROM=point)
    with pytest.raises(RestoreDamaged) as caught:
        run.restore()
    reports = [said for said in ear.received() if isinstance(said, RestoreFailed)]
    assert reports == [RestoreFailed(restore_from=point, message=str(caught.value))]


# In its own process


def test_sigterm_sets_should_stop_and_ends_a_rest(place: Path, ear: Ear) -> None:
    process = script(
        place,
        "import muster; run = muster.join(); run.step(); run.rest(600); "
        "run.checkpoint({}); print('stop' if run.should_stop else 'go on')",
        ear,
    )
    assert ear.receive() == Hello(python=sys.executable)
    assert isinstance(ear.receive(), Heartbeat)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stdout, stderr) == (0, "stop\n", "")
    beat = last_beat(ear)
    assert beat.stopping
    assert beat.checkpoints_saved == 1, "the final state is sent after the last save"


def test_an_error_of_muster_is_one_sentence_and_reported(place: Path, ear: Ear) -> None:
    (place / "data" / "shard_00001.txt").write_bytes(b"4\nnonsense\n")
    process = script(
        place,
        "import muster; run = muster.join()\nfor sample in run.samples(): run.step()",
        ear,
    )
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert stderr.count("\n") == 1
    assert stderr.startswith("muster: ")
    assert "shard_00001.txt:2" in stderr
    assert refusals(ear) == [
        PermanentFailure(
            reason=Reason.INVALID_DATASET, message=stderr.removeprefix("muster: ").strip()
        )
    ]


def test_an_error_of_the_program_is_a_traceback_only(place: Path, ear: Ear) -> None:
    process = script(place, "import muster; run = muster.join(); 1 / 0", ear)
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert stderr.startswith("Traceback")
    assert refusals(ear) == []


def refusals(ear: Ear) -> list[RankMessage]:
    return [message for message in ear.received() if isinstance(message, PermanentFailure)]


ASKED_AND_GONE = """
import os, signal
import muster
run = muster.join()
os.kill(os.getpid(), signal.SIGTERM)
while not run.should_stop: pass
os._exit(0)
"""


def test_sigterm_is_reported_before_the_program_can_exit(place: Path, ear: Ear) -> None:
    """An exit code 0 from then on does not mean that the work is complete."""
    with script(place, ASKED_AND_GONE, ear) as process:
        assert process.wait() == 0
    (*_, last) = ear.received()
    assert isinstance(last, Heartbeat)
    assert last.stopping


@pytest.mark.parametrize("steps", [-1, 2**63, 10**30])
def test_a_total_beyond_a_database_integer_is_refused(place: Path, steps: int) -> None:
    run = run_of(place)
    with pytest.raises(ValueError, match="total_steps"):
        run.total_steps = steps
    run.total_steps = np.int64(7)
    assert run.total_steps == 7
