"""Carries out one order about a job's agent for a coordinator on another host.

The coordinator runs ``python -P -m muster worker.attach`` here through ssh, or the node of this
host does. The node adds the data and home directories of the coordinator's host: paths below them
are below our own here.
Orders come on standard input, answers go to standard output, see
`muster.contracts.messages.attach`. Agents are detached: they live on when the connection breaks.
"""

import os
import platform
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from muster.contracts.host import FREE_LIMIT_MB, HostFacts
from muster.contracts.interpreter import VERSION
from muster.contracts.location import Moves, moved, moved_fields
from muster.contracts.messages.attach import (
    REPEAT_SECONDS,
    AgentEnded,
    AgentRuns,
    Answer,
    CleanHost,
    FetchLogs,
    HostClean,
    HostProbed,
    HostReady,
    LaunchAgent,
    LogFetched,
    LogsFetched,
    LogsKept,
    Order,
    OrderFailed,
    ProbeHost,
    WatchAgent,
)
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import SINGLE_THREADED
from muster.contracts.settings.paths import DataDir, JobFiles, LogName
from muster.host.addresses import publish_address
from muster.host.containment import kill_job, tagged_processes
from muster.host.files import closing, existing, file_identity, shares_directory
from muster.host.gpus import describe_gpus
from muster.host.limits import ShellLimits, usable_memory_mb, usable_processors
from muster.host.processes import boot_id, identify, is_provably_gone, is_running, kill, send_signal
from muster.runtime.agent_process import agent_tag, launch_agent

_PATHS: Final = (
    *("job_root", "address_file", "secrets_dir", "checkpoint_dir", "python"),  # of assignments
    *("data_dir", "directory"),  # of other orders, and of probe files
)


DRAIN_POLL_SECONDS: Final = 0.05


def main() -> None:
    """Read the order, carry it out and answer."""
    limits = ShellLimits.replaced()
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), b"\n")  # what a login shell has printed may end without one
        _say(HostReady(version=VERSION))
        content = sys.stdin.buffer.readline()
        if not content.endswith(b"\n"):
            return  # its sender is gone
        try:
            order = msgspec.json.decode(content, type=Order)
            _carry_out(moved_order(order, _moves(sys.argv[1:], os.environ)), limits)
        except (OSError, msgspec.DecodeError) as error:
            _say(OrderFailed(message=str(error)))
        except Exception as error:  # noqa: BLE001  such as a numpy that does not load
            _say(OrderFailed(message=f"{type(error).__name__}: {error}"))


def _moves(directories: Sequence[str], environ: Mapping[str, str]) -> Moves:
    """Return what stands here for directories of the coordinator's host; () if it has the same."""
    own = environ.get("MUSTER_DATA_DIR", ""), os.path.expanduser("~")  # noqa: PTH111
    return tuple(zip(directories, own, strict=True)) if directories else ()


def moved_order(order: Order, moves: Moves) -> Order:
    """Return an order with its paths as they are on this host."""
    order = moved_fields(order, _PATHS, moves)
    if isinstance(order, ProbeHost | LaunchAgent) and order.probe is not None:
        order = replace(order, probe=moved_fields(order.probe, _PATHS, moves))
    if isinstance(order, LaunchAgent):
        own = replace(moved_fields(order.assignment, _PATHS, moves), moves=moves)
        if moves and own.python is not None and not os.access(own.python, os.X_OK):
            # Without the environment where the job was typed: that of this node.
            own = replace(own, python=None)
        order = replace(order, assignment=own)
    return order


def _carry_out(order: Order, limits: ShellLimits) -> None:
    match order:
        case LaunchAgent():
            _launch(order, limits)
        case WatchAgent():
            agent = _find(order)
            if agent is None:
                _say(AgentEnded())
                return
            if order.kills:
                kill(agent)
            elif order.coordinator is not None:
                file = DataDir(Path(order.data_dir)).coordinator_address
                publish_address(order.coordinator, file)
            _watch(agent, lambda: None)
        case CleanHost():
            _say(HostClean(left=kill_job(order.job_uid, order.known)))
        case ProbeHost():
            _say(_probe(order))
        case FetchLogs():
            _send_logs(order)


def _probe(order: ProbeHost) -> HostProbed:
    data = DataDir(Path(order.data_dir))
    facts = _facts(order.environment, order.data_dir)
    why = _refusal(data.root, data.coordinator_address, order.coordinator_file)
    # In a shared directory they are those of the coordinator's host.
    jobs = _job_directories(data) if order.coordinator_file is not None and not why else {}
    for uid in jobs.keys() & set(order.deleted):
        if not tagged_processes(f"{uid}/"):
            shutil.rmtree(jobs.pop(uid).root, ignore_errors=True)
    return HostProbed(
        facts=facts,
        clock=time.time(),
        is_shared=order.probe is not None and shares_directory(order.probe),
        refusal=why,
        jobs=tuple(jobs),
    )


def _facts(environment: Mapping[str, str], data_dir: str) -> HostFacts:
    """Return what there is here; `environment` is set before numpy is loaded, as for a rank."""
    os.nice(10)  # ranks may train here
    os.environ.update({**SINGLE_THREADED, **environment})
    # Other orders need no numpy, which takes longer to load than all the rest.
    from muster.runtime.fingerprint import numpy_build  # noqa: PLC0415

    numpy_version, blas_kernel, simd = numpy_build()
    return HostFacts(
        version=VERSION,
        python=platform.python_version(),
        machine=platform.machine(),
        blas_kernel=blas_kernel,
        numpy=numpy_version,
        simd=simd,
        cpu_cores=usable_processors(),
        ram_mb=usable_memory_mb(),
        gpus=tuple(describe_gpus()),
        disk_free_mb=_free_mb(Path(data_dir)) if data_dir else None,
    )


