"""Runs the tests of torch's own distributed suite, one set of forked ranks for each test.

``python -m tests.support.torch_suite BACKEND WORLD_SIZE [TEST ...]`` prints one line of JSON for
each test. The suite reads the backend and the number of ranks when it is imported, so a process
has one of each. It is imported as that of gloo: so its decorators skip what they skip for gloo.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn
from unittest import SkipTest

PATIENCE_SECONDS = 90.0
"""A test that takes longer hangs."""

FAILED_SECONDS = 20.0
"""The same once a rank has failed."""

GROUP_SECONDS = 60
SKIPPED = 77


class Outcome(NamedTuple):
    """What one test of the suite came to."""

    test: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    """The ends of the tracebacks, or the reason of a skip."""
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
    play = _Player(backend, world_size)
    for name in tests or play.names():
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(play.test(name, Path(directory))), flush=True)  # noqa: T201


class _Name(str):
    """A backend in whose place the suite takes gloo, where it compares names."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _Player:
    """The suite, imported once."""

    def __init__(self, backend: str, world_size: int) -> None:
        # Here, since the suite reads the environment.
        import torch  # noqa: PLC0415
        import torch._dynamo  # noqa: PLC0415  each rank of DDP would load it
        from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: PLC0415
        from torch.testing._internal.distributed import distributed_test  # noqa: PLC0415

        import muster.torch  # noqa: F401, PLC0415  registers the backend

        torch.set_num_threads(1)
        distributed_test.BACKEND = _Name(backend)
        base = distributed_test.DistributedTest._DistTestBase  # noqa: SLF001
        self._suite: Any = distributed_test
        self._case: Any = type("Case", (distributed_test.TestDistBackend, base), {})
        self._reasons = {it.exit_code: it.message for it in TEST_SKIPS.values()}
        self._backend, self._world_size = backend, world_size

    def names(self) -> list[str]:
        return sorted(name for name in dir(self._case) if name.startswith("test_"))

    def test(self, name: str, directory: Path) -> Outcome:
        for folder in ("barrier", "test_dir", "init_dir"):
            (directory / folder).mkdir()
        os.environ["TEMP_DIR"] = str(directory)
        began = time.monotonic()
        ranks = []
        for rank in range(self._world_size):
            ranks.append(os.fork())
            if not ranks[-1]:
                self._run(name, rank, directory)
        codes = set(_exit_codes(ranks))
        seconds = round(time.monotonic() - began, 2)
        said = [path.read_text() for path in sorted(directory.glob("rank-*"))]
        if codes == {0}:
            return Outcome(name, "passed", "", seconds)
        if codes == {SKIPPED}:
            return Outcome(name, "skipped", said[0], seconds)
        return Outcome(name, "failed", "".join(said), seconds)

    def _run(self, name: str, rank: int, directory: Path) -> NoReturn:
        """Be one rank."""
        answer = (directory / f"rank-{rank}").open("w")
        faulthandler.enable(answer)  # for a rank that hangs, and is ended by SIGABRT
        os.dup2(os.open(os.devnull, os.O_RDWR), sys.stdout.fileno())
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
        code = 1
        try:
            self._run_test(name, rank, directory)
            code = 0
        except SkipTest as error:
            answer.write(str(error))
            code = SKIPPED
        except SystemExit as error:
            answer.write(self._reasons.get(error.code, "exit"))
            code = SKIPPED if error.code in self._reasons else int(bool(error.code))
        except Exception:  # noqa: BLE001  the test has failed
            answer.write(f"rank {rank}\n{traceback.format_exc()[-3000:]}")
        finally:
            answer.flush()
            os._exit(code)

    def _run_test(self, name: str, rank: int, directory: Path) -> None:
        case = self._case(name)
        case.rank, case.file_name = rank, str(directory / "store")
        dist = self._suite.dist
        dist.init_process_group(
            self._backend,
            init_method=f"file://{case.file_name}",
            world_size=self._world_size,
            rank=rank,
            timeout=timedelta(seconds=self._suite.CUSTOM_PG_TIMEOUT.get(name, GROUP_SECONDS)),
        )
        case._barrier()  # noqa: SLF001  of the suite
        self._suite.torch.manual_seed(1234)
        getattr(case, name)()
        case._barrier()  # noqa: SLF001
        dist.destroy_process_group()


def _exit_codes(ranks: Sequence[int]) -> list[int]:
    """Wait for all, and end those that hang."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(codes) < len(ranks):
        for pid in set(ranks) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] not in {0, SKIPPED}:
                deadline = min(deadline, time.monotonic() + FAILED_SECONDS)
        if time.monotonic() > deadline:
            for pid in set(ranks) - codes.keys():
                os.kill(pid, signal.SIGABRT)
            deadline = inf
        time.sleep(0.01)
    return list(codes.values())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
