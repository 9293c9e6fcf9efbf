"""Lists the checkpoints of a job: where they are, of which mode, and their condition.

A synchronous job has one model and saves into the job's place; the ranks of an independent job save
into a place each below it. A running job saves and deletes meanwhile: a checkpoint that is
gone by the time it is read is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice
from typing import Any, Final

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointMissing,
    OtherData,
)
from muster.checkpoints.manifest import SCHEDULE, VIRTUAL_SHARDS, CheckpointName, Manifest
from muster.checkpoints.reader import Checkpoint, CheckpointReader
from muster.checkpoints.store import CheckpointStore, StoreOpener, manifest_of, open_store
from muster.contracts.job.field_types import Mode, StepChoice
from muster.contracts.location import Location
from muster.contracts.messages.agent import RankCheckpoints
from muster.contracts.settings.paths import rank_of_checkpoints, rank_place

ALL_RANKS: Final = "all ranks"

LISTED_LIMIT: Final = 100
"""Newest checkpoints of a rank that decide from where its gang resumes. Ranks in step with each
other differ by few (`muster.contracts.location.save_lead`); others drift apart."""

NAMES_LIMIT: Final = 10_000
"""Of all ranks: their names are one message, of at most 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDir:
    """The place where one rank, or all ranks together, save checkpoints."""

    label: str  # ``all ranks`` or ``rank 3``
    reader: CheckpointReader
    job_uid: str | None  # the job whose checkpoints count; None: the job that saved here last

    @property
    def rank(self) -> int:
        """The rank that saves here; 0 for all ranks."""
        return self.reader.rank

    @property
    def location(self) -> Location:
        return self.reader.store.location

    @property
    def owner_uid(self) -> str | None:
        """The uid of the job whose checkpoints count."""
        return self.job_uid or self.reader.last_uid()

    def newest(self) -> Checkpoint:
        """Return the checkpoint that a restart would load; raises `CheckpointError`."""
        uid = self.owner_uid
        checkpoint = self.reader.newest(lambda manifest: manifest.job_uid == uid)
        if checkpoint is None:
            raise CheckpointMissing(f"{self.location} holds no checkpoint of this job yet")
        return checkpoint

    def problem_of_latest(self) -> str:
        """Return what is wrong with LATEST, "" if it names a checkpoint or there is none.

        A restart uses the newest intact checkpoint; the one that LATEST named is gone.
        """
        store = self.reader.store
        latest, names = store.latest(), store.names()
        # A running job may have replaced the file since `names` was read.
        if not names or latest in names or store.latest() != latest:
            return ""
        return f"names {latest}, which does not exist" if latest else "is missing or unreadable"

    def of_step(self, step: StepChoice) -> Checkpoint:
        """Return the checkpoint that `name_of` names, verified; raises `CheckpointError`."""
        return self.reader.load(self.name_of(step))

    def name_of(self, step: StepChoice) -> CheckpointName:
        """Return the most trusted checkpoint of a step of the job that counts, or its best one.

        Only manifests are read. Raises `CheckpointMissing`.
        """
        found = examine(self, reads_all=False)
        own = [entry for entry in found if entry.condition is not Condition.FOREIGN]
        for entry in own:
            if entry.is_best if step == "best" else entry.name.step == step:
                return entry.name
        steps = ", ".join(map(str, sorted({entry.name.step for entry in own})))
        words = f"checkpoint of step {step}: it has steps {steps or 'of other jobs'}"
        if step == "best":
            words = "best checkpoint: its job has no keep_best, or has not reported the metric yet"
        raise CheckpointMissing(f"{self.location} holds no {words}")


class Condition(StrEnum):
    """The condition of a checkpoint after every byte of it was verified."""

    CURRENT = "current"  # intact, and the one that a restart would load
    INTACT = "intact"
    DAMAGED = "damaged"
    FOREIGN = "another job's"
    """Intact, but left by another job in this directory: never restored by this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint of a directory."""

    name: CheckpointName
    condition: Condition
    manifest: Manifest | None  # None if it is damaged
    damage: str = ""  # a sentence that names the file
    is_best: bool = False  # by the `keep_best` of its job


def checkpoint_dirs(location: Location, job_uid: str | None = None) -> list[CheckpointDir]:
    """Return the places of a job's checkpoints by rank; raises `CheckpointMissing` if none.

    `location` may also be that of one rank. Without `job_uid` the job that saved last counts.
    """
    store = open_store(location)
    own_rank = rank_of_checkpoints(location.name)
    places = [(f"rank {rank}", rank, _of_rank(store, rank)) for rank in store.ranks()]
    if _has_checkpoints(store):
        label = ALL_RANKS if own_rank is None else f"rank {own_rank}"
        places.append((label, own_rank or 0, store))
    found = [
        CheckpointDir(label=label, reader=_reader(place, rank), job_uid=job_uid)
        for label, rank, place in places
    ]
    if not found:
        raise CheckpointMissing(
            f"{location} holds no checkpoints: name a directory such as ./checkpoints/my-job"
        )
    return found


def examine(directory: CheckpointDir, *, reads_all: bool = True) -> Iterator[ListedCheckpoint]:
    """Yield every checkpoint of a place, most trusted first, after verifying its bytes.

    Without `reads_all` those of the manifest alone are verified.
    """
    reader, own = directory.reader, directory.owner_uid
    has_current = has_best = False
    for name in reader.store.by_trust():
        try:
            manifest = reader.load(name).manifest if reads_all else manifest_of(reader.store, name)
        except CheckpointDamaged as damage:
            if name in reader.store.names():
                yield ListedCheckpoint(
                    name=name, condition=Condition.DAMAGED, manifest=None, damage=str(damage)
                )
            continue
        condition = Condition.INTACT if has_current else Condition.CURRENT
        if manifest.job_uid != own:
            condition = Condition.FOREIGN
        has_current = has_current or condition is Condition.CURRENT
        # The newest one that was the best when it was saved still is.
        is_best = manifest.is_at("best") and condition is not Condition.FOREIGN and not has_best
        has_best = has_best or is_best
        yield ListedCheckpoint(name=name, condition=condition, manifest=manifest, is_best=is_best)


