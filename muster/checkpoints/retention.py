"""Which checkpoints may be deleted: a pure rule."""

from collections.abc import Set as AbstractSet

from muster.checkpoints.names import CheckpointName


def expendable(
    names: AbstractSet[CheckpointName],
    latest: CheckpointName,
    trusted: AbstractSet[CheckpointName],
    keep_last: int,
) -> list[CheckpointName]:
    """Return what may go once `latest` is durable, the newest first.

    `latest` and the newest others stay, `keep_last` in all. With two or more to keep, one of the
    others must be `trusted` (written or verified by this process) and everything newer than it
    stays too: a row of damaged directories must not push the last good one out.
    """
    others = sorted(names - {latest}, reverse=True)
    surplus = others[keep_last - 1 :]
    if keep_last == 1:
        return surplus
    fallback = next((name for name in others if name in trusted), None)
    return [name for name in surplus if fallback and name < fallback]
