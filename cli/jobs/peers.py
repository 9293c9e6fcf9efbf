"""``muster run --peers``: a cluster for one job, of the machines on which it is typed.

Each process is the node of its machine in a mesh of that run, and has a data directory for it. The
machine with the lowest id has the job and submits it. All show the job, and end with its exit code.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from cli.errors import Misuse
from cli.jobs.lifecycle import say_end
from cli.jobs.show import show_logs_and_events
from cli.node import joining
from cli.output import Tracebacks, notice_if_slow, say
from cli.services.following import Follower
from cli.services.foreground import in_thread, private_environment
from cli.services.node_services import NodeServices, drain, node_environment, take_part
from cli.services.record import open_for_append, service_lock, service_settings
from cli.services.signals import ignore_signals, interrupt_at_signals
from muster.client import Client, Job
from muster.client.errors import ClientError
from muster.cluster.members import read_members
from muster.contracts.errors import MusterError
from muster.contracts.job.retry import INTERRUPTED_CODE
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import DEFAULT_HOST, TOKEN
from muster.host.code import digest_of, script_of
from muster.links.serving import listen
from muster.mesh.founding import Founding
from muster.mesh.network import Network
from muster.mesh.node import Node
from muster.mesh.secret import NAME_VARIABLE, RUN, cluster_name

POLL_SECONDS: Final = 0.05
LOOK_SECONDS: Final = 1.0
"""Between looks for machines that have come, and for the one that leads."""

LOST_LOOKS: Final = 2
"""Without a node that leads, before that is said."""

LAST_WORDS_SECONDS: Final = 1.0
"""Until others have heard of a script that differs."""

GOODBYE_SECONDS: Final = 20.0
"""For the logs of other machines, and for those that read the end of the job."""


def group_of(word: str) -> str:
    """Return what a run is called after its script."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(word).stem).strip("-")[:32] or "run"


def difference(digest: str, others: Iterable[tuple[str, str]]) -> str:
    """Return which machines run another script than this one, "" if none does.

    `others` has the name and the digest of each.
    """
    differing = [f"{other} on {host}" for host, other in others if other != digest]
    return f"{digest} here, {', '.join(differing)}" if differing else ""


def run_with_peers(peers: int, group: str | None, script: str, job_id: JobId, spec: JobSpec) -> int:
    """Run a job on this machine and `peers` - 1 others; return the exit code.

    `spec` has the ranks of this machine. Raises a `MusterError`, and `Misuse` for a bad `group`.
    """
    if group is not None and group_of(group) != group:
        raise Misuse(f"--group {group}: use up to 32 letters, digits, '-' or '_'")
    group = group or group_of(script)
    interrupt_at_signals()
    # No id of a job, which the directories beside it are called after, has a dot.
    files = DataDir(service_settings().data_dir).foreground(f"peers.{group}")
    environ = private_environment(os.environ, files.root, spec.world_size)
    environ[NAME_VARIABLE] = f"{cluster_name(os.environ)}{RUN}{group}"
    os.environ.pop(TOKEN, None)  # it is for other services
    advice = "wait until that one has ended, or choose another --group"
    with suppress(KeyboardInterrupt), service_lock(files, advice), joining(environ) as own:
        # Nothing is resumed of an earlier run of the group that is over.
        for place in files.root.iterdir() if files.ended.exists() else ():
            if place.is_dir():
                shutil.rmtree(place)
            elif place != files.services_lock:
                place.unlink()
        return asyncio.run(_Run(own.network, files, job_id, spec).run(peers, group, environ))
    return INTERRUPTED_CODE


