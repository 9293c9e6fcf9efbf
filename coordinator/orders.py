"""From a decision to the words an agent understands."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Final, TypeAlias

import msgspec

from coordinator.charge import Charge
from coordinator.snapshot import JobSnapshot
from muster.contracts.environ import Assignment, rank_environment
from muster.contracts.messages import (
    Announce,
    Dismiss,
    KillRank,
    Layout,
    Seat,
    StartRank,
    TerminateRank,
)
from muster.contracts.spec import JobSpec

Order: TypeAlias = StartRank | TerminateRank | KillRank | Announce | Dismiss


LOOPBACK: Final = "127.0.0.1"
"""Where ranks of one host meet over TCP."""


def start_order(charge: Charge, number: int) -> StartRank:
    rank = charge.snapshot.ranks[number]
    places = charge.places
    if places is None:
        raise RuntimeError(f"rank {number} is to start before its job was prepared")
    assignment = Assignment(
        job_id=charge.snapshot.job_id,
        job_uid=charge.snapshot.uid,
        rank=number,
        incarnation=rank.incarnation,
        checkpoint_dir=places.checkpoint_dir,
        dataset_dir=places.dataset_dir,
        master_port=charge.attachment.master_port,
    )
    return StartRank(
        rank=number,
        incarnation=rank.incarnation,
        environment=rank_environment(_spec_now(charge.snapshot), assignment),
        working_dir=str(places.working_dir),
    )


def standing_orders(charge: Charge) -> Iterator[Order]:
    """Yield what an agent that has just come may not have heard."""
    for rank in charge.snapshot.ranks:
        if rank.is_alive and rank.identity is None:
            yield start_order(charge, rank.rank)
        if rank.is_alive and rank.terminated:
            yield terminate_order(charge, rank.rank)
        if rank.is_alive and rank.kill is not None:
            yield kill_order(charge, rank.rank)
    if charge.snapshot.layout.workers:
        yield announce_order(charge)


def _spec_now(snapshot: JobSnapshot) -> JobSpec:
    """Return the spec with the world size of this moment, which includes every rank there is."""
    return msgspec.structs.replace(snapshot.spec, world_size=len(snapshot.ranks))


def announce_order(charge: Charge) -> Announce:
    """Return the present layout; said again, it is word for word the same."""
    layout = charge.snapshot.layout
    ready = [charge.snapshot.ranks[rank].ready for rank in layout.ranks]
    seats = tuple(
        Seat(worker_id=worker, rank=rank, host=LOOPBACK, port=0 if said is None else said.port)
        for worker, rank, said in zip(layout.workers, layout.ranks, ready, strict=True)
    )
    token = sha256(f"{charge.layout_secret}/{layout.generation}".encode()).hexdigest()
    told = Layout(generation=layout.generation, token=token, seats=seats, paused=layout.paused)
    return Announce(layout=told, incarnations=layout.incarnations)


def terminate_order(charge: Charge, number: int) -> TerminateRank:
    return TerminateRank(rank=number, incarnation=charge.snapshot.ranks[number].incarnation)


def kill_order(charge: Charge, number: int) -> KillRank:
    return KillRank(rank=number, incarnation=charge.snapshot.ranks[number].incarnation)
