"""Scripts with `muster.torch` that write their model after the loop, while it is made to fail.

``python -m stress.after_loop [TRIALS] [SEED]`` trains as many models. At a random moment of the
time in which a script writes its model the process that writes is killed or raises an error, up to
three times; it may get SIGTERM, and another rank, the agent or the coordinator may be killed as
well. Each job has to complete, with the whole model of an undisturbed run, written by one rank.
"""

import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from muster.host.containment import tagged_processes
from muster.host.processes import send_signal
from stress.runner import Report, chance, main, say
from tests.support.installation import Installation, is_over, pids

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import muster.torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(256, 64))
run = muster.torch.join(model, optimizer, data=data, batch_size=32)
for (x,) in run.shards():
    run.backward(model(x).square().mean())
model_file, writers, fails = map(Path, sys.argv[1:])
pieces = [bytes(row.numpy()) for row in model.weight.data]
if not run.is_main:
    pieces = []
    time.sleep(0.5)
else:
    with writers.open("a") as file:
        file.write(f"{run.rank} {os.getpid()}\\n")
with model_file.open("wb") if pieces else open(os.devnull) as file:
    for number, piece in enumerate(pieces):
        if fails.exists():
            fails.unlink()
            raise OSError(f"process {os.getpid()} could not write piece {number}")
        file.write(piece)
        file.flush()
        time.sleep(0.03)
"""

WRITING_SECONDS = 64 * 0.03
DEADLINE_SECONDS = 180.0
MOST_FAULTS = 3
OF_THE_WRITER = ("kill", "raise")
FAULTS = (*OF_THE_WRITER, "preempt", "kill another", "kill agent", "kill coordinator")


class Export:
    """One job, and what happens to it while its model is written."""

    def __init__(self, installation: Installation, place: Path, **fields: object) -> None:
        place.mkdir()
        script = place / "train.py"
        script.write_text(SCRIPT)
        self._model, self._by, self._fails = (place / name for name in ("model", "by", "fails"))
        words = [sys.executable, script, self._model, self._by, self._fails]
        self._installation = installation
        installation.deadline_seconds = DEADLINE_SECONDS
        self._job_id = installation.submit(
            mode="synchronous", virtual_shards=8, command=[*map(str, words)], **fields
        )
        self._ended = 0  # processes that were killed, or made to fail, while they wrote
        self.done: Counter[str] = Counter()

    def end(self) -> str:
        """Wait until it completes; return the digest of the model."""
        self._installation.complete(self._job_id)
        ranks = {rank for rank, _ in self._writers()}
        assert len(ranks) == 1, f"ranks {sorted(ranks)} have written the model"
        return sha256(self._model.read_bytes()).hexdigest()

    def disturb(self, fault: str, draw: random.Random) -> None:
        """Let something happen at a random moment of the time in which the model is written."""
        is_due = self._installation.wait_until(
            self._job_id, lambda seen: len(self._writers()) > self._ended or is_over(seen)
        )
        time.sleep(draw.uniform(0, WRITING_SECONDS))
        if is_over(is_due) or is_over(seen := self._installation.see(self._job_id)):
            self.done["too late"] += 1
            return
        _, writer = self._writers()[-1]
        match fault:
            case "kill":
                _kill(writer)
            case "preempt":  # it goes on
                _kill(writer, number=signal.SIGTERM)
            case "raise":
                self._fails.touch()
            case "kill another":
                others = [pid for pid in pids(seen) if pid not in {None, writer}]
                _kill(*others)
            case "kill agent":
                for agent in tagged_processes(f"{self._installation.uids[self._job_id]}/agent"):
                    send_signal(agent, signal.SIGKILL)
            case "kill coordinator":
                self._installation.restart_coordinator()
        self._ended += fault in OF_THE_WRITER
        self.done[fault] += 1

    def _writers(self) -> list[tuple[int, int]]:
        """Return rank and pid of the processes that have begun to write the model."""
        text = self._by.read_text() if self._by.exists() else ""
        return [(int(rank), int(pid)) for rank, pid in map(str.split, text.splitlines())]


def _kill(*processes: int, number: signal.Signals = signal.SIGKILL) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


def run(directory: Path, trials: int = 20, seed: int = 0) -> Report:
    """Compare the models of disturbed jobs with that of one rank that nothing disturbs."""
    report, whole = Report(), 0
    with Installation(directory) as installation:
        right = Export(installation, directory / "alone", world_size=1, spare_ranks=0).end()
        for number in range(seed, seed + trials):
            draw, began_at = chance((__doc__, number)), time.monotonic()
            fields = {"world_size": draw.randint(1, 3), "spare_ranks": draw.randint(0, 1)}
            export = Export(installation, directory / f"trial-{number}", **fields)
            faults = [draw.choice(OF_THE_WRITER)]
            faults += draw.choices(FAULTS, k=draw.randrange(MOST_FAULTS))
            try:
                for fault in faults:
                    export.disturb(fault, draw)
                assert export.end() == right, "the model is not whole, or another one"
                whole += 1
            except AssertionError as error:
                report.faults.append(f"seed {number} after {dict(export.done)}: {error}")
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(export.done.items()))
            say(f"seed {number}  {time.monotonic() - began_at:5.1f} s  {fields}  {counts}")
    report.lines.append(f"{whole} of {trials} models are there and whole")
    return report


if __name__ == "__main__":
    main(run)
