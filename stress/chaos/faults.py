"""The faults of a chaos run, all drawn from the seed before the first is injected.

The process that a fault hits is drawn as a number in [0, 1) that selects among the processes alive
at that moment, so a seed gives the same faults on any machine.
"""

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What happens to a process."""

    KILL = "kill"
    """SIGKILL."""
    TERM = "term"
    """SIGTERM from a process that is not its parent."""
    NAP = "nap"
    """SIGSTOP, then SIGCONT before a timeout expires."""
    FREEZE = "freeze"
    """SIGSTOP until it is replaced, which kills it; a coordinator gets SIGCONT then and exits."""

    @property
    def signal(self) -> signal.Signals:
        return {Kind.KILL: signal.SIGKILL, Kind.TERM: signal.SIGTERM}.get(self, signal.SIGSTOP)

    @property
    def ends(self) -> bool:
        """True if the process must be gone afterwards."""
        return self is not Kind.NAP


class Victim(StrEnum):
    """The kind of process that a fault hits."""

    RANK = "rank"
    SPARE = "spare"
    """A process that has loaded the program and waits to become a rank."""
    PREFORK = "prefork"
    AGENT = "agent"
    COORDINATOR = "coordinator"
    FORK_SERVER = "fork_server"
    """The process that the coordinator forks agents from."""
    API = "api"
    STORAGE = "storage"
    """The process of a job that talks to the object store."""
    STORE = "store"
    """The object store: it does not answer for a while."""

    @property
    def belongs_to_a_job(self) -> bool:
        return self not in {Victim.COORDINATOR, Victim.FORK_SERVER, Victim.API, Victim.STORE}


VICTIMS = {
    Victim.RANK: 45,
    Victim.SPARE: 12,
    Victim.PREFORK: 8,
    Victim.AGENT: 15,
    Victim.COORDINATOR: 18,
    Victim.FORK_SERVER: 6,
    Victim.API: 14,
}
ON_S3 = {**VICTIMS, Victim.STORAGE: 30, Victim.STORE: 15}
KINDS = {Kind.KILL: 65, Kind.TERM: 15, Kind.NAP: 20}
FREEZABLE = {Victim.RANK, Victim.AGENT, Victim.COORDINATOR}
FROZEN = 1 / 2
"""Share of stopped processes that are not resumed in time."""

Choice = tuple[Victim, Kind]
CHOICES: list[Choice] = [
    (victim, kind)
    for victim in Victim
    for kind in Kind
    if kind is not Kind.FREEZE and (victim is not Victim.STORE or kind is Kind.NAP)
] + [(victim, Kind.FREEZE) for victim in Victim if victim in FREEZABLE]

INSIDE = 1 / 4
"""Share of faults injected while a checkpoint is written."""
CALLS_OF_A_SAVE = 8
"""Upper bound of the file events of a save (inotify) before the fault."""

TOGETHER = 1 / 10
"""Share of faults that are injected together with another one."""
AGAIN = 3 / 10
"""Share of faults injected during the recovery from the previous one."""

PAUSES_SECONDS = (0.0, 0.1, 0.3, 0.7, 1.5)
NAPS_SECONDS = (0.05, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    number: int
    kind: Kind
    victim: Victim
    lot: float
    """Selects one of the processes alive, in [0, 1)."""
    calls: int | None
    """File events of a save before the fault; None: at any instant."""
    waits_for_a_step: bool
    pause_seconds: float
    nap_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One or two faults injected at the same time."""

    faults: tuple[Fault, ...]


def choices_of(words: str) -> tuple[Choice, ...]:
    """Return what ``coordinator:kill,agent:term`` names; raises ValueError for anything else."""
    known = {f"{victim}:{kind}": (victim, kind) for victim, kind in CHOICES}
    named = words.split(",")
    if unknown := [word for word in named if word not in known]:
        raise ValueError(f"there is no fault {', '.join(unknown)}: choose of {', '.join(known)}")
    return tuple(known[word] for word in named)


def blows(
    count: int,
    seed: int,
    only: Sequence[Choice] = (),
    victims: Mapping[Victim, int] = VICTIMS,
) -> list[Blow]:
    """Return `count` faults in groups of one or two; from `only`, unless it is empty."""
    chance = random.Random(seed)  # noqa: S311  repeatable on purpose, no secret
    drawn: list[Blow] = []
    number = 0
    while number < count:
        size = min(2 if chance.random() < TOGETHER / (2 - TOGETHER) else 1, count - number)
        drawn.append(
            Blow(faults=tuple(_fault(chance, number + i, only, victims) for i in range(size)))
        )
        number += size
    return drawn


def _fault(
    chance: random.Random, number: int, only: Sequence[Choice], victims: Mapping[Victim, int]
) -> Fault:
    victim, kind = chance.choice(only) if only else _choice(chance, victims)
    return Fault(
        number=number,
        kind=kind,
        victim=victim,
        lot=chance.random(),
        calls=chance.randrange(CALLS_OF_A_SAVE) if chance.random() < INSIDE else None,
        waits_for_a_step=chance.random() >= AGAIN,
        pause_seconds=chance.choice(PAUSES_SECONDS),
        nap_seconds=chance.choice(NAPS_SECONDS),
    )


def _choice(chance: random.Random, victims: Mapping[Victim, int]) -> Choice:
    (victim,) = chance.choices([*victims], [*victims.values()])
    (kind,) = chance.choices([*KINDS], [*KINDS.values()])
    if victim is Victim.STORE:
        return victim, Kind.NAP
    if kind is Kind.NAP and victim in FREEZABLE and chance.random() < FROZEN:
        return victim, Kind.FREEZE
    return victim, kind
