"""The name of a process that never means another one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A pid may be used again; pid, start and boot together may not."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks between boot and its start."""
    boot_id: str
    node: str
