"""Where and how a rank meets its group: by shared memory on one host, over TCP on several."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from muster.collectives.errors import ChannelClosed, PeerUnreachable, TransportFailed
from muster.collectives.reduction.compressed import Compression
from muster.collectives.reduction.tree import Block
from muster.contracts.messages.rank import GroupMember, WorkerGroup
from muster.contracts.settings.environ import RankSettings
from muster.training.groups import group as group_module
from muster.training.groups.group import Group, GroupFactory, group_factory
from muster.training.groups.updates import GroupUpdate
from tests.support.stage import compression_of

RANKS = 4
ELEMENTS = 5000  # too many for a sum that every rank makes by itself


class NoUpdates:
    in_step = False

    def check(self) -> None:
        """Nothing changes."""

    def next(self) -> GroupUpdate:
        raise NotImplementedError


def factory(
    rank: int = 0, compression: Compression | None = None, **variables: object
) -> GroupFactory:
    given = {"RANK": rank, "MUSTER_AGENT_FD": 3, "MUSTER_HOST_COUNT": 2, **variables}
    environ = {name: str(value) for name, value in given.items()}
    settings = RankSettings.read(environ, world_size=RANKS)
    return group_factory(settings, RANKS, ELEMENTS, NoUpdates(), compression)


class Ranks:
    """Ranks that may be on several hosts, and the memory that their agents would give them."""

    def __init__(self, stack: ExitStack, kind: str | None = None, backend: str = "auto") -> None:
        self.compressions = [
            kind and compression_of(kind, RANKS, ELEMENTS - 1, groups=RANKS) for _ in range(RANKS)
        ]
        self.factories = [
            factory(rank, compression or None, MUSTER_BACKEND=backend)
            for rank, compression in enumerate(self.compressions)
        ]
        self._stack = stack
        self._arenas = [self._memory() for _ in range(RANKS)]
        self._threads = stack.enter_context(ThreadPoolExecutor(RANKS))

    def _memory(self) -> int:
        descriptor = os.memfd_create("test")
        self._stack.callback(os.close, descriptor)
        return descriptor

    def meet(self, round_number: int, hosts: dict[int, str]) -> list[Group]:
        """Return the group of these ranks on these hosts, as each of them sees it."""
        members = tuple(
            GroupMember(worker_id=rank, rank=rank, host=host, port=self.factories[rank].port)
            for rank, host in hosts.items()
        )
        group = WorkerGroup(round=round_number, token="", members=members, paused=False)
        results = {host: self._memory() for host in hosts.values()}
        shared = (self._memory(), *(self._arenas[rank] for rank in hosts))

        def create(rank: int) -> Group:
            memory = shared
            if len(set(hosts.values())) > 1:
                here = [self._arenas[peer] for peer in hosts if hosts[peer] == hosts[rank]]
                memory = (self._arenas[rank], results[hosts[rank]], *here)
            found = self.factories[rank].create(GroupUpdate(group=group, memory=memory))
            assert found is not None
            self._stack.callback(found.backend.close)
            return found

        return list(self._threads.map(create, hosts))

    def totals(self, groups: list[Group]) -> list[np.ndarray]:
        """Return the sums of what the slots hold, a leaf on each rank."""
        assignment = [[Block(0, rank)] for rank in range(RANKS)]
        sums = self._threads.map(lambda group: group.reducer.all_reduce(assignment), groups)
        totals = [total.copy() for total in sums]
        for group in groups:
            group.backend.close()
        return totals

    def sum_up(self, groups: list[Group]) -> list[float]:
        """Return one element of the same."""
        return [float(total[-1]) for total in self.totals(groups)]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack)


def test_sums_survive_a_change_of_hosts(ranks: Ranks) -> None:
    slots: dict[int, np.ndarray] = {}
    for round_number, names in enumerate(["aaaa", "aabc", "bbbb", "abab"], start=1):
        groups = ranks.meet(round_number, dict(enumerate(names)))
        for rank, group in enumerate(groups):
            if round_number == 1:
                slots[rank] = group.reducer.slots
                slots[rank][0] = 10**rank
            assert group.reducer.slots is slots[rank]
        assert ranks.sum_up(groups) == [1111.0] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "tcp"])
@pytest.mark.parametrize("kind", ["int8", "bf16", "random"])
def test_compressed_sums_survive_a_change_of_hosts(kind: str, backend: str) -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, kind, backend)
        leaves = np.random.default_rng(0).standard_normal((RANKS, ELEMENTS), np.float32)
        sums = set()
        for round_number, names in enumerate(["aaaa", "aabc", "bbbb", "abab"], start=1):
            groups = ranks.meet(round_number, dict(enumerate(names)))
            for group, compression, leaf in zip(groups, ranks.compressions, leaves, strict=True):
                compression.begin(7)
                group.reducer.slots[0] = leaf
            sums |= {total.tobytes() for total in ranks.totals(groups)}
        assert len(sums) == 1


def test_rank_left_behind_sees_that_a_peer_left_for_tcp(ranks: Ranks) -> None:
    *_, left = ranks.meet(1, dict.fromkeys(range(RANKS), "a"))
    ranks.meet(2, {0: "a", 1: "b", 2: "a"})
    with pytest.raises(ChannelClosed):
        left.reducer.all_reduce([[Block(0, rank)] for rank in range(RANKS)])


def test_unreachable_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "UNREACHABLE_SECONDS", 0.0)
    names = {0: ("a", free_port()), 3: ("b", 0)}
    members = tuple(
        GroupMember(worker_id=7, rank=rank, host=host, address="127.0.0.1", port=port)
        for rank, (host, port) in names.items()
    )
    group = WorkerGroup(round=1, token="", members=members, paused=False)
    here = factory(3, MUSTER_BACKEND="tcp")
    with pytest.raises(PeerUnreachable, match=rf"rank 0 .* 127.0.0.1:{names[0][1]} on host a"):
        here.create(GroupUpdate(group=group))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_rank_of_a_job_on_one_host_listens_nowhere() -> None:
    assert factory(MUSTER_HOST_COUNT=1).port == 0


def test_ranks_listen_in_the_given_range() -> None:
    port = free_port()
    ports = {"MUSTER_RANK_PORTS": f"{port}-{port}"}
    first = factory(**ports)
    assert first.port == port
    with pytest.raises(TransportFailed, match=f"no port from {port} to {port} .*MUSTER_RANK_PORTS"):
        factory(1, **ports)
