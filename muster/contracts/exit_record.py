"""How a process ended, written down by its parent for whoever was away at the time."""

import msgspec


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `exit_code` and `signal` is set."""

    pid: int
    exit_code: int | None
    signal: int | None
    stopping: bool
    """It had said that it was asked to stop: exit code 0 then means saved, not done."""
    at: str
    """RFC 3339, UTC."""
