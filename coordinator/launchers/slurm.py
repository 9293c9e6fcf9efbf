"""Slurm, through its own commands, as the user of the service would type them."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.scheduler import Refused, SchedulerJob, SchedulerUnavailable
from muster.cluster.requests import sbatch_script, sbatch_words
from muster.contracts.errors import printable
from muster.contracts.job.spec import JobSpec
from muster.contracts.messages.attach import JOIN_EXITS, JoinOrder
from muster.host.processes import module_command

COMMAND_SECONDS: Final = 30.0  # Slurm's own limits are below that

_FORMAT: Final = "JobID:|,Name:|,State:|,Reason:|,SubmitTime:|,exit_code:|"

_WAITING: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"})
_RUNNING: Final = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"})

_UP: Final = ("idle", "mix", "alloc", "comp", "plnd", "resv")  # states of nodes that take jobs

_PERMANENT: Final = (
    *("invalid partition", "Invalid account", "Invalid qos", "Invalid generic resource"),
    *("Invalid feature", "time limit", "node configuration is not available", "not permitted"),
    *("Memory specification", "More processors requested", "Access/permission denied"),
)
"""In the words of `sbatch` about a job that it will never take."""

_LIMITS: Final = ("QOS", "Assoc", "MaxSubmit", "MaxJobs")  # about one that it may take later

_OF_USERS: Final = ("SQUEUE_", "SCANCEL_", "SINFO_", "SBATCH_", "SLURM_CLUSTERS")
"""How variables begin that change what the commands do or print."""

COMMANDS_LIMIT: Final = 8  # at once: Slurm asks its users not to send bursts


class Slurm:
    """See `Scheduler`."""

    name = "slurm"

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ` is that of its commands and, as with `sbatch`, of the jobs."""
        self._environ = {k: v for k, v in environ.items() if not k.startswith(_OF_USERS)}
        self._running = asyncio.Semaphore(COMMANDS_LIMIT)

    async def check(self) -> None:
        for command in ("sbatch", "squeue", "scancel", "sinfo"):
            if shutil.which(command, path=self._environ.get("PATH")) is None:
                words = f"there is no {command} on the PATH of the coordinator"
                raise NotStarted(f"{words}: install slurm-client there")
        try:
            code, output, error = await self._run(["sinfo", "--noheader", "--format=%D %t"])
        except SchedulerUnavailable as away:
            raise NotStarted(f"{away}: run sinfo on the coordinator's host") from away
        if code != 0:
            raise NotStarted(f"sinfo: {_reason(error)}: run it on the coordinator's host")
        if not any(state.startswith(_UP) for state in output.split()[1::2]):
            raise NotStarted(f"no node of Slurm is up: sinfo says {printable(output.strip())!r}")

    async def submit(self, name: str, order: JoinOrder, spec: JobSpec) -> None:
        if shutil.which("sbatch", path=self._environ.get("PATH")) is None:
            raise Refused("there is no sbatch on the PATH of the coordinator: muster engines")
        script = sbatch_script(order, module_command("worker.join"))
        code, output, error = await self._run(sbatch_words(name, spec), script.encode())
        if code == 0:
            return
        words = f"sbatch: {_reason(error or output)}"
        if any(phrase in words for phrase in _LIMITS):
            raise NotStarted(words)
        if any(phrase in words for phrase in _PERMANENT):
            raise Refused(words)
        raise SchedulerUnavailable(words)  # after a timeout it may have the job nevertheless

    async def jobs(self) -> Mapping[str, SchedulerJob]:
        words = ["squeue", "--me", "--all", "--noheader", "--states=all", f"--Format={_FORMAT}"]
        code, output, error = await self._run(words)
        if code != 0:
            raise SchedulerUnavailable(f"squeue: {_reason(error)}")
        return parse_jobs(output)

    async def cancel(self, job_id: str) -> None:
        code, _, error = await self._run(["scancel", job_id])
        if code != 0:
            raise SchedulerUnavailable(f"scancel: {_reason(error)}")

    async def forget(self, job_id: str) -> None:
        """Slurm does, after some minutes."""

    async def _run(self, words: Sequence[str], content: bytes = b"") -> tuple[int, str, str]:
        """Return the exit code and the output of a command. Raises `SchedulerUnavailable`."""
        async with self._running:
            try:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=self._environ,
                    cwd="/",
                    start_new_session=True,  # Ctrl-C is for the coordinator
                )
            except OSError as error:
                raise SchedulerUnavailable(f"{words[0]}: {error}") from error
            try:
                async with asyncio.timeout(COMMAND_SECONDS):
                    outputs = await process.communicate(content)
            except TimeoutError as error:
                why = f"{words[0]} takes over {COMMAND_SECONDS:g} s"
                raise SchedulerUnavailable(why) from error
            finally:
                if process.returncode is None:
                    process.kill()
        output, errors = (each.decode(errors="replace") for each in outputs)
        return process.returncode or 0, output, errors


def parse_jobs(output: str) -> dict[str, SchedulerJob]:
    """Return the jobs in the output of ``squeue``, by name."""
    found: dict[str, SchedulerJob] = {}
    for line in output.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) <= _FORMAT.count("|") or not fields[0].isdigit():
            continue  # not a line of the format
        number, name, state, reason, since, status, *_ = fields
        state = state.split()[0] if state else ""
        if name in found and int(found[name].id) > int(number):
            continue
        why = "" if reason in {"", "None"} else f", {reason}"
        exit_code = int(status) >> 8 if status.isdigit() else 0
        if exit_code and state in {"FAILED", "COMPLETED"}:
            why = f": {JOIN_EXITS.get(exit_code, f'exit code {exit_code}')}"
        found[name] = SchedulerJob(
            id=number,
            is_waiting=state in _WAITING,
            is_over=state not in _WAITING | _RUNNING,
            words=f"Slurm job {number}: {state}{why}" + f", since {since}" * (state in _WAITING),
        )
    return found


def _reason(text: str) -> str:
    """Return the last lines that a command wrote, without what all of them begin with."""
    lines = [line.partition("error: ")[2] or line for line in text.strip().splitlines()[-3:]]
    return printable("; ".join(lines)) or "it wrote no error"
