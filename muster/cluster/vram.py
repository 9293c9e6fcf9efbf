"""The arithmetic of a host's ledger of GPU memory: leases, what they count, where a rank fits.

Of a GPU a rank may have what is usable, less all leases, less what processes without a lease use,
and never more than `nvidia-smi` shows as free. Times are seconds since 1970.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from muster.contracts.rank import ProcessRecord

SETTLED_SECONDS: Final = 300.0
"""After this long a rank has allocated what a step needs. PyTorch keeps what it has freed, so that
`nvidia-smi` shows the most that it ever needed."""

UsedMb: TypeAlias = Mapping[tuple[str, str], int]
"""Measured, as far as possible, by process tag (empty: of others) and GPU."""

LEASE_SECONDS: Final = 24 * 3600.0
RENEW_SECONDS: Final = 3600.0
"""How often an agent renews the leases of its ranks, which may train for weeks."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """GPU memory that is reserved for one attempt of a rank."""

    tag: str  # its process tag, see `muster.host.containment`
    holder: str  # for people
    gpu: str
    vram_mb: int  # what the job asks for
    peak_mb: int = 0  # the most that was measured; 0: nothing yet
    process: ProcessRecord  # the agent until the rank has started, then the rank
    taken_at: float
    renewed_at: float

    def counted_mb(self, now: float) -> int:
        """Return the measured use of a rank that has run for a while, else at least the estimate.

        A rank without measured use keeps its estimate: it may not have reached its GPU yet.
        """
        is_settled = self.peak_mb > 0 and now >= self.taken_at + SETTLED_SECONDS
        return self.peak_mb if is_settled else max(self.vram_mb, self.peak_mb)


def prune(leases: Iterable[Lease], now: float, is_gone: Callable[[Lease], bool]) -> list[Lease]:
    """Return the leases that were renewed within `LEASE_SECONDS` and whose processes live."""
    renewed = (lease for lease in leases if now < lease.renewed_at + LEASE_SECONDS)
    return [lease for lease in renewed if not is_gone(lease)]


def measure(leases: Iterable[Lease], used: UsedMb) -> list[Lease]:
    """Return the leases with higher peaks where more was measured than ever before."""
    peaks = ((lease, max(lease.peak_mb, used.get((lease.tag, lease.gpu), 0))) for lease in leases)
    return [replace(lease, peak_mb=peak) for lease, peak in peaks]


def change(leases: Iterable[Lease], *tags: str, **changes: Any) -> list[Lease]:  # noqa: ANN401
    """Return the leases, those of `tags` with other fields."""
    return [replace(lease, **changes) if lease.tag in tags else lease for lease in leases]


def release(leases: Iterable[Lease], tag: str) -> list[Lease]:
    """Return the leases without that of `tag`."""
    return [lease for lease in leases if lease.tag != tag]


def free_mb(
    usable: Mapping[str, int],
    leases: Iterable[Lease],
    used: UsedMb,
    unused: Mapping[str, int],
    now: float,
) -> dict[str, int]:
    """Return the MB that can still be reserved, by GPU, at least 0; `unused` is measured, too."""
    free, counted = dict(usable), dict(used)
    for lease in leases:
        counted.pop((lease.tag, lease.gpu), None)  # the lease covers it
        if lease.gpu in free:
            free[lease.gpu] -= lease.counted_mb(now)
    for (_, gpu), mb in counted.items():
        if gpu in free:
            free[gpu] -= mb
    return {gpu: max(0, min(mb, unused.get(gpu, mb))) for gpu, mb in free.items()}


def choose(free: Mapping[str, int], vram_mb: int, count: int) -> str | None:
    """Return the GPU with the most free memory; None unless `count` ranks fit on all together."""
    fits = sum(mb // vram_mb for mb in free.values()) >= count
    return max(free, key=lambda gpu: free[gpu]) if free and fits else None
