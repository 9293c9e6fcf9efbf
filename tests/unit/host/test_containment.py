import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from muster.contracts.settings.names import PROCESS_TAG
from muster.host import containment
from muster.host.containment import (
    can_tag,
    cgroup_of,
    cgroups_of_job,
    kill_attempt,
    kill_cgroup,
    tag_number_of,
    tag_numbers,
)

UID = "5f" * 16
tagging = pytest.mark.skipif(not can_tag(), reason="RLIMIT_LOCKS is limited")


ENCLOSED = """
import os, sys
from muster.host.containment import contain_self
contain_self(sys.argv[1])
{then}
os.setsid()
print("up", flush=True)
os.execve("/bin/sleep", ["sleep", "600"], {{}})
"""


@contextmanager
def enclosed(tag: str, *, then: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run a contained process that leaves its session and its environment.

    `then` is Python that runs after containment.
    """
    command = [sys.executable, "-c", ENCLOSED.format(then=then), tag]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def is_killed(tag: str) -> bool:
    """Return whether it can be killed; one attempt may be too short on a busy machine."""
    return any(kill_attempt(tag) for _ in range(100))


def test_tag_numbers_of_job_and_rank_contain_those_of_attempts() -> None:
    (number,) = tag_numbers(f"{UID}/3/7")
    for containing in (f"{UID}/3", f"{UID}/"):
        assert number in tag_numbers(containing)
    for other in (f"{UID}/4/", f"{UID[1:]}/", f"{UID}/3/8"):
        assert number not in tag_numbers(other)


@pytest.mark.parametrize("place", ["0/0", "4095/1023", "4096/1024"])
def test_tag_numbers_fit_the_kernels_limit(place: str) -> None:
    (number,) = tag_numbers(f"{UID}/{place}")
    assert 1 << 62 <= number < 1 << 63
    assert number in tag_numbers(UID)


def test_tag_numbers_do_not_change() -> None:
    """Processes that were tagged by an earlier release must still be found."""
    assert tag_numbers(f"{UID}/3/7") == range(8717160323146058759, 8717160323146058760)


@pytest.mark.parametrize("place", ["agent", "prefork", "0/0/0"])
def test_only_ranks_have_tag_numbers(place: str) -> None:
    assert not tag_numbers(f"{UID}/{place}")


@pytest.mark.slow
@tagging
@pytest.mark.parametrize(
    "then",
    [
        "",
        "contain_self(sys.argv[1].replace('7', '9'))",
        "import resource; resource.setrlimit(10, (resource.getrlimit(10)[1],) * 2)",
    ],
    ids=["left alone", "tagged again", "limits raised"],
)
def test_a_tag_outlives_environment_session_and_exec(then: str) -> None:
    with enclosed(f"{UID}/3/7", then=then) as process:
        assert tag_number_of(process.pid) in tag_numbers(f"{UID}/3/7")
    for cgroup in cgroups_of_job(UID):
        kill_cgroup(cgroup)


@pytest.mark.slow
def test_killing_an_attempt_spares_the_next_attempt() -> None:
    uid = uuid4().hex
    with enclosed(f"{uid}/1/0") as process, enclosed(f"{uid}/1/1") as other:
        assert is_killed(f"{uid}/1/0")
        assert process.wait() == -signal.SIGKILL
        assert other.poll() is None
        assert is_killed(f"{uid}/1/1")
        assert other.wait() == -signal.SIGKILL
    assert list(cgroups_of_job(uid)) == []


def test_a_copied_environment_counts_only_without_tag_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tag = f"{uuid4().hex}/0/0"
    with subprocess.Popen(["/bin/sleep", "600"], env={PROCESS_TAG: tag}) as process:
        if can_tag():
            assert kill_attempt(tag)
            assert process.poll() is None
        monkeypatch.setattr(containment, "can_tag", lambda: False)
        assert is_killed(tag)
        assert process.wait() == -signal.SIGKILL


def test_killing_a_cgroup_kills_and_removes_nested_cgroups() -> None:
    tag = f"{uuid4().hex}/0/0"
    with enclosed(tag) as process:
        cgroup = cgroup_of(tag)
        if cgroup is None or not cgroup.exists():
            process.kill()
            pytest.skip("cgroup v2 is not delegated")
        (cgroup / "inner").mkdir()
        (cgroup / "inner" / "cgroup.procs").write_text(str(process.pid))
        while not kill_cgroup(cgroup):
            pass
        assert process.wait() == -signal.SIGKILL
    assert not cgroup.exists()
