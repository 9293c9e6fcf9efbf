"""The NVIDIA GPUs of this host, without importing torch: how many, which, and who has them.

A claim of a GPU is an abstract Unix socket with its name. The kernel gives the name to one process
of the host (of its network namespace), of any user. It frees the name when the last process
that inherited the socket has ended, so there is no record that could be wrong after a crash.
"""

import errno
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from muster.host.containment import tag_of

NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
NVIDIA_SMI_LIST: Final = ("nvidia-smi", "-L")

_PREFIX: Final = "GPU-"
_UUID: Final = re.compile(rf"(?:{_PREFIX})?[0-9a-f]{{8}}[0-9a-f-]*")
"""The board of a Jetson shows its own without the prefix (JetPack 6)."""

ANSWER_SECONDS: Final = 5.0
"""Without persistence mode the driver loads first. The agent's loop waits meanwhile."""

MEASURE_SECONDS: Final = 1.5
"""Of each of two questions, whose answers an agent can do without."""


class GpusBusy(OSError):
    """Too few GPUs, or too little memory, are free now; the text is a verb phrase about a rank."""

    retry_after_seconds: float | None = None
    """None: as after any start that failed."""
    is_final: bool = False  # the rank has waited for as long as its job allows


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many GPUs a program started here may use."""
    present = len(list(devices.glob("nvidia[0-9]*")))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not present:
        return present
    # -1 is a common way to say none.
    return sum(bool(word) and not word.startswith("-") for word in listed.split(","))


def list_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES names, or of all without it.

    As in CUDA, a word may be the beginning of a UUID with its prefix. A number counts as
    `nvidia-smi` does, in the order of the PCI bus. Raises `GpusBusy` if `nvidia-smi` does not
    answer in time, `OSError` if it cannot be run, and `subprocess.CalledProcessError` if it fails.
    """
    try:
        output = subprocess.run(  # noqa: S603  no word of it comes from outside
            NVIDIA_SMI, check=True, capture_output=True, text=True, timeout=ANSWER_SECONDS
        ).stdout
    except subprocess.TimeoutExpired as error:
        message = f"waits for nvidia-smi, which has not answered for {error.timeout:g} s"
        raise GpusBusy(message) from error
    # A GPU that does not answer has an error in its line, but keeps its number.
    numbered = list(enumerate(line.strip() for line in output.splitlines()))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    words = [_PREFIX] if listed is None else [word.strip() for word in listed.split(",")]
    starts = tuple(word for word in words if word.startswith(_PREFIX))
    return [
        uuid
        for number, uuid in numbered
        if _UUID.fullmatch(uuid)
        and (f"{_PREFIX}{uuid.removeprefix(_PREFIX)}".startswith(starts) or str(number) in words)
    ]


def nameable(uuids: Collection[str]) -> list[str]:
    """Return those that CUDA_VISIBLE_DEVICES can name; a board has one GPU, without a prefix."""
    return [uuid for uuid in uuids if uuid.startswith(_PREFIX)]


def describe_gpus() -> list[str]:
    """Return a line for each GPU as `nvidia-smi` shows it; none if it cannot tell."""
    return [line.strip() for line in _told(NVIDIA_SMI_LIST, ANSWER_SECONDS)]


def measure_gpus() -> tuple[dict[str, int], Counter[tuple[str, str]]]:
    """Return free MB by UUID, and used MB by process tag (empty: of others) and UUID.

    What `nvidia-smi` cannot tell is missing: the numbers of boards with unified memory, and in a
    container the processes.
    """
    free = _query("--query-gpu=uuid,memory.free", columns=2)
    used = _query("--query-compute-apps=pid,gpu_uuid,used_memory", columns=3)
    by_tag: Counter[tuple[str, str]] = Counter()
    for pid, uuid, mb in used:
        if (pid + mb).isdecimal():
            by_tag[tag_of(int(pid)) or "", uuid] += int(mb)
    return {uuid: int(mb) for uuid, mb in free if mb.isdecimal()}, by_tag


def total_memory_mb() -> int:
    """Return the memory of all GPUs, as far as `nvidia-smi` can tell."""
    return sum(int(mb) for (mb,) in _query("--query-gpu=memory.total", columns=1) if mb.isdecimal())


def _query(question: str, columns: int) -> list[list[str]]:
    argv = ("nvidia-smi", question, "--format=csv,noheader,nounits")
    lines = _told(argv, MEASURE_SECONDS)
    rows = ([cell.strip() for cell in line.split(",")] for line in lines)
    return [row for row in rows if len(row) == columns]


def _told(argv: Sequence[str], seconds: float) -> list[str]:
    """Return the lines that a command prints; none if it fails, or not in time."""
    try:
        told = subprocess.run(  # noqa: S603  no word of it comes from outside
            argv, check=True, capture_output=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return told.stdout.splitlines()


def is_claimed(uuid: str) -> bool:
    """Return whether a process has this GPU for itself."""
    try:
        with claimed([uuid], 1, 1):
            return False
    except GpusBusy:
        return True


@contextmanager
def claimed(
    uuids: Sequence[str],
    count: int,
    at_once: int,
    shared: Callable[[], Collection[str]] = tuple,
) -> Iterator[dict[str, int]]:
    """Claim `count` of these GPUs, for processes that inherit the descriptors, by UUID.

    This process gives up its own part at the end of the block. Raises `GpusBusy` if fewer than
    `at_once` are free, of which the others stay free. `shared` returns GPUs that are not, as ranks
    share them. It is asked after each claim, because such a rank looks for claims last.
    """
    found: dict[str, int] = {}
    with ExitStack() as sockets:
        for uuid in uuids:
            if len(found) == at_once:
                break
            claim = sockets.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(f"\0muster-gpu/{uuid}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                if uuid in shared():
                    claim.close()
                else:
                    found[uuid] = claim.fileno()
        if len(found) < at_once:
            raise GpusBusy(f"found {len(found)} of {at_once} free GPUs on its host")
        yield dict(list(found.items())[:count])
