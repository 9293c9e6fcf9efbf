"""What the pool of a synchronous job needs: the right number of ranks, and a layout that fits.

Rules of `coordinator.plan`, kept apart because they are about the group and not about one rank.
"""

from collections.abc import Iterator

from coordinator.actions import Action, Announce, Enlist, KillProcess, Move, Retire, Terminate
from coordinator.pool_fold import DIFFERED
from coordinator.snapshot import AgentState, JobSnapshot, LayoutSnapshot, RankSnapshot
from coordinator.wording import describe_recovery
from muster.contracts.job import JobStatus, Reason, StopRequest

COMPANY_SECONDS = 1.0
"""How long a newcomer waits for others that were started with it: one layout is cheaper."""

_TRAINS = frozenset({JobStatus.RUNNING, JobStatus.RECOVERING, JobStatus.PAUSED})


def pool_has_its_size(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    """New ranks take the lowest free places, shrinking takes the highest."""
    if not snapshot.is_synchronous or snapshot.is_ending:
        return
    serving = [rank.rank for rank in snapshot.in_service]
    missing = snapshot.wanted_world_size - len(serving)
    if missing > 0:
        # A rank that was retired and has not gone yet keeps its place.
        taken = {rank.rank for rank in snapshot.ranks if rank.in_service or rank.is_alive}
        free = (rank for rank in range(snapshot.wanted_world_size) if rank not in taken)
        yield from (Enlist(rank=rank) for rank, _ in zip(free, range(missing), strict=False))
    elif missing < 0:
        yield from (Retire(rank=rank) for rank in serving[missing:])


def who_is_out_of_service_goes(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    """A member leaves when the layout goes on without it; nobody waits for who never was one."""
    if not snapshot.is_synchronous or snapshot.is_ending:
        return
    for rank in snapshot.ranks:
        strays = rank.is_alive and not rank.in_service and rank.took_up < 0
        if strays and not rank.terminated:
            yield Terminate(rank=rank.rank)


def who_differs_is_stopped(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    for rank in snapshot.ranks:
        if rank.is_alive and rank.kill is None and rank.worker_id in snapshot.disputed:
            yield KillProcess(rank=rank.rank, cause=DIFFERED)


def layout_fits_the_pool(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Announce another layout when the members change, when one is stranded, or for a pause."""
    if not snapshot.is_synchronous or snapshot.agent is not AgentState.CONNECTED:
        return
    if snapshot.is_ending and not _lacks_a_keeper(snapshot):
        return
    members = sorted(filter(_can_train, snapshot.ranks), key=lambda rank: rank.worker_id or 0)
    present = snapshot.layout
    wanted = LayoutSnapshot(
        generation=present.generation + 1,
        workers=tuple(rank.worker_id or 0 for rank in members),
        ranks=tuple(rank.rank for rank in members),
        incarnations=tuple(rank.incarnation for rank in members),
        paused=snapshot.pause_asked or snapshot.is_ending,
    )
    if len(members) < (1 if snapshot.is_ending else max(1, snapshot.spec.min_workers)):
        return  # who is left waits at the step it is at
    if not _differs(snapshot, wanted) or _company_is_coming(snapshot, now):
        return
    yield Announce(layout=wanted)


def may_go(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """Whether a rank of a job that ends may be asked to go: the one that saves for all goes first.

    Should it die before it has saved, a last layout makes another one the keeper: no work is lost
    as long as anybody lives who holds it.
    """
    if not snapshot.is_synchronous or snapshot.done or rank.took_up < 0 or not _can_train(rank):
        return True
    keeper = _keeper(snapshot)
    if keeper is None:
        return False
    if keeper.rank == rank.rank:
        return rank.took_up == snapshot.layout.generation
    return not keeper.is_alive and keeper.exit_code == 0


def status_of_pool(snapshot: JobSnapshot) -> Move | None:
    """Return what the group has to say of the job's status, if anything."""
    layout = snapshot.layout
    if not snapshot.is_synchronous or snapshot.is_ending or snapshot.status not in _TRAINS:
        return None
    if snapshot.pool.is_paused:
        return Move(
            status=JobStatus.PAUSED,
            reason=Reason.TOO_FEW_WORKERS,
            message=_shortage(snapshot),
        )
    if layout.paused and all(snapshot.ranks[n].took_up == layout.generation for n in layout.ranks):
        return Move(
            status=JobStatus.PAUSED,
            reason=Reason.PAUSED_BY_USER,
            message="paused on request; resume it to go on from the same step",
        )
    return None


def _shortage(snapshot: JobSnapshot) -> str:
    pool = snapshot.pool
    causes = [
        describe_recovery(snapshot, rank, rank.trouble) for rank in snapshot.ranks if rank.trouble
    ]
    count = (
        f"{pool.world_size} of at least {pool.min_workers} workers are active; training goes on by "
        "itself when there are enough"
    )
    return ". ".join([*causes[:1], count])


def is_to_step(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """Whether a rank that takes no step is to be blamed: not while it waits for others, by rule.

    One that is not ready yet has only its own program to wait for.
    """
    if not snapshot.is_synchronous or rank.ready is None:
        return True
    holds = snapshot.layout.paused or snapshot.pool.is_paused
    return not holds and rank.worker_id in snapshot.layout.workers


def newcomers_limit(snapshot: JobSnapshot) -> int | None:
    """Return how many may join now; None: everybody, where there is no pool."""
    return snapshot.pool.room if snapshot.is_synchronous else None


def layout_moments(snapshot: JobSnapshot) -> Iterator[float]:
    """Yield when the rules here have to be asked again."""
    if snapshot.is_synchronous:
        for rank in snapshot.ranks:
            if rank.is_alive and rank.ready is None:
                yield rank.spawned_at + COMPANY_SECONDS


def _lacks_a_keeper(snapshot: JobSnapshot) -> bool:
    """Whether somebody holds work that nobody will save, in a job that is to end in peace."""
    if snapshot.done or snapshot.stop is StopRequest.FORCED:
        return False
    keeper = _keeper(snapshot)
    if keeper is not None and _has_saved_or_will(keeper, snapshot.layout):
        return False
    return any(_can_train(rank) and rank.took_up >= 0 for rank in snapshot.ranks)


def _has_saved_or_will(keeper: RankSnapshot, layout: LayoutSnapshot) -> bool:
    if not keeper.is_alive:
        return keeper.exit_code == 0
    is_asked = keeper.terminated or keeper.stopping
    return keeper.kill is None and (is_asked or keeper.took_up == layout.generation)


def _keeper(snapshot: JobSnapshot) -> RankSnapshot | None:
    """Return the rank that saves for all, None if its process has been replaced since."""
    layout = snapshot.layout
    if not layout.ranks:
        return None
    first = snapshot.ranks[layout.ranks[0]]
    return first if first.incarnation == layout.incarnations[0] else None


def _can_train(rank: RankSnapshot) -> bool:
    is_wanted = rank.in_service and not rank.terminated and rank.kill is None
    return is_wanted and rank.is_alive and rank.ready is not None and not rank.stopping


def _differs(snapshot: JobSnapshot, wanted: LayoutSnapshot) -> bool:
    present = snapshot.layout
    stranded = any(rank.is_alive and rank.stranded >= present.generation for rank in snapshot.ranks)
    return stranded or (present.workers, present.paused) != (wanted.workers, wanted.paused)


def _company_is_coming(snapshot: JobSnapshot, now: float) -> bool:
    """Whether somebody is about to be ready, and nobody waits for it in the middle of a step."""
    if any(_is_missed(snapshot, rank) for rank in snapshot.ranks):
        return True
    alive = {rank.worker_id for rank in snapshot.ranks if rank.is_alive}
    if not alive.issuperset(snapshot.layout.workers):
        return False
    return any(
        rank.is_alive
        and rank.in_service
        and rank.ready is None
        and now < rank.spawned_at + COMPANY_SECONDS
        for rank in snapshot.ranks
    )


def _is_missed(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """Whether a member goes on and has not found its new agent yet.

    A layout without it would send it away; should it never come, its silence is the end of it.
    """
    is_wanted = rank.in_service and not rank.terminated and rank.kill is None
    is_away = is_wanted and rank.is_alive and rank.ready is None and not rank.stopping
    return is_away and rank.worker_id is not None and snapshot.pool.is_active(rank.worker_id)
