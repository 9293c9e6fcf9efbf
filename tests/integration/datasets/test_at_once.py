"""Several processes use one data set at the same time."""

import subprocess
import sys
from pathlib import Path

from muster.contracts.shards import HASH_MODULUS
from muster.datasets.index import line_hash
from muster.datasets.reader import find_shards

DEADLINE_SECONDS = 60
PROCESSES = 4

# Each says that it is ready and waits for a line, so that all begin together.
WAIT = "import sys; from pathlib import Path; print('ready', flush=True); sys.stdin.readline();"
OPEN_INDEX = (
    "from muster.datasets.index import ShardIndex;"
    + WAIT
    + "index = ShardIndex.open(Path(sys.argv[1])); print(index.lines, index.hash_sum)"
)
ENSURE = (
    "from muster.datasets.synthetic import ensure_synthetic;"
    + WAIT
    + "print(ensure_synthetic(Path(sys.argv[1])))"
)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def run_at_once(script: str, path: Path) -> list[str]:
    """Return what each process printed, once all have succeeded."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        printed = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * PROCESSES
    return printed


def test_four_ranks_index_one_shard_and_agree(tmp_path: Path) -> None:
    shard = tmp_path / "shard_00000.txt"
    lines = [b"line %d" % number for number in range(200_000)]
    shard.write_bytes(b"\n".join(lines))
    expected = f"{len(lines)} {sum(map(line_hash, lines)) % HASH_MODULUS}\n"
    assert run_at_once(OPEN_INDEX, shard) == [expected] * PROCESSES
    assert names_in(tmp_path) == ["shard_00000.idx", "shard_00000.txt"]


def test_concurrent_servers_share_one_default_data_set(tmp_path: Path) -> None:
    directory = tmp_path / "synthetic"
    assert run_at_once(ENSURE, directory) == [f"{directory}\n"] * PROCESSES
    assert len(find_shards(directory)) == 8
    assert names_in(tmp_path) == ["synthetic"]
