"""``muster up -d``: a `muster up` that no terminal holds, waited for until it serves."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from api.preflight import refuse_door
from cli.household import is_healthy
from cli.office import Holder, holder_of, is_held, open_in
from cli.welcome import next_steps
from muster.contracts.environ import DoorSettings, ServiceSettings
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory
from muster.processes import is_running
from muster.remarks import remark

LOOK_SECONDS: Final = 0.05
PATIENCE_SECONDS: Final = 5.0
"""A person who has heard nothing for so long wonders."""

LONG_BYTES: Final = 8 << 20

PROBE_BYTES: Final = 1 << 16
"""More than fits into what is left of a block."""

LAST_LINES: Final = 5
"""Of the log of services that did not come up: their own sentence is among them."""


class NotUp(MusterError):
    """The services ended before they served."""

    def __init__(self, log: Path, said: str) -> None:
        super().__init__(f"the services did not come up; all they said is in {log}:\n{said}")


def serve_detached(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Start the services, unless they run, and return once they serve; 0.

    Who starts them at the same time is waited for, too. Raises `NotUp` if they end instead, and
    what `refuse_door` does before anything is started. Ctrl-C ends them.
    """
    files = DataDirectory(settings.data_dir)
    holder = holder_of(files)
    if holder is not None and not holder.is_ending:
        remark(f"muster: up already, at {holder.url}, with its data in {files.root}")
        return 0
    if holder is not None:
        _await_end(holder)
    door = DoorSettings.read(environ)
    refuse_door(settings, door)
    _set_aside_if_long(files.keeper_log)
    with open_in(files, files.keeper_log) as log:
        remark(f"muster: starting, with the data in {files.root} …")
        already = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", "up"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        holder = _await_service(process, files)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        raise
    if holder is None:
        said = _last_lines(files.keeper_log, already)
        raise NotUp(files.keeper_log, said or why_silent(files.root))
    _say_where(holder, files, door)
    return 0


def why_silent(data_dir: Path) -> str:
    """Return what may have kept services from saying why they ended: mostly there is no room."""
    try:
        with tempfile.NamedTemporaryFile(dir=data_dir) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        return f"nothing, and {data_dir} cannot be written to: {error.strerror}"
    return "nothing"


def _await_end(holder: Holder) -> None:
    remark("muster: those before are ending; ranks save and exit …")
    while is_running(holder.process):
        time.sleep(LOOK_SECONDS)


def _await_service(process: "subprocess.Popen[bytes]", files: DataDirectory) -> Holder | None:
    """Return who serves, once somebody does; None if all who would have ended before that.

    The process is not alone if another was faster: then it has ended, and the other is waited for.
    """
    said = time.monotonic()
    while process.poll() is None or is_held(files):
        holder = holder_of(files)
        if holder is not None and not holder.is_ending and is_healthy(holder.url):
            return holder
        if time.monotonic() > said + PATIENCE_SECONDS:
            said = time.monotonic()
            remark(f"muster: still starting; what it says is in {files.keeper_log} …")
        time.sleep(LOOK_SECONDS)  # another process's readiness: there is no event to wait for
    return None


def _set_aside_if_long(log: Path) -> None:
    """Begin the log anew once it is long; the one before is kept."""
    with suppress(OSError):  # there is none, or no room to do that in: it grows on
        if log.stat().st_size > LONG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


def _say_where(holder: Holder, files: DataDirectory, door: DoorSettings) -> None:
    remark(f"muster: ready at {holder.url}, with its data in {files.root}")
    remark(f"muster: what it says is in {files.keeper_log}; it goes on until: muster down")
    remark("muster: next; `muster --help` has more:")
    for line in next_steps(holder.url, files.root, door):
        remark(line)


def _last_lines(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start, os.SEEK_SET)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])
