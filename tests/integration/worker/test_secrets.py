"""What an agent that takes over knows of the secrets that living ranks hold."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from secret_rank import LENT, VALUE, assignment, told_by

from muster.contracts.agent import AdoptedRank
from muster.processes import identify
from muster.safe import Safe
from worker.secrets import Secrets

HELD = {"A": "file:token", "B": "env:LENT"}
NEWER = "a new one, since the old one leaked"


@pytest.fixture
def safe(tmp_path: Path) -> Safe:
    safe = Safe(tmp_path / "secrets")
    safe.put("token", VALUE)
    return safe


@contextmanager
def living(environment: dict[str, str]) -> Iterator[AdoptedRank]:
    with subprocess.Popen(["/bin/sleep", "600"], env=environment) as process:
        record = identify(process.pid)
        assert record is not None
        try:
            yield AdoptedRank(rank=0, incarnation=0, process=record, mark="uid/0/0")
        finally:
            process.kill()


def test_it_knows_what_a_living_rank_got_before_it_was_replaced(safe: Safe, tmp_path: Path) -> None:
    got = Secrets.of(assignment(tmp_path, **HELD)).variables()
    with living(got) as rank:
        safe.put("token", NEWER)
        secrets = Secrets.of(assignment(tmp_path, rank, **HELD))
    told = told_by(secrets, f"{VALUE}; {NEWER}; {LENT}")
    assert told == "[secret]; [secret]; [secret]"


@pytest.mark.usefixtures("safe")
def test_a_process_that_is_no_rank_of_ours_teaches_nothing(tmp_path: Path) -> None:
    with living({"MUSTER_SECRETS": "A", "A": "of another process"}) as rank:
        other = replace(rank.process, start_ticks=1)
        stranger = msgspec.structs.replace(rank, process=other)
        secrets = Secrets.of(assignment(tmp_path, stranger, **HELD))
    assert told_by(secrets, "of another process") == "of another process"
