"""Several processes use one data set at the same time."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from muster.contracts.shards import HASH_MODULUS
from muster.datasets.index import line_hash
from muster.datasets.sources import open_source

PROCESSES = 4

# Each says that it is ready and waits for a line, so that all begin together.
PROGRAM = """
import sys
from pathlib import Path
from muster.datasets.index import ShardIndex
from muster.datasets.synthetic import ensure_synthetic
print("ready", flush=True)
sys.stdin.readline()
path = Path(sys.argv[1])
"""
OPEN_INDEX = (
    PROGRAM + "index = ShardIndex.open(path); print(index.totals.lines, index.totals.hash_sum)"
)
ENSURE = PROGRAM + "print(ensure_synthetic(path))"


def run_at_once(program: str, path: Path) -> list[str]:
    """Return what each process printed, once all have succeeded."""
    arguments = [sys.executable, "-c", program, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(arguments, **pipes)) for _ in range(PROCESSES)
        ]
        for process in processes:
            stack.callback(process.kill)
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * PROCESSES
        for process in processes:
            print("go", file=process.stdin, flush=True)
        printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES
    return printed


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_ranks_that_index_one_shard_agree(tmp_path: Path) -> None:
    shard = tmp_path / "shard_00000.txt"
    lines = [b"line %d" % number for number in range(200_000)]
    shard.write_bytes(b"\n".join(lines))
    expected = f"{len(lines)} {sum(map(line_hash, lines)) % HASH_MODULUS}\n"
    assert run_at_once(OPEN_INDEX, shard) == [expected] * PROCESSES
    assert names_in(tmp_path) == ["shard_00000.idx", "shard_00000.txt"]


def test_servers_share_one_default_data_set(tmp_path: Path) -> None:
    directory = tmp_path / "synthetic"
    assert run_at_once(ENSURE, directory) == [f"{directory}\n"] * PROCESSES
    assert len(open_source(directory).shards) == 8
    assert names_in(tmp_path) == ["synthetic"]
