"""``muster up`` and ``down``: start API and coordinator, keep them running, end them in order.

Ctrl-C and SIGTERM mean the same: ranks checkpoint and exit, their jobs return to the queue and
resume at the next start. A second Ctrl-C kills the services at once.
"""

import asyncio
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from cli.checks.doctor import require_startable
from cli.config import config_file
from cli.connection import CONNECT_SECONDS
from cli.output import Output, ShellPath, facts, notice_if_slow, output_option, say, show
from cli.services.processes import ServicePair, failed_start
from cli.services.record import (
    ServiceRecord,
    is_serving,
    open_for_append,
    read_record,
    service_lock,
    service_settings,
    write_record,
)
from cli.services.signals import ignore_signals
from muster.contracts.errors import MusterError
from muster.contracts.settings.names import LIFELINE_FD
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import (
    CA_FILE,
    TOKEN,
    AccessSettings,
    ServiceSettings,
    local_url,
)
from muster.host.extras import require_server
from muster.host.files import rotate
from muster.host.ports import free_port, is_port_free
from muster.host.private import UnusableDirectory
from muster.host.processes import (
    exit_with_parent,
    is_running,
    module_command,
    send_signal,
    this_process,
)
from muster.runtime.stderr_messages import print_stderr

if TYPE_CHECKING:
    from muster.client import Client

LOG_CHECK_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.05


@click.command()
@click.option("-d", "--detach", is_flag=True, help="Return once they serve; muster down ends them.")
def up(*, detach: bool) -> None:
    """Run the API and the coordinator on this machine.

    They run until Ctrl-C, and either is restarted whenever it dies.

    MUSTER_PORT, MUSTER_HOST and MUSTER_DATA_DIR in the environment choose the port, the
    address and the directory of the data; muster config show has them all.
    """
    require_server("up")
    settings = service_settings()
    require_startable(os.environ)
    files = DataDir(settings.data_dir)
    if files.cluster_record.exists():
        say("this machine belongs to a cluster, which muster node serves: these are services apart")
    if not detach:
        sys.exit(run_services(settings, os.environ))
    record = read_record(files)
    if record and not record.is_ending and is_serving(record.url):
        say(f"up already, at {record.url}, with its data in {files.root}")
        return
    record = start_detached(files, os.environ)
    say_ready(record.url, files.root, AccessSettings.read(os.environ))
    say("to end the services: muster down")


@click.command()
def down() -> None:
    """Stop the services; every rank saves first.

    Ends the `muster up` of this data directory, as Ctrl-C does there. The jobs go on at the
    next start.
    """
    files = DataDir(service_settings().data_dir)
    record = read_record(files)
    if record is None:
        click.echo(
            f"nothing runs for {files.root}; set MUSTER_DATA_DIR to choose another", err=True
        )
        return
    click.echo("ranks checkpoint and exit … (muster ps shows those that still run)", err=True)
    end_detached(record)
    again = "muster up" if record.node_port is None else "muster node"
    click.echo(f"down; unfinished jobs go on at the next: {again}", err=True)


@click.command()
@click.argument(
    "file", type=ShellPath(path_type=Path), metavar="FILE", help="A new file, such as muster.bak."
)
@output_option
def backup(*, file: Path, output: Output) -> None:
    """Copy the database, and list the files that belong to it.

    The services may run. Checkpoints, logs, secrets and the node's key are plain files and
    not copied.
    docs/operations.md says how to restore. For PostgreSQL use pg_dump.
    """
    require_server("backup")
    settings = service_settings()
    made = subprocess.run(
        module_command("api", "--backup", str(file)), stdout=subprocess.PIPE, check=False
    )
    if made.returncode:
        sys.exit(made.returncode)
    files = DataDir(settings.data_dir)
    checkpoints = {*msgspec.json.decode(made.stdout, type=list[str]), str(settings.checkpoint_dir)}
    body = {
        "copy": [str(file.absolute())],
        "checkpoints": sorted(checkpoints),
        "logs": [str(files.jobs)],
        "secrets": [str(files.secrets)],
        "node": [str(files.node_key)],
        "settings": [str(config_file(os.environ))],
    }
    lines = ((name, path) for name, paths in body.items() for path in paths)
    show(output, body, facts(lines), body["copy"])
    click.echo("only the database is copied: copy what you need of the rest", err=True)


