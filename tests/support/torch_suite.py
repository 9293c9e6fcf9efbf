"""Runs the tests of torch's own distributed suite, one set of forked ranks for each test.

``python -m tests.support.torch_suite BACKEND WORLD_SIZE [TEST ...]`` prints one line of JSON for
each test. The suite reads the backend and the number of ranks when it is imported, so a process
has one of each. It is imported as that of gloo: so its decorators skip what they skip for gloo.
"""

import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn
from unittest import SkipTest

SUITE = "torch.testing._internal.distributed.distributed_test"
PATIENCE_SECONDS = 90.0
"""A test that takes longer hangs."""

GROUP_TIMEOUT_SECONDS = 60
SKIPPED = 77


class Outcome(NamedTuple):
    """What one test of the suite came to."""

    test: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    """The end of the traceback of the first rank that failed, or the reason of a skip."""
    seconds: float


def outcomes(backend: str, world_size: int, tests: Sequence[str] = ()) -> Iterator[Outcome]:
    """Run tests, by default all, in a process of their own."""
    words = [sys.executable, "-W", "ignore", "-m", __name__, backend, str(world_size), *tests]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Outcome(*json.loads(line))
    assert process.returncode == 0, f"the suite ended with exit code {process.returncode}"


def main(backend: str, world_size: int, tests: Sequence[str]) -> None:
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    suite = _suite(backend)
    base = suite.DistributedTest._DistTestBase  # noqa: SLF001  of the suite
    names = tests or sorted(name for name in dir(base) if name.startswith("test_"))
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(_play(suite, backend, world_size, name, Path(directory))), flush=True)


class _Name(str):
    """A backend in whose place the suite takes gloo, where it compares names."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def _suite(backend: str) -> Any:  # noqa: ANN401  a module
    import torch

    import muster.torch  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    import torch._dynamo
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = _Name(backend)
    return distributed_test


def _play(suite: Any, backend: str, world_size: int, name: str, directory: Path) -> Outcome:  # noqa: ANN401
    for folder in ("barrier", "test_dir", "init_dir"):
        (directory / folder).mkdir()
    os.environ["TEMP_DIR"] = str(directory)
    began = time.monotonic()
    ranks = [_fork(suite, backend, world_size, name, rank, directory) for rank in range(world_size)]
    codes: dict[int, int] = {}
    while len(codes) < world_size:
        for rank, pid in enumerate(ranks):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > PATIENCE_SECONDS or any(
            code not in (0, SKIPPED) for code in codes.values()
        ) and (time.monotonic() - began > 8):
            for rank, pid in enumerate(ranks):
                if rank not in codes:
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
            for rank, pid in enumerate(ranks):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[rank] = -signal.SIGKILL
        time.sleep(0.01)
    seconds = round(time.monotonic() - began, 2)
    said = [path.read_text() for path in sorted(directory.glob("rank-*"))]
    detail = "".join(said) or str(codes)
    if set(codes.values()) == {0}:
        return Outcome(name, "passed", "", seconds)
    if set(codes.values()) == {SKIPPED}:
        return Outcome(name, "skipped", said[0], seconds)
    return Outcome(name, "failed", f"{codes}\n{detail}", seconds)


def _fork(
    suite: Any, backend: str, world_size: int, name: str, rank: int, directory: Path  # noqa: ANN401
) -> int:
    pid = os.fork()
    if pid == 0:
        _rank(suite, backend, world_size, name, rank, directory)
    return pid


def _rank(
    suite: Any, backend: str, world_size: int, name: str, rank: int, directory: Path  # noqa: ANN401
) -> NoReturn:
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    answer = Path(directory, f"rank-{rank}")
    dump = Path(directory, f"rank-{rank}-hang").open("w")
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    if not os.environ.get("SUITE_STDERR"):
        os.dup2(null, 2)

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]  # noqa: SLF001
        """All tests."""

    code = 1
    try:
        case = Case(name)
        case.rank, case.file_name = rank, str(directory / "store")
        seconds = suite.CUSTOM_PG_TIMEOUT.get(name, GROUP_TIMEOUT_SECONDS)
        dist.init_process_group(
            backend,
            init_method=f"file://{case.file_name}",
            world_size=world_size,
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        case._barrier()
        common_utils.set_rng_seed()
        getattr(case, name)()
        case._barrier()
        dist.destroy_process_group()
        code = 0
    except SkipTest as error:
        answer.write_text(str(error))
        code = SKIPPED
    except SystemExit as error:
        answer.write_text(f"exit {error.code}")
        code = SKIPPED if error.code else 0
    except BaseException:
        answer.write_text(f"rank {rank}\n{traceback.format_exc()[-3000:]}")
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
