"""Kills what writes, sends and keeps a copy of the database, at any moment.

``python -m stress.copy_kills [KILLS] [SEED]``: a process writes and waits for its follower, as API
and coordinator do. It, the process that sends its rows and the one that keeps the copy are killed
(SIGKILL) at random, alone or together. No row that was acknowledged may be missing from the copy,
and once it has caught up it equals the original, row by row.
"""

import asyncio
import itertools
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

from database.replication.copy import position_of
from database.replication.messages import CHUNK_BYTES, ToOthers, Unpacker, Wait, pack
from muster.host.processes import module_command
from stress.runner import Report, chance, main, say
from tests.support.copies import WRITES, Writers, content, leading, open_leading

ROUNDS_PER_COMPARISON = 10
LONGEST_LIFE_SECONDS = 0.4
DEADLINE_SECONDS = 60.0


class Machines:
    """A leader and its follower, with a disk each."""

    def __init__(self, directory: Path) -> None:
        self.path, self.copy = directory / "muster.db", directory / "copy" / "muster.db"
        self.copy.parent.mkdir()
        self.socket = directory / "replication.sock"
        self.members = leading(directory)
        self.acknowledged = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, seed: int = 0) -> None:
        """Start a process unless it runs."""
        if name in self.processes:
            return
        if name == "write":
            command = [sys.executable, "-m", "stress.copy_kills", name, str(self.path), str(seed)]
            self.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE)
        elif name == "lead":
            files = map(str, (self.path, self.socket, self.members))
            command = module_command("database.replication", name, *files)
            self.processes[name] = subprocess.Popen(command)
        else:
            with self.connect() as stream:
                self.processes[name] = subprocess.Popen(
                    module_command("database.replication", name, str(self.copy)),
                    stdin=stream,
                    stdout=stream,
                    stderr=subprocess.DEVNULL,
                )

    def connect(self) -> socket.socket:
        """Connect to the process that leads, once it listens."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect(str(self.socket))
            except OSError:
                stream.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return stream

    def await_acknowledgement(self) -> None:
        output = self.processes["write"].stdout
        assert output is not None
        self.acknowledged = int(output.readline())

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
        for name in names:
            process = self.processes.pop(name)
            rest, _ = process.communicate()
            if rest:  # what it wrote before; its last line may be cut
                self.acknowledged = int(rest.rsplit(b"\n", 2)[-2].split()[-1])

    def end(self) -> None:
        """Take the leader away: the follower executes what it has, and ends."""
        self.kill(*self.processes.keys() & {"write", "lead"})
        if follower := self.processes.pop("follow", None):
            follower.wait(DEADLINE_SECONDS)

    def catch_up(self) -> None:
        """Wait until the follower has all rows, and end both."""
        self.start("lead")
        self.start("follow")
        position = position_of(self.path)
        assert position is not None
        unpacker = Unpacker(ToOthers)
        with self.connect() as stream:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while time.monotonic() < deadline:
                stream.send(pack(Wait(position.number)))
                if unpacker.feed(stream.recv(CHUNK_BYTES))[0].is_acknowledged:
                    break
                time.sleep(0.05)
        self.end()


def run(directory: Path, kills: int = 200, seed: int = 0) -> Report:
    """Kill so many times."""
    draw, machines, report = chance(str(seed)), Machines(directory), Report()
    for number in range(1, kills + 1):
        for name in ("write", "lead", "follow"):
            machines.start(name, seed=number)
        machines.await_acknowledgement()
        time.sleep(draw.uniform(0, LONGEST_LIFE_SECONDS))
        victims = draw.sample(["write", "lead", "follow"], draw.randint(1, 3))
        machines.kill(*victims)
        if draw.random() < 0.5:
            machines.end()
            report.faults += missing(machines, f"kill {number} of {victims}")
        if number % ROUNDS_PER_COMPARISON == 0 or number == kills:
            machines.end()
            machines.catch_up()
            if content(machines.copy) != content(machines.path):
                report.faults.append(f"after kill {number} the copy differs")
            say(f"{number} kills, {machines.acknowledged} rows, {len(report.faults)} faults")
    report.lines.append(f"{kills} kills, {machines.acknowledged} rows acknowledged")
    return report


def missing(machines: Machines, when: str) -> list[str]:
    position = position_of(machines.copy)
    if position is not None and position.number >= machines.acknowledged:
        return []
    return [f"{when}: row {machines.acknowledged} was acknowledged, the copy has {position}"]


async def write(path: Path, draw: random.Random) -> None:
    """Write for ever; print the number of each row that is acknowledged."""
    database = open_leading(path)
    assert database.replication is not None
    writers = Writers(database)
    for _ in itertools.count():
        writers.write(draw.choice(sorted(WRITES)), draw.randint(1, 5))
        newest = database.replication.newest.number
        if await database.acknowledge():
            os.write(1, b"%d\n" % newest)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        asyncio.run(write(Path(sys.argv[2]), chance(sys.argv[3])))
    main(run)
