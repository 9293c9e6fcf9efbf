"""The GPUs of a job's ranks: whole ones, or memory of one that several ranks share.

A whole GPU is claimed for each start and then held by the rank alone (`muster.host.gpus`). Shared
memory is a lease in the ledger of this host and user, which all Muster installations of the user
write under one lock. The file is replaced atomically and named after the boot, so that machines
with one home directory, or a machine that has restarted, do not meet in it.
"""

import fcntl
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from muster.cluster import vram
from muster.cluster.vram import Lease
from muster.contracts.job.retry import VRAM_BACKOFF
from muster.contracts.messages.agent import StartRank
from muster.contracts.messages.assignment import AgentAssignment, VramNeed
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.containment import tagged_processes
from muster.host.files import closing, replace_private
from muster.host.gpus import GpusBusy, claimed, is_claimed, list_gpus, measure_gpus, nameable
from muster.host.processes import boot_id, is_provably_gone, this_process
from muster.program import InvalidProgram
from muster.runtime.stderr_messages import print_stderr


class VramLedger:
    """The leases of this host and user, in a file below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory / f"{boot_id()}.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the ledger. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / "lock"
        with closing(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # agents hold it for milliseconds
            yield

    def read(self) -> list[Lease]:
        """Return the leases that count, whether locked or not. Raises OSError."""
        try:
            leases = msgspec.json.decode(self._file.read_bytes(), type=list[Lease])
        except (FileNotFoundError, PermissionError):  # nor can this user have written it
            return []
        except msgspec.DecodeError as error:
            message = f"{self._file} is damaged ({error}): remove it once no rank uses a GPU"
            raise OSError(message) from error
        return vram.prune(leases, time.time(), _is_gone)

    def gpus(self) -> set[str]:
        """Return the GPUs that ranks share."""
        return {lease.gpu for lease in self.read()}

    def write(self, leases: Sequence[Lease]) -> None:
        """Replace all leases; the ledger must be locked. Raises OSError."""
        replace_private(self._file, msgspec.json.encode(leases))

    def change(self, change: Callable[[list[Lease]], list[Lease]]) -> None:
        """Change leases; those of a process that cannot are pruned once it has ended."""
        try:
            with self.locked():
                self.write(change(self.read()))
        except OSError as error:
            print_stderr(f"the ledger of GPU memory cannot be written: {error}")


class RankGpus:
    """The GPUs of the ranks of one job on this host."""

    def __init__(self, assignment: AgentAssignment) -> None:
        self._per_rank = assignment.gpus_per_rank
        self._at_once = assignment.gpus_at_once
        self._host = assignment.host
        self._need = assignment.vram
        self._is_sharing = assignment.vram is not None and not self._per_rank
        self._usable_mb: Mapping[str, int] = {}
        """By GPU, of those that the job may use; 0 if it does not ask for memory."""
        self._waits: dict[int, tuple[float, int]] = {}
        """By rank: since when, and how often it has tried."""
        self._next_renewal = 0.0
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111  never raises
        self._ledger = VramLedger(Path(state, "muster", "gpu-leases"))

    @contextmanager
    def claimed(self, order: StartRank, running: int) -> Iterator[tuple[list[str], list[int]]]:
        """Claim the GPUs of one more rank, or reserve its memory, while it is started.

        Yields what CUDA_VISIBLE_DEVICES is to name, and descriptors for the rank to inherit.

        Raises `GpusBusy`, also if the rest of a gang lacks something: two gangs that start would
        each hold what the other needs. Raises `InvalidProgram` if the host has too few.
        """
        if not self._at_once:
            yield [], []
            return
        if not self._usable_mb:
            self._usable_mb = self._list({**os.environ, **order.environment})
        share = self._per_rank or 1
        missing = max(share, self._at_once - share * running)
        if self._need is not None and not self._per_rank:
            lease = self._reserve(order, self._need, missing)
            try:
                yield nameable([lease.gpu]), []
            except BaseException:
                self.release(lease.tag)
                raise
            return
        uuids, leased = list(self._usable_mb), self._ledger.gpus
        with claimed(uuids, self._per_rank, missing, leased) as found:
            yield nameable(found), list(found.values())

    def hand_over(self, tag: str, process: ProcessRecord | None) -> None:
        """Make a rank that has started the holder of its lease, which outlives this agent."""
        if self._is_sharing and process is not None:
            self._ledger.change(lambda leases: vram.change(leases, tag, process=process))

    def renew(self, tags: Sequence[str]) -> None:
        """Renew the leases of running ranks from time to time; to be called at every tick."""
        if self._is_sharing and time.monotonic() >= self._next_renewal:
            self._next_renewal = time.monotonic() + vram.RENEW_SECONDS
            self._ledger.change(lambda leases: vram.change(leases, *tags, renewed_at=time.time()))

    def release(self, tag: str) -> None:
        """Give back the memory of an attempt that has ended."""
        if self._is_sharing:
            self._ledger.change(lambda leases: vram.release(leases, tag))

    def _reserve(self, order: StartRank, need: VramNeed, missing: int) -> Lease:
        """Write a lease for a rank, or raise `GpusBusy`."""
        unused, used = measure_gpus()
        with self._ledger.locked():
            now = time.time()
            leases = vram.measure(self._ledger.read(), used)
            usable = {gpu: 0 if is_claimed(gpu) else mb for gpu, mb in self._usable_mb.items()}
            free = vram.free_mb(usable, leases, used, unused, now)
            gpu = vram.choose(free, need.vram_mb, missing)
            if gpu is not None:
                lease = Lease(
                    tag=order.environment[PROCESS_TAG],
                    holder=f"rank {order.rank} of {order.environment['JOB_ID']}",
                    gpu=gpu,
                    vram_mb=need.vram_mb,
                    process=this_process(),
                    taken_at=now,
                    renewed_at=now,
                )
                self._ledger.write([*leases, lease])
                # Look again after writing: a claim of a GPU looks for leases last.
                if not is_claimed(gpu):
                    self._waits.pop(order.rank, None)
                    return lease
            self._ledger.write(leases)
        gpu = max(free, key=lambda gpu: free[gpu])
        facts = [f"{free[gpu]} MB free on {gpu}"]
        on_it = (lease for lease in leases if lease.gpu == gpu)
        facts += [f"{lease.holder} holds {lease.counted_mb(now)} MB of it" for lease in on_it]
        facts += [] if usable[gpu] else ["a rank has it for itself"]
        ranks = f" for each of {missing} ranks" if missing > 1 else ""
        needed = f"{need.vram_mb} MB of GPU memory{ranks} on {self._host}"
        raise self._busy(order.rank, need.wait_seconds, needed, facts)

    def _busy(self, rank: int, limit_seconds: float, needed: str, facts: Sequence[str]) -> GpusBusy:
        """Return when a rank tries again, or that it has waited for as long as its job allows."""
        now = time.monotonic()
        since, tries = self._waits.get(rank, (now, 0))
        left_seconds = limit_seconds - (now - since)
        if left_seconds <= 0:
            waited = f"has waited {limit_seconds:g} s (vram_wait_seconds)"
            busy = GpusBusy(f"{waited} for {needed}: {'; '.join(facts)}")
            busy.is_final = True
            return busy
        self._waits[rank] = since, tries + 1
        seconds = min(left_seconds, VRAM_BACKOFF.delay_seconds(tries + 1, ""))
        busy = GpusBusy(f"waits for {needed}: {facts[0]}; next try in {math.ceil(seconds)} s")
        busy.retry_after_seconds = seconds
        return busy

    def _list(self, environ: Mapping[str, str]) -> Mapping[str, int]:
        """Return the usable memory of the GPUs that the job may use, or raise `InvalidProgram`."""
        described = {} if self._need is None else self._need.usable_mb
        try:
            found = list_gpus(environ)
        except FileNotFoundError:
            # A board that shares main memory may have no nvidia-smi, and a name instead of a UUID.
            found = [name for name in described if not name.startswith("GPU-")]
            why = "as there is no nvidia-smi on the PATH of the service"
        except subprocess.CalledProcessError as error:
            found, why = [], f"as nvidia-smi failed ({(error.stdout + error.stderr).strip()})"
        else:
            why = "CUDA_VISIBLE_DEVICES included"
        usable, of_size = dict.fromkeys(found, 0), ""
        if self._need is not None:
            # A description may shorten a UUID, as CUDA_VISIBLE_DEVICES may.
            pairs = (
                (gpu, mb) for gpu in found for uuid, mb in described.items() if gpu.startswith(uuid)
            )
            usable = {gpu: mb for gpu, mb in pairs if mb >= self._need.vram_mb}
            of_size = f" of {self._need.vram_mb} MB, as the cluster file describes them,"
        needed = 1 if self._is_sharing else self._at_once
        if len(usable) < needed:
            advice = "choose a smaller gpus_per_rank, or fewer ranks for a gang"
            absent = [uuid for uuid in described if not any(gpu.startswith(uuid) for gpu in found)]
            if absent and found:
                named = f"the cluster file names {', '.join(absent)}, and the host has"
                advice = f"{named} {', '.join(found)}: correct it, and restart the services"
            raise InvalidProgram(
                f"the job needs {needed} GPUs{of_size} at once, and its host has {len(usable)} for "
                f"it, {why}: {advice}"
            )
        return usable


def _is_gone(lease: Lease) -> bool:
    """Return whether the holder has ended, and everything that the rank has started, too."""
    return is_provably_gone(lease.process) and not tagged_processes(lease.tag)
