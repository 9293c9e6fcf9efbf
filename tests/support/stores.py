"""Places for checkpoints, one of each kind, for the promises that every store keeps."""

import asyncio
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, cast

import msgspec
from xxhash import xxh3_64_hexdigest

from coordinator.agents.checkpoint_receiver import JobDirectories
from coordinator.agents.server import AgentServer, Listener
from muster.checkpoints.errors import CheckpointDamaged, StaleGeneration
from muster.checkpoints.format import Packed
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    STATE,
    WITNESS,
    CheckpointName,
    Fence,
    FileFacts,
    Manifest,
    sign,
)
from muster.checkpoints.s3 import S3Store
from muster.checkpoints.store import CheckpointStore
from muster.contracts.location import Location
from muster.contracts.messages.agent import AgentClaim
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.settings.paths import rank_of_checkpoints, rank_place
from muster.contracts.token import sha256_of
from muster.host.addresses import publish_address
from muster.objects.client import S3Client
from tests.support.s3_server import bare_client, new_bucket, shared_store
from worker.coordinator.store import CoordinatorStore, StoreLink


@dataclass(slots=True)
class Contents:
    """What one location holds."""

    files: dict[CheckpointName, dict[str, bytes]] = field(default_factory=dict)
    latest: CheckpointName | None = None
    claims: dict[str | None, int] = field(default_factory=dict)
    """The newest generation of each job."""


class MemoryPlace:
    """The locations that several stores share. Safe for threads."""

    def __init__(self) -> None:
        self.lock: Final = Lock()
        self.contents: Final[defaultdict[Location, Contents]] = defaultdict(Contents)


class MemoryStore:
    """The least that keeps the promises of `CheckpointStore`: nothing in them needs a disk."""

    def __init__(self, place: MemoryPlace, location: Location = Path("/memory")) -> None:
        self.location: Final = location
        self._place: Final = place
        self._contents: Final = place.contents[location]
        self._generation = -1
        self._job_uid: str | None = None

    def latest(self) -> CheckpointName | None:
        return self._contents.latest

    def names(self) -> list[CheckpointName]:
        with self._place.lock:
            return list(self._contents.files)

    def by_trust(self) -> Iterator[CheckpointName]:
        latest = self.latest()
        yield from sorted(self.names(), key=lambda name: (name == latest, name), reverse=True)

    def ranks(self) -> list[int]:
        below = [at.name for at in [*self._place.contents] if at.parent == self.location]
        return sorted(rank for name in below if (rank := rank_of_checkpoints(name)) is not None)

    def read(self, name: CheckpointName, file: str, limit_bytes: int) -> bytearray:
        content = self._contents.files.get(name, {}).get(file)
        if content is None or len(content) > limit_bytes:
            raise CheckpointDamaged(f"{self.location}/{name}/{file} cannot be read")
        return bytearray(content)

    def claim(self, generation: int | None, job_uid: str | None) -> int:
        self._job_uid = job_uid
        with self._place.lock:
            self._generation = self._newest() + 1 if generation is None else generation
            self._refuse_if_stale()
            self._contents.claims[job_uid] = self._generation
        return self._generation

    def commit(self, unsigned: Manifest, packed: Packed) -> tuple[CheckpointName, Manifest]:
        files = {STATE: b"".join(packed.buffers)} if packed.buffers else {}
        facts = {file: FileFacts(len(it), xxh3_64_hexdigest(it)) for file, it in files.items()}
        manifest, files[MANIFEST] = sign(msgspec.structs.replace(unsigned, files=facts))
        with self._place.lock:
            self._refuse_if_stale()
            name = CheckpointName(self._generation, unsigned.step)
            while name in self._contents.files:
                name = name._replace(revision=name.revision + 1)
            self._contents.files[name] = files
            self._contents.latest = name
        return name, manifest

    def put_witness(self, name: CheckpointName, content: bytes) -> None:
        if name in self._contents.files:
            self._contents.files[name][WITNESS] = content

    def rewind(self, name: CheckpointName) -> None:
        with self._place.lock:
            self._refuse_if_stale()
            self._contents.latest = name

    def remove(self, name: CheckpointName) -> None:
        with self._place.lock:
            self._contents.files.pop(name, None)

    def close(self) -> None:
        """Nothing is kept."""

    def _newest(self) -> int:
        """Return the newest generation of this job; of every job for a process started by hand."""
        claims = self._contents.claims
        return max([-1, *(claims[job] for job in claims if self._job_uid in {None, job})])

    def _refuse_if_stale(self) -> None:
        if (newest := self._newest()) > self._generation:
            raise StaleGeneration(str(self.location), self._generation, newest)


