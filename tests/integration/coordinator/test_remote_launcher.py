"""Agents on other hosts: what is evidence there, and hosts that do not answer."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from coordinator.agents.launching import AgentStarter
from coordinator.agents.lifecycle import AgentLifecycle
from coordinator.launchers import remote
from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.remote import CommandLauncher, CommandLaunchers
from database.records import AgentRecord
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.interpreter import VERSION
from muster.contracts.job.status import JobUid
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.paths import DataDir, JobFiles
from muster.contracts.settings.services import ServiceSettings
from muster.host.addresses import publish_address, read_coordinator_address
from muster.host.containment import tagged_processes
from muster.host.processes import descendants, environment_of, this_process
from muster.runtime.archive import claim_directory
from muster.runtime.secrets import SecretStore
from stress.frozen_hosts import command_of
from tests.support.hosts import Host, needs_hosts
from tests.support.installation import await_value
from tests.support.launchers import ENVIRON, Scene, agents_of, by_command, local
from tests.support.stories import queued_job
from worker.ranks.start import RankSecrets

DEADLINE_SECONDS = 60.0

SILENT = ("sh", "-c", "sleep 60; exit 1")

VALUES = ("shared", "of a file", "of the store")


def clients() -> list[int]:
    """Return the pids of the programs through which hosts are reached."""
    return [pid for pid in descendants(os.getpid()) if "worker.attach" in command_of(pid)]


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(await_value, condition, lambda: f"clients: {clients()}")


def refusal(root: Path, *command: str) -> str:
    """Return why an agent is not started through a command."""

    async def check() -> str:
        scene = Scene(root, by_command(*command))
        with pytest.raises(NotStarted) as caught:
            await scene.launcher().start(scene.assignment())
        return str(caught.value)

    return asyncio.run(check())


def test_a_broken_line_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.01)

    async def check() -> None:
        async with Scene(tmp_path, by_command("env")) as scene:
            by, assignment = scene.launcher(), scene.assignment()
            agent = await scene.start(by, assignment)
            for _ in range(3):
                broken = clients()
                for pid in broken:
                    os.kill(pid, signal.SIGKILL)
                await until(lambda broken=broken: set(clients()) - set(broken))
                assert not agent.ended.done()
            assert len(agents_of(assignment.job_uid)) == 1
            os.kill(*agents_of(assignment.job_uid), signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert await agent.ended is None

    asyncio.run(check())
    assert clients() == []


def test_an_agent_without_an_answer_may_run(tmp_path: Path) -> None:
    """The connection breaks after the order was given, before the host says that the agent runs."""
    words = "import sys; print(sys.argv[1], flush=True); sys.stdin.readline()"
    ready = json.dumps({"type": "ready", "version": VERSION})

    async def check() -> None:
        command = (sys.executable, "-c", words, ready)
        scene = Scene(tmp_path, by_command(*command))
        by = scene.launcher()
        agent = await by.start(scene.assignment())
        assert agent.record is None
        assert not agent.ended.done()
        by.close()

    asyncio.run(check())


@needs_hosts(network=False)
def test_only_a_host_that_answers_tells_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host loses its power; then it is booted."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.01)
    host, other = Host("gpu-box", tmp_path), Host("other", tmp_path)

    async def check() -> None:
        async with Scene(tmp_path, by_command(*host.prefix)) as scene:
            first, assignment = scene.launcher(), scene.assignment()
            agent = await scene.start(first, assignment)
            await asyncio.to_thread(host.power_off)
            await until(lambda: "No such file" in str(logs))
            assert not agent.ended.done()
            await asyncio.to_thread(host.power_on)
            elsewhere = scene.launcher(by_command(*other.prefix))
            unknown = await elsewhere.adopt(assignment.job_uid, agent.record)
            assert unknown is not None
            await until(lambda: "of gpu-box cannot be seen" in str(logs))
            assert not unknown.ended.done()
            gone = await scene.launcher(by_command(*host.prefix)).adopt(
                assignment.job_uid, agent.record
            )
            assert gone is not None
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert await gone.ended is None
            agent.ended.cancel()

    with capture_logs() as logs:
        asyncio.run(check())
    host.power_off()
    other.power_off()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exec /nowhere/ssh", "/nowhere/ssh: not found"),
        (
            "echo hello; echo first >&2; echo no route >&2; exit 255",
            "cannot be used: hello; no route; try",
        ),
        ("echo This account is not available", "cannot be used: This account is not available; "),
        ("printf 'no commands here'", "cannot be used: no commands here; try"),
        ("head -c 200000 /dev/zero", "its login shell prints too much"),
        ("exit 1", "it wrote no error"),
        ("exec yes", "its login shell prints too much"),
        ("""echo Hello; echo '{"type":"ready","version":"0.0.1"}'""", "it has Muster 0.0.1"),
        ("sleep 60; exit 0", "no answer within 0.5 s"),
    ],
)
def test_a_failed_start_says_where_and_why(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "READY_SECONDS", 0.5)
    message = refusal(tmp_path, "sh", "-c", script)
    assert message.startswith("elsewhere cannot be used: ")
    assert message.endswith(f"; try `sh -c {shlex.quote(script)} true`")
    assert why in message


def test_a_client_that_is_missing_starts_nothing(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path, "/nowhere/ssh")


def test_a_silent_host_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "KILL_SECONDS", 0.1)
    settings = ServiceSettings.read({"MUSTER_DATA_DIR": str(tmp_path)}, cores=2)

    async def holds_lease() -> bool:
        return True

    async def check() -> None:
        async with Scene(tmp_path, local) as scene:
            by, silent = scene.launcher(), scene.launcher(by_command(*SILENT))
            lifecycle = AgentLifecycle(
                AgentStarter(local=by, others={"gpu-box": silent}, settings=settings), holds_lease
            )
            assignment = scene.assignment()
            agent = await scene.start(by, assignment)
            rows = [AgentRecord(host="gpu-box", agent_number=1, process=agent.record)]
            async with asyncio.timeout(DEADLINE_SECONDS):
                job = queued_job(hosts=(LOCAL_HOST, "gpu-box"))
                job = replace(job, uid=JobUid(assignment.job_uid))
                found = await lifecycle.find(job, rows)
                assert set(found) == {LOCAL_HOST, "gpu-box"}
                assert found[LOCAL_HOST].record == agent.record
                await silent.kill(found["gpu-box"])
            assert not found["gpu-box"].ended.done()

    asyncio.run(check())
    assert clients() == []


def test_a_host_that_the_cluster_has_no_more_does_not_answer(tmp_path: Path) -> None:
    async def check() -> None:
        scene = Scene(tmp_path)
        launchers = CommandLaunchers([], ENVIRON, DataDir(tmp_path))
        agent = await launchers["gpu-box"].adopt("uid", None)
        assert agent is not None
        await launchers["gpu-box"].kill(agent)
        with pytest.raises(NotStarted, match="gpu-box is not in the cluster any more"):
            await launchers["gpu-box"].start(scene.assignment())
        assert not agent.ended.done()
        launchers["gpu-box"].close()

    asyncio.run(check())


def test_a_directory_that_two_hosts_share_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        async with Scene(tmp_path, local) as scene:
            by, assignment = scene.launcher(by_command("env")), scene.assignment()
            claim_directory(JobFiles(Path(assignment.job_root)), JobUid(assignment.job_uid))
            with pytest.raises(NotStarted, match="is shared with the coordinator's host"):
                await by.start(assignment)
            assert agents_of(assignment.job_uid) == []

    asyncio.run(check())


def test_a_probe_is_told_what_a_rank_would_find() -> None:
    environ = {**ENVIRON, "OPENBLAS_CORETYPE": "Nehalem"}
    probed = asyncio.run(CommandLauncher("elsewhere", ["env"], environ).probe())
    assert probed.facts.version == VERSION
    assert probed.facts.cpu_cores >= 1
    if probed.facts.machine == "x86_64":
        assert probed.facts.blas_kernel == "Nehalem"


def test_a_host_that_does_not_answer_a_probe_is_named() -> None:
    with pytest.raises(NotStarted, match=r"elsewhere cannot be used: no route; try"):
        asyncio.run(
            CommandLauncher("elsewhere", ["sh", "-c", "echo no route >&2"], ENVIRON).probe()
        )


@needs_hosts(network=False)
def test_a_host_tells_whether_it_shares_the_directory(tmp_path: Path) -> None:
    elsewhere = Host("elsewhere", tmp_path)
    by_host = by_command(*elsewhere.prefix)

    async def check() -> None:
        async with Scene(tmp_path, local) as scene:
            by = scene.launcher(by_host)
            for place, is_shared in [(elsewhere.shared, True), (elsewhere.local, False)]:
                given = scene.assignment()
                assert (await by.probe(place)).is_shared is is_shared
                agent = await by.start(msgspec.structs.replace(given, checkpoint_dir=str(place)))
                log = JobFiles(Path(given.job_root)).storage_log
                if not is_shared:  # its checkpoints are sent
                    await_value(log.exists, lambda: "no storage process")
                await by.kill(agent)
                assert log.exists() is not is_shared
                await_value(lambda place=place: not any(place.iterdir()), lambda: "left behind")

    asyncio.run(check())
    elsewhere.power_off()


@needs_hosts(network=False)
def test_an_agent_needs_some_room_on_its_disk(tmp_path: Path) -> None:
    elsewhere = Host("elsewhere", tmp_path)
    elsewhere.run("mount", "-t", "tmpfs", "-o", "size=32m", "none", str(elsewhere.local))

    async def check() -> None:
        data_dir = str(elsewhere.local)
        by = CommandLauncher("elsewhere", elsewhere.prefix, ENVIRON, data_dir)
        async with Scene(elsewhere.local / "jobs", local) as scene:
            probed = await by.probe()
            assert probed.facts.disk_free_mb == 32
            assert "make room there" in " ".join(probed.facts.warnings())
            with pytest.raises(NotStarted, match="elsewhere cannot start it: only 32 MiB are free"):
                await by.start(scene.assignment())

    asyncio.run(check())
    elsewhere.power_off()


@needs_hosts(network=False)
def test_a_data_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    elsewhere = Host("elsewhere", tmp_path)
    elsewhere.run("mount", "-t", "tmpfs", "-o", "ro", "none", str(elsewhere.local))

    async def check() -> None:
        by = CommandLauncher("elsewhere", elsewhere.prefix, ENVIRON, str(elsewhere.local / "data"))
        why = f"{elsewhere.local}/data cannot be written: set MUSTER_DATA_DIR to "
        probed = await by.probe()
        assert probed.facts is not None
        assert probed.refusal.startswith(why)
        async with Scene(elsewhere.local / "data" / "jobs", local) as scene:
            with pytest.raises(NotStarted, match=f"elsewhere cannot start it: {why}"):
                await by.start(scene.assignment())

    asyncio.run(check())
    elsewhere.power_off()


def test_a_clock_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.time, "time", lambda: time.monotonic() - 100)
    probed = asyncio.run(CommandLauncher("elsewhere", ["env"], ENVIRON).probe())
    assert "s ahead, as the times of its logs are" in " ".join(probed.facts.warnings())


def test_an_older_connection_does_not_change_the_address(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.json"
    with socket.create_server(("127.0.0.1", 0)) as first, ExitStack() as opened:
        second = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        older, newer, next_epoch = (
            CoordinatorAddress(host="127.0.0.1", port=by.getsockname()[1], number=number)
            for by, number in ((first, (3, 4)), (first, (3, 5)), (second, (4, 1)))
        )
        for told, kept in (
            (newer, newer),
            (older, newer),
            (next_epoch, next_epoch),
            (newer, next_epoch),
        ):
            with (
                nullcontext() if told == kept else pytest.raises(OSError, match="newer coordinator")
            ):
                publish_address(told, file)
            assert read_coordinator_address(file) == kept
        opened.close()
        publish_address(newer, file)
        assert read_coordinator_address(file) == newer, "a restored database counts from less"


def test_a_rank_elsewhere_may_live() -> None:
    gone = replace(this_process(), start_ticks=1, node="elsewhere")
    assert local().living([gone]) == frozenset()
    assert by_command("env")().living([gone]) == {gone}


def test_secrets_travel_by_standard_input_only(tmp_path: Path) -> None:
    """The host is a script that keeps what it is sent."""
    kept = tmp_path / "kept"
    SecretStore(tmp_path / "secrets").put("token", "of a file")
    words = (
        "import sys, pathlib, time; print(sys.argv[2], flush=True); "
        "pathlib.Path(sys.argv[1]).write_text(sys.stdin.readline()); time.sleep(60)"
    )
    ready = json.dumps({"type": "ready", "version": VERSION})
    environ = {**ENVIRON, "S3_SECRET_KEY": "of the store"}
    secrets = {"ONE": "env:API_KEY", "TWO": "file:token", "THREE": "file:missing"}

    async def check() -> None:
        scene = Scene(tmp_path)
        given = msgspec.structs.replace(
            scene.assignment(),
            secrets=secrets,
            secrets_dir=str(tmp_path / "secrets"),
            store_keys={},
        )
        command = [sys.executable, "-c", words, str(kept), ready]
        by = CommandLauncher("elsewhere", command, environ)
        starting = asyncio.ensure_future(by.start(given))
        await until(lambda: kept.exists() and kept.read_text().endswith("\n"))
        (client,) = clients()
        seen = f"{environment_of(client)} {command_of(client)}"
        assert not [value for value in VALUES if value in seen]
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        by.close()

    asyncio.run(check())
    assert clients() == []
    order = json.loads(kept.read_text())
    received = msgspec.convert(order["assignment"], AgentAssignment)
    assert received.store_keys == {"S3_SECRET_KEY": "of the store"}
    two = msgspec.structs.replace(
        received, secrets={"ONE": secrets["ONE"], "TWO": secrets["TWO"]}, secrets_dir="/nowhere"
    )
    variables = RankSecrets(two).variables()
    assert (variables["ONE"], variables["TWO"]) == ("shared", "of a file")


class _Ended:
    """An ended job: a part of a log is here, the rest and an exit record on its host."""

    def __init__(self, root: Path) -> None:
        self.here, self.away = (DataDir(root / it).job("done") for it in ("here", "away"))
        for files, text in ((self.here, b"one\n"), (self.away, b"one\ntwo\n")):
            claim_directory(files, JobUid("uid"))
            for directory in (files.logs, files.exits):
                directory.mkdir(parents=True)
            files.log(0, 0).write_bytes(text)
        self.here.log_host(0, 0).symlink_to("elsewhere")
        self.away.times(0, 0).touch()
        self.away.exit_record(0, 0).write_bytes(b"{}")

    def fetch(self, data: Path) -> None:
        launcher = CommandLauncher("elsewhere", ("env",), ENVIRON, str(data))
        asyncio.run(launcher.fetch_logs("uid", self.here))


def test_the_rest_of_an_ended_jobs_logs_is_fetched(tmp_path: Path) -> None:
    job = _Ended(tmp_path)
    job.fetch(tmp_path / "away")
    assert job.here.log(0, 0).read_bytes() == b"one\ntwo\n"
    assert job.here.exit_record(0, 0).read_bytes() == b"{}"
    assert not job.away.root.exists()


def test_a_shared_or_used_directory_stays_on_its_host(tmp_path: Path) -> None:
    job = _Ended(tmp_path)
    with pytest.raises(OSError, match="is shared with the coordinator's host"):
        job.fetch(tmp_path / "here")
    assert job.here.log(0, 0).read_bytes() == b"one\n"
    environ = {**os.environ, PROCESS_TAG: "uid/agent"}
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env=environ) as used:
        await_value(lambda: tagged_processes("uid/"), lambda: "not tagged")
        with pytest.raises(OSError, match="processes of job uid still run"):
            job.fetch(tmp_path / "away")
        used.terminate()
    assert job.away.log(0, 0).read_bytes() == b"one\ntwo\n"
