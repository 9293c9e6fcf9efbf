"""The brand: whose process this is, where neither a program nor an accident wipes it off.

A name in the environment goes with ``env -i``; sessions and parents are left with two forks. But
fork and exec hand the resource limits down, the kernel tells them of any process of the same user
for one cheap call, and one of them limits nothing: since Linux 2.4 RLIMIT_LOCKS is a number that
is kept and never looked at. So a rank writes its name there, in a number far above every limit
that anybody means, and lowers the hard limit to it, so that nothing raises it again.

The brand is the mark of `muster.contracts.environ` as a number: those of a job lie side by side,
and those of a rank among them.
"""

import resource
from hashlib import blake2b
from typing import Final

LIMIT: Final = 10
"""RLIMIT_LOCKS, which the standard library has no name for."""

_RANK_BITS: Final = 12
_INCARNATION_BITS: Final = 10
"""Counted round: who lives a thousand incarnations later is no contemporary."""

_JOB_BYTES: Final = 5
"""By accident two of a thousand jobs of one machine share them once in two million times."""

_LOWEST: Final = 1 << 62
"""Every brand is above, and no limit that a person has set."""


def brands(mark: str) -> range:
    """Return the brands of all marks below `mark`: of a job, a rank, or one incarnation.

    Empty for what is no rank's: an agent's processes wear none.
    """
    job, *place = mark.rstrip("/").split("/")
    first = _LOWEST | int.from_bytes(blake2b(job.encode(), digest_size=_JOB_BYTES).digest()) << (
        _RANK_BITS + _INCARNATION_BITS
    )
    match [int(part) if part.isdecimal() else None for part in place]:
        case []:
            return range(first, first + (1 << (_RANK_BITS + _INCARNATION_BITS)))
        case [int(rank)]:
            first += rank % (1 << _RANK_BITS) << _INCARNATION_BITS
            return range(first, first + (1 << _INCARNATION_BITS))
        case [int(rank), int(incarnation)]:
            first += rank % (1 << _RANK_BITS) << _INCARNATION_BITS
            first += incarnation % (1 << _INCARNATION_BITS)
            return range(first, first + 1)
        case _:
            return range(0)


def can_brand() -> bool:
    """Return whether what this process starts can wear a brand.

    Not where somebody has limited the limit, which may be an outer rank's brand: that one stays.
    """
    return resource.getrlimit(LIMIT)[1] == resource.RLIM_INFINITY


def wear_brand(mark: str) -> None:
    """Brand the calling process and all that it will start; nothing happens where that cannot be.

    `mark` is one incarnation's.
    """
    if can_brand():
        brand = brands(mark).start
        resource.setrlimit(LIMIT, (brand, brand))


def brand_of(pid: int) -> int:
    """Return the number a process wears: no brand if it is none of ours, 0 if there is none.

    Always a number, since a range looks for anything else one by one.
    """
    try:
        return resource.prlimit(pid, LIMIT)[0]
    except (ProcessLookupError, PermissionError):
        return 0