def start_detached(
    files: DataDir, environ: Mapping[str, str], lifeline: int | None = None
) -> ServiceRecord:
    """Start `muster up` without a terminal, and return its record once it serves.

    If another one holds the data directory, wait for that. Raises a `MusterError` if the services
    end instead. Ctrl-C ends them. They inherit `lifeline`, and end once its other side is closed.
    """
    with notice_if_slow("waiting until the previous services have ended …"):
        while (record := read_record(files)) and record.is_ending:
            time.sleep(POLL_SECONDS)
    rotate(files.services_log)
    with open_for_append(files, files.services_log) as log:
        say(f"starting, with the data in {files.root}; log: {log.name} …")
        offset = log.tell()
        process = subprocess.Popen(
            module_command("cli", "up"),
            env=environ if lifeline is None else {**environ, LIFELINE_FD: str(lifeline)},
            pass_fds=() if lifeline is None else (lifeline,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while (record := read_record(files)) or process.poll() is None:
            if record and not record.is_ending and is_serving(record.url):
                return record
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        if lifeline is None:  # two signals would kill the services at once
            process.send_signal(signal.SIGTERM)
        raise
    raise failed_start(files, offset)


def end_detached(record: ServiceRecord) -> None:
    """End a `muster up` and wait until it is gone; raises `MusterError` for another user's."""
    try:
        send_signal(record.process, signal.SIGTERM)
    except PermissionError:
        who = f"the services (process {record.process.pid})"
        raise MusterError(f"{who} belong to another user, who has to end them") from None
    while is_running(record.process):
        time.sleep(POLL_SECONDS)


def run_services(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Run API and coordinator until a signal; return the exit code.

    Raises a `MusterError` before anything is started.
    """
    files = DataDir(settings.data_dir)
    with service_lock(files):
        environ = {**environ, "MUSTER_PORT": str(_choose_port(settings, environ))}
        certificate = _self_signed_certificate(AccessSettings.read(environ))
        record = ServiceRecord(
            url=local_url(environ),
            process=this_process(),
            log=_log_of_stderr(files.services_log),
            is_ending=False,
            ca_file=str(certificate) if certificate else None,
        )
        write_record(files, record)

        async def run() -> int:
            return await Supervisor(settings, environ, record).run()

        return asyncio.run(run())


class Supervisor:
    """What `muster up` does with its two services, from their start to their end."""

    def __init__(
        self, settings: ServiceSettings, environ: Mapping[str, str], record: ServiceRecord
    ) -> None:
        """Start the services; needs a running event loop."""
        self._settings = settings
        self._access = AccessSettings.read(environ)
        self._record = record
        self._services = ServicePair(environ)
        self._ending = asyncio.Event()

    async def run(self) -> int:
        """Run both until a signal, or until one gives up; return the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ending.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        exit_with_parent(os.environ)  # not before: a SIGINT that is ignored so far would be lost
        services = (self._services.api, self._services.coordinator)
        ending = asyncio.create_task(self._ending.wait())
        announcement = asyncio.create_task(self._announce())
        rotation = asyncio.create_task(self._rotate_log())
        await asyncio.wait([*services, ending], return_when=asyncio.FIRST_COMPLETED)
        announcement.cancel()
        rotation.cancel()
        ended = [task.result() for task in services if task.done()]
        self._ending.set()
        with suppress(UnusableDirectory):  # a full disk must not keep the services from ending
            ending_record = msgspec.structs.replace(self._record, is_ending=True)
            write_record(DataDir(self._settings.data_dir), ending_record)
        # The coordinator first: while ranks checkpoint, the API still shows it.
        if not self._services.coordinator.done():
            say("ranks checkpoint and exit … (Ctrl-C again kills the services at once)")
        await self._services.end_coordinator()
        await self._services.end_api()
        say("down")
        return next((code for code in ended if code), 0)

    def _interrupt(self) -> None:
        if not self._ending.is_set():
            self._ending.set()
            return
        self._services.kill()
        say(
            "killed the services; the next start takes over the jobs. Without one, their ranks "
            f"checkpoint and exit after {self._settings.orphan_timeout_seconds:g} s"
        )

    async def _rotate_log(self) -> None:
        while self._record.log is not None:
            await asyncio.to_thread(rotate, Path(self._record.log))
            await asyncio.sleep(LOG_CHECK_SECONDS)

    async def _announce(self) -> None:
        # The readiness of another process: there is no event to wait for.
        while not await asyncio.to_thread(is_serving, self._record.url):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        self._services.mark_served()
        say_ready(self._record.url, self._settings.data_dir, self._access)
        say("Ctrl-C lets every job checkpoint; jobs resume at the next start")


def next_steps(data_dir: Path, access: AccessSettings) -> Iterator[str]:
    """Yield the lines to type in another terminal, first those that lead to these services.

    Commands find the URL in the data directory, also after a start on another port.
    """
    activate = Path(sys.prefix, "bin", "activate")
    is_environment = sys.prefix != sys.base_prefix and activate.exists()
    if is_environment:  # another terminal may not have it on its PATH
        yield f"source {shlex.quote(str(activate))}"
    if certificate := _self_signed_certificate(access):
        yield f"export {CA_FILE}={shlex.quote(str(certificate))}"
    if access.require_token:
        yield f"export {TOKEN}=…"
    if data_dir != ServiceSettings.read({"HOME": os.environ.get("HOME", "/")}, cores=1).data_dir:
        yield f"export MUSTER_DATA_DIR={shlex.quote(str(data_dir))}"
    yield "muster submit -- python train.py"
    yield "muster submit -n 2 --gang -- python train.py  # DDP: if a rank dies, all start again"
    yield "muster ps; muster open  # in a terminal; in a browser"


def say_ready(url: str, data_dir: Path, access: AccessSettings) -> None:
    """Print where the services are, and what to type next."""
    say(f"ready at {url}, with its data in {data_dir}")
    say("next, in another terminal (muster --help has more):")
    for line in next_steps(data_dir, access):
        print_stderr(line)


def _choose_port(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Return the configured port, or a free one if the default port is taken."""
    if settings.port == 0:
        return free_port(settings.host)
    if is_port_free(settings.host, settings.port):
        return settings.port
    if environ.get("MUSTER_PORT"):
        raise MusterError(
            f"port {settings.port} of {settings.host} is taken: stop what listens there, choose "
            "another with MUSTER_PORT, or leave that unset for a free one"
        )
    port = free_port(settings.host)
    say(f"port {settings.port} is taken, so port {port} is used (MUSTER_PORT chooses another)")
    return port


def _self_signed_certificate(access: AccessSettings) -> Path | None:
    """Return the certificate file if clients have to trust it explicitly."""
    if access.tls_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(OSError):
        context.load_verify_locations(access.tls_certfile)
    is_self_signed = any(ca["subject"] == ca["issuer"] for ca in context.get_ca_certs())
    return access.tls_certfile if is_self_signed else None


def _log_of_stderr(log: Path) -> str | None:
    with suppress(OSError):
        return str(log) if os.path.samestat(os.fstat(2), log.stat()) else None
    return None


@contextmanager
def temporary_services(stage: Path, slots: int) -> "Iterator[Client]":
    """Run `muster up` in `stage`, with a port and a database of its own, inside the block.

    It also ends if this process is killed. Signals are ignored from the end of the block on.
    """
    from muster.client import Client  # noqa: PLC0415  slow

    environ = {
        **os.environ,
        "MUSTER_DATA_DIR": str(stage),
        "MUSTER_DATABASE_URL": "",
        "MUSTER_HOST": "127.0.0.1",
        "MUSTER_PORT": str(free_port()),
        "MUSTER_SLOTS": str(slots),
        "MUSTER_CLUSTER": "",
        "MUSTER_AGENT_ADDRESS": "",
    }
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs:
                services = start_detached(DataDir(stage), environ, lifeline=theirs.fileno())
            with Client(services.url, retry_seconds=CONNECT_SECONDS) as client:
                yield client
        except KeyboardInterrupt:
            click.echo("\nmuster: interrupted; ranks checkpoint, and the services end …", err=True)
            raise
        finally:
            ignore_signals()
            ours.shutdown(socket.SHUT_WR)
            ours.recv(1)  # returns once `muster up` has ended, also one that has no record yet
