"""Rules of `plan` about the pool of a synchronous job: its size and who trains together."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

from coordinator.decide import actions
from coordinator.decide.actions import Action, SetStatus
from coordinator.decide.events import describe_recovery
from coordinator.decide.fold_pool import divergence
from coordinator.decide.state.job import GroupSnapshot, JobSnapshot, Partition
from coordinator.decide.state.rank import RankSnapshot
from muster.contracts.agent import UNPLACED
from muster.contracts.job.status import JobStatus, Reason

GATHER_SECONDS: Final = 1.0
"""How long a new rank waits for others started with it: one group round is cheaper than two."""

_TRAINS = frozenset({JobStatus.RUNNING, JobStatus.RECOVERING, JobStatus.PAUSED})


def resize_pool(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    """New ranks take the lowest free numbers; shrinking empties a host, the highest rank first."""
    if not snapshot.is_synchronous or snapshot.is_ending or snapshot.is_past_loop:
        return
    missing = snapshot.wanted_world_size - len(snapshot.in_service)
    if missing > 0:
        # A removed rank keeps its number until its process is gone.
        taken = {rank.rank for rank in snapshot.ranks if rank.in_service or rank.is_alive}
        free = (rank for rank in range(snapshot.wanted_world_size) if rank not in taken)
        yield from (actions.AddRank(rank=rank) for rank in islice(free, missing))
    elif missing < 0:
        leaving = sorted(snapshot.in_service, key=partial(_leaving_order, snapshot))[:-missing]
        numbers = sorted(rank.rank for rank in leaving)
        yield from (actions.RemoveRank(rank=number) for number in numbers)


def _leaving_order(snapshot: JobSnapshot, rank: RankSnapshot) -> tuple[bool, int, int, int]:
    """Ranks without a host leave first, then those of the host with the fewest of them.

    Those of the coordinator's own host leave last: one of them saves.
    """
    count = sum(other.host == rank.host for other in snapshot.in_service)
    is_local = snapshot.spans_hosts and snapshot.agent_of(rank).is_local
    return is_local, count * (rank.host != UNPLACED), -snapshot.agent_of(rank).order, -rank.rank


def release_removed_ranks(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    """Terminate removed ranks that never joined; a member leaves with the next group round."""
    if not snapshot.is_synchronous or snapshot.is_ending:
        return
    for rank in snapshot.ranks:
        is_removed = rank.is_alive and not rank.in_service and not rank.has_joined
        if is_removed and rank.attempt.intent.terminated_at is None:
            yield actions.Terminate(rank=rank.rank)


def stop_divergent_ranks(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    """Kill ranks whose state, or code, differs from that of the others."""
    for rank in snapshot.ranks:
        # The ranks of a failed job have time to save.
        cause = None if snapshot.is_ending else rank.attempt.refused
        cause = divergence(snapshot, rank) or cause
        if cause is not None and rank.is_alive and rank.attempt.intent.kill is None:
            yield actions.KillProcess(rank=rank.rank, cause=cause)


def publish_group(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Start a group round for new members, a lost peer, a pause or a requested checkpoint."""
    if not snapshot.is_synchronous or not _are_agents_connected(snapshot):
        return
    if snapshot.is_ending and not _needs_another_saver(snapshot):
        return
    requested, done = snapshot.checkpoint_requests, snapshot.checkpoint_requests_done
    members = sorted(
        filter(_can_train, snapshot.ranks),
        key=lambda rank: (snapshot.agent_of(rank).order, rank.attempt.worker_id or 0),
    )
    is_over = snapshot.is_ending or snapshot.is_past_loop
    if len(members) < (1 if is_over else max(1, snapshot.spec.min_workers)):
        return  # the remaining members wait at their present step
    wanted = GroupSnapshot(
        round=snapshot.group.round + 1,
        workers=tuple(rank.attempt.worker_id or 0 for rank in members),
        ranks=tuple(rank.rank for rank in members),
        attempts=tuple(rank.attempt.number for rank in members),
        paused=snapshot.is_ending or (snapshot.pause_requested and not snapshot.is_past_loop),
        save=requested if requested > done else 0,
        exporter=snapshot.end.exporter,
    )
    is_due = _is_change(snapshot, wanted) and not _is_gathering(snapshot, now)
    if is_due and not _are_members_joining(snapshot, wanted):
        yield actions.PublishGroup(group=wanted)


