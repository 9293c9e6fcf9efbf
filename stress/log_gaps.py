"""Every line is in the stream in order and once, whichever process is killed.

``python -m stress.log_gaps --deaths 100 --seed 0`` runs commands that write thousands of lines per
second, very long lines, partial lines and invalid bytes. It kills ranks, agents, the coordinator
and the API, and compares what readers got, resuming by `Last-Event-ID`, with the files, byte for
byte.
"""

import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from muster.contracts.settings.paths import LogName
from muster.host.containment import tagged_processes
from muster.host.processes import send_signal
from muster.logs.source import decode, shorten
from stress.restarter import Restarter, await_api
from stress.runner import Report, chance, main
from stress.scribbler import FAST_LINES
from tests.support.installation import Installation, is_over, is_running
from tests.support.log_follower import LogFollower

VICTIMS = {"rank": 30, "agent": 15, "coordinator": 20, "api": 35}
PAUSES_SECONDS = (0.0, 0.3, 0.8, 1.5, 2.5)
LISTENING = 4 / 5
"""Share of the kills of the API that wait until it serves and has readers."""

TAIL = 500
LAST_SECONDS = 120.0
"""For readers to receive the rest after the last line was written."""

TOKEN = re.compile(rb"line (\d+) of ([0-9.]+\.(?:rank|child));")


def run(directory: Path, *, deaths: int = 120, seed: int = 0, jobs: int = 2) -> Report:
    """Kill processes while jobs write, and check what their readers got."""
    with Installation(directory) as installation:
        return _run(installation, deaths, chance(seed), jobs)


def _run(installation: Installation, deaths: int, draw: random.Random, jobs: int) -> Report:
    died: Counter[str] = Counter()
    root = installation.root / "scribbles"
    root.mkdir()
    command = [sys.executable, str(Path(__file__).parent / "scribbler.py"), str(root)]
    fields = {"world_size": 2, "command": command, "max_restarts": 1000}
    began = time.monotonic()
    written = [installation.submit(**fields) for _ in range(jobs)]
    readers = {
        (job_id, rank): _reader(installation.url, job_id, rank, root / f"{job_id}.{rank}")
        for job_id in written
        for rank in (None, 0)[: 1 + (job_id == written[0])]
    }
    restarters = [Restarter(installation.coordinator), Restarter(installation.api)]
    for job_id in written:
        installation.wait_until(job_id, is_running)
    for restarter in restarters:
        restarter.start()
    for _ in range(deaths):
        (victim,) = draw.choices([*VICTIMS], [*VICTIMS.values()])
        died[victim] += _kill(installation, victim, draw.choice(written), draw)
        time.sleep(draw.choice(PAUSES_SECONDS))
    await_api(installation)
    (root / "enough").touch()
    for job_id in written:
        installation.wait_until(job_id, is_over)
    until = time.monotonic() + LAST_SECONDS
    for reader in readers.values():
        reader.wait(max(0.0, until - time.monotonic()))
    lines, resumed = (sum(getattr(it, n) for it in readers.values()) for n in ("lines", "resumed"))
    counts = ", ".join(f"{count} x {victim}" for victim, count in died.items())
    figures = f"{died.total()} deaths ({counts}); {lines} lines read over {resumed} resumptions"
    report = Report([f"{figures} in {time.monotonic() - began:.0f} s"])
    if not (lines and resumed):
        report.faults.append("no reader was interrupted: this has shown nothing")
    report.faults += _faults(installation, root, readers)
    for restarter in restarters:
        restarter.end()
    return report


def _faults(
    installation: Installation, root: Path, readers: Mapping[tuple[str, int | None], LogFollower]
) -> Iterator[str]:
    for job_id in {job_id for job_id, _ in readers}:
        yield from _missing_in_files(installation, root, job_id)
        yield from _wrong_tail(installation, job_id)
    for (job_id, rank), reader in readers.items():
        if not reader.has_ended:
            yield f"the stream of {job_id} has no end"
        yield from _wrong_stream(installation, root / f"{job_id}.{rank}", job_id, rank)


