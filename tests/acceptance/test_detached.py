"""`muster up -d`, `status` and `down`: services without a terminal."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cli.errors import ExitCode
from cli.services.record import ServiceRecord, read_record
from database.engine import Database
from database.tokens import Tokens
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import DEFAULT_PORT
from muster.contracts.token import Scope
from muster.host.containment import tagged_processes
from muster.host.files import LOG_LIMIT_BYTES
from muster.host.ports import free_port
from muster.host.processes import is_running, send_signal
from tests.support.certificates import key_of, needs_openssl, own_certificate
from tests.support.installation import DEADLINE_SECONDS, await_value, without_ours
from tests.support.marks import long
from tests.support.services import child_service

SLEEPER = "import time; time.sleep(600)"

NO_DATABASE = "sqlite:////proc/none/muster.db"


class Shell:
    """A data directory, and the commands that are typed for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = DataDir(root / "data")
        self.environ = {
            **without_ours(os.environ),
            "MUSTER_DATA_DIR": str(self.files.root),
            "MUSTER_PORT": str(free_port()),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", *words],
            cwd=self.root,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "cli", *words],
            cwd=self.root,
            env={**self.environ, **more},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    def up(self, **more: str) -> str:
        """Start the services, which has to succeed; return what it printed."""
        ended = self.run("up", "-d", **more)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    def record(self) -> ServiceRecord:
        record = read_record(self.files)
        assert record is not None, "it is not up"
        return record

    def status(self) -> tuple[int, Any]:
        ended = self.run("status", "-o", "json")
        return ended.returncode, json.loads(ended.stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.run("down")


def test_services_come_up_and_go_down_without_a_terminal(shell: Shell) -> None:
    printed = shell.up()
    record = shell.record()
    assert f"ready at {record.url}, with its data in {shell.files.root}" in printed
    assert f"export MUSTER_DATA_DIR={shell.files.root}\n" in printed

    assert (
        shell.up() == f"muster: up already, at {record.url}, with its data in {shell.files.root}\n"
    )
    assert shell.record() == record

    # The data directory is enough to find the port.
    words = ["submit", "-d", "--id", "sleeper", "-n", "1", "--", sys.executable, "-c", SLEEPER]
    submitted = shell.run(*words, MUSTER_PORT="")
    assert submitted.returncode == 0, submitted.stderr
    code, status = shell.status()
    assert (code, status["status"]) == (0, "ok")
    assert status["version"]["data_dir"] == str(shell.files.root)
    assert status["up"]["log"] == str(shell.files.services_log)
    assert sum(status["jobs"].values()) == 1
    uid = shell.files.job("sleeper").owner.read_text().strip()

    with shell.files.services_log.open("ab") as log:
        log.write(b"a line\n" * (LOG_LIMIT_BYTES // 4))
    rotated = Path(f"{shell.files.services_log}.1")
    await_value(rotated.exists, lambda: "the log is not rotated while it is written")

    down = shell.run("down")
    assert down.returncode == 0, down.stderr
    assert "ranks checkpoint and exit …" in down.stderr
    assert not is_running(record.process)
    assert not tagged_processes(f"{uid}/")
    assert "the job resumes at the next start" in shell.files.services_log.read_text()

    twice = shell.run("down")
    assert twice.returncode == 0
    assert twice.stderr.startswith(f"nothing runs for {shell.files.root};")
    code, status = shell.status()
    assert (code, status["status"], status["up"]) == (3, "down", None)


def test_command_waits_while_up_restarts_the_api(shell: Shell) -> None:
    shell.up()
    up = shell.record().process
    send_signal(up, signal.SIGSTOP)  # so that the restart takes long
    api = child_service(up.pid, "api")
    assert api is not None
    send_signal(api, signal.SIGKILL)
    with shell.start("ps") as ps:
        assert ps.stderr is not None
        notice = ps.stderr.readline()
        send_signal(up, signal.SIGCONT)
        assert notice.startswith("muster: waiting for the API at ")
        assert ps.wait(DEADLINE_SECONDS) == 0, ps.stderr.read()

    # Commands also work in a directory that was removed.
    gone = shell.root / "gone"
    gone.mkdir()
    ended = subprocess.run(
        ["/bin/sh", "-c", f'cd {gone} && rmdir {gone} && exec "$0" -P -m cli ps', sys.executable],
        env=shell.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "no jobs; submit one: muster submit --help\n")


def test_two_concurrent_ups_both_return_once_services_are_ready(shell: Shell) -> None:
    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(lambda _: shell.run("up", "-d"), range(2)))
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    assert all(f" at {shell.record().url}, " in one.stderr for one in ended)


def test_default_port_that_is_taken_is_replaced(shell: Shell) -> None:
    host = str(IPv4Address("127.0.0.0") + os.getpid())  # one that no other test uses
    with ExitStack() as stack:
        with suppress(OSError):  # another process may have it, at every address
            stack.enter_context(socket.create_server((host, DEFAULT_PORT)))
        printed = shell.up(MUSTER_HOST=host, MUSTER_PORT="")
    port = urlsplit(shell.record().url).port
    assert port != DEFAULT_PORT
    assert f"ready at http://{host}:{port}, " in printed


def test_requiring_tokens_without_an_admin_says_what_to_do(shell: Shell) -> None:
    shell.files.root.mkdir()
    with closing(Database.open(shell.files.root / "muster.db")) as database:
        Tokens(database).create("ci", Scope.SUBMIT, lifetime=None, created_by=None)
    strict, lax = ({"MUSTER_REQUIRE_TOKEN": word} for word in "10")
    printed = shell.up(**strict)
    assert "no admin token is valid" in printed
    assert "\nexport MUSTER_TOKEN=…\n" in printed
    refused = shell.run("token", "create", "me", "--scope", "admin", **strict)
    assert refused.returncode == ExitCode.NOT_ALLOWED
    assert "export MUSTER_TOKEN=mst_…" in refused.stderr
    code, status = shell.status()
    assert (code, status["status"]) == (ExitCode.NOT_ALLOWED, "ok")
    assert "export MUSTER_TOKEN=mst_…" in status["refusal"]

    # The way out that all of them name.
    way = "MUSTER_REQUIRE_TOKEN=0 muster up -d; muster token create NAME --scope admin"
    assert all(way in text for text in (printed, refused.stderr, status["refusal"]))
    shell.run("down")
    shell.up(**lax)
    token = shell.run("token", "create", "me", "--scope", "admin").stdout.strip()
    shell.run("down")
    assert "admin" not in shell.up(**strict)
    assert shell.run("token", "revoke", "ci", MUSTER_TOKEN=token).returncode == 0


@needs_openssl
@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        ("IP:127.0.0.1", ExitCode.OK, ""),
        ("DNS:train.example", ExitCode.UNREACHABLE, "Set MUSTER_URL to a name"),
    ],
)
def test_self_signed_certificate_works_for_local_services(
    shell: Shell, name: str, code: ExitCode, sentence: str
) -> None:
    certificate = own_certificate(shell.root, name)
    tls = {"MUSTER_TLS_CERTFILE": certificate.name, "MUSTER_TLS_KEYFILE": key_of(certificate).name}
    assert f"export MUSTER_CA_FILE={certificate}\n" in shell.up(**tls)
    for verb in ("status", "ps"):
        ended = shell.run(verb)
        assert (ended.returncode, sentence in ended.stderr) == (code, True), ended.stderr


