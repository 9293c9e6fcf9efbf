"""What the sender of logs reads and the receiver writes, without the connection between them."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.agents.log_receiver import CoordinatorLogs
from muster.contracts.messages.logs import LogPart
from muster.contracts.settings.paths import LOG_EPOCH_BYTES, TIME_MARK, JobFiles, LogName
from muster.host.files import KEEP_SIZE, PUNCH_HOLE, fallocate
from muster.logs.log_file import LogFile
from worker.coordinator.log_sender import LogPasses

UID, HOST, ELSEWHERE = "uid", "b", (0, 0)
NAME = LogName(3, 0)
BLOCK = 4096
ROUNDS = 1000


class Cut(Exception):
    """The connection broke."""


def job_files(root: Path) -> JobFiles:
    files = JobFiles(root / "jobs" / "a-job")
    files.logs.mkdir(parents=True)
    files.exits.mkdir(parents=True)
    files.owner.write_text(UID)
    return files


@dataclass
class Away:
    """A rank on another host, its agent there, and the coordinator's files."""

    files: JobFiles
    coordinator: JobFiles
    epoch: int = 0
    passes: LogPasses | None = None
    until_cut: int = -1
    """How many parts still go through; negative: all."""

    @classmethod
    def below(cls, root: Path) -> "Away":
        away = cls(job_files(root / "away"), job_files(root / "coordinator"))
        for path in (away.log, away.times):
            path.touch()
        return away

    @property
    def log(self) -> Path:
        return self.files.log(*NAME.key)

    @property
    def times(self) -> Path:
        return self.files.times(*NAME.key)

    def prints(self, blocks: int, text: bytes) -> None:
        with self.log.open("ab") as log:
            log.write(text * (blocks * BLOCK // len(text) + 1))

    def truncates(self, *_: object) -> None:
        os.truncate(self.log, 0)
        self.epoch += 1

    def is_noted(self, *_: object) -> None:
        size = self.epoch * LOG_EPOCH_BYTES + self.log.stat().st_size
        with self.times.open("ab") as times:
            times.write(TIME_MARK.pack(size, times.tell()))

    def loses_its_beginning(self, blocks: int, *_: object) -> None:
        blocks = min(blocks, self.log.stat().st_size // BLOCK)
        if blocks:  # a running attempt keeps its last block
            with self.log.open("rb+") as log:
                fallocate(log.fileno(), KEEP_SIZE | PUNCH_HOLE, 0, blocks * BLOCK)

    def loses_all(self) -> None:
        with self.log.open("rb+") as log:
            fallocate(log.fileno(), KEEP_SIZE | PUNCH_HOLE, 0, self.log.stat().st_size + BLOCK)

    def sends(self, parts: int, *_: object) -> None:
        """Make a pass, which breaks off after so many parts, unless there are fewer."""
        self.until_cut = parts
        with suppress(Cut):
            self.passes = self.passes or self.connects()
            self.passes.send_new()
            return
        self.passes = None

    def connects(self) -> LogPasses:
        received = CoordinatorLogs(self.coordinator, HOST)
        sizes = {(LogName(*key), kind): size for *key, kind, size in received.sizes(UID, ELSEWHERE)}

        def send(part: LogPart) -> None:
            if self.until_cut == 0:
                raise Cut
            self.until_cut -= 1
            received.keep(part)
            received.keep(part)  # repeated after a full disk

        return LogPasses(self.files, sizes, send, part_bytes=BLOCK // 2)

    def ends(self) -> None:
        self.is_noted()
        self.files.exit_record(*NAME.key).write_bytes(b"how it ended")
        self.arrives()

    def arrives(self) -> None:
        self.until_cut = -1
        self.passes = self.passes or self.connects()
        assert any(not self.passes.send_new() for _ in range(ROUNDS)), "it never comes to rest"


def seen(files: JobFiles) -> Iterator[object]:
    log = LogFile(files, NAME)
    yield log.extent()
    for path in files.log, files.times, files.exit_record:
        yield path(*NAME.key).read_bytes()


ACTS: list[Callable[[Away, int, bytes], None]] = [
    Away.prints,
    Away.prints,
    Away.truncates,
    Away.is_noted,
    Away.loses_its_beginning,
    Away.sends,
    Away.sends,
]
HISTORIES = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 4), st.sampled_from([b"a\n", b"bc\n", b"d"])),
    max_size=30,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HISTORIES)
def test_logs_arrive_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[Callable[..., None], int, bytes]]
) -> None:
    away = Away.below(tmp_path_factory.mktemp("hosts"))
    for act, number, text in history:
        act(away, number, text)
    away.ends()
    assert list(seen(away.coordinator)) == list(seen(away.files))
    away.loses_all()
    away.arrives()
    assert list(seen(away.coordinator)) == list(seen(away.files))


