"""Brings the members of a new worker group to the same step and state.

1. Every member reports its step, the digest of its state and the block sums it holds.
2. Among the members that are furthest, those whose digest differs from the majority are removed
   before they can send their state.
3. The first member that is furthest sends its state to all members that are behind.
4. All digests are compared again, which verifies the transfer.
5. The blocks of the unfinished step that no member holds are assigned.

A member that is one step behind was interrupted after its peers had committed that step; a newcomer
is behind by all steps. Both receive the state from memory, not from disk.

No member waits for a newcomer on its host: that copies the state out of the first member's memory
while the others compute the next step. It takes its own part of that step if the state is small. A
`Replica` writes to that memory again at the end of the step after it, for which the newcomer is
needed. In a later group without the newcomer it is not: the digest shows that the copy is torn.
"""

import mmap
import os
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_128

from muster.checkpoints.nested import with_leaves
from muster.collectives.backend import Backend
from muster.collectives.errors import PeerRefused
from muster.collectives.reduction.tree import Block, BlockAssignment, assign_blocks
from muster.contracts.messages.rank import EpochDone
from muster.contracts.shards import Position
from muster.datasets.index import Totals
from muster.host.processes import boot_id, pid_namespace
from muster.runtime.fingerprint import ANY_BITS, Fingerprint, explain
from muster.training.groups.group import (
    NAMES_LIMIT,
    WorkersDiverged,
    different_names,
    divergent_members,
    gather_values,
    refuse_other_data,
)
from muster.training.schema import bytes_of, read_only

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

_ALIGNMENT: Final = 64
"""Bytes; a cache line. Arrays in shared memory start at multiples of it."""


