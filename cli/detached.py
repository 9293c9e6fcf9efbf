"""``muster up -d``: a `muster up` that no terminal holds, waited for until it serves."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from api.preflight import refuse_door
from cli.office import Holder, holder_of, is_held, open_in
from cli.probe import write_probe
from cli.required_token import warn_of_no_admin
from cli.serving import serves
from cli.tls_key import warn_of_open_key
from cli.welcome import another_port, next_steps
from muster.contracts.environ import DoorSettings, ServiceSettings
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory
from muster.processes import is_running
from muster.remarks import remark
from store.place import refuse_unknown

LOOK_SECONDS: Final = 0.05
PATIENCE_SECONDS: Final = 5.0
"""A person who has heard nothing for so long wonders."""

LONG_BYTES: Final = 8 << 20

LAST_LINES: Final = 5
"""Of the log of services that did not come up: their own sentence is among them."""


class NotUp(MusterError):
    """The services ended before they served."""

    def __init__(self, log: Path, said: str) -> None:
        super().__init__(f"the services did not come up; all they said is in {log}:\n{said}")


def serve_detached(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Start the services, unless they run, and return once they serve; 0.

    Who starts them at the same time is waited for, too. Raises `NotUp` if they end instead; and
    before anything is started `StoreUnavailable` for a URL that names no database, and what
    `refuse_door` does. Ctrl-C ends them if they are ours.
    """
    files = DataDirectory(settings.data_dir)
    holder = holder_of(files)
    if holder is not None and holder.is_ending:
        _await_end(holder)
    elif holder is not None and _await_service(files, lambda: is_held(files)):
        remark(f"muster: up already, at {holder.url}, with its data in {files.root}")
        return 0
    refuse_unknown(settings.database_url)
    door = DoorSettings.read(environ)
    warn_of_open_key(door)
    refuse_door(settings, door)
    warn_of_no_admin(settings, door)
    _set_aside_if_long(files.keeper_log)
    with open_in(files, files.keeper_log) as log:
        remark(f"muster: starting, with the data in {files.root} …")
        already = log.tell()
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", "up"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        # The process is not alone if another was faster: then it has ended, and that one is waited
        # for.
        holder = _await_service(files, lambda: started.poll() is None or is_held(files))
    except KeyboardInterrupt:
        started.send_signal(signal.SIGTERM)
        raise
    if holder is None:
        said = _last_lines(files.keeper_log, already)
        raise NotUp(files.keeper_log, said or why_silent(files.root))
    port = urlsplit(holder.url).port
    # Somebody else's, who was faster, may have been told of another one.
    if holder.process.pid == started.pid and port is not None and settings.port not in {0, port}:
        remark(f"muster: {another_port(settings.port, port)}")
    _say_where(holder, files, door)
    return 0


def why_silent(data_dir: Path) -> str:
    """Return what may have kept services from saying why they ended: mostly there is no room."""
    trouble = _trouble_of_writing(data_dir)
    return f"nothing, and {trouble}" if trouble else "nothing"


def _trouble_of_writing(data_dir: Path) -> str | None:
    try:
        write_probe(data_dir)
    except OSError as error:
        return f"{data_dir} cannot be written to: {error.strerror}"
    return None


def _await_end(holder: Holder) -> None:
    remark("muster: those before are ending; ranks save and exit …")
    while is_running(holder.process):
        time.sleep(LOOK_SECONDS)


def _await_service(files: DataDirectory, is_coming: Callable[[], bool]) -> Holder | None:
    """Return who serves, once somebody does; None if nobody is coming any more before that."""
    said = time.monotonic()
    while is_coming():
        holder = holder_of(files)
        if holder is not None and not holder.is_ending and serves(holder.url):
            return holder
        if time.monotonic() > said + PATIENCE_SECONDS:
            said = time.monotonic()
            log = files.keeper_log if holder is None else holder.log
            said_in = f"in {log}" if log else "at its terminal"
            trouble = _trouble_of_writing(files.root)
            why = f": {trouble}" if trouble else ""
            remark(f"muster: nothing serves yet{why}; what it says is {said_in} …")
        time.sleep(LOOK_SECONDS)  # another process's readiness: there is no event to wait for
    return None


def _set_aside_if_long(log: Path) -> None:
    """Begin the log anew once it is long; the one before is kept."""
    with suppress(OSError), log.open("rb") as held:  # there is none, or no room: it grows on
        # Of two who do this at once the second would set aside what the first has begun.
        fcntl.flock(held, fcntl.LOCK_EX)
        found = log.stat()
        if os.path.samestat(os.fstat(held.fileno()), found) and found.st_size > LONG_BYTES:
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
