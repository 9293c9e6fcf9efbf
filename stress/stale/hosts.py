"""An installation whose coordinator moves from host to host, with its jobs."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from muster.checkpoints.comparison import digests
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.settings.paths import checkpoints_of_job
from stress.chaos.reader import CheckpointWatch
from stress.chaos.saves import Saves
from stress.frozen_hosts import CoordinatorHost, let_go
from stress.runner import chance
from stress.stale.findings import Findings, Waking
from stress.stale.jobs import (
    COMMON,
    KINDS,
    Training,
    changes,
    generation_in,
    is_finished,
    is_locked,
    mapped_memory,
    standing,
    writable_memory,
)
from tests.support.hosts import signal_all
from tests.support.installation import Installation, Seen, await_value, is_over, write_small_dataset

PACE_SECONDS = 0.02
"""Between steps: a job goes through several hosts."""

NEW_STEPS = 10
"""What a successor has taken at least before the host goes on."""

WATCH_SECONDS = 0.3
"""After the last has gone, for what it might have left to happen."""

INSTANTS = ("in a checkpoint", "in a sum", "at random")
ORDERS = (("ranks", "agents", "coordinator"), ("coordinator", "ranks", "agents"), ("all",))
SAW, REFUSED, ENDED = "saw its successor", "refused a checkpoint", "ended by its agent"
SENTENCES = {
    "this process has been replaced and exits": SAW,
    "it has been replaced and must exit": REFUSED,
}


class MovingInstallation:
    """Hosts that come and go, the jobs that they train, and what is found."""

    def __init__(
        self,
        installation: Installation,
        seed: int,
        findings: Findings,
        fields: Mapping[str, int],
    ) -> None:
        """`fields` are those of each job."""
        self.installation = installation
        self.findings = findings
        self._chance = chance(seed)
        self._fields = fields
        self._hosts: list[CoordinatorHost] = []
        self._trainings: dict[str, Training] = {}
        """The youngest of each kind, which instants are chosen of."""
        self._elder: list[Training] = []
        """Those that come to their end meanwhile."""
        self._undisturbed: dict[str, object] = {}
        self._reader: CheckpointWatch | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Start the first host, and see what undisturbed jobs end with."""
        write_small_dataset(self.installation.root / "shards")
        self.installation.start_api()
        self._bring_a_host()
        await_value(self._hosts[-1].coordinates, self._describe)
        calm = {kind: self._submit(kind, sleep_sec=0.0) for kind in KINDS}
        for kind, training in calm.items():
            self.installation.complete(training.job_id)
            self._undisturbed[kind] = self._digests(training)
        self._reader = CheckpointWatch(self.installation.checkpoint_dir)

    def __exit__(self, *error: object) -> None:
        if self._reader is not None:
            read = self._reader.end()
            self.findings.faults += [*read["invalid"], *read["regressed"]]
            self.findings.commits = read["checkpoints"]
        try:
            if error[0] is None:
                self.installation.end_jobs()
            else:
                self.installation.forget_jobs()
        finally:
            for host in self._hosts:
                host.power_off()
            self.installation.close()

    # Hosts

    def replace_host(self) -> None:
        """Freeze the host, let another take over, and let the old one go on."""
        self._keep_training()
        old, new = self._hosts[-1], self._bring_a_host()
        new.await_standby()
        for training in self._trainings.values():
            self._await_steps(training, NEW_STEPS)
        instants = self._freeze(old)
        self._leave_the_database(old)
        generations = {directory: generation_in(directory) for directory in self._places()}
        places = {pid: self._place_of(tag) for pid, tag in old.ranks().items()}
        await_value(new.coordinates, self._describe)
        for training in self._all():
            self._await_successors(training, generations)
        before = standing(self.installation, self._all())
        self.findings.note_memory(writable_memory(old), mapped_memory(new))
        order = self._chance.choice(ORDERS)
        for part in order:
            self._wake(old, part, places, instants)
        self._expect_fenced(old)
        time.sleep(WATCH_SECONDS)
        after = standing(self.installation, self._all())
        self.findings.faults += changes(before, after)
        self._expect_living(new)
        old.power_off()

    def finish(self) -> None:
        """Let every job come to its end."""
        for training in self._all():
            self._complete(training)

    def _bring_a_host(self) -> CoordinatorHost:
        self._hosts.append(CoordinatorHost(self.installation, f"host-{len(self._hosts)}"))
        return self._hosts[-1]

    # Jobs

    def _submit(self, kind: str, **fields: object) -> Training:
        described = {**COMMON, **KINDS[kind], **self._fields, **fields}
        return Training(kind=kind, job_id=self.installation.submit(**described))

    def _keep_training(self) -> None:
        """Have a job of every kind that is not about to end."""
        for kind in KINDS:
            training = self._trainings.get(kind)
            if training is not None and self._has_much_left(training):
                continue
            if training is not None:
                self._elder.append(training)
            self._trainings[kind] = self._submit(kind, sleep_sec=PACE_SECONDS)
        for training in self._trainings.values():
            self._await_steps(training, NEW_STEPS)
        over = [it for it in self._elder if is_over(self.installation.see(it.job_id))]
        for training in over:
            self._elder.remove(training)
            self._complete(training)

    def _all(self) -> list[Training]:
        return [*self._elder, *self._trainings.values()]

    def _places(self) -> list[Path]:
        return [directory for training in self._all() for directory in self._directories(training)]

    def _has_much_left(self, training: Training) -> bool:
        seen = self.installation.see(training.job_id)
        return not is_over(seen) and seen["step"] < seen["total_steps"] / 2

    def _complete(self, training: Training) -> None:
        self.installation.complete(training.job_id)
        self.findings.completed += 1
        if self._digests(training) != self._undisturbed[training.kind]:
            self.findings.faults.append(f"{training}: other bits than an undisturbed run")
        if training.kind != "independent":
            audit = self.installation.request("GET", f"/jobs/{training.job_id}/audit").json()
            if not (audit["complete"] and audit["exactly_once"]):
                self.findings.faults.append(f"{training}: {audit}")

    def _await_steps(self, training: Training, count: int) -> None:
        seen = self.installation.see(training.job_id)
        target = seen["step"] + count
        self.installation.wait_until(
            training.job_id, lambda now: is_over(now) or now["step"] >= target
        )

    def _await_successors(self, training: Training, before: Mapping[Path, int]) -> None:
        """Wait until every successor has committed, and gone on."""

        def have_committed(seen: Seen) -> bool:
            places = enumerate(self._directories(training))
            return is_over(seen) or all(
                generation_in(directory) > before[directory]
                or (training.kind == "independent" and is_finished(seen, rank))
                for rank, directory in places
            )

        self.installation.wait_until(training.job_id, have_committed)
        self._await_steps(training, NEW_STEPS)

    def _digests(self, training: Training) -> object:
        directory = checkpoints_of_job(self.installation.checkpoint_dir, training.job_id)
        return list(digests(checkpoint_dirs(directory)))

    def _directories(self, training: Training) -> list[Path]:
        return training.directories(self.installation.checkpoint_dir)

    # Freezing

    def _freeze(self, host: CoordinatorHost) -> dict[str, str]:
        """Stop a host at some instant of one job; return the instants by kind of job."""
        instant = self._chance.choice(INSTANTS)
        kinds = list(KINDS) if instant != "in a sum" else ["shared memory", "tcp"]
        target = self._trainings[self._chance.choice(kinds)]
        pids = self._pids_of(target, host)
        if instant == "in a checkpoint":
            is_hit = self._freeze_in_a_checkpoint(host, target, pids)
            instant = instant if is_hit else "at random"
        elif instant == "in a sum":
            # All others come to the sum, and wait there for this one.
            signal_all(pids[:1], signal.SIGSTOP)
            time.sleep(5 * PACE_SECONDS)
            host.freeze()
        else:
            time.sleep(self._chance.uniform(0, 0.2))
            host.freeze()
        return {kind: instant if kind == target.kind else "at random" for kind in KINDS}

    def _leave_the_database(self, host: CoordinatorHost) -> None:
        """Let a coordinator finish its transaction; SQLite allows no takeover before."""
        while is_locked(self.installation):
            self.findings.inside_transactions += 1
            signal_all(host.coordinators(), signal.SIGCONT)
            time.sleep(PACE_SECONDS)
            host.freeze()

    def _freeze_in_a_checkpoint(
        self, host: CoordinatorHost, target: Training, pids: Sequence[int]
    ) -> bool:
        directory = self._directories(target)[0]
        with Saves(directory) as saves:
            saves.reach(self._chance.randrange(8), 5.0)
            host.freeze(pids)
            return saves.is_unfinished()

    def _pids_of(self, training: Training, host: CoordinatorHost) -> list[int]:
        uid = self.installation.uids[training.job_id]
        tags = {tag: pid for pid, tag in host.ranks().items() if tag.startswith(f"{uid}/")}
        return [tags[tag] for tag in sorted(tags)]

    # Resuming

    def _wake(
        self,
        host: CoordinatorHost,
        part: str,
        places: Mapping[int, tuple[Training, int, int]],
        instants: Mapping[str, str],
    ) -> None:
        """Let some go on, and wait until they are gone."""
        parts: dict[str, Callable[[], Sequence[int]]] = {
            "ranks": lambda: [pid for pid in host.ranks() if pid in places],
            "agents": lambda: list(host.agents()),
            "coordinator": host.coordinators,
        }
        whats = {
            pid: name[: -1 if name.endswith("s") else None]
            for name, pids in parts.items()
            if part in {name, "all"}
            for pid in pids()
        }
        for pid, seconds in let_go(whats, self.findings.in_time_seconds).items():
            if whats[pid] == "rank":
                training, rank, attempt = places[pid]
                what, instant = training.kind, instants[training.kind]
                outcome = self._outcome(training, rank, attempt)
                if outcome == ENDED and part != "all":
                    self.findings.faults.append(f"{training}: rank {rank} did not say why")
            else:
                what, instant, outcome = whats[pid], "", "exits"
            self.findings.note(Waking(what=what, instant=instant, outcome=outcome, seconds=seconds))

    def _outcome(self, training: Training, rank: int, attempt: int) -> str:
        log = self.installation.files.job(training.job_id).log(rank, attempt).read_text()
        return next((outcome for words, outcome in SENTENCES.items() if words in log), ENDED)

    def _place_of(self, tag: str) -> tuple[Training, int, int]:
        uid, rank, attempt = tag.split("/")
        for training in self._all():
            if self.installation.uids[training.job_id] == uid:
                return training, int(rank), int(attempt)
        raise AssertionError(f"{tag} is of no job that trains")

    def _expect_fenced(self, host: CoordinatorHost) -> None:
        if (code := host.coordinator.wait()) != 75:
            log = host.log.read_text()[-500:]
            self.findings.faults.append(f"the stale coordinator ended with {code}: {log}")

    def _expect_living(self, host: CoordinatorHost) -> None:
        if host.coordinator.poll() is not None:
            self.findings.faults.append(f"{host.name} has lost its coordinator")

    def _describe(self) -> str:
        ids = [training.job_id for training in self._all()]
        logs = [host.log.read_text()[-2000:] for host in self._hosts[-2:]]
        return "\n".join([*map(self.installation.describe, ids), *logs])