@dataclass(frozen=True)
class Place:
    """A place that any number of stores use at once."""

    open: Callable[[], CheckpointStore]
    """Return another reader or writer, as a new process would have."""
    open_rank: Callable[[int], CheckpointStore]
    """Return a store of the place that a rank has below this one."""
    entries: Callable[[], set[str]]
    """Return what is stored for checkpoints, whole or not; without LATEST and marks of claims."""
    damage: Callable[[CheckpointName, str, bytes | None], None]
    """Replace the bytes of a checkpoint's file; None removes it."""


@contextmanager
def local(directory: Path) -> Iterator[Place]:
    root = directory / "checkpoints" / "job"

    def entries() -> set[str]:
        found = {str(path.relative_to(root)) for path in root.rglob("*")}
        return {name for name in found if name != "LATEST" and Fence.parse(name) is None}

    def damage(name: CheckpointName, file: str, content: bytes | None) -> None:
        path = root / str(name) / file
        path.unlink() if content is None else path.write_bytes(content)

    yield Place(
        open=partial(LocalStore, root),
        open_rank=lambda rank: LocalStore(rank_place(root, rank)),
        entries=entries,
        damage=damage,
    )


@contextmanager
def memory(_directory: Path) -> Iterator[Place]:
    shared, root = MemoryPlace(), Path("/job")

    def entries() -> set[str]:
        found = shared.contents[root].files.items()
        return {f"{name}/{file}" for name, files in found for file in files}

    def damage(name: CheckpointName, file: str, content: bytes | None) -> None:
        files = shared.contents[root].files[name]
        files.pop(file)
        if content is not None:
            files[file] = content

    yield Place(
        open=partial(MemoryStore, shared, root),
        open_rank=lambda rank: MemoryStore(shared, rank_place(root, rank)),
        entries=entries,
        damage=damage,
    )


@contextmanager
def s3(_directory: Path) -> Iterator[Place]:
    access = shared_store()
    root, client, bare = new_bucket(access), S3Client(access), bare_client(access)

    def entries() -> set[str]:
        unfinished = {name for name, _ in client.uploads(root)}
        return unfinished | {stored.name for stored in client.list(root)} - {LATEST}

    def damage(name: CheckpointName, file: str, content: bytes | None) -> None:
        named = {"Bucket": root.bucket, "Key": (root / str(name) / file).prefix}
        if content is None:
            bare.delete_object(**named)
        else:
            bare.put_object(**named, Body=content)

    yield Place(
        open=partial(S3Store, client, root),
        open_rank=lambda rank: S3Store(client, rank_place(root, rank)),
        entries=entries,
        damage=damage,
    )


class Host:
    """A listener that knows one agent of another host."""

    def __init__(self, agent: AgentAssignment, own: Path) -> None:
        self._agent = agent
        self._directories = JobDirectories(own=own, inherited=None)

    def token_sha256(self, _claim: AgentClaim, **_where: bool) -> str:
        return sha256_of(self._agent.token)

    def checkpoint_directories(self, _claim: AgentClaim) -> JobDirectories:
        return self._directories


@contextmanager
def coordinator(directory: Path) -> Iterator[Place]:
    """Have another host save in a directory of this one."""
    # An address of this process alone: tests beside it may take a port of 127.0.0.1 meanwhile.
    own = f"127.1.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    with socket.create_server((own, 0)) as free:
        endpoint = free.getsockname()
    agent = AgentAssignment(
        job_uid="uid",
        host="host-1",
        agent_number=0,
        token="secret",  # noqa: S106  of a test
        job_root=str(directory / "job-root"),
        address_file=str(directory / "coordinator.json"),
        coordinator=CoordinatorAddress(host=endpoint[0], port=endpoint[1]),
        is_managed=True,
        orphan_timeout_seconds=60.0,
        stop_grace_seconds=1.0,
        agent_heartbeat_seconds=1.0,
        max_log_bytes=1 << 20,
    )
    assert agent.coordinator is not None
    publish_address(agent.coordinator, Path(agent.address_file))
    with local(directory) as here, ExitStack() as opened:
        root = directory / "checkpoints" / "job"
        opened.enter_context(serving(Host(agent, root), endpoint))

        def store(location: Path) -> CoordinatorStore:
            link = StoreLink(agent)
            opened.callback(link.close)
            return CoordinatorStore(link, location, print)

        yield replace(
            here, open=partial(store, root), open_rank=lambda rank: store(rank_place(root, rank))
        )


@contextmanager
def serving(host: Host, endpoint: tuple[str, int]) -> Iterator[None]:
    """Run the server of a coordinator in a thread of its own."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    server = AgentServer(epoch=1, listener=cast("Listener", host), endpoint=endpoint)

    def run() -> None:
        loop.run_until_complete(server.start())
        started.set()
        loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


PLACES: Mapping[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "local": local,
    "memory": memory,
    "coordinator": coordinator,
    "s3": s3,
}