def refuse_other_mode(location: Location, mode: Mode) -> None:
    """Raise `CheckpointMismatch` if a job's place has checkpoints only of the other mode.

    A job that looked in the wrong place would start from the beginning. A missing directory has no
    checkpoints. Raises another `CheckpointError` if the place cannot be read.
    """
    found = set(_modes(location))
    if not found or mode in found:
        return
    (other,) = found
    raise CheckpointMismatch(
        f"the checkpoints in {location} are of mode {other}, and a job of mode {mode} cannot "
        f"resume from them: use mode {other}, or start a job with another id and no resume_from"
    )


def gang_checkpoints(
    location: Location,
    ranks: int,
    job_uid: str | None,
    *,
    is_inherited: bool,
    guard: Callable[[str], AbstractContextManager[object]] = nullcontext,
    open_at: StoreOpener = open_store,
) -> list[RankCheckpoints]:
    """Return what each rank of a gang has below a job's place, as the manifests tell.

    That is what the job itself has saved or, of what it inherits, the job that saved last: one and
    the same for all ranks. `guard` is entered with the place of each rank. Raises a
    `CheckpointError` if a place cannot be read.
    """
    found, limit = [], max(1, min(LISTED_LIMIT, NAMES_LIMIT // ranks))
    for rank in range(ranks):
        place = rank_place(location, rank)
        with guard(str(place)):
            found.append(_manifests(open_at(place), None if is_inherited else job_uid, limit))
    uid = job_uid
    if is_inherited:
        known = filter(None, chain(*(manifests.values() for manifests in found)))
        others = [manifest for manifest in known if manifest.job_uid != job_uid]
        if not others:
            return []
        uid = max(others, key=lambda manifest: manifest.time).job_uid
    return [
        RankCheckpoints(
            intact=_texts(
                (name for name, file in manifests.items() if file and file.job_uid == uid), limit
            ),
            damaged=_texts((name for name, file in manifests.items() if file is None), limit),
        )
        for manifests in found
    ]


def _manifests(
    store: CheckpointStore, job_uid: str | None, limit: int
) -> dict[CheckpointName, Manifest | None]:
    """Return the manifests in a place, newest first; None for a damaged one.

    With a `job_uid` no more than `limit` of that job are read.
    """
    found: dict[CheckpointName, Manifest | None] = {}
    owned = 0
    for name in sorted(store.names(), reverse=True):
        try:
            found[name] = manifest = manifest_of(store, name)
        except CheckpointDamaged:
            found[name] = None
            continue
        owned += manifest.job_uid == job_uid
        if job_uid is not None and owned == limit:
            break
    if None in found.values():  # it may have been deleted meanwhile
        present = {*store.names()}
        found = {name: file for name, file in found.items() if file is not None or name in present}
    return found


def _texts(names: Iterable[CheckpointName], limit: int) -> tuple[str, ...]:
    return tuple(map(str, islice(names, limit)))


def values_of_newest(location: Location) -> Mapping[str, Any]:
    """Return the values of the newest checkpoint of the job that saved last, or nothing.

    Only the manifest is verified. Raises a `CheckpointError` if the place cannot be read.
    """
    reader = _reader(open_store(location), 0)
    uid = reader.last_uid()
    for name in reader.store.by_trust():
        with suppress(CheckpointDamaged):
            manifest = manifest_of(reader.store, name)
            if manifest.job_uid == uid:
                return manifest.values
    return {}


def refuse_other_schedule(
    values: Mapping[str, Any], wanted: Mapping[str, object], where: str
) -> None:
    """Raise `CheckpointMismatch` if the values of a synchronous checkpoint are of another schedule.

    Other samples would be read, or summed in another order. What an old one lacks is not compared.
    """
    found = {"virtual_shards": values.get(VIRTUAL_SHARDS), "drop_last": 0}
    found["compression"] = "none"
    found |= values.get(SCHEDULE, {})
    other = [name for name, value in wanted.items() if found.get(name) not in (None, value)]
    if other:
        kind = OtherData if {*other} <= {"lines", "hash_sum"} else CheckpointMismatch
        raise kind(
            f"the checkpoint {where} was made with "
            f"{', '.join(f'{name} {found[name]}' for name in other)}, and this job has "
            f"{', '.join(str(wanted[name]) for name in other)}: the bits would differ. Use the "
            "same values and the same data set, or begin a job that does not resume"
        )


def holds_checkpoints(location: Location) -> bool:
    """Return whether a job's place has any checkpoints, intact or not; raises as the store."""
    return any(_modes(location))


def _reader(store: CheckpointStore, rank: int) -> CheckpointReader:
    return CheckpointReader(store=store, rank=rank, world_size=None, warn=lambda _sentence: None)


def _of_rank(store: CheckpointStore, rank: int) -> CheckpointStore:
    return open_store(rank_place(store.location, rank))


def _modes(location: Location) -> Iterator[Mode]:
    store = open_store(location)
    if _has_checkpoints(store):
        yield "synchronous"
    if any(_has_checkpoints(_of_rank(store, rank)) for rank in store.ranks()):
        yield "independent"


def _has_checkpoints(store: CheckpointStore) -> bool:
    return store.latest() is not None or bool(store.names())
