"""A coordinator's server for agents of other hosts, as a process that prints what it receives.

``python -m tests.support.agent_server HOST:PORT AGENT ORDER [DIRECTORY]``: the hello of the one
agent that is expected, as JSON, and the messages it gets when it connects, encoded and in
hexadecimal digits; where its logs go.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from coordinator.agents.checkpoint_receiver import JobDirectories
from coordinator.agents.server import AgentServer
from muster.contracts.job.status import JobUid
from muster.contracts.messages.agent import AgentClaim, AgentHeartbeat, AgentHello, AgentMessage
from muster.contracts.messages.logs import LogsDrained
from muster.contracts.messages.wire import decode_coordinator_message
from muster.contracts.settings.paths import JobFiles, LogName
from muster.contracts.token import sha256_of
from muster.runtime.stderr_messages import print_stdout


class Printer:
    """The listener of the server."""

    def __init__(self, expected: AgentHello, order: bytes, job_root: str = "") -> None:
        self._expected = expected
        self._files = JobFiles(Path(job_root)) if job_root else None
        self._order = decode_coordinator_message(order)
        self.server: AgentServer

    def token_sha256(self, claim: AgentHello | AgentClaim, **_where: bool) -> str | None:
        is_known = claim.job_uid == self._expected.job_uid
        return sha256_of(self._expected.token) if is_known else None

    def is_expected(self, hello: AgentHello) -> bool:
        return hello.token == self._expected.token

    def coordinator_files(self, _claim: AgentClaim) -> JobFiles | None:
        return self._files

    def checkpoint_directories(self, _claim: AgentClaim) -> JobDirectories | None:
        if self._files is None:
            return None
        return JobDirectories(own=self._files.root / "checkpoints", inherited=None)

    def may_send(self, _claim: AgentClaim, _name: LogName) -> bool:
        return True

    def is_draining(self, _uid: JobUid, _host: str) -> bool:
        return True

    def on_drained(self, _claim: AgentClaim, _message: LogsDrained) -> None:
        print_stdout("drained")

    def on_refused(self, _uid: JobUid, why: str) -> None:
        print_stdout(why)

    def on_connected(self, hello: AgentHello) -> None:
        print_stdout(f"connected {hello.machine} {hello.boot_id} {hello.node}")
        self.server.send(JobUid(hello.job_uid), hello.host, self._order)

    def on_disconnected(self, _hello: AgentHello) -> None:
        print_stdout("disconnected")

    def on_message(self, _hello: AgentHello, message: AgentMessage) -> None:
        if not isinstance(message, AgentHeartbeat):
            print_stdout(str(message))


async def main(address: str, expected: str, order: str, job_root: str = "") -> None:
    host, _, port = address.rpartition(":")
    hello = msgspec.json.decode(expected, type=AgentHello)
    printer = Printer(hello, bytes.fromhex(order), job_root)
    printer.server = AgentServer(epoch=1, listener=printer, endpoint=(host, int(port)))
    await printer.server.start()
    print_stdout("listens")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