def test_marks_never_come_before_their_bytes(tmp_path: Path) -> None:
    away = Away.below(tmp_path)
    for number in range(20):
        away.prints(1, b"a\n")
        away.is_noted()
        away.sends(number % 3)
        log = LogFile(away.coordinator, NAME)
        assert log.times.size_at(1 << 63) <= log.size()


def test_the_end_is_told_after_the_last_line(tmp_path: Path) -> None:
    away = Away.below(tmp_path)
    away.prints(3, b"a\n")
    away.files.exit_record(*NAME.key).touch()
    away.sends(-1)
    assert not away.coordinator.exit_record(*NAME.key).exists()
    away.ends()
    assert away.coordinator.exit_record(*NAME.key).exists()


def test_an_end_that_a_power_cut_has_taken_goes_there_too(tmp_path: Path) -> None:
    away = Away.below(tmp_path)
    for text in (b"a\n", b"b\n"):
        away.prints(0, text)
        away.is_noted()
    away.ends()
    os.truncate(away.log, 2)
    os.truncate(away.times, TIME_MARK.size)
    away.arrives()
    assert list(seen(away.coordinator)) == list(seen(away.files))


def part_of(name: LogName, **fields: object) -> LogPart:
    values = {"kind": "log", "start": 0, "data": b"x", **fields}
    return LogPart(rank=name.rank, attempt=name.attempt, **values)  # type: ignore[arg-type]


def test_an_attempt_belongs_to_one_host(tmp_path: Path) -> None:
    files = job_files(tmp_path)
    files.log(0, 0).write_bytes(b"of this host")
    CoordinatorLogs(files, "b").keep(part_of(LogName(1, 0), data=b"of b"))
    for rank in range(2):
        CoordinatorLogs(files, "c").keep(part_of(LogName(rank, 0), data=b"of c"))
    assert files.log(0, 0).read_bytes() == b"of this host"
    assert files.log(1, 0).read_bytes() == b"of b"
    assert CoordinatorLogs(files, "b").sizes(UID, ELSEWHERE) == [(1, 0, "log", 4)]
    assert CoordinatorLogs(files, "c").sizes(UID, ELSEWHERE) == []


@pytest.mark.parametrize("link", ["logs", "logs/rank_00003.000.log"])
def test_no_link_is_followed(tmp_path: Path, link: str) -> None:
    files = job_files(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    files.logs.rmdir()
    if link != "logs":
        files.logs.mkdir()
        files.log_host(*NAME.key).symlink_to(HOST)
        elsewhere = elsewhere / "file"
        elsewhere.touch()
    (files.root / link).symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        CoordinatorLogs(files, HOST).keep(part_of(NAME))
    assert elsewhere.is_dir() or not elsewhere.read_bytes()
    assert not elsewhere.is_dir() or not list(elsewhere.iterdir())


def test_files_of_another_job_are_left_alone(tmp_path: Path) -> None:
    files = job_files(tmp_path)
    files.owner.write_text("another")
    with pytest.raises(OSError, match="belongs to another one"):
        CoordinatorLogs(files, HOST).sizes(UID, ELSEWHERE)


def test_a_shared_directory_is_refused(tmp_path: Path) -> None:
    files = job_files(tmp_path)
    owner = files.owner.stat()
    with pytest.raises(OSError, match="same data directory"):
        CoordinatorLogs(files, HOST).sizes(UID, (owner.st_ino, owner.st_mtime_ns))
