"""Kills, stops and disconnects ranks in the middle of collectives; the others must notice.

``python -m stress.collective_kills [TRIALS] [SEED]`` starts 2 to 5 processes for each trial, by
sockets and by shared memory in turn. They run collectives of random kinds and sizes, some in the
background, some with views of the group under way, and compare each result with what it has to be.
One of them is killed, is stopped for a while, or loses a connection. All others must end with a
`CollectiveError`, and go on: after a death in a view without the dead rank, after a stop together.
"""

import math
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muster.collectives import SharedMemoryBackend, SubBackend, TcpBackend
from muster.collectives import operations as do
from muster.collectives.backend import Backend
from muster.collectives.errors import CollectiveError
from muster.host.ports import free_port
from stress.detection import quantile
from stress.runner import Report, chance, main, say

GOAL_SECONDS = 0.2
"""Within which a death should be noticed; a busy machine may need `LIMIT_SECONDS`."""
LIMIT_SECONDS = 15.0
STOPPED_SECONDS = 0.4
"""The timeout of an operation where a rank is stopped."""
CUT_SECONDS = 2.0
"""The same where a connection is cut. Its two ends fail in one operation; a rank that has ended
that one waits in the next for ranks that do not come, although none has died."""
PATIENCE_SECONDS = 30.0
"""For everything that has to happen and is not measured."""
SIZES = (0, 1, 30, 2_000, 40_000, 300_000)
CALLS_AFTERWARDS = 6

OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class Trial(NamedTuple):
    """What all ranks of a trial know."""

    seed: str
    world_size: int
    is_tcp: bool
    harm: str
    """kill, stop or cut"""
    has_views: bool
    place: str
    """Where the ranks meet: a path or an address."""

    def timeout_seconds(self) -> float:
        return {"stop": STOPPED_SECONDS, "cut": CUT_SECONDS}.get(self.harm, PATIENCE_SECONDS)


def drawn(seed: int, number: int, directory: Path) -> Trial:
    draw = chance(f"{seed}/{number}")
    is_tcp = number % 2 == 0
    harm = draw.choices(["kill", "stop", "cut"], [6, 1, 1 if is_tcp else 0])[0]
    place = f"127.0.0.1:{free_port()}" if is_tcp else str(directory / f"meeting-{number}")
    has_views = harm != "stop" and draw.random() < 1 / 2
    return Trial(f"{seed}/{number}", draw.randint(2, 5), is_tcp, harm, has_views, place)


# A rank: what runs in a process of its own


def run_rank(trial: Trial, rank: int, harness: Connection) -> None:
    """Meet, run collectives until one fails, and go on as the harness says."""
    signal.signal(signal.SIGUSR1, cut_a_connection)
    where, size = trial.place, trial.world_size
    kind = TcpBackend if trial.is_tcp else SharedMemoryBackend
    backend = kind.connect(where, rank, size, timeout_seconds=PATIENCE_SECONDS)
    views = []
    if trial.has_views:
        groups = [range(size - 1), range(1, size), range(size)]
        views = [SubBackend(backend, group) for group in groups if rank in group]
    last, error = until_an_error(backend, views, trial, harness)
    harness.send((last, type(error), time.monotonic()))
    order, argument = harness.recv()
    group: Backend = backend
    if order == "go on without":
        group = SubBackend(backend, set(range(size)) - {argument})
        last = argument = 0
    if order == "end":
        return
    for number in range(last + 1, argument + 1):  # which others have called
        try:
            check_one(group, trial, number)
        except CollectiveError:
            continue
    for number in range(argument + 1, argument + 1 + CALLS_AFTERWARDS):
        check_one(group, trial, number)
    group.barrier()
    harness.send("done")
    harness.recv()
    backend.close()


def until_an_error(
    backend: Backend, views: list[SubBackend], trial: Trial, harness: Connection
) -> tuple[int, CollectiveError]:
    """Return the number of the call that failed, and its error."""
    number = 0
    while True:
        number += 1
        try:
            ones = [np.ones(20_000, np.float32) for _ in views]
            handles = [
                do.all_reduce(view, array, async_op=True, timeout_seconds=trial.timeout_seconds())
                for view, array in zip(views, ones, strict=True)
            ]
            check_one(backend, trial, number)
            for view, handle in zip(views, handles, strict=True):
                assert (handle.wait() == view.world_size).all(), "a view got a wrong result"
        except CollectiveError as error:
            return number, error
        if number == 1:
            harness.send("runs")