class Committed(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The training position of a state, and what every finished epoch consumed."""

    position: Position
    epochs: tuple[EpochDone, ...] = ()
    values: bytes = b""  # what belongs to the state and is no array, as JSON
    is_stopped: bool = False  # the program stopped training after this step
    stop_requested: bool = False
    """The program of this rank wants to stop after the next step. No part of the digest: that of
    another rank may not want to."""


QUICK_COPY_BYTES: Final = 16 << 20
"""A newcomer copies a state of this size in about 5 ms, and then takes its part of the step."""

EMPTY: Final = Committed(position=Position(step=-1))
"""Of a replica that has no state yet."""

_NAMES: Final = {"values": "run.values", "groups": "optimizer.param_groups", "kept": "optimizer"}
"""What people know parts of `Committed.values` as."""


class Replica:
    """A rank's copy of the model state and its position, always of the same step.

    Two sets of arrays are used in turn. A step writes its new state into the unused set and takes
    it over in one assignment, so a failure before that leaves the last committed state whole.
    """

    advice = "update() may depend on its arguments alone"  # if members differ

    def __init__(self, example: Arrays) -> None:
        """`example` is any state of the program: it gives names, shapes and dtypes."""
        self.state: Arrays = {}
        """Read-only; valid until the second next step is committed."""
        self.committed = EMPTY
        self._current, self._memory = _allocate(example)
        self.other, self._other_memory = _allocate(example)
        for descriptor in (self._memory, self._other_memory):
            weakref.finalize(self, os.close, descriptor)  # arrays that live longer stay mapped

    @property
    def is_empty(self) -> bool:
        return self.committed == EMPTY

    @property
    def position(self) -> Position:
        return self.committed.position

    def commit(self, state: Arrays, committed: Committed) -> None:
        """Take over a complete state: `other` itself, or arrays that are copied into it."""
        if state is not self.other:
            for name, array in self.other.items():
                array[...] = state[name]
        self._current, self.other = self.other, self._current
        self._memory, self._other_memory = self._other_memory, self._memory
        self.state, self.committed = read_only(self._current), committed

    def digest(self) -> str:
        """Return 32 hexadecimal digits of state and position; equal bits give equal digits."""
        return _digest(self.state, self.committed)

    @property
    def size_bytes(self) -> int:
        """Of the state."""
        return os.fstat(self._memory).st_size

    @property
    def address(self) -> tuple[int, int, int]:
        """Process, descriptor and inode of the memory that holds the state."""
        return os.getpid(), self._memory, os.fstat(self._memory).st_ino

    @property
    def namespace(self) -> str:
        """Boot and pid namespace in which the pid of `address` counts."""
        return f"{boot_id()}/{pid_namespace()}"

    def offer(self) -> None:
        """Prepare the memory at `address` for newcomers, which are about to copy it."""

    def copy(self, memory: int, committed: Committed, digest: str) -> bool:
        """Replace this replica by that of a peer, whose memory this descriptor is.

        Return False, and change nothing, if what was read does not have the digest.
        """
        offset = 0
        for array in self.other.values():
            target = bytes_of(array)
            while count := os.preadv(memory, [target], offset):
                target, offset = target[count:], offset + count
            offset += -offset % _ALIGNMENT  # where `_allocate` has put the next one
        if _digest(self.other, committed) != digest:
            return False
        self.commit(self.other, committed)
        return True

    def send(self, backend: Backend, peer: int) -> None:
        """Send the replica to a peer that calls `receive`."""
        committed = msgspec.msgpack.encode(self.committed)
        backend.send(peer, len(committed).to_bytes(8, "little"))
        backend.send(peer, committed)
        for array in self.state.values():
            backend.send(peer, bytes_of(array))

    def receive(self, backend: Backend, peer: int) -> None:
        """Replace this replica by a peer's; an interrupted transfer changes nothing."""
        size_bytes = int.from_bytes(backend.recv(peer, 8), "little")
        committed = msgspec.msgpack.decode(backend.recv(peer, size_bytes), type=Committed)
        for array in self.other.values():
            backend.recv_into(peer, bytes_of(array))
        self.commit(self.other, committed)


class InPlaceReplica(Replica):
    """A replica whose one set of arrays is updated in place, for a state that others refer to.

    A newcomer copies a snapshot, made when it comes. A replica that is given a state loses its own
    before the new one is whole, so until then it is empty.
    """

    advice = (
        "What a hook changes has to change on every rank, and what the script itself keeps belongs "
        'in run.values or run.register(): see "States that differ" in docs/pytorch.md'
    )

    def __init__(self, example: Arrays) -> None:
        self.state, self.committed = {}, EMPTY
        self._current, self._memory = _allocate(example)
        self.other = self._current
        self._snapshot = os.memfd_create("muster-snapshot", os.MFD_CLOEXEC)
        for descriptor in (self._memory, self._snapshot):
            weakref.finalize(self, os.close, descriptor)

    def commit(self, state: Arrays, committed: Committed) -> None:
        self._copy_in(state)
        self.state, self.committed = read_only(self._current), committed

    def _copy_in(self, state: Arrays) -> None:
        if state is not self.other:
            for name, array in self._current.items():
                array[...] = state[name]

    @property
    def address(self) -> tuple[int, int, int]:
        return os.getpid(), self._snapshot, os.fstat(self._snapshot).st_ino

    def offer(self) -> None:
        os.lseek(self._snapshot, 0, os.SEEK_SET)
        offset = 0
        while offset < self.size_bytes:
            offset += os.sendfile(self._snapshot, self._memory, offset, self.size_bytes - offset)

    def receive(self, backend: Backend, peer: int) -> None:
        self.committed = EMPTY
        super().receive(backend, peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """What the members of a group agreed on."""

    assignment: BlockAssignment
    """The blocks of the next sum that each member contributes, held ones first."""
    held: BlockAssignment
    """The blocks whose sums exist already."""


UNKNOWN: Final = Totals(lines=0, hash_sum=0)
"""Of a data set that is not compared."""


class _Report(msgspec.Struct, frozen=True):
    """What one member sends to the others."""

    step: int
    digest: str
    held: tuple[tuple[int, int], ...]
    arithmetic: str
    """Digest of the arithmetic fingerprint."""
    facts: dict[str, str]
    """Facts of the arithmetic fingerprint."""
    address: tuple[int, int, int]
    """Of the state, see `Replica`."""
    namespace: str
    """Of the address."""
    node: str
    """The name of its machine."""
    lines: int
    """Of its data set, as the hash sum; see `Totals`."""
    hash_sum: int


def sync_state(  # noqa: PLR0913  what the members agree on
    backend: Backend,
    replica: Replica,
    held: Sequence[Block],
    leaves: int,
    arithmetic: Fingerprint,
    load: Callable[[], None],
    totals: Totals = UNKNOWN,
    *,
    groups: int = 0,
) -> SyncResult:
    """Bring every member to the same step and state; all members call this.

    `held` are the blocks of the unfinished step whose sums this rank has. `load` fills the replica
    if no member has a state; the first member calls it. `totals` are those of this rank's data set;
    `groups` as in `assign_blocks`. With `bits: any` members take the first one's state.
    Raises `WorkersDiverged`, and what the backend raises; the replica stays whole in any case.
    """
    report = _Report(
        replica.position.step,
        "" if replica.is_empty else replica.digest(),
        tuple((block.level, block.number) for block in held),
        arithmetic.digest,
        dict(arithmetic.facts),
        replica.address,
        replica.namespace,
        platform.node(),
        totals.lines,
        totals.hash_sum,
    )
    reports = gather_values(backend, report, _Report)
    _compare_arithmetic(reports, backend.rank)
    data = [
        f"{report.lines} lines (hash sum {report.hash_sum:016x})" * (report.lines > 0)
        for report in reports
    ]
    refuse_other_data(data, [report.node for report in reports], backend.rank)
    furthest = max(report.step for report in reports)
    source = next(member for member, report in enumerate(reports) if report.step == furthest)
    if furthest < 0 and backend.rank == source:
        load()
    right = {"", reports[source].digest}
    differs = [arithmetic.digest == ANY_BITS and report.digest not in right for report in reports]
    is_behind = [
        report.step < furthest or furthest < 0 or differ
        for report, differ in zip(reports, differs, strict=True)
    ]
    compared = {peer: report.digest for peer, report in enumerate(reports) if not is_behind[peer]}
    _compare_states(backend, replica, compared)
    blocks = [report.held if report.step == furthest else () for report in reports]
    kept = [[Block(*block) for block in member] for member in blocks]
    are_new = furthest >= 0 and not any(differs)
    are_new &= all(report.step in {-1, furthest} for report in reports)
    assignment = assign_blocks(kept, leaves, groups, backend.hosts)
    if any(is_behind):
        if not (are_new and _copy_aside(backend, replica, reports, source)):
            _send_state(backend, replica, is_behind, source)
        elif replica.size_bytes > QUICK_COPY_BYTES:  # newcomers copy while the others compute
            ahead = [held for held, behind in zip(kept, is_behind, strict=True) if not behind]
            pairs = zip(backend.hosts, is_behind, strict=bool(backend.hosts))
            places = [host for host, behind in pairs if not behind]
            shares = iter(assign_blocks(ahead, leaves, groups, places))
            assignment = [() if behind else next(shares) for behind in is_behind]
    return SyncResult(assignment=assignment, held=kept)


def _send_state(backend: Backend, replica: Replica, is_behind: Sequence[bool], source: int) -> None:
    """Send the state of `source` to those that are behind, and compare all states."""
    if backend.rank == source:
        for member, behind in enumerate(is_behind):
            if behind and member != source:
                replica.send(backend, member)
    elif is_behind[backend.rank]:
        replica.receive(backend, source)
    compare_states(backend, replica)


def take_first_state(backend: Backend, replica: Replica) -> None:
    """Give members whose state differs that of the first one; all members call this."""
    digests = gather_values(backend, replica.digest(), str)
    if len(set(digests)) > 1:
        _send_state(backend, replica, [digest != digests[0] for digest in digests], 0)


def compare_states(backend: Backend, replica: Replica) -> None:
    """Raise `WorkersDiverged` if the members hold different states; all members call this."""
    digests = gather_values(backend, replica.digest(), str)
    _compare_states(backend, replica, dict(enumerate(digests)))


def _copy_aside(
    backend: Backend, replica: Replica, reports: Sequence[_Report], source: int
) -> bool:
    """Let newcomers copy the state of `source` by themselves; return False if one of them cannot.

    The other members do not wait for the copy. Raises `PeerRefused` on a newcomer whose copy has
    other bits: the others have gone on in a later group, and write to that memory again.
    """
    first = reports[source]
    with ExitStack() as stack:
        # A pid of another boot or namespace is some other process here.
        is_here = replica.is_empty and first.namespace == replica.namespace
        memory = _open(*first.address, stack) if is_here else None
        own = memory is not None or not replica.is_empty, replica.committed
        if backend.rank == source:
            replica.offer()
        answers = gather_values(backend, own, tuple[bool, Committed])
        if not all(is_able for is_able, _ in answers):
            return False
        committed = answers[source][1]
        if memory is not None and not replica.copy(memory, committed, first.digest):
            raise PeerRefused("the state of the first member changed while it was copied")
    return True


def _open(pid: int, descriptor: int, inode: int, stack: ExitStack) -> int | None:
    """Open a descriptor of another process; None if it is closed to us or another file."""
    with suppress(OSError):
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, opened)
        return opened if os.fstat(opened).st_ino == inode else None
    return None


def _compare_arithmetic(reports: Sequence[_Report], rank: int) -> None:
    """Refuse members whose machine computes other bits, and name the setting that differs."""
    prints = [Fingerprint(digest=report.arithmetic, facts=report.facts) for report in reports]
    divergent = divergent_members([report.arithmetic for report in reports])
    if divergent:
        right = next(found for member, found in enumerate(prints) if member not in divergent)
        wrong, other = reports[divergent[0]].node, reports[prints.index(right)].node
        where = f" ({wrong} and {other})" if wrong != other else ""
        raise WorkersDiverged(explain(prints[divergent[0]], right) + where, divergent, rank)


def _compare_states(backend: Backend, replica: Replica, digests: dict[int, str]) -> None:
    """Refuse the minority. Without a majority no state can be trusted, so all are refused."""
    members, counts = list(digests), Counter(digests.values())
    if len(counts) < 2:  # noqa: PLR2004  all equal
        return
    (right, most), (_, next_most) = counts.most_common(2)
    divergent = [member for member in members if digests[member] != right or most == next_most]
    names = different_names(backend, _entries(replica), members)
    more = f" and {len(names) - NAMES_LIMIT} more" * (len(names) > NAMES_LIMIT)
    raise WorkersDiverged(
        f"the state of {len(divergent)} of {len(members)} workers differs from that of the others "
        f"at the same step, in {', '.join(names[:NAMES_LIMIT])}{more}: stopped before the next "
        f"step. {replica.advice}",
        divergent,
        backend.rank,
        *names,
    )


def _entries(replica: Replica) -> dict[str, bytes]:
    """Return digests by name, first of the values, by which hooks often change arrays."""
    found: dict[str, bytes] = {}

    def put(value: object, name: str) -> None:
        found[name] = xxh3_64_digest(msgspec.json.encode(value))

    values = msgspec.json.decode(replica.committed.values or b"{}")
    for name, value in {**values.pop("objects", {}), **values}.items():
        with_leaves(value, _NAMES.get(name, name), put)
    found |= {name: xxh3_64_digest(bytes_of(array)) for name, array in replica.state.items()}
    put(replace(replica.committed, values=b"", stop_requested=False), "position")
    return found


def _allocate(example: Arrays) -> tuple[dict[str, NDArray[Any]], int]:
    """Return writable arrays in the order of their names, and the memfd that holds them.

    Every page is touched now, while the other ranks still train without this one. Otherwise the
    page faults would come in the first step, in which all ranks wait for it.
    """
    memory = os.memfd_create("muster-state", os.MFD_CLOEXEC)
    places, size = {}, 0
    for name in sorted(example):
        places[name] = size
        size += example[name].nbytes + -example[name].nbytes % _ALIGNMENT
    os.ftruncate(memory, max(size, 1))
    mapped = mmap.mmap(memory, max(size, 1))  # an empty file cannot be mapped
    arrays = {
        name: np.ndarray(example[name].shape, example[name].dtype, mapped, place)
        for name, place in places.items()
    }
    for array in arrays.values():
        array.fill(0)
    return arrays, memory


def _digest(state: Arrays, committed: Committed) -> str:
    hasher = xxh3_128(msgspec.json.encode(replace(committed, stop_requested=False)))
    for name, array in state.items():
        hasher.update(name.encode())
        hasher.update(bytes_of(array))
    return hasher.hexdigest()
