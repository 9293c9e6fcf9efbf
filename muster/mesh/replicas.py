"""The checkpoints of members that all hold the same state, on the disks of several hosts.

On each host the member of the lowest rank saves, in one directory that belongs to the node: which
ranks its processes have is another matter in every group. A checkpoint is that of a script that
runs alone, rank 0 of 1.

The members restore together. The newest intact step that any of them holds is sent to the others
before it is used, and becomes durable on their hosts, too.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec.msgpack import decode, encode
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMismatch
from muster.checkpoints.format import Packed, State, pack, unpack
from muster.checkpoints.manager import open_manager
from muster.checkpoints.manifest import STATE, CheckpointName, Manifest, decode_manifest, sign
from muster.checkpoints.reader import Checkpoint
from muster.collectives.operations import all_gather_bytes, messages_of
from muster.contracts.messages.storage import OpenCheckpoints
from muster.contracts.shards import Position
from muster.datasets.errors import DatasetDiffers
from muster.datasets.source import DataSource

if TYPE_CHECKING:
    from muster.mesh.group import MeshBackend

WAIT_SECONDS: Final = 3600.0
"""For members that read or write a large state. One that is gone is known much sooner."""


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a member holds."""

    step: int = -1
    digest: str = ""
    sizes: tuple[int, ...] = ()
    """Of the buffers that it can send, in bytes: the manifest, and those of the arrays' file."""
    place: str
    damage: str = ""
    """Why it holds nothing, although it has checkpoints."""


class ReplicaCheckpoints:
    """The checkpoints of one member. For the main thread, like the `CheckpointManager`."""

    def __init__(
        self, session: OpenCheckpoints, warn: Callable[[str], None], backend: "MeshBackend"
    ) -> None:
        self._place = session.location
        self._warn = warn
        self._backend = backend
        nodes = [member.node_id for member in backend.members]
        is_saver = nodes.index(nodes[backend.rank]) == backend.rank
        self._own = open_manager(session, warn) if is_saver else None

    def claim(self) -> None:
        """Fence earlier processes of this host."""
        if self._own is not None:
            self._own.claim()

    def restore(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of all members, who all call this; None without any.

        Raises as `CheckpointManager.restore`, on all members `CheckpointDamaged` if there are
        checkpoints and none is intact, and `CheckpointMismatch` if two hold different states of
        the newest step; and what the backend raises.
        """
        backend = self._backend
        own, buffers, report = self._read()
        gathered = all_gather_bytes(backend, encode(report), timeout_seconds=WAIT_SECONDS)
        reports = [decode(each, type=_Report) for each in gathered]
        newest = max(reports, key=lambda report: report.step)  # the first of equal ones
        source = reports.index(newest)
        self._refuse(reports, source)
        behind = [rank for rank, report in enumerate(reports) if report.step < newest.step]
        if backend.rank == source:
            for piece in chain(*(messages_of(np.frombuffer(each, np.uint8)) for each in buffers)):
                backend.exchange([(to, piece) for to in behind], [], timeout_seconds=WAIT_SECONDS)
        elif backend.rank in behind:
            own = self._receive(source, newest)
        # The next calls have shorter timeouts than a large state takes to become durable.
        backend.barrier(timeout_seconds=WAIT_SECONDS)
        return own

    def save(
        self, step: int, position: Position, state: State, on_saved: Callable[[int], None]
    ) -> None:
        """Save a checkpoint as `CheckpointManager.save`, if this member does for its host."""
        if self._own is not None:
            self._own.save(step, position, state, on_saved)

    def flush(self) -> None:
        """Do nothing: a checkpoint is durable when `save` has returned."""

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _read(self) -> tuple[Checkpoint | None, list[memoryview], _Report]:
        """Return what this member holds, as the buffers to send, and as it tells the others."""
        try:
            own = None if self._own is None else self._own.restore()
        except CheckpointDamaged as error:
            return None, [], _Report(place=self._place, damage=str(error))
        if own is None:
            return None, [], _Report(place=self._place)
        _, manifest = sign(msgspec.structs.replace(own.manifest, manifest_xxh3=""))
        buffers = [memoryview(manifest), *pack(own.state).buffers]
        sizes, digest = tuple(map(len, buffers)), _digest(own.manifest)
        return own, buffers, _Report(step=own.step, digest=digest, sizes=sizes, place=self._place)

    def _refuse(self, reports: list[_Report], source: int) -> None:
        """Raise the same on all members if they cannot go on from what `source` holds."""
        members, newest = self._backend.members, reports[source]
        for rank, report in enumerate(reports):
            if report.damage and newest.step < 0:
                raise CheckpointDamaged(f"{members[rank]}: {report.damage}")
            if report.step == newest.step and report.digest != newest.digest:
                raise CheckpointMismatch(
                    f"{members[source]} and {members[rank]} hold different states of step "
                    f"{newest.step}, as they went on apart: move the directory of one away, on its "
                    f"host ({newest.place} or {report.place}), and restore again"
                )
        if damage := reports[self._backend.rank].damage:
            self._warn(f"{damage}. The state of {members[source]} is taken")

    def _receive(self, source: int, newest: _Report) -> Checkpoint:
        """Return what `source` sends, durable if this member saves."""
        where = f"step {newest.step} of {self._backend.members[source]}"
        manifest = decode_manifest(self._fill(source, newest.sizes[:1]), where)
        content = self._fill(source, newest.sizes[1:])
        facts = manifest.files.get(STATE)
        if facts is not None and xxh3_64_hexdigest(content) != facts.xxh3:
            raise CheckpointDamaged(f"{where} was damaged on its way: restore again")
        if self._own is not None:
            packed = Packed([memoryview(content)], len(content), manifest.values)
            self._own.save(manifest.step, manifest.position, packed)
        state = unpack(content if facts else None, manifest.state_values, where)
        name = CheckpointName(manifest.generation, manifest.step)
        return Checkpoint(name=name, manifest=manifest, state=state)

    def _fill(self, source: int, sizes: Sequence[int]) -> bytearray:
        """Receive buffers of these sizes, one behind the other."""
        content = bytearray(sum(sizes))
        for start, end in pairwise(accumulate(sizes, initial=0)):
            for piece in messages_of(np.frombuffer(content, np.uint8)[start:end]):
                self._backend.recv_into(source, piece, timeout_seconds=WAIT_SECONDS)
        return content


def compare_samples(backend: "MeshBackend", source: DataSource) -> None:
    """Raise `DatasetDiffers` unless all members, who all call this, have the same samples."""
    own = encode(
        [(shard.lines, shard.hash_sum) for shard in source.totals(range(len(source.shards)))]
    )
    found = all_gather_bytes(backend, own, timeout_seconds=WAIT_SECONDS)
    for member, samples in zip(backend.members, found, strict=True):
        if samples != own:
            raise DatasetDiffers(source.location, str(member))


def _digest(manifest: Manifest) -> str:
    """Return what is equal for equal states: nothing of who has saved it, and when."""
    facts = [manifest.state_values, manifest.position, manifest.files]
    return xxh3_128_hexdigest(msgspec.json.encode(facts, order="sorted"))
