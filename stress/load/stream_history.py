"""How soon a long log begins to arrive, and how much memory the service needs."""

import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from muster.contracts.settings.paths import TIME_MARK
from tests.support.usage import memory_bytes

STEM = b"epoch 3 loss 0.25 accuracy 0.93 samples/s 12345 and what else a program has to say "
BLOCK_LINES = 10_000
MARK_MICROS = 250_000
"""An agent looks four times a second."""

READ_ON_BYTES = 32 << 20
"""Long enough to count the memory of a running stream."""

PIECE_BYTES = 1 << 16
TIMEOUT_SECONDS = 60.0
ROUNDS = 5
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The results of one request, sent several times."""

    first_seconds: float
    """Time to the first line; the median."""
    worst_seconds: float
    extra_bytes: int
    """Peak memory of the service while it answered, minus its memory at rest."""


def write_log(log: Path, times: Path, size_bytes: int) -> int:
    """Write numbered lines of a hundred bytes and when they were written; return how many."""
    block = b"".join(STEM + b"%015d\n" % number for number in range(BLOCK_LINES))
    blocks = -(-size_bytes // len(block))
    with log.open("wb") as text, times.open("wb") as marks:
        for number in range(1, blocks + 1):
            text.write(block)
            marks.write(TIME_MARK.pack(text.tell(), micros_at(number * BLOCK_LINES)))
    return blocks * BLOCK_LINES


def micros_at(line: int) -> int:
    """Return when a line of such a log was written."""
    return 1_700_000_000_000_000 + line // BLOCK_LINES * MARK_MICROS


def questions(job_id: str, lines: int) -> Mapping[str, str]:
    """Return what is asked of a long log, by what to call it."""
    late = micros_at(lines * 9 // 10) / 1e6
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(late))
    logs = f"/jobs/{job_id}/logs"
    return {
        "stream": f"{logs}/stream",
        "stream, rank=0": f"{logs}/stream?rank=0",
        "stream, tail=100": f"{logs}/stream?tail=100",
        "tail=100": f"{logs}?tail=100",
        "rank=0": f"{logs}?rank=0",
        "since": f"{logs}?since={since}",
        "until": f"{logs}?until={since}",
        "grep, found often": f"{logs}?grep=accuracy",
        "grep, found nowhere": f"{logs}?grep=nowhere",
        "since and grep": f"{logs}?since={since}&grep=nowhere",
    }


def arrivals(
    port: int, pid: int, asked: Mapping[str, str], *, read_on_bytes: int = READ_ON_BYTES
) -> Iterator[tuple[str, Arrival]]:
    """Ask everything, and yield what came of it; whole streams are read on for a while."""
    rest = memory_bytes(pid, "VmRSS")
    for name, path in asked.items():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        seconds = [_first_line_seconds(port, path, read_on_bytes) for _ in range(ROUNDS)]
        yield (
            name,
            Arrival(
                first_seconds=median(seconds),
                worst_seconds=max(seconds),
                extra_bytes=memory_bytes(pid, "VmHWM") - rest,
            ),
        )


def _first_line_seconds(port: int, path: str, read_on_bytes: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    connection.connect()
    try:
        began = time.monotonic()
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == http.client.OK, answer.read()
        got = answer.read1(PIECE_BYTES)
        while "/stream" in path and b"data: " not in got:  # a stream has something to say before
            got += answer.read1(PIECE_BYTES)
        first_seconds = time.monotonic() - began
        if "tail" not in path:  # such a stream waits for new lines
            _read_on(answer, read_on_bytes)
        return first_seconds
    finally:
        connection.close()


def _read_on(answer: http.client.HTTPResponse, count: int) -> None:
    while count > 0 and (got := answer.read1(PIECE_BYTES)):
        count -= len(got)
