"""Scripts that meet by multicast DNS on loopback, lose one of them, and go on from checkpoints.

Each data directory stands for a host: it has the key of a node, and the checkpoints.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.mesh.secret import make_secret
from tests.support.installation import DEADLINE_SECONDS, without_ours
from tests.support.ranks import write_shards

ROOT = Path(__file__).parents[3]

SCRIPT = f"""
import os, signal, sys
import numpy as np
import muster
from muster.collectives import DistributedContext
from muster.mesh import PeerGone, discover

size, last, dies_at = map(int, sys.argv[1:])
backend = discover(peers=size - 1, timeout_seconds={DEADLINE_SECONDS})
run = muster.join(backend=backend)
while run.steps_done < last:
    try:
        state = run.restore(backend=backend)
        total = np.zeros(3) if state is None else state["total"]
        print("begins", run.world_size, run.steps_done, total.tolist())
        context = DistributedContext(backend)
        for batch in run.batches(7):
            if run.steps_done == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            own = np.array(batch[run.rank :: run.world_size], np.float64)
            added = np.array([own.sum(), (own**2).sum(), own.size])
            context.all_reduce(added)
            total = total * 3 % 1_000_003 + added  # whole numbers: every order has these bits
            run.step()
            if run.should_checkpoint:
                run.checkpoint(total=total)
            if run.steps_done == last:
                break
    except PeerGone as gone:
        print("gone", gone.rank)
        backend = discover(after=backend, timeout_seconds={DEADLINE_SECONDS})
print("ends", run.steps_done, total.tolist())
"""

SAMPLES = [[7 * shard + line for line in range(41)] for shard in range(5)]
EPOCHS = 3


def undisturbed(steps: int) -> list[float]:
    """Return what one process that reads everything computes."""
    whole = [sample for shard in SAMPLES for sample in shard]
    batches = [whole[at : at + 7] for at in range(0, len(whole), 7)] * EPOCHS
    total = [0.0, 0.0, 0.0]
    for batch in batches[:steps]:
        added = sum(batch), sum(sample**2 for sample in batch), len(batch)
        total = [
            float(value * 3 % 1_000_003 + more) for value, more in zip(total, added, strict=True)
        ]
    return total


class Household:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "script.py").write_text(SCRIPT)
        write_shards(root / "samples", *SAMPLES)
        self.environ = {
            **without_ours(os.environ),
            "MUSTER_CLUSTER_KEY": make_secret(),
            "MUSTER_CLUSTER_NAME": root.name,
            "DATASET_DIR": str(root / "samples"),
            "CHECKPOINT_EVERY": "5",
            "MUSTER_EPOCHS": str(EPOCHS),
        }

    def run(
        self, hosts: str, last: int, dies_at: Sequence[int] = (), script: str = "script.py"
    ) -> list[list[str]]:
        """Run a script on each host; return what each has printed. One may die after a step."""
        processes = [
            subprocess.Popen(
                [sys.executable, script, str(len(hosts)), str(last), str(dies)],
                env={**self.environ, "MUSTER_DATA_DIR": str(self.root / host)},
                cwd=self.root,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host, dies in zip(hosts, dies_at or [-1] * len(hosts), strict=True)
        ]
        try:
            said = [process.communicate(timeout=2 * DEADLINE_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        self.warnings = "".join(errors for _, errors in said)
        for process, dies in zip(processes, dies_at or [-1] * len(hosts), strict=True):
            assert process.wait() == (0 if dies < 0 else -9), self.warnings
        return [out.splitlines() for out, _ in said]

    def checkpoints(self, host: str) -> list[Path]:
        return sorted(
            (self.root / host / "checkpoints").glob("n*/script-default-*/worker_0/step_*")
        )


@pytest.fixture
def household(tmp_path: Path) -> Household:
    return Household(tmp_path)


def test_the_others_go_on_from_their_checkpoint(household: Household) -> None:
    """The end is that of a run that nothing disturbs, also with a host that has nothing yet."""
    said = household.run("abc", 30, [-1, -1, 17])
    for lines in said[:2]:
        assert lines[0] == "begins 3 0 [0.0, 0.0, 0.0]"
        assert lines[1].startswith("gone ")
        assert lines[2:] == [f"begins 2 15 {undisturbed(15)}", f"ends 30 {undisturbed(30)}"]
    newest = household.checkpoints("a")[-1] / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    said = household.run("abd", 41)  # the disk of a is damaged, that of d is empty
    for lines in said:
        assert lines == [f"begins 3 30 {undisturbed(30)}", f"ends 41 {undisturbed(41)}"]
    assert "does not match its hash" in household.warnings
    assert len(household.checkpoints("d")) == 3  # 30, 35 and 40


def test_the_example_goes_on_after_a_machine_came_back(household: Household) -> None:
    write_dataset(household.root / "points", synthetic(samples=20_000))
    environ = {**household.environ, "DATASET_DIR": str(household.root / "points")}
    environ["MUSTER_EPOCHS"] = "6"  # long enough for a kill before the end

    def start(host: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, ROOT / "examples/home.py", "1"],
            env={**environ, "MUSTER_DATA_DIR": str(household.root / host)},
            cwd=household.root,
            stdout=subprocess.PIPE,
            text=True,
        )

    processes = [start("a"), start("b")]
    try:
        lost = processes[1]
        assert lost.stdout is not None
        with lost.stdout as said_by_lost:
            assert said_by_lost.readline().endswith("begins after step 0\n")
        lost.kill()
        processes.append(start("b"))
        first, _, third = processes
        said = [each.communicate(timeout=2 * DEADLINE_SECONDS)[0] for each in (first, third)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ends = [lines.splitlines()[-1] for lines in said]
    assert ends[0] == ends[1]
    assert ends[0].startswith("ends after step 1254 ")


def test_another_script_of_that_name_begins_anew(household: Household) -> None:
    household.run("ab", 6)
    other = household.root / "other" / "script.py"
    other.parent.mkdir()
    other.write_text(SCRIPT)
    for lines in household.run("ab", 6, script=str(other)):
        assert lines[0] == "begins 2 0 [0.0, 0.0, 0.0]"
