"""A `muster up`: its record, and the services it runs as its children."""

from contextlib import suppress
from pathlib import Path

from cli.services.record import ServiceRecord
from muster.contracts.rank import ProcessRecord
from muster.host.processes import identify, this_process


def service_record(
    url: str, process: ProcessRecord | None = None, ca_file: Path | None = None
) -> ServiceRecord:
    """Return the record of a `muster up`, of this process unless another is given."""
    return ServiceRecord(
        url=url,
        process=process or this_process(),
        log=None,
        is_ending=False,
        ca_file=str(ca_file) if ca_file else None,
    )


def child_service(up: int, module: str) -> ProcessRecord | None:
    """Return the child of the process `up` that runs `module` now, if there is one."""
    for task in Path(f"/proc/{up}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended since has none
            for pid in (task / "children").read_text().split():
                if _command_of(int(pid))[-1:] == [module]:
                    return identify(int(pid))
    return None


def _command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []
