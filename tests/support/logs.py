"""Logs as ranks and their agent write them."""

from muster.contracts.settings.paths import TIME_MARK, JobFiles
from muster.logs.follower import JobFollower
from muster.logs.source import IsOver, Position


class JobLogs:
    """Writes the logs of one job and the times beside them."""

    def __init__(self, files: JobFiles) -> None:
        self.files = files

    def write(
        self, rank: int, text: str, *, at_micros: int | None = None, attempt: int = 0
    ) -> None:
        """Add to a log; without `at_micros` it is not known yet when that was."""
        self.files.logs.mkdir(parents=True, exist_ok=True)
        with self.files.log(rank, attempt).open("ab") as log:
            log.write(text.encode())
            size = log.tell()
        if at_micros is not None:
            with self.files.times(rank, attempt).open("ab") as times:
                times.write(TIME_MARK.pack(size, at_micros))


def is_always(_name: object) -> bool:
    return True


def is_never(_name: object) -> bool:
    return False


def batches(follower: JobFollower, is_over: IsOver = is_always) -> list[tuple[list[str], Position]]:
    """Return the rest: each batch's lines, after their ranks, with the position after it."""
    found = []
    while batch := follower.next_batch(is_over):
        texts = [f"{lines.name.rank} {text}" for lines in batch for text in lines.text.split("\n")]
        found.append((texts, follower.position))
    return found


def rest_of(follower: JobFollower, is_over: IsOver = is_always) -> list[str]:
    """Return all lines that are left, each after its rank."""
    return [line for lines, _ in batches(follower, is_over) for line in lines]
