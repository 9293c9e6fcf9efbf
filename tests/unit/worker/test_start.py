"""Errors of starts as the kernel gives them, and the secrets of ranks."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from muster.contracts.job.secrets import SecretUnavailable
from muster.contracts.messages.agent import StartRank
from muster.contracts.messages.assignment import FORKED_PID, AdoptedRank
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import JOB_VARIABLES
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.limits import ShellLimits
from muster.host.processes import counts_waits, environment_of, identify
from muster.runtime.secrets import SecretStore
from tests.support.installation import await_value
from tests.support.secret_rank import LENT, VALUE, assignment, redacted_by
from worker.ranks.start import (
    ExecStarter,
    PreforkStarter,
    RankSecrets,
    is_command_error,
    is_permanent_start_error,
)


def error_of_start(working_dir: str) -> OSError:
    order = StartRank(
        rank=0, attempt=0, environment={PROCESS_TAG: "uid/0/0"}, working_dir=working_dir
    )
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError) as caught:  # noqa: PT011  the caller looks closer
        ExecStarter(ShellLimits(64, 64)).start(order, 2, theirs)
    return caught.value


@pytest.mark.parametrize("working_dir", ["/nowhere/at/all", "/nowhere//at/all/", "/dev/null"])
def test_an_unusable_working_directory_is_permanent(working_dir: str) -> None:
    assert is_permanent_start_error(error_of_start(working_dir), working_dir)


def test_a_too_large_environment_is_permanent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "x" * (1 << 18))
    error = error_of_start("/")
    assert error.errno == errno.E2BIG
    assert is_permanent_start_error(error, "/")


BUSY = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"


@pytest.mark.slow
@pytest.mark.skipif(not counts_waits(), reason="the kernel counts no waits")
def test_imports_have_time_in_which_no_processor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.ranks.start.IMPORT_SECONDS", 0.5)
    monkeypatch.setattr("worker.ranks.start.FORK_SECONDS", 0.05)
    order = StartRank(rank=0, attempt=0, environment={PROCESS_TAG: "uid/0/0"}, working_dir="/")
    ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as opened:
        opened.enter_context(server)
        for _ in range(4):  # the last one is taken for the server
            process = subprocess.Popen([sys.executable, "-S", "-c", BUSY])
            opened.enter_context(process)
            opened.callback(process.kill)
        answer_at = time.monotonic() + 0.5

        def answer_late() -> None:
            if time.monotonic() > answer_at:
                server.send(FORKED_PID.pack(4711))

        starter = PreforkStarter("uid", ShellLimits(64, 64), None, answer_late)
        starter.use(process.pid, ours)
        assert starter.start(order, 2, server) == 4711
        starter.close()


@pytest.mark.parametrize(
    ("job_env", "python"), [({}, sys.executable), ({"PATH": "{root}"}, "another")]
)
def test_python_in_a_command_is_that_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_env: dict[str, str], python: str
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho another\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["python", "-c", "import sys; print(sys.executable)"]
    environment = {
        **{name: value.format(root=tmp_path) for name, value in job_env.items()},
        JOB_VARIABLES["command"]: msgspec.json.encode(command).decode(),
        PROCESS_TAG: "uid/0/0",
    }
    order = StartRank(rank=0, attempt=0, environment=environment, working_dir=str(tmp_path))
    log = tmp_path / "log"
    ours, theirs = socket.socketpair()
    with ours, theirs, log.open("wb") as file:
        pid = ExecStarter(ShellLimits(64, 64)).start(order, file.fileno(), theirs)
        os.waitpid(pid, 0)
    assert log.read_text() == f"{python}\n"


def test_a_missing_interpreter_is_not_permanent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    error = error_of_start("/")
    assert error.errno == errno.ENOENT
    assert not is_permanent_start_error(error, "/")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_lack_of_resources_is_not_permanent(number: int) -> None:
    assert not is_permanent_start_error(OSError(number, os.strerror(number), "/"), "/")
    assert not is_command_error(OSError(number, os.strerror(number), "sh"))


@pytest.mark.parametrize("command", ["/nowhere/at/all", "/dev/null", "/"])
def test_an_unusable_command_is_permanent(command: str) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011  one of several
        subprocess.run([command], check=False)
    assert is_command_error(caught.value)


# Secrets

REFERENCES = {"A": "file:token", "B": "env:LENT"}
NEWER = "a new value, since the old one leaked"
GONE = AdoptedRank(
    rank=0,
    attempt=0,
    process=ProcessRecord(
        pid=2**22 + 1, start_ticks=1, boot_id="boot", node="here", pid_namespace=1
    ),
    process_tag="uid/0/0",
)


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> SecretStore:
    store = SecretStore(tmp_path / "secrets")
    store.put("token", VALUE)
    return store


@contextmanager
def running(environment: dict[str, str]) -> Iterator[AdoptedRank]:
    with subprocess.Popen(["/bin/sleep", "600"], env=environment) as process:
        await_value(lambda: environment_of(process.pid), lambda: "exec has not finished")
        record = identify(process.pid)
        assert record is not None
        try:
            yield AdoptedRank(rank=0, attempt=0, process=record, process_tag="uid/0/0")
        finally:
            process.kill()


def test_a_rank_gets_the_values_of_its_references(tmp_path: Path) -> None:
    secrets = RankSecrets(assignment(tmp_path, **REFERENCES))
    assert secrets.variables() == {"A": VALUE, "B": LENT, "MUSTER_SECRETS": "A,B"}
    assert RankSecrets(assignment(tmp_path)).variables() == {}


def test_secrets_are_read_again_for_each_start(store: SecretStore, tmp_path: Path) -> None:
    secrets = RankSecrets(assignment(tmp_path, A="file:token"))
    secrets.variables()
    store.put("token", NEWER)
    assert secrets.variables()["A"] == NEWER
    store.remove("token")
    with pytest.raises(SecretUnavailable, match="file:token"):
        secrets.variables()
    assert redacted_by(secrets, f"{VALUE}; {NEWER}") == "[secret]; [secret]", "a rank may hold it"


def test_a_variable_that_the_service_does_not_lend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretUnavailable, match=r"env:HOME .* MUSTER_SECRET_ENV"):
        RankSecrets(assignment(tmp_path, A="env:HOME")).variables()


def test_an_adopting_agent_redacts_all_current_values(store: SecretStore, tmp_path: Path) -> None:
    store.put("other", "another value")
    store.remove("token")
    secrets = RankSecrets(assignment(tmp_path, GONE, **REFERENCES, C="file:other"))
    assert redacted_by(secrets, f"another value, {LENT}") == "[secret], [secret]"


def test_an_adopting_agent_redacts_what_ranks_were_started_with(
    store: SecretStore, tmp_path: Path
) -> None:
    variables = RankSecrets(assignment(tmp_path, **REFERENCES)).variables()
    with running(variables) as rank:
        store.put("token", NEWER)
        secrets = RankSecrets(assignment(tmp_path, rank, **REFERENCES))
    assert redacted_by(secrets, f"{VALUE}; {NEWER}; {LENT}") == "[secret]; [secret]; [secret]"


def test_the_environment_of_a_reused_pid_is_ignored(tmp_path: Path) -> None:
    with running({"MUSTER_SECRETS": "A", "A": "of another process"}) as rank:
        reused = msgspec.structs.replace(rank, process=replace(rank.process, start_ticks=1))
        secrets = RankSecrets(assignment(tmp_path, reused, **REFERENCES))
    assert redacted_by(secrets, "of another process") == "of another process"
