"""Log streams under load: many readers of one job, and a long history.

``python -m stress.load.streams`` starts a service on one core and reads from the other. It prints
each figure with its goal.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from stress.load.figures import Figure, percentile, report_of
from stress.load.stream_follow import Followed, follow
from stress.load.stream_history import MIB, READ_ON_BYTES, arrivals, questions, write_log
from stress.load.stream_service import StreamService
from stress.runner import Report, main

DELAY_SECONDS = 0.5
END_SECONDS = 5.0
FIRST_SECONDS = 0.1
EXTRA_BYTES = 20e6
SHOWN_FAULTS = 5


def run(
    directory: Path,
    *,
    clients: int = 500,
    lines: float = 20.0,
    seconds: float = 30.0,
    size: int = 1024,
    seed: int = 0,
) -> Report:
    """Let `clients` read `lines` per second, then ask a log of `size` MiB."""
    for name in ("crowd", "history"):
        (directory / name).mkdir()
    with StreamService(directory / "crowd") as service:
        follows = follow(
            service, clients=clients, lines_per_second=lines, seconds=seconds, seed=seed
        )
        figures = list(_crowd(asyncio.run(follows), clients))
    with StreamService(directory / "history") as service:
        figures += _history(service, size)
    return report_of(figures)


def _crowd(found: Followed, clients: int) -> Iterator[Figure]:
    yield Figure(f"{clients} streams are open after", f"{found.opened_seconds:.2f} s")
    p50, p99 = percentile(found.delays, 50), percentile(found.delays, 99)
    yield Figure("from a line's write to its receipt, p50", _milliseconds(p50))
    goal = f"<= {_milliseconds(DELAY_SECONDS)}"
    yield Figure("the same, p99", _milliseconds(p99), goal, p99 <= DELAY_SECONDS)
    yield Figure("the same, maximum", _milliseconds(max(found.delays)))
    yield Figure("the service's core in use meanwhile", f"{found.core_share:.0%}")
    yield Figure(
        "SIGTERM with all of them open: gone after",
        f"{found.ended_seconds:.2f} s, code {found.exit_code}",
        f"<= {END_SECONDS:.0f} s, code 0",
        found.ended_seconds <= END_SECONDS and found.exit_code == 0,
    )
    yield Figure("all are back at the next one after", f"{found.back_seconds:.2f} s")
    what = f"{found.lines} lines for each, {found.resumed} resumptions"
    faults = "; ".join(found.faults[:SHOWN_FAULTS])
    yield Figure(what, faults or "each line once", "each line once", not faults)


def _history(service: StreamService, size: int) -> Iterator[Figure]:
    service.run("long")
    files = service.files("long")
    asking = questions("long", write_log(files.log(0, 0), files.times(0, 0), size * MIB))
    read_on = min(READ_ON_BYTES, size * MIB // 2)
    for name, found in arrivals(service.port, service.pid, asking, read_on_bytes=read_on):
        is_soon, is_small = found.first_seconds <= FIRST_SECONDS, found.extra_bytes <= EXTRA_BYTES
        first, worst = _milliseconds(found.first_seconds), _milliseconds(found.worst_seconds)
        yield Figure(
            f"of {size} MiB, {name}",
            f"{first} (worst {worst}), {found.extra_bytes / 1e6:.1f} MB more memory",
            f"<= {_milliseconds(FIRST_SECONDS)}, {EXTRA_BYTES / 1e6:.0f} MB",
            is_soon and is_small,
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


if __name__ == "__main__":
    main(run)
