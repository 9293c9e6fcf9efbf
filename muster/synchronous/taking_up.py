"""How the members of a new layout come to stand at one step with one state.

    everybody tells everybody: where I stand, the digest of my state, which sums I hold
    of those that are furthest, whoever differs from the others is out: before it gives to anybody
    the first that is furthest gives its state to all who are behind
    digests are compared once more, now of all: what was given has arrived
    what nobody holds of the unfinished step is dealt out

A member that is behind by a step was interrupted after its peers had committed that step; a
newcomer is behind by all of them. Both are healed in the same way, from memory, not from disk.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from muster.collectives.backend import Backend
from muster.collectives.tree import Block, Deal, deal
from muster.contracts.errors import MusterError
from muster.fingerprint import Fingerprint, explain
from muster.synchronous.gathering import gather
from muster.synchronous.replica import Replica


class Differs(MusterError):
    """Members cannot train with the others; `places` says who, within the group."""

    def __init__(self, message: str, places: Sequence[int], rank: int) -> None:
        super().__init__(message)
        self.places = tuple(places)
        self.is_me = rank in places


class _Standing(msgspec.Struct, frozen=True):
    """What one member tells the others."""

    step: int
    digest: str
    held: tuple[tuple[int, int], ...]
    arithmetic: str
    """The fingerprint's digest."""
    facts: dict[str, str]
    """The fingerprint's facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the members of a layout have agreed on."""

    shares: Deal
    """Which blocks of the next sum each member contributes, those that it holds first."""
    held: Deal
    """Those whose sums there are already."""


def take_up(
    backend: Backend,
    replica: Replica,
    held: Sequence[Block],
    leaves: int,
    own: Fingerprint,
    begin: Callable[[], None],
) -> Agreement:
    """Bring every member to the same step and state; all of them call this.

    `held` are the blocks of the unfinished step whose sums this rank has. `begin` fills the replica
    where no member has a state: the first one calls it. Raises `Differs`, and what the backend
    raises; the replica is whole in any case.
    """
    standing = _Standing(
        replica.position.step, _digest(replica), _plain(held), own.digest, dict(own.facts)
    )
    standings = gather(backend, standing, _Standing)
    _compare_arithmetic(standings, backend.rank)
    furthest = max(standing.step for standing in standings)
    source = next(place for place, it in enumerate(standings) if it.step == furthest)
    if furthest < 0 and backend.rank == source:
        begin()
    is_behind = [it.step < furthest or furthest < 0 for it in standings]
    _compare_states([it.digest for it in standings], is_behind, backend.rank)
    _spread(backend, replica, source, is_behind)
    digests = gather(backend, replica.digest(), str)
    _compare_states(digests, [False] * len(digests), backend.rank)
    blocks = [it.held if it.step == furthest else () for it in standings]
    kept = [[Block(*block) for block in held] for held in blocks]
    return Agreement(shares=deal(kept, leaves), held=kept)


def _digest(replica: Replica) -> str:
    return "" if replica.is_empty else replica.digest()


def _plain(held: Sequence[Block]) -> tuple[tuple[int, int], ...]:
    return tuple((block.level, block.number) for block in held)


def _spread(backend: Backend, replica: Replica, source: int, is_behind: Sequence[bool]) -> None:
    if backend.rank == source:
        for place, behind in enumerate(is_behind):
            if behind and place != source:
                replica.send(backend, place)
    elif is_behind[backend.rank]:
        replica.receive(backend, source)


def _compare_arithmetic(standings: Sequence[_Standing], rank: int) -> None:
    """Turn away who computes other bits before it has computed any, and say what to set."""
    prints = [Fingerprint(digest=it.arithmetic, facts=it.facts) for it in standings]
    odd = odd_ones([it.digest for it in prints])
    if odd:
        right = next(it for place, it in enumerate(prints) if place not in odd)
        raise Differs(explain(prints[odd[0]], right), odd, rank)


def _compare_states(digests: Sequence[str], is_behind: Sequence[bool], rank: int) -> None:
    """Where no state is more common than any other, nobody knows which is right: all are out."""
    places = [place for place, behind in enumerate(is_behind) if not behind]
    counts = Counter(digests[place] for place in places)
    if len(counts) < 2:  # noqa: PLR2004  all alike
        return
    (right, most), (_, next_most) = counts.most_common(2)
    odd = [place for place in places if digests[place] != right or most == next_most]
    raise Differs(
        f"the state of {len(odd)} of {len(places)} workers differs from that of the others at the "
        "same step: stopped before the next one",
        odd,
        rank,
    )


def odd_ones(digests: Sequence[str]) -> list[int]:
    """Return who differs from the most common digest, or else from the first one."""
    counts = Counter(digests)
    right = max(counts, key=lambda digest: (counts[digest], digest == digests[0]))
    return [place for place, digest in enumerate(digests) if digest != right]