def test_services_that_do_not_come_up_say_why(shell: Shell) -> None:
    ended = shell.run("up", "-d", MUSTER_DATABASE_URL=NO_DATABASE)
    assert ended.returncode == 1
    log = shell.files.services_log
    assert f"muster: the services did not come up; their log is {log}:\n" in ended.stderr
    assert "cannot create the database /proc/none/muster.db" in ended.stderr
    assert not shell.files.services_record.exists()


@pytest.mark.parametrize("words", [long(("up",)), ("up", "-d")], ids=" ".join)
@pytest.mark.parametrize(
    ("environ", "code", "word"),
    [
        ({"MUSTER_HOST": "0.0.0.0"}, 1, "0.0.0.0"),  # noqa: S104  it is refused
        ({"MUSTER_DATABASE_URL": "postgresql://me:hunter2secretpw"}, 1, "database"),
        ({"MUSTER_DATA_DIR": "a-file"}, 2, "cannot hold the data ("),
    ],
    ids=["open without TLS", "no database", "no directory"],
)
def test_up_is_refused_before_anything_starts(
    shell: Shell, words: tuple[str, ...], environ: dict[str, str], code: int, word: str
) -> None:
    (shell.root / "a-file").touch()
    ended = shell.run(*words, **environ)
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1), ended.stderr
    assert word in ended.stderr
    assert "hunter2" not in ended.stderr
    assert not (shell.files.root / "muster.db").exists()
