"""Checkpoints of members that hold the same state, each host with a directory of its own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMismatch, CheckpointMissing
from muster.checkpoints.manager import open_manager
from muster.checkpoints.reader import Checkpoint
from muster.collectives import operations
from muster.collectives.backend import Backend
from muster.collectives.simulated import SimulatedBackend, run_ranks
from muster.contracts.messages.storage import OpenCheckpoints
from muster.contracts.shards import Position
from muster.datasets.errors import DatasetDiffers
from muster.datasets.source import LocalSource
from muster.mesh.group import MeshBackend
from muster.mesh.identity import Member
from muster.mesh.replicas import ReplicaCheckpoints, compare_samples
from muster.program import InvalidProgram
from muster.run import Run, join
from muster.runtime.agent_client import AgentClient, AgentSocket
from tests.support.ranks import run_of, settings_of


class Home:
    """Hosts, each named by a letter, with a directory of checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warnings: list[str] = []

    def group(self, hosts: str) -> list[MeshBackend]:
        """Return the backend of each rank of a new group; each letter is the host of one."""
        backends = SimulatedBackend.create_group(len(hosts))
        members = tuple(
            Member(process_id=f"p-{rank}", node_id=f"n-{host}", host=host, address=("", 0))
            for rank, host in enumerate(hosts)
        )
        for backend in backends:  # as a `MeshBackend` has them
            vars(backend).update(members=members, group="default")
        return cast("list[MeshBackend]", backends)

    def session(self, host: str) -> OpenCheckpoints:
        return OpenCheckpoints(
            location=str(self.root / host),
            inherited=None,
            job_id="train",
            job_uid=None,
            rank=0,
            world_size=1,
            generation=None,
            keep_last=3,
        )

    def of(self, backend: MeshBackend) -> ReplicaCheckpoints:
        host = backend.members[backend.rank].host
        return ReplicaCheckpoints(self.session(host), self.warnings.append, backend)

    def save(self, host: str, step: int, state: Mapping[str, Any]) -> Path:
        """Save as an earlier member of a host; return the directory of the checkpoint."""
        manager = open_manager(self.session(host), self.warnings.append)
        manager.save(step, Position(step=step, line_idx=step), state)
        manager.close()
        return max((self.root / host).glob("step_*"))

    def held(self, host: str) -> Checkpoint | None:
        return open_manager(self.session(host), self.warnings.append).restore()

    def restore(self, hosts: str) -> list[Checkpoint | None]:
        """Restore as a new group; return what each rank got."""
        return run_ranks(
            self.group(hosts), lambda backend: self.of(cast("MeshBackend", backend)).restore()
        )


def test_members_with_other_samples_are_refused(tmp_path: Path) -> None:
    for host, last in ("a", "3"), ("b", "3"), ("c", "4"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "shard_00000.txt").write_text(f"1\n2\n{last}\n")

    def rank(backend: Backend) -> str:
        member = cast("MeshBackend", backend)
        try:
            compare_samples(member, LocalSource(tmp_path / member.members[backend.rank].host))
        except DatasetDiffers as error:
            return str(error)
        return ""

    home = Home(tmp_path)
    assert run_ranks(home.group("aab"), rank) == [""] * 3
    assert ["p-1" in said for said in run_ranks(home.group("bc"), rank)] == [True, False]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def state_of(step: int) -> dict[str, Any]:
    values = np.arange(4097, dtype=np.float32) * step
    odd = np.array([True, False, True])
    return {"weights": values, "odd": odd, "empty": np.zeros((0, 3)), "lr": 0.1, "name": "é"}


def damage(checkpoint: Path) -> None:
    file = checkpoint / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def assert_all_at(step: int, found: Sequence[Checkpoint | None]) -> None:
    for checkpoint in found:
        assert checkpoint is not None
        assert checkpoint.position == Position(step=step, line_idx=step)
        wanted = state_of(step)
        assert checkpoint.state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert np.asarray(checkpoint.state[name]).tobytes() == np.asarray(value).tobytes()


