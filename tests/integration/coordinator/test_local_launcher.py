"""Agents forked from the fork server: as separate from their coordinator as after exec."""

import asyncio
import os
import signal
import socket
import subprocess
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest

from coordinator.launchers.launcher import AgentProcess
from muster.contracts.messages.assignment import ForkAgent
from muster.contracts.settings.names import PROCESS_TAG, PROCESS_TAG_WIDTH
from muster.host.containment import tag_of, tagged_processes
from muster.host.processes import descendants, environment_of, is_stopped, module_command
from tests.support.hosts import USER, needs_hosts
from tests.support.installation import DEADLINE_SECONDS, await_value
from tests.support.launchers import Scene, local


def pid_of(agent: AgentProcess) -> int:
    assert agent.record is not None
    return agent.record.pid


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def open_files(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory itself, while we read our own
            found.add(str(entry.readlink()))
    return {name for name in found if name != os.devnull and not name.startswith("anon_inode")}


def test_a_forked_agent_has_nothing_of_its_coordinator(tmp_path: Path) -> None:
    async def check() -> None:
        async with Scene(tmp_path) as scene:
            assignment = scene.assignment()
            agent = await scene.start(scene.launcher(), assignment)
            pid = pid_of(agent)
            assert parent_of(pid) in descendants(os.getpid())
            assert os.getsid(pid) == pid
            assert not open_files(pid) & open_files(os.getpid())
            assert tag_of(pid) == f"{assignment.job_uid}/agent"
            assert "API_KEY" not in environment_of(pid)
            (prefork,) = tagged_processes(f"{assignment.job_uid}/prefork")
            assert os.getsid(prefork.pid) == prefork.pid
            assert len(open_files(prefork.pid)) == 2  # the agent's log and its channel
            successor = scene.launcher(local)
            found = await successor.adopt(assignment.job_uid, None)
            assert found is not None
            assert found.record == agent.record
            await successor.kill(found)
            assert await agent.ended == -signal.SIGKILL

    asyncio.run(check())


def test_an_agent_outlives_the_fork_server(tmp_path: Path) -> None:
    async def check() -> None:
        async with Scene(tmp_path) as scene:
            by = scene.launcher()
            agent = await scene.start(by, scene.assignment())
            os.kill(parent_of(pid_of(agent)), signal.SIGKILL)
            execed = await scene.start(by, scene.assignment())
            assert parent_of(pid_of(execed)) == os.getpid()
            forked = await scene.start(by, scene.assignment())
            assert parent_of(parent_of(pid_of(forked))) == os.getpid()
            assert not agent.ended.done()
            await by.kill(agent)
            assert await agent.ended is None

    asyncio.run(check())


def test_an_agent_starts_if_the_fork_server_dies_meanwhile(tmp_path: Path) -> None:
    async def check() -> None:
        async with Scene(tmp_path) as scene:
            by = scene.launcher()
            server = parent_of(pid_of(await scene.start(by, scene.assignment())))
            os.kill(server, signal.SIGSTOP)
            await asyncio.to_thread(await_value, partial(is_stopped, server), str)
            starting = asyncio.ensure_future(scene.start(by, scene.assignment()))
            await asyncio.sleep(0)  # now it waits for the answer
            os.kill(server, signal.SIGKILL)
            assert parent_of(pid_of(await starting)) == os.getpid()

    asyncio.run(check())


@needs_hosts(network=False)
def test_an_agent_of_another_network_is_ended_not_awaited(tmp_path: Path) -> None:
    uid = uuid.uuid4().hex
    words = ["unshare", *USER, "--net", "sh", "-c", "echo; read _"]
    environ = {**os.environ, PROCESS_TAG: f"{uid}/agent"}

    async def adopted() -> AgentProcess | None:
        async with Scene(tmp_path) as scene:
            return await scene.launcher(local).adopt(uid, None)

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=environ, **pipes) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()  # it is there, and executes no other program
        assert asyncio.run(adopted()) is None
        assert agent.wait(DEADLINE_SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_fork_server_ends_with_its_coordinator(tmp_path: Path, *, is_busy: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            module_command("worker.fork_server"),
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
            env={**os.environ, PROCESS_TAG: " " * PROCESS_TAG_WIDTH},
        )
    log = tmp_path / "log"
    if is_busy:  # with an agent that gets no assignment
        request = msgspec.msgpack.encode(ForkAgent(job_uid="0" * 32, has_prefork=False))
        with Path(os.devnull).open() as nothing, log.open("w") as output:
            socket.send_fds(ours, [request], [nothing.fileno(), output.fileno()])
    ours.close()
    _, errors = server.communicate(timeout=60)
    assert (server.returncode, errors) == (0, b"")
    if is_busy:
        await_value(lambda: "has no assignment and exits" in log.read_text(), log.read_text)
