"""Log streams under load: many readers, a long history, and one complete log.

``python -m stress.load.streams`` starts a service on one core and reads from the other. It prints
each figure with its goal, and exits with 1 if a goal is missed.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from stress.load.figures import Figure, percentile, report
from stress.load.stream_follow import Followed, follow
from stress.load.stream_history import MIB, READ_ON_BYTES, arrivals, questions, write_log
from stress.load.stream_rate import lines_in, plain_copies, received, stream_request
from stress.load.stream_stage import Stage

DELAY_SECONDS = 0.5
END_SECONDS = 5.0
FIRST_SECONDS = 0.1
EXTRA_BYTES = 20e6
SHARE_OF_COPY = 1 / 20

RATE_ROUNDS = 7
SHOWN_FAULTS = 5


def figures(asked: argparse.Namespace) -> Iterator[Figure]:
    """Run each load against a new service, and yield each figure when it is known."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name, load in (("crowd", _crowd), ("history", _history), ("rate", _rate)):
            (root / name).mkdir()
            with Stage(root / name) as stage:
                yield from load(stage, asked)
            shutil.rmtree(root / name)


def _crowd(stage: Stage, asked: argparse.Namespace) -> Iterator[Figure]:
    found = asyncio.run(
        follow(
            stage,
            clients=asked.clients,
            lines_per_second=asked.lines,
            seconds=asked.seconds,
            seed=asked.seed,
        )
    )
    yield Figure(
        what=f"{asked.clients} streams are open after", found=f"{found.opened_seconds:.2f} s"
    )
    yield from _delays(found)
    yield Figure(what="the service's core in use meanwhile", found=f"{found.core_share:.0%}")
    yield Figure(
        what="SIGTERM with all of them open: gone after",
        found=f"{found.ended_seconds:.2f} s, code {found.exit_code}",
        goal=f"<= {END_SECONDS:.0f} s, code 0",
        is_met=found.ended_seconds <= END_SECONDS and found.exit_code == 0,
    )
    yield Figure(what="all are back at the next one after", found=f"{found.back_seconds:.2f} s")
    yield Figure(
        what=f"{found.lines} lines for each, {found.resumed} resumptions",
        found="; ".join(found.faults[:SHOWN_FAULTS]) or "each line once",
        goal="each line once",
        is_met=not found.faults,
    )


def _delays(found: Followed) -> Iterator[Figure]:
    p50, p99 = percentile(found.delays, 50), percentile(found.delays, 99)
    yield Figure(what="from a line's write to its receipt, p50", found=_milliseconds(p50))
    yield Figure(
        what="the same, p99",
        found=_milliseconds(p99),
        goal=f"<= {_milliseconds(DELAY_SECONDS)}",
        is_met=p99 <= DELAY_SECONDS,
    )
    yield Figure(what="the same, maximum", found=_milliseconds(max(found.delays)))


def _history(stage: Stage, asked: argparse.Namespace) -> Iterator[Figure]:
    stage.run("long")
    files = stage.files("long")
    size_bytes = asked.size * MIB
    asking = questions("long", write_log(files.log(0, 0), files.times(0, 0), size_bytes))
    read_on = min(READ_ON_BYTES, size_bytes // 2)
    for name, found in arrivals(stage.service.port, stage.pid, asking, read_on_bytes=read_on):
        is_soon, is_small = found.first_seconds <= FIRST_SECONDS, found.extra_bytes <= EXTRA_BYTES
        first, worst = _milliseconds(found.first_seconds), _milliseconds(found.worst_seconds)
        yield Figure(
            what=f"of {asked.size} MiB, {name}",
            found=f"{first} (worst {worst}), {found.extra_bytes / 1e6:.1f} MB more memory",
            goal=f"<= {_milliseconds(FIRST_SECONDS)}, {EXTRA_BYTES / 1e6:.0f} MB",
            is_met=is_soon and is_small,
        )


def _rate(stage: Stage, asked: argparse.Namespace) -> Iterator[Figure]:
    stage.run("whole")
    files = stage.files("whole")
    lines = write_log(files.log(0, 0), files.times(0, 0), asked.copied * MIB)
    stage.finish("whole")
    copy_seconds, stream_seconds = [], []
    with plain_copies(files.log(0, 0), stage.on_its_core()) as port:
        for _ in range(RATE_ROUNDS):  # in turn, so that load on the machine affects both
            seconds, copy = received(port)
            copy_seconds.append(seconds)
            seconds, stream = received(stage.service.port, stream_request("whole"))
            stream_seconds.append(seconds)
    copied, streamed = (lines / median(seconds) for seconds in (copy_seconds, stream_seconds))
    is_same = lines_in(stream) == copy.decode().splitlines()
    yield Figure(what="lines/s of a plain copy over TCP", found=f"{copied:,.0f}")
    yield Figure(
        what="lines/s of a stream, one reader",
        found=f"{streamed:,.0f}, 1/{copied / streamed:.1f}" + ("" if is_same else ", others"),
        goal=f">= 1/{1 / SHARE_OF_COPY:.0f}, the same lines",
        is_met=is_same and streamed >= copied * SHARE_OF_COPY,
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def main() -> int:
    """Run all loads, print the table, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500, help="readers of one job (500)")
    parser.add_argument("--lines", type=float, default=20, help="lines per second (20)")
    parser.add_argument("--seconds", type=float, default=30, help="duration (30)")
    parser.add_argument("--size", type=int, default=1024, help="MiB of the long log (1024)")
    parser.add_argument("--copied", type=int, default=64, help="MiB for one reader (64)")
    parser.add_argument("--seed", type=int, default=0, help="decides which readers reconnect (0)")
    found = list(figures(parser.parse_args()))
    for line in report(found):
        print(line)
    return int(not all(figure.is_met for figure in found))


if __name__ == "__main__":
    sys.exit(main())