def check_one(backend: Backend, trial: Trial, number: int) -> None:
    """Call a random collective; raises AssertionError if its result is wrong."""
    draw = chance(f"{trial.seed}/{number}")
    if draw.random() < 1 / 10:
        barrier = do.barrier if trial.harm == "stop" else type(backend).barrier
        barrier(backend, timeout_seconds=trial.timeout_seconds())
        return
    operation, elements = draw.choice(OPERATIONS), draw.choice(SIZES)
    ranks, rank, root = range(backend.world_size), backend.rank, draw.randrange(backend.world_size)
    is_in_parts = operation in {"reduce_scatter", "all_to_all"}
    shape = (len(ranks), elements // len(ranks)) if is_in_parts else (elements,)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    data = [(numbers * (each + 3) + number) % 91 for each in ranks]
    options: dict[str, Any] = {"timeout_seconds": trial.timeout_seconds()}
    if operation in {"reduce", "broadcast"}:
        options["root"] = root
    if draw.random() < 1 / 3:
        options["async_op"] = True
    given = data[rank].astype(np.float32)
    arguments = list(given) if operation == "all_to_all" else given
    result = getattr(do, operation)(backend, arguments, **options)
    if "async_op" in options:
        result = result.wait()
    expected = {
        "all_reduce": lambda: sum(data),
        "reduce": lambda: sum(data) if rank == root else data[rank],
        "broadcast": lambda: data[root],
        "all_gather": lambda: np.stack(data),
        "reduce_scatter": lambda: sum(each[rank] for each in data),
        "all_to_all": lambda: np.stack([each[rank] for each in data]),
    }[operation]()
    assert np.array_equal(np.stack(result) if operation == "all_to_all" else result, expected), (
        f"call {number}, {operation} of {elements}: a wrong result"
    )


def cut_a_connection(*_: object) -> None:
    """Shut one connection of this process down, as a network does that fails."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.exists() and descriptor.is_socket():
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                if connection.family == socket.AF_INET:
                    connection.shutdown(socket.SHUT_RDWR)
                    return


# The harness


@dataclass
class Ranks:
    """The processes of one trial, and what they say."""

    trial: Trial
    processes: list[ForkServerProcess] = field(default_factory=list)
    ends: list[Connection] = field(default_factory=list)

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        for rank in range(self.trial.world_size):
            own, other = context.Pipe()
            process = context.Process(target=run_rank, args=(self.trial, rank, other))
            process.start()
            other.close()
            self.processes.append(process)
            self.ends.append(own)

    def receive(self, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Return what each of the ranks says next; those are missing that say nothing in time."""
        received: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while missing := [it for it in ranks if it not in received]:
            left = max(0.0, deadline - time.monotonic())
            ready = wait([self.ends[it] for it in missing], left)
            if not ready:
                break
            for rank in (it for it in missing if self.ends[it] in ready):
                try:
                    received[rank] = self.ends[rank].recv()
                except EOFError:
                    received[rank] = (0, "it has died, see its output", 0.0)
        return received

    def tell(self, ranks: Iterable[int], order: tuple[str, int]) -> None:
        for rank in ranks:
            with suppress(BrokenPipeError):
                self.ends[rank].send(order)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for end in self.ends:
            end.close()


def perform(trial: Trial, took: dict[str, list[float]]) -> Iterator[str]:
    """Yield what went wrong; note how long it took each rank to notice."""
    draw = chance(f"{trial.seed} harm")
    ranks, victim = Ranks(trial), draw.randrange(trial.world_size)
    others = [rank for rank in range(trial.world_size) if rank != victim]
    with closing(ranks):
        ranks.start()
        runs = ranks.receive(range(trial.world_size), PATIENCE_SECONDS)
        if set(runs.values()) != {"runs"} or len(runs) < trial.world_size:
            yield f"not all ranks began: {runs}"
            return
        time.sleep(draw.uniform(0.0, 0.3))
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cut": signal.SIGUSR1}[trial.harm]
        at = time.monotonic()
        os.kill(ranks.processes[victim].pid or 0, number)
        affected = range(trial.world_size) if trial.harm == "cut" else others
        ended = ranks.receive(affected, LIMIT_SECONDS + STOPPED_SECONDS)
        if trial.harm == "stop":
            os.kill(ranks.processes[victim].pid or 0, signal.SIGCONT)
            ended |= ranks.receive([victim], PATIENCE_SECONDS)
            affected = range(trial.world_size)
        for rank in affected:
            _, error, when = ended.get(rank, (0, None, at))
            if not (isinstance(error, type) and issubclass(error, CollectiveError)):
                yield f"rank {rank} did not end with a CollectiveError: {ended.get(rank)}"
                return
            took[trial.harm].append(when - at)
        if trial.harm == "stop":
            ranks.tell(affected, ("call up to", max(last for last, _, _ in ended.values())))
        else:
            affected = others
            ranks.tell(others, ("go on without", victim))
        done = ranks.receive(affected, PATIENCE_SECONDS)
        if done != dict.fromkeys(affected, "done"):
            yield f"not all ranks went on: {done}"
        ranks.tell(affected, ("end", 0))


def run(directory: Path, trials: int = 200, seed: int = 0) -> Report:
    """Run so many trials; trial i has the seed SEED/i."""
    report, kinds = Report(), Counter[str]()
    took: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(trials):
        trial = drawn(seed, number, directory)
        name = f"{trial.harm} by {'sockets' if trial.is_tcp else 'shared memory'}"
        kinds[name] += 1
        report.faults += [f"trial {number}, {trial}: {fault}" for fault in perform(trial, took)]
        if (number + 1) % 20 == 0:
            say(f"{number + 1} trials, {len(report.faults)} faults")
    report.lines += [f"{count:5d} x {name}" for name, count in sorted(kinds.items())]
    for harm, seconds in took.items():
        p50, p95 = (quantile(seconds, share) for share in (0.5, 0.95))
        late = sum(it > GOAL_SECONDS for it in seconds)
        report.lines.append(
            f"{harm}: {len(seconds)} ranks ended after p50 {p50 * 1e3:.0f} ms, p95 "
            f"{p95 * 1e3:.0f} ms, at most {max(seconds) * 1e3:.0f} ms"
            + f"; {late} of them after more than {GOAL_SECONDS:g} s"
            * (harm != "stop")
        )
    return report


if __name__ == "__main__":
    main(run)