class _Run:
    """One machine of a run."""

    def __init__(self, network: Network, files: DataDir, job_id: JobId, spec: JobSpec) -> None:
        self._network = network
        self._files = files
        self._job_id = job_id
        self._spec = spec
        self._part: Node
        self._job: Job | None = None
        self._code: int = INTERRUPTED_CODE

    async def run(self, peers: int, group: str, environ: Mapping[str, str]) -> int:
        """Return the exit code of the command, once nothing of the run is left here."""
        network, files, slots = self._network, self._files, self._spec.world_size
        founding = Founding(files.cluster_record, has_mark=False, has_secret_file=True)
        if founding.record is None or founding.record.founder != network.node_id:
            waits = f"waits for {peers} machines in the group {group!r}: type the same command"
            with notice_if_slow(f"{waits} on each; Ctrl-C ends this"):
                founding.has_mark = await self._gather(peers)
        listening = listen(DEFAULT_HOST, 0)
        url = f"http://{DEFAULT_HOST}:{listening.getsockname()[1]}"
        with open_for_append(files, files.services_log) as output:
            services = NodeServices(node_environment(environ, files), url, output)
            self._part = take_part(network, files, founding, services, listening, slots)
            following = in_thread(partial(self._follow, url))
            watching = asyncio.create_task(self._watch())
            await services.run(lambda: following.done() or not network.is_alive)
            watching.cancel()
            is_over = following.done()
            await self._leave(services, is_over=is_over)
        ignore_signals(asyncio.get_running_loop())
        if not network.is_alive:
            raise MusterError("the run has ended here by a fault, see above: start it again")
        if is_over:
            following.result()
        return self._code

    async def _gather(self, peers: int) -> bool:
        """Wait for the others; return whether this machine has the lowest id of those that begin.

        Raises `MusterError` if the script of another differs.
        """
        network = self._network
        script = script_of(self._spec.command, None, Path.cwd())
        digest = (script and digest_of(script.file)) or ""
        network.do(lambda: network.say(script=digest))
        while True:
            met = [(peer, hello) for peer, hello in network.hellos() if hello.script is not None]
            others = ((peer.host, str(hello.script)) for peer, hello in met)
            if differing := difference(digest, others):
                await asyncio.sleep(LAST_WORDS_SECONDS)
                raise MusterError(
                    f"the scripts differ: {differing} (sha256): copy one to all machines, or "
                    "choose another --group"
                )
            is_on = any(hello.cluster for _, hello in met)
            if is_on or len(met) + 1 >= peers:
                return not is_on and network.node_id < min(peer.node_id for peer, _ in met)
            await asyncio.sleep(POLL_SECONDS)

    def _follow(self, url: str) -> None:
        """Show the job until its end, however long no machine leads; in a thread."""
        tracebacks = Tracebacks()
        with Client(url, retry_seconds=inf) as client:
            while self._job is None:
                if self._part.leads:
                    self._job = self._submit(client)
                else:
                    self._job = next(client.jobs(limit=1), None)
                    time.sleep(POLL_SECONDS)
            say(f"the job is {self._job.id}; its page is {url}")
            show_logs_and_events(self._job, tracebacks)
            self._code = say_end(self._job, tracebacks.shorten)

    def _submit(self, client: Client) -> Job:
        """Submit the job, or find it if this machine comes back to it."""
        if found := next(client.jobs(limit=1), None):
            return found
        size = self._slots()
        # Machines that come later bring more ranks.
        spec = msgspec.structs.replace(
            self._spec, world_size=size, max_workers=max(size, self._spec.virtual_shards)
        )
        return Follower(self._job_id, spec, self._files).submit(client)

    async def _watch(self) -> None:
        """Give the job the ranks of machines that come, and say when the one that leads is away."""
        lost_looks = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            cluster, job = self._part.cluster, self._job
            if self._part.leads and job is not None:
                size = min(self._slots(), int(job.view.spec["max_workers"]))
                if size > job.view.world_size:
                    with suppress(ClientError):  # it ends, or is asked again
                        await asyncio.to_thread(job.scale, size)
            lost_looks = 0 if self._part.master else lost_looks + 1
            if cluster and cluster.founder != self._network.node_id and lost_looks == LOST_LOOKS:
                say(
                    f"{cluster.name} has the job, and is away: the job waits. Type the same "
                    "command there; Ctrl-C here leaves the run"
                )

    async def _leave(self, services: NodeServices, *, is_over: bool) -> None:
        """End what runs here, and have the run go on elsewhere or be over."""
        network, files, leads = self._network, self._files, self._part.leads
        if is_over and leads and self._job:
            await _until(lambda: not network.members())
        is_last = is_over or not (network.is_alive and network.members())
        await services.end()
        # The job's directory goes once the machine that leads has its logs.
        is_clean = is_over and not leads and await _until(lambda: not any(files.jobs.glob("*")))
        if network.is_alive and self._part.cluster and not (leads or is_clean):
            await drain(network, files)
        if is_last or not leads:
            files.ended.touch()
        else:
            say("the job waits for this machine: the same command, typed here again, goes on")
        if leads and is_last and not is_over and self._job:
            say(f"the same command with --job-id {self._job.id} goes on with what is saved")

    def _slots(self) -> int:
        """Return how many ranks all machines take; only where the job is."""
        members = read_members(self._files.nodes)
        return sum(node.slots for node in members.nodes) if members else self._spec.world_size


async def _until(is_true: Callable[[], bool]) -> bool:
    """Wait for other processes, for a while; return whether they have done it."""
    until = time.monotonic() + GOODBYE_SECONDS
    # There is no event to wait for.
    while not (done := is_true()) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    return done
