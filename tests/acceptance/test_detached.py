"""`muster up -d`, `status` and `down`: services without a terminal."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.support.kept_services import kept_by

from cli.errors import ExitCode
from cli.service_record import ServiceRecord, service_lock
from cli.services import LOG_LIMIT_BYTES
from muster.contracts.paths import DataDir
from muster.contracts.settings import DEFAULT_PORT
from muster.host.containment import tag_of, tagged_processes
from muster.host.ports import free_port
from muster.host.processes import is_running, send_signal, this_process
from tests.support.certificates import key_of, needs_openssl, own_certificate
from tests.support.installation import DEADLINE_SECONDS, await_value, without_ours

SLEEPER = "import time; time.sleep(600)"

NOWHERE = "sqlite:////proc/none/muster.db"

BEGINNER = """
import signal, sys
from pathlib import Path
from cli.service_record import service_lock
from muster.contracts.paths import DataDir

with service_lock(DataDir(Path(sys.argv[1]))) as office:
    print("begins", flush=True)
    sys.stdin.readline() or sys.exit()
    office.publish("http://127.0.0.1:9", (), None)
    signal.pause()
"""
"""A `muster up` that takes long to find its place."""


class House:
    """A data directory, and what a person types for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = DataDir(root / "data")
        self.environ = {
            **without_ours(os.environ),
            "MUSTER_DATA_DIR": str(self.files.root),
            "MUSTER_PORT": str(free_port()),
        }

    def begin(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Let a person type it, who hears what it says as it says it."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", *words],
            cwd=self.root,
            env={**self.environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def say(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "cli", *words],
            cwd=self.root,
            env={**self.environ, **more},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    def holder(self) -> ServiceRecord:
        return msgspec.json.decode(self.files.keeper.read_bytes(), type=ServiceRecord)

    def status(self) -> tuple[int, Any]:
        said = self.say("status", "-o", "json")
        return said.returncode, json.loads(said.stdout)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.say("down")


def test_services_come_up_and_go_down_without_a_terminal(house: House) -> None:
    up = house.say("up", "-d")
    assert up.returncode == 0, up.stderr
    holder = house.holder()
    assert f"ready at {holder.url}, with its data in {house.files.root}" in up.stderr
    assert f"export MUSTER_DATA_DIR={house.files.root}\n" in up.stderr

    again = house.say("up", "-d")
    assert (again.returncode, house.holder()) == (0, holder)
    assert again.stderr == (
        f"muster: up already, at {holder.url}, with its data in {house.files.root}\n"
    )

    # The data directory is enough to find the port.
    words = ["submit", "-d", "--id", "sleeper", "-n", "1", "--", sys.executable, "-c", SLEEPER]
    submitted = house.say(*words, MUSTER_PORT="")
    assert submitted.returncode == 0, submitted.stderr
    await_value(lambda: house.status()[1]["agents"] == {"running": 1}, lambda: str(house.status()))
    code, standing = house.status()
    assert (code, standing["status"]) == (0, "ok")
    assert standing["version"]["data_dir"] == str(house.files.root)
    assert standing["up"]["log"] == str(house.files.keeper_log)
    assert sum(standing["jobs"].values()) == 1
    uid = house.files.job("sleeper").owner.read_text().strip()

    (agent,) = [one for one in tagged_processes(f"{uid}/") if tag_of(one.pid) == f"{uid}/agent"]
    send_signal(agent, signal.SIGSTOP)
    code, standing = house.status()
    send_signal(agent, signal.SIGCONT)
    assert (code, standing["status"], standing["agents"]) == (1, "degraded", {"stopped": 1})

    down = house.say("down")
    assert down.returncode == 0, down.stderr
    assert down.stderr.splitlines()[0] == "ranks checkpoint and exit …"
    assert not is_running(holder.process)
    assert not tagged_processes(f"{uid}/")
    assert "the job resumes at the next start" in house.files.keeper_log.read_text()

    twice = house.say("down")
    assert twice.returncode == 0
    assert twice.stderr.startswith(f"nothing runs for {house.files.root};")
    code, standing = house.status()
    assert (code, standing["status"], standing["up"]) == (3, "down", None)


def test_a_command_waits_while_its_own_up_starts_the_api_again(house: House) -> None:
    assert house.say("up", "-d").returncode == 0
    holder = house.holder()
    send_signal(holder.process, signal.SIGSTOP)  # so it takes as long as it does on no machine
    api = kept_by(holder.process.pid, "api")
    assert api is not None
    send_signal(api, signal.SIGKILL)
    with house.begin("ps") as ps:
        assert ps.stderr is not None
        heard = ps.stderr.readline()
        send_signal(holder.process, signal.SIGCONT)
        assert heard.startswith(
            f"muster: waiting until `muster up` (process {holder.process.pid}) has restarted "
        )
        assert ps.wait(DEADLINE_SECONDS) == 0, ps.stderr.read()
    assert_commands_work_in_a_removed_directory(house)


def assert_commands_work_in_a_removed_directory(house: House) -> None:
    gone = house.root / "gone"
    gone.mkdir()
    ps = subprocess.run(
        ["/bin/sh", "-c", f'cd {gone} && rmdir {gone} && exec "$0" -P -m cli ps', sys.executable],
        env=house.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ps.returncode, ps.stderr) == (0, "no jobs; submit one: muster submit --help\n")


def test_two_concurrent_ups_both_return_once_services_are_ready(house: House) -> None:
    with ThreadPoolExecutor(2) as both:
        said = list(both.map(lambda _: house.say("up", "-d"), range(2)))
    assert [one.returncode for one in said] == [0, 0], [one.stderr for one in said]
    assert all(f" at {house.holder().url}, " in one.stderr for one in said)


def test_a_concurrent_up_that_fails_is_not_taken_for_services(house: House) -> None:
    with ExitStack() as first:
        first.enter_context(service_lock(house.files)).publish("http://127.0.0.1:9", (), None)
        with house.begin("up", "-d") as second:
            assert second.stderr is not None
            first.close()
            said = second.stderr.read()
    assert second.returncode == 0, said
    assert f"muster: ready at {house.holder().url}, " in said
    assert house.status()[0] == 0


def test_down_waits_for_a_starting_up_and_ends_it(house: House) -> None:
    beginner = [sys.executable, "-c", BEGINNER, str(house.files.root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(beginner, **pipes) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "begins\n"
        with house.begin("down") as down:
            assert down.stderr is not None
            heard = down.stderr.readline()
            first.stdin.write("\n")
            first.stdin.flush()
            said = down.stderr.read()
    assert heard == f"muster: waiting for a `muster up` that starts in {house.files.root} …\n"
    assert (down.returncode, first.returncode) == (0, -signal.SIGTERM), said
    assert said.startswith("ranks checkpoint and exit …\n")


def test_down_waits_for_a_starting_up_that_gives_up(house: House) -> None:
    with ExitStack() as first:
        first.enter_context(service_lock(house.files))
        with house.begin("down") as down:
            assert down.stderr is not None
            heard = down.stderr.readline()
            first.close()
            said = down.stderr.read()
    assert heard.startswith("muster: waiting for a `muster up` that starts")
    assert down.returncode == 0
    assert said.startswith(f"nothing runs for {house.files.root};")


def test_a_url_that_is_none_is_not_repeated_beside_services_that_are_up(house: House) -> None:
    with service_lock(house.files) as office:
        office.publish("http://127.0.0.1:9", (), None)
        said = house.say("status", MUSTER_URL="http://me:hunter2secretpw")
    assert (said.returncode, said.stderr.count("\n")) == (2, 1)
    assert "is not a URL such as" in said.stderr
    assert "hunter2" not in said.stderr


def test_the_usual_port_being_taken_is_told_to_the_terminal(house: House) -> None:
    host = "127.0.0.2"  # a loopback address that no other test uses
    with ExitStack() as stack:
        with suppress(OSError):  # another process may have it, at every address
            stack.enter_context(socket.create_server((host, DEFAULT_PORT)))
        up = house.say("up", "-d", MUSTER_HOST=host, MUSTER_PORT="")
    assert up.returncode == 0, up.stderr
    port = urlsplit(house.holder().url).port
    assert port != DEFAULT_PORT
    assert f"ready at http://{host}:{port}, " in up.stderr


@pytest.mark.parametrize("words", [("up",), ("up", "-d")], ids=" ".join)
def test_an_open_door_is_refused_before_anything_starts(
    words: tuple[str, ...], house: House
) -> None:
    up = house.say(*words, MUSTER_HOST="0.0.0.0")  # noqa: S104  it is refused
    assert (up.returncode, up.stderr.count("\n")) == (1, 1)
    assert "0.0.0.0" in up.stderr  # noqa: S104
    assert not (house.files.root / "muster.db").exists()


def test_a_broken_setting_of_the_client_does_not_keep_services_up(house: House) -> None:
    assert house.say("up", "-d").returncode == 0
    holder = house.holder()
    down = house.say("down", MUSTER_TOKEN="of an\x01 invalid kind")  # noqa: S106  no token
    assert down.returncode == 0, down.stderr
    assert not is_running(holder.process)


def test_requiring_tokens_without_an_admin_says_what_to_do(house: House) -> None:
    assert house.say("up", "-d").returncode == 0
    assert house.say("token", "create", "ci", "--scope", "submit").returncode == 0
    house.say("down")
    strict, lax = ({"MUSTER_REQUIRE_TOKEN": word} for word in "10")
    up = house.say("up", "-d", **strict)
    assert up.returncode == 0, up.stderr
    assert "no admin token is valid" in up.stderr
    assert "\nexport MUSTER_TOKEN=…\n" in up.stderr
    refused = house.say("token", "create", "me", "--scope", "admin", **strict)
    assert refused.returncode == ExitCode.NOT_ALLOWED
    assert "export MUSTER_TOKEN=mst_…" in refused.stderr
    code, standing = house.status()
    assert (code, standing["status"]) == (ExitCode.NOT_ALLOWED, "ok")
    assert standing["up"]["process"]["pid"] == house.holder().process.pid
    assert "export MUSTER_TOKEN=mst_…" in standing["refusal"]

    # The way out that all of them name.
    way = "MUSTER_REQUIRE_TOKEN=0 muster up -d; muster token create NAME --scope admin"
    assert all(way in told for told in (up.stderr, refused.stderr, standing["refusal"]))
    house.say("down")
    assert house.say("up", "-d", **lax).returncode == 0
    text = house.say("token", "create", "me", "--scope", "admin").stdout.strip()
    house.say("down")
    assert "admin" not in house.say("up", "-d", **strict).stderr
    assert house.say("token", "revoke", "ci", MUSTER_TOKEN=text).returncode == 0


@needs_openssl
@pytest.mark.parametrize(
    ("name", "status", "note"),
    [("IP:127.0.0.1", "ok", None), ("DNS:train.example", "degraded", "Set MUSTER_URL to a name")],
)
def test_a_self_signed_certificate_works_for_local_services(
    house: House, name: str, status: str, note: str | None
) -> None:
    certificate = own_certificate(house.root, name)
    tls = {"MUSTER_TLS_CERTFILE": certificate.name, "MUSTER_TLS_KEYFILE": key_of(certificate).name}
    up = house.say("up", "-d", **tls)
    assert up.returncode == 0, up.stderr
    assert f"export MUSTER_CA_FILE={certificate}\n" in up.stderr
    _, standing = house.status()
    assert (standing["status"], standing["up"]["url"]) == (status, house.holder().url)
    assert house.say("ps").returncode == (0 if status == "ok" else ExitCode.UNREACHABLE)
    assert (note or "None") in str(standing["doubt"])


def test_a_long_log_is_begun_anew_and_the_one_before_is_kept(house: House) -> None:
    house.files.root.mkdir(parents=True)
    with house.files.keeper_log.open("wb") as log:
        log.truncate(LOG_LIMIT_BYTES + 1)
    assert house.say("up", "-d", MUSTER_DATABASE_URL=NOWHERE).returncode == 1
    assert house.files.keeper_log.stat().st_size < LOG_LIMIT_BYTES
    assert Path(f"{house.files.keeper_log}.1").stat().st_size == LOG_LIMIT_BYTES + 1


def test_services_that_do_not_come_up_say_why(house: House) -> None:
    up = house.say("up", "-d", MUSTER_DATABASE_URL=NOWHERE)
    assert up.returncode == 1
    assert (
        f"muster: the services did not come up; their log is {house.files.keeper_log}:\n"
    ) in up.stderr
    assert "cannot create the database /proc/none/muster.db" in up.stderr
    assert not house.files.keeper.exists()


@pytest.mark.parametrize("words", [("up",), ("up", "-d")], ids=" ".join)
def test_a_url_that_names_no_database_is_refused_before_anything_is_started(
    words: tuple[str, ...], house: House
) -> None:
    up = house.say(*words, MUSTER_DATABASE_URL="postgresql://me:hunter2secretpw")
    assert (up.returncode, up.stderr.count("\n")) == (1, 1)
    assert "hunter2" not in up.stderr
    assert not house.files.root.exists()


@pytest.mark.parametrize("words", [("up",), ("up", "-d")], ids=" ".join)
def test_a_place_where_there_can_be_no_data_is_a_sentence(
    words: tuple[str, ...], house: House
) -> None:
    house.files.root.write_text("a file")
    up = house.say(*words)
    assert (up.returncode, up.stderr.count("\n")) == (2, 1)
    assert up.stderr.startswith(f"muster: {house.files.root} cannot hold the data (")
    assert house.files.root.read_text() == "a file"


def test_a_stale_record_does_not_end_a_process_with_its_pid(house: House) -> None:
    ours = this_process()
    house.files.root.mkdir(parents=True)
    gone = replace(ours, start_ticks=ours.start_ticks - 1)
    record = ServiceRecord(url="http://127.0.0.1:9", process=gone, log=None, is_ending=False)
    house.files.keeper.write_bytes(msgspec.json.encode(record))
    down = house.say("down")  # a signal would end this test
    assert down.returncode == 0
    assert down.stderr.startswith(f"nothing runs for {house.files.root};")
