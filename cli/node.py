"""``muster node``: this machine as a member of its household."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import click
import msgspec

from cli.output import say
from cli.services.record import open_for_append, service_settings
from cli.services.signals import interrupt_at_signals
from muster.contracts.errors import MusterError
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.paths import DataDir
from muster.host.files import replace_private
from muster.host.private import UnusableDirectory
from muster.host.processes import is_running, this_process

if TYPE_CHECKING:
    from muster.mesh.group import Mesh


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A `muster node`, and the port at which it listens."""

    process: ProcessRecord
    port: int


@click.command()
def node() -> None:
    """Make this machine a node of its household, until Ctrl-C.

    The nodes find each other and elect a master. `muster mesh` shows what they know. See
    docs/home.md.
    """
    files = DataDir(service_settings().data_dir)
    interrupt_at_signals()
    with suppress(KeyboardInterrupt), _node_lock(files), joining() as mesh:
        from muster.mesh.node import Node  # noqa: PLC0415  as `Mesh`

        Node(mesh.network, files.election, say)
        record = NodeRecord(process=this_process(), port=mesh.network.port)
        try:
            replace_private(files.node_record, msgspec.json.encode(record))
        except OSError as error:
            raise UnusableDirectory.because_of(files.root, error) from error
        own = f"{mesh.network.hello.host} is node {mesh.network.node_id}"
        say(f"{own}; see the others with muster mesh, end it with Ctrl-C")
        mesh.network.wait()
        raise MusterError("this node has ended by a fault, see above: start it again")


@contextmanager
def joining() -> Iterator[Mesh]:
    """Yield a process of the household."""
    try:
        from muster.mesh.group import Mesh  # noqa: PLC0415  needs zeroconf
    except ModuleNotFoundError as error:
        raise MusterError(str(error)) from error
    with closing(Mesh("default")) as own:
        yield own


def read_node_port(files: DataDir) -> int | None:
    """Return the port of the node that runs for a data directory, if one does."""
    with suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode(files.node_record.read_bytes(), type=NodeRecord)
        return record.port if is_running(record.process) else None
    return None


@contextmanager
def _node_lock(files: DataDir) -> Iterator[None]:
    with open_for_append(files, files.node_lock) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MusterError(
                f"a node runs already for {files.root}: see it with muster mesh, or set "
                "MUSTER_DATA_DIR for another one"
            ) from None
        try:
            yield
        finally:
            files.node_record.unlink(missing_ok=True)
