"""The promises of launchers: on the coordinator's own host, and through a command elsewhere."""

import asyncio
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.launchers.launcher import AgentProcess, NotStarted
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.processes import identify, is_running
from tests.support.hosts import Host, refusal
from tests.support.households import household
from tests.support.installation import await_value
from tests.support.launchers import (
    Make,
    Scene,
    agents_of,
    by_command,
    forking,
    local,
)

pytestmark = pytest.mark.slow  # each agent is a process

DEADLINE_SECONDS = 60.0


HERE = {
    "local": local,
    "forked": forking,
    "env": by_command("env"),
    "shell": by_command("/bin/sh", "-c", '"$@"; exit $?', "sh"),
}


@pytest.fixture(params=HERE)
def here(request: pytest.FixtureRequest) -> Make:
    return HERE[request.param]


@pytest.fixture(params=[*HERE, "mesh", "namespaces"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    if request.param in HERE:
        yield HERE[request.param]
        return
    if request.param == "mesh":
        with household(tmp_path) as own:
            yield own.launcher
        return
    if why := refusal(network=False):
        pytest.skip(f"no test hosts can be made here: {why}")
    host = Host("elsewhere", tmp_path)
    yield by_command(*host.prefix)
    host.power_off()


def only(found: list[int]) -> list[int] | None:
    return found if len(found) == 1 else None


async def end_of(agent: AgentProcess | None) -> int | None:
    """Return the status of an agent that ends; None if that is not known."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        return None if agent is None else await agent.ended


def test_a_started_agent_runs_until_it_is_killed(make: Make, tmp_path: Path) -> None:
    async def check() -> None:
        async with Scene(tmp_path, make) as scene:
            by, assignment = scene.launcher(), scene.assignment()
            agent = await scene.start(by, assignment)
            # A fork that becomes its prefork server has its tag for a moment.
            (pid,) = await_value(lambda: only(agents_of(assignment.job_uid)), lambda: "two agents")
            assert os.getsid(pid) == pid
            assert not agent.ended.done()
            assert agent.record is not None
            assert by.living([agent.record]) == {agent.record}
            await by.kill(agent)
            assert await end_of(agent) == -signal.SIGKILL

    asyncio.run(check())


@pytest.mark.parametrize("is_recorded", [True, False])
def test_an_agent_outlives_its_launcher(make: Make, tmp_path: Path, *, is_recorded: bool) -> None:
    async def check() -> None:
        async with Scene(tmp_path, make) as scene:
            first, assignment = scene.launcher(), scene.assignment()
            agent = await scene.start(first, assignment)
            first.close()
            by = scene.launcher()
            record = agent.record if is_recorded else None
            found = await by.adopt(assignment.job_uid, record)
            assert found is not None
            assert agents_of(assignment.job_uid)
            assert not found.ended.done()
            await by.kill(found)
            assert await end_of(found) is None
            assert await end_of(await by.adopt(assignment.job_uid, record)) is None
            assert agents_of(assignment.job_uid) == []

    asyncio.run(check())


def test_a_sweep_ends_all_of_a_job_and_nothing_else(make: Make, tmp_path: Path) -> None:
    async def check() -> None:
        async with Scene(tmp_path, make) as scene:
            by, swept, spared = scene.launcher(), scene.assignment(), scene.assignment()
            ended, running = [await scene.start(by, it) for it in (swept, spared)]
            await by.sweep(swept.job_uid, ())
            assert agents_of(swept.job_uid) == []
            await end_of(ended)
            assert not running.ended.done()
            assert len(agents_of(spared.job_uid)) == 1

    asyncio.run(check())


@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_sweep_ends_ranks_and_what_they_started(
    here: Make, tmp_path: Path, *, is_tagged: bool
) -> None:
    uid = uuid.uuid4().hex
    environ = {**os.environ, PROCESS_TAG: f"{uid}/0/0"} if is_tagged else os.environ
    words = ["/bin/sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        started, record = identify(int(rank.stdout.readline())), identify(rank.pid)
        assert started is not None
        assert record is not None

        async def sweep() -> None:
            async with Scene(tmp_path, here) as scene:
                await scene.launcher().sweep(uid, [] if is_tagged else [record])

        asyncio.run(sweep())
        rank.wait(DEADLINE_SECONDS)
        assert not is_running(started)


def test_an_agent_that_cannot_be_started_is_an_error(make: Make, tmp_path: Path) -> None:
    async def check() -> None:
        async with Scene(tmp_path, make) as scene:
            (tmp_path / "file").touch()
            root = str(tmp_path / "file" / "job")
            assignment = msgspec.structs.replace(scene.assignment(), job_root=root)
            with pytest.raises((NotStarted, OSError), match=r"Not a directory|File exists"):
                await scene.launcher().start(assignment)

    asyncio.run(check())
