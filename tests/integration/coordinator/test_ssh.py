"""The SSH connections of a coordinator: agents connect through them, and they end with it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.remote import CommandLaunchers
from coordinator.launchers.ssh import SocketDirectory
from muster.cluster.description import ClusterNode
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.settings.paths import DataDir
from muster.host.addresses import read_coordinator_address
from muster.host.processes import descendants
from stress.frozen_hosts import command_of
from tests.support.clusters import (
    AGENT_PORT,
    SSHD,
    ClusterInstallation,
    cluster,
    needs_cluster,
    ssh_client,
    sshd_config,
)
from tests.support.installation import await_value, pids
from tests.support.launchers import ENVIRON, Scene, agents_of

pytestmark = needs_cluster()

MASTER = "ControlMaster=yes"


def clients(installation: ClusterInstallation, kind: str = "/ssh -F ") -> dict[int, str]:
    """Return the ssh processes on the coordinator's host."""
    here, *_ = installation.machines
    found = {pid: command_of(pid) for pid in here.processes()}
    return {pid: words for pid, words in found.items() if kind in words}


def wait_until_seen(installation: ClusterInstallation, job_id: str) -> dict[str, object]:
    """Return the job once all of its ranks were seen after this call."""
    began = time.monotonic()

    def is_seen(seen: dict[str, list[dict[str, float]]]) -> bool:
        ages = [it["last_heartbeat_age_seconds"] for it in seen["workers"]]
        return max(ages) < time.monotonic() - began - 1.0

    return installation.wait_until(job_id, is_seen)


def test_agents_reach_the_coordinator_through_ssh(tmp_path: Path) -> None:
    with cluster(tmp_path, MUSTER_AGENT_ADDRESS="") as installation:
        job_id = installation.submit(
            mode="synchronous", world_size=6, min_workers=6, epochs=60, sleep_sec=0.02
        )
        before = installation.wait_until(job_id, lambda seen: seen["step"] > 3)
        masters = clients(installation, MASTER)
        assert len(masters) == 2
        logs = [host.log for host in installation.machines[1:]]
        assert [log.read_text().count("Accepted publickey") for log in logs] == [1, 1]
        for pid in masters:
            os.kill(pid, signal.SIGKILL)
        await_value(
            lambda: len(set(clients(installation, MASTER)) - set(masters)) == 2,
            lambda: f"{clients(installation)}",
        )
        wait_until_seen(installation, job_id)
        installation.coordinator.end(signal.SIGKILL)
        await_value(lambda: not clients(installation), lambda: f"{clients(installation)}")
        first, *_ = installation.machines
        for address in ("", f"{first.address}:{AGENT_PORT}"):
            installation.coordinator.environment["MUSTER_AGENT_ADDRESS"] = address
            installation.coordinator.start()
            adopted = wait_until_seen(installation, job_id)
            assert pids(adopted) == pids(before)
            if not address:
                installation.coordinator.end(signal.SIGKILL)
        ended = installation.complete(job_id)
        kinds = installation.kinds(job_id)
        assert (ended["restarts"], kinds.count("rank_started")) == (0, 6)
        assert "agent_lost" not in kinds
        installation.coordinator.end(signal.SIGTERM)
        await_value(lambda: not clients(installation), lambda: f"{clients(installation)}")
        installation.coordinator.start()


