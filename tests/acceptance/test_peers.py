"""`muster run --peers`, typed on machines of a household: one job, and nothing stays behind."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.mesh.secret import KEY_VARIABLE, keep_secret
from tests.support.hosts import Host, Process, hosts, needs_hosts
from tests.support.installation import await_value
from tests.support.nodes import ROOT, Nodes, nodes
from tests.support.torch_jobs import EXAMPLE, digest_of

pytestmark = needs_hosts()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(3, tmp_path / "hosts") as made:
        yield made


class Typed:
    """The command as typed on machines; what it prints there is in a file of each."""

    def __init__(self, running: Nodes, directory: Path) -> None:
        self._running = running
        self._directory = directory
        self._processes: dict[Host, Process] = {}

    def start(self, host: Host, script: str, ranks: int = 1) -> None:
        (host.directory / host.name / "train.py").write_text(script)
        own = self._running.environ(host)
        keep_secret(host.directory / "node" / "cluster.key", own.pop(KEY_VARIABLE))
        environ = os.environ | own | {"PYTHONPATH": str(ROOT), "PAUSE_SECONDS": "0.03"}
        words = ["run", "--peers", "2", "--elastic", "-n", str(ranks), "--python", sys.executable]
        command = [sys.executable, "-m", "cli", *words, "train.py"]
        with self._log(host).open("wb") as log:
            self._processes[host] = host.start(command, environ, cwd=Path(own["HOME"]), output=log)

    def said(self, host: Host) -> str:
        return self._log(host).read_text()

    def end(self, host: Host) -> int:
        """Return the exit code of the command once nothing is left of it."""
        code = self._processes[host].wait(120)
        assert not host.processes(), self.said(host)
        return code

    def _log(self, host: Host) -> Path:
        return self._directory / f"{host.name}.said"


@pytest.fixture
def typed(machines: list[Host], tmp_path: Path) -> Iterator[Typed]:
    with nodes(machines, ["cli"]) as running:
        yield Typed(running, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_train_one_job_and_end_with_it(machines: list[Host], typed: Typed) -> None:
    pytest.importorskip("torch")
    first, second, late = machines
    for host, ranks in ((first, 2), (second, 1)):
        typed.start(host, EXAMPLE.read_text(), ranks)
    together = "ranks 0, 1, 2 train together"
    await_value(lambda: together in typed.said(first), lambda: typed.said(first))
    typed.start(late, EXAMPLE.read_text())
    assert [typed.end(host) for host in machines] == [0, 0, 0]
    said = [typed.said(host) for host in machines]
    assert "a change from 3 to 4 ranks was requested" in said[0]
    assert len({digest_of(each) for each in said}) == 1


def test_scripts_that_differ_are_refused_on_both(machines: list[Host], typed: Typed) -> None:
    for host, script in zip(machines[:2], ("print(1)", "print(2)"), strict=True):
        typed.start(host, script)
    assert [typed.end(host) for host in machines[:2]] == [1, 1]
    for host in machines[:2]:
        found = re.findall("[0-9a-f]{16}", typed.said(host))
        assert set(found) == {"d287bb7f9d15abdc", "fc92339e2c864d8f"}, typed.said(host)