def _reader(url: str, job_id: str, rank: int | None, spool: Path) -> LogFollower:
    """Follow a stream of logs into a file."""
    spool.touch()

    def keep(lines: Sequence[str]) -> None:
        with spool.open("ab") as kept:
            kept.write("".join(f"{line}\n" for line in lines).encode())

    reader = LogFollower(url, job_id, keep, rank=rank)
    reader.start()
    return reader


def _kill(installation: Installation, victim: str, job_id: str, draw: random.Random) -> int:
    """Kill one process, if there is one; return how many were."""
    match victim:
        case "api" | "coordinator":
            if victim == "api" and draw.random() < LISTENING:
                await_api(installation)
            service = installation.api if victim == "api" else installation.coordinator
            if service.process is None or service.process.poll() is not None:
                return 0
            service.process.send_signal(signal.SIGKILL)
            service.process.wait()
            return 1
        case "agent":
            found = tagged_processes(f"{installation.uids[job_id]}/agent")
        case _:
            ranks = (f"{installation.uids[job_id]}/{rank}/" for rank in range(2))
            found = [record for tag in ranks for record in tagged_processes(tag)[:1]]
    if not found:
        return 0
    send_signal(draw.choice(found), signal.SIGKILL)
    return 1


def _files(installation: Installation, job_id: str, rank: int) -> list[Path]:
    directory = installation.files.job(job_id).logs
    named = [(LogName.parse(path.name), path) for path in directory.glob("*.log")]
    return [path for name, path in sorted(named) if name is not None and name.rank == rank]


def _written(installation: Installation, job_id: str, rank: int) -> Iterator[bytes]:
    """Yield the lines of a rank as a reader must see them, incomplete ones included."""
    for path in _files(installation, job_id, rank):
        with path.open("rb") as log:
            for raw in log:
                yield decode(shorten(raw.removesuffix(b"\n"))).encode()


def _wrong_stream(
    installation: Installation, spool: Path, job_id: str, asked: int | None
) -> Iterator[str]:
    for rank in (0, 1) if asked is None else (asked,):
        prefix = f"[rank {rank}] ".encode() if asked is None else b""
        with spool.open("rb") as got:
            read = (line[len(prefix) : -1] for line in got if line.startswith(prefix))
            pairs = zip_longest(read, _written(installation, job_id, rank))
            for number, (found, wanted) in enumerate(pairs):
                if found != wanted:
                    yield (
                        f"line {number} of rank {rank} of {job_id} is {_short(found)} in the "
                        f"stream and {_short(wanted)} in the file"
                    )
                    break


def _wrong_tail(installation: Installation, job_id: str) -> Iterator[str]:
    for rank in (0, 1):
        query = {"rank": rank, "tail": TAIL}
        answer = installation.request("GET", f"/jobs/{job_id}/logs", params=query).json()
        found = [line["line"] for line in answer["lines"]]
        wanted = [line.decode() for line in _written(installation, job_id, rank)][-TAIL:]
        if found != wanted:
            yield f"the last {TAIL} lines of rank {rank} of {job_id} differ from the file"


def _missing_in_files(installation: Installation, root: Path, job_id: str) -> Iterator[str]:
    numbers: dict[str, list[int]] = {}
    for rank in (0, 1):
        for path in _files(installation, job_id, rank):
            for number, name in TOKEN.findall(path.read_bytes()):
                numbers.setdefault(name.decode(), []).append(int(number))
    for witness in (root / "witnesses" / job_id).iterdir():
        least = int.from_bytes(witness.read_bytes(), "little")
        found = numbers.get(witness.name, [])
        # It may have been killed between its last write and its counter.
        if found != list(range(len(found))) or not least <= len(found) <= least + FAST_LINES:
            yield f"{witness.name} wrote {least} lines, and {len(found)} are in its file"


def _short(line: bytes | None) -> str:
    return "missing" if line is None else repr(line[:80])


if __name__ == "__main__":
    main(run)