def _free_mb(directory: Path) -> int:
    return shutil.disk_usage(existing(directory)).free >> 20


def _refusal(data_dir: Path, own_file: Path, coordinator_file: tuple[int, int] | None) -> str:
    """Return why no agent can have its files in a directory, "" if one can.

    `coordinator_file` is the identity of `own_file` on the coordinator's host.
    """
    if coordinator_file is not None and file_identity(own_file) == coordinator_file:
        return (
            f"{data_dir} is shared with the coordinator's host: set MUSTER_DATA_DIR "
            "to a path that is on a disk of its own on every host, such as /var/tmp/muster"
        )
    if os.access(existing(data_dir), os.W_OK | os.X_OK):
        return ""
    return f"{data_dir} cannot be written: set MUSTER_DATA_DIR to a path that every host can write"


def _launch(order: LaunchAgent, limits: ShellLimits) -> None:
    files = JobFiles(Path(order.assignment.job_root))
    if (free_mb := _free_mb(files.root)) < FREE_LIMIT_MB:
        raise OSError(f"only {free_mb} MiB are free in {files.root.parents[1]}: make room there")
    if why := _refusal(files.root.parents[1], files.owner, order.coordinator_file):
        raise OSError(why)
    if moves := order.assignment.moves:  # it need not have what the coordinator's host has
        for path in [Path(moved(each, moves)) for each in order.assignment.needs]:
            if path == DataDir(files.root.parents[1]).synthetic_dataset:
                from muster.datasets.synthetic import ensure_synthetic  # noqa: PLC0415  as numpy

                ensure_synthetic(path)
            elif not path.exists():
                raise OSError(f"{path} is missing there: copy it to that machine")
    process = launch_agent(with_checkpoints(order), limits)
    agent = identify(process.pid, or_zombie=True)
    if agent is not None:  # always: it is not reaped yet
        _watch(agent, process.wait)


def with_checkpoints(order: LaunchAgent) -> LaunchAgent:
    """Return the order as it is for this host, which may share the directory of checkpoints."""
    sends = order.probe is not None and not shares_directory(order.probe)
    return replace(order, assignment=replace(order.assignment, sends_checkpoints=sends))


def _find(order: WatchAgent) -> ProcessRecord | None:
    """Return the agent; None if it is gone. Raises OSError if that cannot be told here."""
    agent = order.process
    if agent is not None and is_running(agent):
        return agent
    # We are on the host that the order is for. One of the agent's name has been booted since;
    # under another name its address may lead to another machine now.
    has_booted = agent is None or (agent.boot_id != boot_id() and agent.node == platform.node())
    if agent is not None and not (has_booted or is_provably_gone(agent)):
        raise OSError(f"this is {platform.node()}, where an agent of {agent.node} cannot be seen")
    return next(iter(tagged_processes(agent_tag(order.job_uid))), None)


def drain(data: DataDir, seconds: float) -> int:
    """Have the ranks of this host save and exit; return how many agents are left after that time.

    Each agent leaves with its ranks, and the coordinator starts them elsewhere.
    """
    agents = [agent for uid in _job_directories(data) for agent in tagged_processes(agent_tag(uid))]
    for agent in agents:
        send_signal(agent, signal.SIGTERM)
    until = time.monotonic() + seconds
    while (left := sum(map(is_running, agents))) and time.monotonic() < until:
        time.sleep(DRAIN_POLL_SECONDS)
    return left


def _job_directories(data: DataDir) -> dict[str, JobFiles]:
    """Return the files of each job that has a directory here, by the job's uid."""
    roots = data.jobs.iterdir() if data.jobs.is_dir() else ()
    owned = [files for files in map(JobFiles, roots) if files.owner.is_file()]
    return {files.owner.read_text(): files for files in owned}


def _send_logs(order: FetchLogs) -> None:
    """Send what is left of an ended job's logs; remove its directory once they are kept."""
    # Other orders need no connection of an agent, whose modules take long to load.
    from worker.coordinator.log_sender import LogPasses  # noqa: PLC0415

    files = _job_directories(DataDir(Path(order.data_dir))).get(order.job_uid)
    if files is None:
        raise OSError(f"job {order.job_uid} has no directory in {order.data_dir}")
    if tagged_processes(f"{order.job_uid}/"):
        raise OSError(f"processes of job {order.job_uid} still run")
    if order.coordinator_file is None or file_identity(files.owner) == order.coordinator_file:
        raise OSError(f"{files.root} is shared with the coordinator's host")
    sizes = {(LogName(rank, attempt), kind): n for rank, attempt, kind, n in order.sizes}
    passes = LogPasses(files, sizes, lambda part: _say(LogFetched(part=part)))
    while passes.send_new():
        pass
    _say(LogsFetched())
    if msgspec.json.decode(sys.stdin.buffer.readline(), type=LogsKept):
        shutil.rmtree(files.root)
        _say(HostClean(left=0))


def _watch(agent: ProcessRecord, reap: Callable[[], int | None]) -> None:
    """Answer that an agent runs, until it ends or the connection breaks."""
    _say(AgentRuns(process=agent))
    with suppress(ProcessLookupError), closing(os.pidfd_open(agent.pid)) as pidfd:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN)
        while is_running(agent):
            ready = [descriptor for descriptor, _ in poll.poll(REPEAT_SECONDS * 1000)]
            if sys.stdin.fileno() in ready:  # nothing follows an order: this is the end
                return
            if not ready:
                _say(AgentRuns(process=agent))
    _say(AgentEnded(status=reap()))


def _say(answer: Answer) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
