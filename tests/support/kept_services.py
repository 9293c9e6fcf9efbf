"""The services that a `muster up` keeps, found as its children."""

from contextlib import suppress
from pathlib import Path

from muster.contracts.rank import ProcessRecord
from muster.host.processes import identify


def kept_by(keeper: int, module: str) -> ProcessRecord | None:
    """Return the service of this `muster up` that runs `module` now, if there is one."""
    for task in Path(f"/proc/{keeper}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended since has none
            for pid in (task / "children").read_text().split():
                if _command_of(int(pid))[-2:] == ["-m", module]:
                    return identify(int(pid))
    return None


def _command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []
