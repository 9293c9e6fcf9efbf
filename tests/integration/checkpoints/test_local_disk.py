"""Checkpoints on a real file system, with real processes and signals."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from muster.checkpoints.comparison import identity, identity_of
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import LATEST, CheckpointName
from tests.support.checkpoint_ranks import Rank, owner, position, state

KILLS = 20
SAVES_BEFORE_A_KILL = 6

SAVER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[3]]
from tests.support.checkpoint_ranks import Rank, owner
from muster.checkpoints.local import LocalFileSystem
generation = int(sys.argv[2])
rank = Rank(LocalFileSystem(), owner(generation=generation), directory=Path(sys.argv[1]))
checkpoint = rank.manager.restore()
step = checkpoint.step if checkpoint else 0
while True:
    step += 1
    rank.save(step)
    print(step, flush=True)
"""


def on_disk(place: Path, generation: int = 0) -> Rank:
    return Rank(LocalFileSystem(), owner(generation=generation), directory=place)


def killed_while_saving(place: Path, generation: int, draw: random.Random) -> int:
    """Kill a process that saves in a loop; return the last step it acknowledged."""
    arguments = [sys.executable, "-c", SAVER, place, str(generation), Path(__file__).parents[3]]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        acknowledged = 0
        for _ in range(SAVES_BEFORE_A_KILL):
            acknowledged = int(process.stdout.readline())
        # At a random point of the next save, which takes a few milliseconds.
        for _ in range(draw.randrange(80_000)):
            pass
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            if line.endswith("\n"):
                acknowledged = int(line)
    assert process.returncode == -signal.SIGKILL
    return acknowledged


def test_no_acknowledged_checkpoint_is_lost_to_kill_9(tmp_path: Path) -> None:
    place = tmp_path / "job" / "worker_0"
    draw = random.Random(1)  # noqa: S311  no secret
    before = 0
    for generation in range(KILLS):
        acknowledged = killed_while_saving(place, generation, draw)
        assert acknowledged >= before + SAVES_BEFORE_A_KILL
        checkpoint = on_disk(place, generation).manager.restore()
        assert checkpoint is not None
        assert checkpoint.name in (
            CheckpointName(generation, acknowledged),
            CheckpointName(generation, acknowledged + 1),
        )
        step = checkpoint.step
        assert identity_of(checkpoint) == identity(state(generation, step), position(step))
        before = step
    rank = on_disk(place, KILLS)
    rank.restored()
    rank.save(before + 1, before + 2)
    kept = [f"step_{step:010d}.g{KILLS:04d}" for step in (before + 1, before + 2)]
    assert rank.on_disk() == [LATEST, *kept]


FILLS_THE_DISK = """
import resource, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from tests.support.checkpoint_ranks import Rank, position, state
from muster.checkpoints.errors import CheckpointFailed
from muster.checkpoints.local import LocalFileSystem
rank = Rank(LocalFileSystem(), directory=Path(sys.argv[1]))
rank.save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
try:
    rank.manager.save(2, position(2), {**state(0, 2), "more": list(range(1000))})
except CheckpointFailed as failure:
    print(failure)
print(*rank.on_disk())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
rank.save(2)
"""


def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    # A limit on the file size behaves like a full disk: a short write, then an error.
    arguments = [sys.executable, "-c", FILLS_THE_DISK, tmp_path, Path(__file__).parents[3]]
    told = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "Older checkpoints are untouched" in told[0]
    assert told[1] == "LATEST step_0000000001.g0000"
    assert on_disk(tmp_path).restored() == CheckpointName(0, 2)


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    rank = on_disk(tmp_path)
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  names only
    rank.save(1, 2, 3)
    rank.restored()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  names only