def may_terminate(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """True if a rank of an ending job may be asked to exit: the rank that saves exits first.

    If the saver dies before it has saved, a last group round makes another member the saver: no
    work is lost as long as one member lives.
    """
    if not snapshot.is_synchronous or snapshot.is_done:
        return True
    if not rank.has_joined or not _can_train(rank):
        return True
    saver = _saver(snapshot)
    if saver is None:
        return False
    if saver.rank == rank.rank:
        return rank.attempt.member.joined_round == snapshot.group.round
    return _has_saved(saver)


def pool_status(snapshot: JobSnapshot) -> SetStatus | None:
    """Return PAUSED if members wait for others, or all of them have joined a paused round."""
    group = snapshot.group
    is_over = snapshot.is_ending or snapshot.is_past_loop
    if not snapshot.is_synchronous or is_over or snapshot.status not in _TRAINS:
        return None
    pool = snapshot.pool
    if pool.is_paused and pool.active:  # without any, there is only a rank to wait for
        troubles = (
            describe_recovery(snapshot, rank, rank.trouble)
            for rank in snapshot.ranks
            if rank.trouble
        )
        count = (
            f"{pool.world_size} of at least {pool.min_workers} workers are active; training "
            "resumes when there are enough"
        )
        message = ". ".join([*islice(troubles, 1), count])
        return SetStatus(status=JobStatus.PAUSED, reason=Reason.TOO_FEW_WORKERS, message=message)
    is_saving = group.save > 0 and snapshot.reason is Reason.PAUSED_BY_USER  # paused before
    if group.paused and (is_saving or snapshot.has_joined_group):
        return SetStatus(
            status=JobStatus.PAUSED,
            reason=Reason.PAUSED_BY_USER,
            message="paused on request; resume it to continue from the same step",
        )
    return None


def is_step_expected(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """False for a member that waits for others by rule; such a rank may take no step.

    A rank that is not ready yet waits only for its own program.
    """
    if rank.attempt.member.is_past_loop:
        return False
    if not snapshot.is_synchronous or rank.attempt.member.ready is None:
        return True
    is_held = snapshot.group.paused or snapshot.pool.is_paused
    return not is_held and rank.attempt.worker_id in snapshot.group.workers


def group_deadlines(snapshot: JobSnapshot) -> Iterator[float]:
    """Yield when `publish_group` has to run again."""
    if snapshot.is_synchronous:
        for rank in snapshot.ranks:
            if rank.is_alive and rank.attempt.member.ready is None:
                yield rank.attempt.spawned_at + GATHER_SECONDS


def _needs_another_saver(snapshot: JobSnapshot) -> bool:
    """True if a job with time to save has members with unsaved work and no rank that saves it."""
    if snapshot.is_done or snapshot.end.is_forced:
        return False
    saver = _saver(snapshot)
    if saver is not None and _has_saved_or_will(saver, snapshot.group):
        return False
    return any(_can_train(rank) and rank.has_joined for rank in snapshot.ranks)


def _has_saved_or_will(saver: RankSnapshot, group: GroupSnapshot) -> bool:
    if _has_saved(saver) or not saver.is_alive:
        return _has_saved(saver)
    intent, member = saver.attempt.intent, saver.attempt.member
    is_asked = intent.terminated_at is not None or intent.stopping
    return intent.kill is None and (is_asked or member.joined_round == group.round)


def _has_saved(saver: RankSnapshot) -> bool:
    is_gone = not saver.is_alive and saver.attempt.exit_code == 0
    return saver.finished or saver.attempt.member.is_past_loop or is_gone


def _saver(snapshot: JobSnapshot) -> RankSnapshot | None:
    """Return the rank that saves for the group; None if its attempt has been replaced."""
    group = snapshot.group
    if not group.ranks:
        return None
    first = snapshot.ranks[group.ranks[0]]
    return first if first.attempt.number == group.attempts[0] else None


def lose_partitioned_host(snapshot: JobSnapshot, partition: Partition) -> Action:
    """Give up the host with fewer members of two that cannot reach each other, never our own."""
    hosts = [snapshot.ranks[number].host for number in snapshot.group.ranks]

    def worth(host: str) -> tuple[bool, int, int]:
        agent = snapshot.agents[host]
        return agent.is_local, hosts.count(host), -agent.order

    lost, kept = sorted(partition.hosts, key=worth)
    why = f"{lost} and {kept} cannot reach each other: open the ports of MUSTER_RANK_PORTS"
    return actions.LoseHost(host=lost, why=why)


def _are_agents_connected(snapshot: JobSnapshot) -> bool:
    """True if each host with living ranks is connected: a round without one loses its members."""
    return all(snapshot.agent_of(rank).is_connected for rank in snapshot.ranks if rank.is_alive)


def _is_staying(rank: RankSnapshot) -> bool:
    intent = rank.attempt.intent
    is_asked = intent.terminated_at is not None or intent.stopping or intent.kill is not None
    is_asked |= rank.attempt.refused is not None
    is_gone = not rank.is_alive or rank.attempt.died or rank.is_exiting
    is_gone |= rank.attempt.member.is_past_loop
    return rank.in_service and not is_gone and not is_asked


def _can_train(rank: RankSnapshot) -> bool:
    return _is_staying(rank) and rank.attempt.member.ready is not None


def _is_change(snapshot: JobSnapshot, wanted: GroupSnapshot) -> bool:
    present = snapshot.group
    # Those that have finished leave without a round of their own: the others are about to.
    finished = {
        rank.attempt.worker_id
        for rank in snapshot.ranks
        if rank.finished or rank.attempt.member.is_past_loop
    }
    workers = tuple(worker for worker in present.workers if worker not in finished)
    is_same = (workers, present.paused) == (wanted.workers, wanted.paused)
    return not is_same or wanted.save > present.save or _is_peer_lost(snapshot)


def _is_peer_lost(snapshot: JobSnapshot) -> bool:
    present = snapshot.group.round
    members = (rank.attempt.member for rank in snapshot.ranks if rank.is_alive)
    return any(member.peer_lost_round >= present for member in members)


def _are_members_joining(snapshot: JobSnapshot, wanted: GroupSnapshot) -> bool:
    """True if new ranks have to wait because members are just joining the present round.

    Once these have joined, they finish their step before they let new ranks in.
    """
    present = snapshot.group
    if not set(wanted.workers).issuperset(present.workers) or _is_peer_lost(snapshot):
        return False
    members = (snapshot.ranks[number].attempt.member for number in present.ranks)
    is_joining = any(member.joined_round < present.round for member in members)
    return wanted.paused == present.paused and is_joining


def _is_gathering(snapshot: JobSnapshot, now: float) -> bool:
    """True if a rank is about to be ready and no member waits for the round within a step."""
    if any(_is_rejoining(snapshot, rank) for rank in snapshot.ranks):
        return True
    attempts = (rank.attempt for rank in snapshot.ranks if rank.is_alive)
    alive = {attempt.worker_id for attempt in attempts if not attempt.died}
    if not alive.issuperset(snapshot.group.workers):
        return False
    return any(
        rank.is_alive
        and rank.in_service
        and rank.attempt.member.ready is None
        and now < rank.attempt.spawned_at + GATHER_SECONDS
        for rank in snapshot.ranks
    )


def _is_rejoining(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """True if a member runs on and has not reached its new agent yet.

    A group round without it would remove it. If it never comes, its silence ends it.
    """
    worker_id = rank.attempt.worker_id
    is_away = _is_staying(rank) and rank.attempt.member.ready is None
    return is_away and worker_id is not None and snapshot.pool.is_active(worker_id)