def test_members_take_the_newest_step_of_any(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MESSAGE_BYTES", 1000)
    home.save("a", 10, state_of(10))
    newest = home.save("b", 20, state_of(20))
    assert_all_at(20, home.restore("aabc"))
    assert home.warnings == []
    for host in "abc":  # durable, and equal to the byte
        assert_all_at(20, [home.held(host)])
        taken = max((home.root / host).glob("step_*20.*"))
        files = [each / "state.safetensors" for each in (taken, newest)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_state_without_arrays_is_sent(home: Home) -> None:
    home.save("b", 3, {"count": 7})
    assert [found and found.state for found in home.restore("ab")] == [{"count": 7}] * 2


def test_members_without_checkpoints_begin(home: Home) -> None:
    assert home.restore("aab") == [None, None, None]


def test_a_damaged_newest_checkpoint_is_not_taken(home: Home) -> None:
    for host in "ab":
        home.save(host, 10, state_of(10))
    damage(home.save("a", 20, state_of(20)))
    assert_all_at(10, home.restore("ab"))
    assert any("does not match its hash" in warning for warning in home.warnings)


def test_a_host_with_only_damage_takes_the_state_of_another(home: Home) -> None:
    damage(home.save("a", 20, state_of(20)))
    home.save("b", 10, state_of(10))
    assert_all_at(10, home.restore("ab"))
    assert any("The state of b (p-1) is taken" in warning for warning in home.warnings)
    damage(home.save("c", 20, state_of(20)))
    with pytest.raises(CheckpointDamaged, match=r"c \(p-1\): no checkpoint in .* is intact"):
        home.restore("dc")


def test_different_states_of_one_step_are_refused(home: Home) -> None:
    home.save("a", 10, state_of(10))
    home.save("b", 10, {**state_of(10), "lr": 0.2})
    errors: list[str] = []

    def restore(backend: MeshBackend) -> None:
        with pytest.raises(CheckpointMismatch) as raised:
            home.of(backend).restore()
        errors.append(str(raised.value))

    run_ranks(home.group("acb"), cast("Callable[[Any], None]", restore))
    assert len(set(errors)) == 1
    assert len(errors) == 3
    assert "a (p-0) and b (p-2) hold different states of step 10" in errors[0]
    assert str(home.root / "b") in errors[0]
    home.save("a", 11, state_of(11))  # what is older than the newest is nothing to compare
    assert_all_at(11, home.restore("acb"))


@pytest.mark.parametrize("hosts", ["aab", "aba"])
def test_the_lowest_rank_of_each_host_saves(home: Home, hosts: str) -> None:
    saved: list[int] = []
    for backend in home.group(hosts):
        member, steps = home.of(backend), [1, 2]
        for step in steps:
            member.save(step, Position(step=step, line_idx=step), state_of(step), saved.append)
        member.close()
    assert len(saved) == 4
    assert_all_at(2, [home.held("a"), home.held("b")])


def run_at(home: Home, backend: MeshBackend) -> Run:
    place = home.root / backend.members[backend.rank].host
    return Run(settings_of(place, JOB_ID="train"), AgentClient(AgentSocket(None)), backend)


def test_a_run_goes_on_in_another_group(home: Home) -> None:
    """The one that saves on a host is another then, and its ranks are others."""
    groups = [home.group("abb"), home.group("bab")]

    def train(backend: MeshBackend) -> list[tuple[int, int, bool]]:
        run = run_at(home, backend)
        place = home.root / backend.members[backend.rank].host / "checkpoints/train/worker_0"
        found = []
        for number, group in enumerate(groups):
            new = group[(backend.rank + number) % 3]  # a is 0 and 1, the others 1 and 2, 2 and 0
            state = run.restore(backend=new)
            run.steps_done += 1
            run.checkpoint(steps=run.steps_done)
            new.barrier()
            names = [each.name for each in place.glob("step_*")]
            is_saved = any(name.startswith(f"step_{run.steps_done:010d}") for name in names)
            assert state == ({"steps": number} if number else None)
            found.append((run.rank, run.world_size, is_saved))
            new.barrier()
        return found

    found = run_ranks(groups[0], cast("Callable[[Any], list[tuple[int, int, bool]]]", train))
    assert found == [
        [(0, 3, True), (1, 3, True)],
        [(1, 3, True), (2, 3, True)],
        [(2, 3, True), (0, 3, True)],
    ]


def test_steps_of_which_there_is_no_checkpoint_are_refused(home: Home) -> None:
    def train(backend: MeshBackend) -> None:
        run = run_at(home, backend)
        assert run.restore() is None
        run.steps_done = 1
        with pytest.raises(CheckpointMissing, match="start all scripts anew"):
            run.restore(backend=backend)

    run_ranks(home.group("ab"), cast("Callable[[Any], None]", train))


def test_a_backend_is_for_scripts_that_have_joined_with_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = home.group("ab")[0]
    with pytest.raises(ValueError, match="join"):
        run_of(home.root).restore(backend=backend)
    monkeypatch.setenv("MUSTER_JOB_UID", "0" * 32)
    with pytest.raises(InvalidProgram, match="a rank of a job has its group from it"):
        join(backend=backend)
