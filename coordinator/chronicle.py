"""What is worth telling of a job's life: from happenings to one-sentence entries. Pure.

Beats are not news. An entry is made only if the happening changed what is known, so that a
message told twice is an entry once.
"""

from dataclasses import dataclass
from signal import SIGKILL

from coordinator import actions, happenings
from coordinator.happenings import Happening
from coordinator.snapshot import NEVER, JobSnapshot
from coordinator.wording import describe_exit, describe_layout, legible
from muster.contracts.job import JobStatus
from muster.contracts.messages import Disputed, RankExited, RankSaid, RankSpawned, Stranded, Warned
from muster.contracts.process import ProcessRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event to be, without its time."""

    kind: str
    message: str
    rank: int | None = None
    incarnation: int | None = None


def narrate(before: JobSnapshot, happening: Happening, after: JobSnapshot) -> Entry | None:
    """Return what to tell of a happening that led from `before` to `after`."""
    if after == before:
        return None
    match happening:
        case RankSaid():
            return _of_words(before, happening)
        case RankSpawned(rank=rank) if _identity(before, rank) != _identity(after, rank):
            return _of_start(after, happening)
        case RankExited():
            return _of_end(before, happening, after)
        case happenings.AgentJoined() if after.any_alive:
            return _of_adoption(before)
        case happenings.AgentLost() if before.needs_agent:
            return Entry(kind="agent_lost", message=happening.message)
        case happenings.Taken():
            return _of_action(before, happening.action, after)
        case _:
            return None


def _of_start(after: JobSnapshot, spawned: RankSpawned) -> Entry | None:
    """Tell which process a rank is, unless it was told already that it is killed."""
    if after.ranks[spawned.rank].kill is not None:
        return None
    return _of_rank(after, spawned.rank, "rank_started", f"runs as pid {spawned.pid}")


def _of_end(before: JobSnapshot, exited: RankExited, after: JobSnapshot) -> Entry | None:
    """Tell how a process has ended, unless it was told that it is killed, and why."""
    if before.ranks[exited.rank].kill is not None and exited.signal == SIGKILL:
        return None
    ended = describe_exit(after.ranks[exited.rank])
    words = ended if exited.unstarted is None else legible(exited.unstarted)
    return _of_rank(after, exited.rank, "rank_exited", words)


def _of_words(before: JobSnapshot, said: RankSaid) -> Entry | None:
    match said.message:
        case Warned(message=warning):
            return _of_rank(before, said.rank, "warned", warning)
        case Disputed() as disputed:
            return _of_dispute(disputed)
        case Stranded() as stranded:
            return _of_stranded(before, said.rank, stranded)
        case _:
            return None


def _of_adoption(before: JobSnapshot) -> Entry:
    """Tell that ranks which went on alone are looked after again, and by whom."""
    sentence = "the job's agent is there, its ranks go on"
    # Whoever has never heard an agent of a job that has ranks is not who started them.
    if before.agent_heard_at == NEVER:
        sentence = f"a new coordinator has taken over; {sentence}"
    return Entry(kind="agent_adopted", message=sentence)


def _of_action(before: JobSnapshot, action: actions.Action, after: JobSnapshot) -> Entry | None:
    match action:
        case actions.KillProcess():
            return _of_rank(after, action.rank, "rank_killed", action.cause.message)
        case actions.KillAgent():
            message = "the job's agent does not answer and is replaced"
            return Entry(kind="agent_killed", message=message)
        case actions.Announce():
            return Entry(kind="layout_announced", message=describe_layout(action.layout))
        case actions.Suspect():
            return _of_rank(after, action.rank, "rank_suspected", "is late with its heartbeat")
        case actions.Move() if before.status is not after.status:
            return _of_move(after)
        case _:
            return None


def _of_move(after: JobSnapshot) -> Entry:
    if after.status is JobStatus.STOPPING and after.verdict is not None:
        # Why, it says when it has failed.
        words = "the job cannot go on; ranks that are left are saving and exiting"
        return Entry(kind="job_failing", message=words)
    # What was said of a job when it was submitted is no reason for what becomes of it.
    why = None if after.message == after.note else after.message
    sentence = f"the job is {after.status}"
    return Entry(
        kind=f"job_{after.status.lower()}", message=f"{sentence}: {why}" if why else sentence
    )


def _identity(snapshot: JobSnapshot, rank: int) -> ProcessRecord | None:
    return snapshot.ranks[rank].identity if 0 <= rank < len(snapshot.ranks) else None


def _of_dispute(disputed: Disputed) -> Entry:
    """Tell who differs, and in what: for a person to mend if it is a machine's setting."""
    workers = ", ".join(map(str, disputed.workers))
    one = len(disputed.workers) == 1
    message = f"worker{'' if one else 's'} {workers}: {legible(disputed.message)}"
    return Entry(kind="workers_disputed", message=message)


def _of_stranded(before: JobSnapshot, rank: int, stranded: Stranded) -> Entry | None:
    """Tell why there will be another layout, once: peers lose each other, and all say so.

    Those of a job that is ending lose each other as one exits before the other, and meet no more.
    """
    if before.is_ending:
        return None
    layout = before.layout
    is_known = any(other.stranded >= layout.generation for other in before.ranks)
    if is_known or stranded.generation != layout.generation:
        return None
    ranks = ", ".join(map(str, layout.ranks))
    group = f"the group of ranks {ranks}, in this order" if ranks else "its group"
    words = f"has lost {group}: {legible(stranded.message)}"
    return _of_rank(before, rank, "rank_stranded", words)


def _of_rank(snapshot: JobSnapshot, rank: int, kind: str, words: str) -> Entry:
    return Entry(
        kind=kind,
        message=f"rank {rank} {words}",
        rank=rank,
        incarnation=snapshot.ranks[rank].incarnation,
    )