class Sshd:
    """An sshd on a port of this machine, which its client calls ``gpu-box``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._client = ssh_client(root)
        self.coordinator = socket.create_server(("127.0.0.1", 0))
        self.data = DataDir(root / "data")

    def start(self, lines: str = "", client: str = "") -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        lines = f"Port {port}\nListenAddress 127.0.0.1\n{lines}"
        config = sshd_config(self._root, self._root, lines=lines)
        self._process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(config)])
        await_value(lambda: _answers(port), lambda: "no sshd")
        self.configure(port, client)

    def configure(self, port: int, client: str = "") -> None:
        file = self._client / "config"
        words = f"HostName 127.0.0.1\nHostKeyAlias gpu-box\nPort {port}\n{client}\n"
        file.write_text(f"Host gpu-box\n{words}\nHost *\n{file.read_text()}")

    def launchers(self, host: str = "gpu-box") -> CommandLaunchers:
        environ = {**ENVIRON, "PATH": f"{self._client}:{os.environ['PATH']}"}
        node = ClusterNode(name="elsewhere", host=host, user="root", transport="ssh")
        port = self.coordinator.getsockname()[1]
        address = CoordinatorAddress(host="127.0.0.1", port=port, number=(7, 0))
        return CommandLaunchers([node], environ, self.data, address)

    def problem(self, host: str = "gpu-box") -> str:
        """Return why the host cannot be used."""

        async def check() -> str:
            with closing(self.launchers(host)) as launchers:
                with pytest.raises(NotStarted) as caught:
                    await launchers["elsewhere"].probe()
                return str(caught.value)

        return asyncio.run(check())

    def close(self) -> None:
        self.coordinator.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with closing(Sshd(tmp_path)) as made:
        yield made


NO_KEY = (
    "it takes no key that ssh has: run `ssh-add` if yours has a passphrase, otherwise "
    "`ssh-copy-id root@gpu-box`"
)


@pytest.mark.parametrize(
    ("lines", "client", "why"),
    [
        ("AuthorizedKeysFile none", "", NO_KEY),
        (
            "AuthenticationMethods publickey,password\nPasswordAuthentication yes",
            "",
            "it wants more than a key (password): set AuthenticationMethods publickey for",
        ),
        ("AllowTcpForwarding no", "", "it forwards no port: set AllowTcpForwarding yes"),
        (
            "",
            "StrictHostKeyChecking yes",
            "its host key is not known: log in by hand and compare it",
        ),
        (
            "",
            "StrictHostKeyChecking yes\nUserKnownHostsFile {root}/known",
            "its host key has changed: if it should, ",
        ),
        ("ForceCommand exit 1", "", "it wrote no error"),
        ("ForceCommand echo no commands here", "", "no commands here; "),
        ("ForceCommand yes", "", "its login shell prints too much"),
    ],
)
def test_what_a_host_refuses_is_a_sentence(
    sshd: Sshd, tmp_path: Path, lines: str, client: str, why: str
) -> None:
    other = (tmp_path / "ssh" / "key.pub").read_text()
    (tmp_path / "known").write_text(f"gpu-box {other}")
    sshd.start(lines, client.format(root=tmp_path))
    problem = sshd.problem()
    assert problem.startswith(f"elsewhere cannot be used: {why}")
    assert problem.endswith("; try `ssh root@gpu-box true`")


CHANGED = "Offending RSA key in /x/known:7\r\n"
COMMAND = '  remove with:\r\n  ssh-keygen -f "/x/known" -R "[box]:2222"\r\n'
FAILED = "Host key verification failed.\r\n"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (CHANGED + FAILED, "its host key has changed: if it should, remove line 7 of /x/known"),
        (
            CHANGED + COMMAND + FAILED,
            'its host key has changed: if it should, `ssh-keygen -f "/x/known" -R "[box]:2222"`',
        ),
        (
            'Load key "/x/id": bad permissions\r\nbox: Permission denied (publickey).\r\n',
            "ssh cannot use the key /x/id: bad permissions",
        ),
    ],
)
def test_what_another_ssh_writes_is_understood(
    sshd: Sshd, tmp_path: Path, written: str, why: str
) -> None:
    (tmp_path / "written").write_text(written)
    (tmp_path / "ssh" / "ssh").write_text(f"#!/bin/sh\ncat {tmp_path}/written >&2; exit 255\n")
    assert f"elsewhere cannot be used: {why}; " in sshd.problem()


def test_a_host_that_waits_for_an_answer_is_quoted(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.launchers.ssh.LOGIN_SECONDS", 2.0)
    (tmp_path / "ssh" / "ssh").write_text("#!/bin/sh\nprintf 'press a key'; exec sleep 60\n")
    assert "it did not let us in within 2 s (press a key); " in sshd.problem()


def test_a_login_shell_may_print_without_a_newline(sshd: Sshd) -> None:
    sshd.start("""ForceCommand printf '\\033]0;title\\007'; eval "$SSH_ORIGINAL_COMMAND"\n""")

    async def check() -> None:
        with closing(sshd.launchers()) as launchers:
            probed = await launchers["elsewhere"].probe()
            assert probed.facts is not None

    asyncio.run(check())


def test_a_host_that_is_not_there_is_a_sentence(sshd: Sshd) -> None:
    assert "no address of nowhere.invalid is known" in sshd.problem("nowhere.invalid")
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        sshd.configure(silent.getsockname()[1])
        assert "what listens on its SSH port does not answer" in sshd.problem()
    assert "nothing listens on its SSH port: start sshd there" in sshd.problem()


def test_a_host_without_muster_is_a_sentence(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    sshd.start()
    assert "/nowhere/python: No such file or directory: install Muster" in sshd.problem()


def test_the_path_of_the_interpreter_may_have_a_space(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "my $env" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    sshd.start()

    async def check() -> None:
        with closing(sshd.launchers()) as launchers:
            assert (await launchers["elsewhere"].probe()).facts is not None

    asyncio.run(check())


def test_a_data_directory_of_two_hosts_is_told(sshd: Sshd) -> None:
    sshd.start()
    sshd.data.root.mkdir(exist_ok=True)

    async def refusal() -> str:
        with closing(sshd.launchers()) as launchers:
            return (await launchers["elsewhere"].probe()).refusal

    assert asyncio.run(refusal()) == "", "no coordinator is there"
    sshd.data.coordinator_address.touch()
    expected = f"{sshd.data.root} is shared with the coordinator's host: set MUSTER_DATA_DIR to"
    assert asyncio.run(refusal()).startswith(expected)


def test_sockets_of_a_killed_coordinator_are_removed(tmp_path: Path) -> None:
    first, second = SocketDirectory(tmp_path), SocketDirectory(tmp_path)
    first.new_socket().touch()
    path = second.new_socket()
    path.touch()
    assert len(str(path)) < 40, "sun_path has 108 bytes"
    assert len(list(tmp_path.glob("*/*"))) == 1
    first.close()  # it was only suspended
    assert path.exists()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_more_orders_than_sessions_are_carried_out(sshd: Sshd) -> None:
    """Ssh connects anew for them; all agents learn of the next connection all the same."""
    sshd.start("MaxSessions 3")

    async def check() -> None:
        with closing(sshd.launchers()) as launchers:
            async with Scene(sshd.data.jobs, lambda: launchers["elsewhere"]) as scene:
                by = scene.launcher()
                file = str(sshd.data.coordinator_address)
                given = [replace(scene.assignment(), address_file=file) for _ in range(4)]
                await asyncio.gather(*(scene.start(by, it) for it in given))
                first = read_coordinator_address(sshd.data.coordinator_address)
                assert first is not None
                for pid in descendants(os.getpid()):
                    if MASTER in command_of(pid):
                        os.kill(pid, signal.SIGKILL)

                def is_replaced() -> bool:
                    return read_coordinator_address(sshd.data.coordinator_address) != first

                await asyncio.to_thread(await_value, is_replaced, lambda: f"{first}")
                assert all(len(agents_of(it.job_uid)) == 1 for it in given)

    asyncio.run(check())
