"""How a process ended, written down by its agent for whoever was away at the time."""

import msgspec


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most one of `exit_code` and `signal` is set; neither for an end that nobody saw."""

    pid: int
    exit_code: int | None
    signal: int | None
    stopping: bool
    """It had said that it was asked to stop: exit code 0 then means saved, not done."""
    at: str
    """RFC 3339, UTC."""
