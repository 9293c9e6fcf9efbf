"""Orders to the node of this machine: each has a `worker.attach`, whose bytes a link carries."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from muster.contracts.settings.names import SERVICE_ONLY
from muster.host.processes import module_command
from muster.links.serving import ServedLink
from muster.mesh.identity import Claim
from muster.mesh.messages import Attach
from muster.mesh.network import Network
from muster.mesh.streams import pump


def serve_orders(network: Network, data_dir: Path, leads: Callable[[str], bool]) -> None:
    """Take orders from the machine that leads; `leads` gets the id of a node.

    Agents have their files in `data_dir`. Once one came of a later lease, those of earlier ones are
    refused: their coordinator was stopped, and has been succeeded.
    """
    newest = 0

    async def serve(link: ServedLink, claim: Claim, first: Attach) -> None:
        nonlocal newest
        host, master = network.hello.host, claim.node_id
        if network.hello.is_leaving:
            link.send(f"{host} leaves the cluster\n".encode())
        elif first.epoch < newest:
            link.send(f"{host} takes the orders of a later coordinator\n".encode())
        elif leads(master):
            newest = first.epoch
            await _attach(link, data_dir, first)
        else:
            link.send(f"{host} does not know that {master} leads: see muster mesh\n".encode())

    network.servers[Attach] = serve


async def _attach(link: ServedLink, data_dir: Path, first: Attach) -> None:
    """Run `worker.attach` until either side ends the connection.

    It learns that from the end of its input, and ends by itself; agents live on.
    """
    environ = {name: value for name, value in os.environ.items() if name not in SERVICE_ONLY}
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *module_command("worker.attach", first.data_dir, first.home),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=theirs.fileno(),  # the caller shows what is no answer
                env={**environ, "MUSTER_DATA_DIR": str(data_dir)},
                cwd=data_dir,
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        link.send(f"worker.attach cannot be started: {error}\n".encode())
        return
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
        with closing(writer):
            await pump(link, reader, writer)
        await process.wait()
    finally:
        if process.returncode is None:  # this node ends
            process.kill()
            await process.wait()
