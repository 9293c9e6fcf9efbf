"""Machines that stand still, are replaced, and go on: nothing of what wakes up there counts.

``python tests/stale_ranks.py [WAKINGS] [SEED]`` trains jobs of every kind on one machine after the
other (`frozen_hosts`). Each is stopped at a chosen instant, the next takes over its jobs, trains
and saves, and then the old ranks, agents and coordinator are let go on. All have to notice and
exit, and meanwhile no name, no `LATEST`, no row and no byte of memory in use may be theirs.
"""

import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from chaos_saves import Saves
from frozen_hosts import Host, is_there, shared_memory, signal_all
from installation import Installation, Seen, await_value, is_over

from cli.digest import digests
from muster.checkpoints.names import LATEST, CheckpointName, parse_latest
from muster.contracts.layout import checkpoints_of_job, checkpoints_of_rank
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from store.database import Database
from store.leases import COORDINATOR_LEASE, Leases

KINDS: Mapping[str, Mapping[str, Any]] = {
    "independent": {"mode": "independent", "world_size": 3},
    "shared memory": {"mode": "synchronous", "backend": "shared_memory", "world_size": 3},
    "tcp": {"mode": "synchronous", "backend": "tcp", "world_size": 2},
}
COMMON = {"checkpoint_every": 5, "max_restarts": 100_000}
EPOCHS = 80
PACE_SECONDS = 0.02
"""Between steps: a job goes through several machines."""

IN_TIME_SECONDS = 2.0
NEW_STEPS = 10
"""What a successor has taken at least before the machine goes on."""

LOOK_SECONDS = 0.005
WATCH_SECONDS = 0.3
"""After the last has gone, for what it might have left to happen."""

INSTANTS = ("in a checkpoint", "in a sum", "at random")
ORDERS = (("ranks", "agents", "coordinator"), ("coordinator", "ranks", "agents"), ("all",))
SAW, REFUSED, ENDED = "saw its successor", "refused a checkpoint", "ended by its agent"
SENTENCES = {
    "this process has been replaced, and exits": SAW,
    "it has been replaced and must exit": REFUSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waking:
    """A stale process that was let go on."""

    what: str
    instant: str
    outcome: str
    seconds: float
    """Until it was gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A job of one kind."""

    kind: str
    job_id: str


@dataclass(slots=True)
class Findings:
    """What happened, and sentences about what must not."""

    wakings: list[Waking] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    completed: int = 0
    commits: int = 0
    """By successors, seen while stale processes ran or after."""

    def of(self, *whats: str) -> list[Waking]:
        return [waking for waking in self.wakings if waking.what in whats]


class Watch:
    """Reads what every `LATEST` says, again and again: none may go back."""

    def __init__(self) -> None:
        self._newest: dict[Path, CheckpointName] = {}
        self._directories: set[Path] = set()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.commits = 0
        self.breaches: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._is_ending.set()

    def follow(self, directories: Sequence[Path]) -> None:
        self._directories |= set(directories)

    def _run(self) -> None:
        while not self._is_ending.wait(LOOK_SECONDS):
            for directory in tuple(self._directories):
                self._look(directory)

    def _look(self, directory: Path) -> None:
        found = latest_of(directory)
        before = self._newest.get(directory)
        if found is None or found == before:
            return
        if before is not None and found < before:
            self.breaches.append(f"{directory}: LATEST went back from {before} to {found}")
        self._newest[directory] = found
        self.commits += 1


class Scene:
    """An installation whose coordinator lives on one machine after the other."""

    def __init__(
        self, installation: Installation, seed: int, findings: Findings, epochs: int
    ) -> None:
        self.installation = installation
        self.findings = findings
        self._chance = random.Random(seed)  # noqa: S311  can be repeated, no secret
        self._epochs = epochs
        self._hosts: list[Host] = []
        self._trainings: dict[str, Training] = {}
        """The youngest of each kind, which instants are chosen of."""
        self._elder: list[Training] = []
        """Those that come to their end meanwhile."""
        self._undisturbed: dict[str, object] = {}
        self._watch = Watch()

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Start the first machine, and see what undisturbed jobs end with."""
        write_dataset(
            self.installation.root / "shards", synthetic(samples=512, shards=8, features=8)
        )
        self.installation.start_api()
        self._bring_a_host()
        await_value(self._hosts[-1].coordinates, self._describe)
        calm = {kind: self._submit(kind, sleep_sec=0.0) for kind in KINDS}
        for kind, training in calm.items():
            self.installation.complete(training.job_id)
            self._undisturbed[kind] = self._digests(training)
        self._watch.start()

    def __exit__(self, *error: object) -> None:
        self._watch.end()
        self.findings.breaches += self._watch.breaches
        self.findings.commits = self._watch.commits
        try:
            if error[0] is None:
                self.installation.end_jobs()
            else:
                self.installation.forget_jobs()
        finally:
            for host in self._hosts:
                host.end()
            self.installation.close()

    # One machine after the other

    def replace_a_host(self) -> None:
        """Freeze the machine, let another take over, and let the old one go on."""
        self._keep_training()
        old, new = self._hosts[-1], self._bring_a_host()
        new.await_standby()
        for training in self._trainings.values():
            self._await_steps(training, NEW_STEPS)
        instants = self._freeze(old)
        generations = {directory: generation_in(directory) for directory in self._places()}
        places = {pid: self._place_of(mark) for pid, mark in old.ranks().items()}
        await_value(new.coordinates, self._describe)
        for training in self._all():
            self._await_successors(training, generations)
        before = self._standing()
        self._compare_memory(old, new)
        order = self._chance.choice(ORDERS)
        for part in order:
            self._wake(old, part, places, instants)
        self._expect_fenced(old)
        time.sleep(WATCH_SECONDS)
        self._compare(before, self._standing())
        self._expect_living(new)
        old.end()

    def finish(self) -> None:
        """Let every job come to its end."""
        for training in self._all():
            self._complete(training)

    def _bring_a_host(self) -> Host:
        self._hosts.append(Host(self.installation, f"host-{len(self._hosts)}"))
        return self._hosts[-1]

    # Its jobs

    def _submit(self, kind: str, **fields: object) -> Training:
        described = {**COMMON, **KINDS[kind], "epochs": self._epochs, **fields}
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
            self._watch.follow(self._directories(training))
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
            self.findings.breaches.append(f"{training}: other bits than an undisturbed run")
        if training.kind != "independent":
            audit = self.installation.request("GET", f"/jobs/{training.job_id}/audit").json()
            if not (audit["complete"] and audit["exactly_once"]):
                self.findings.breaches.append(f"{training}: {audit}")

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
        return list(digests(checkpoints_of_job(self.installation.checkpoint_dir, training.job_id)))

    def _directories(self, training: Training) -> list[Path]:
        root, job_id = self.installation.checkpoint_dir, training.job_id
        if training.kind != "independent":
            return [checkpoints_of_job(root, job_id)]
        ranks = range(KINDS[training.kind]["world_size"])
        return [checkpoints_of_rank(root, job_id, rank) for rank in ranks]

    # The instant

    def _freeze(self, host: Host) -> dict[str, str]:
        """Stop a machine at some instant of one job; return the instants by kind of job."""
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

    def _freeze_in_a_checkpoint(self, host: Host, target: Training, pids: Sequence[int]) -> bool:
        directory = self._directories(target)[0]
        with Saves(directory) as saves:
            saves.reach(self._chance.randrange(8), 5.0)
            host.freeze(pids)
            return saves.is_unfinished()

    def _pids_of(self, training: Training, host: Host) -> list[int]:
        uid = self.installation.uids[training.job_id]
        marks = {mark: pid for pid, mark in host.ranks().items() if mark.startswith(f"{uid}/")}
        return [marks[mark] for mark in sorted(marks)]

    # The waking

    def _wake(
        self,
        host: Host,
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
        for pid, seconds in self._let_go(whats).items():
            if whats[pid] == "rank":
                training, rank, incarnation = places[pid]
                what, instant = training.kind, instants[training.kind]
                outcome = self._outcome(training, rank, incarnation)
                if outcome == ENDED and part != "all":
                    self.findings.breaches.append(f"{training}: rank {rank} did not say why")
            else:
                what, instant, outcome = whats[pid], "", "exits"
            self.findings.wakings.append(
                Waking(what=what, instant=instant, outcome=outcome, seconds=seconds)
            )

    def _let_go(self, whats: Mapping[int, str]) -> dict[int, float]:
        """Return after how many seconds each was gone."""
        started = time.monotonic()
        signal_all(whats, signal.SIGCONT)
        gone: dict[int, float] = {}

        def look() -> bool:
            for pid in whats:
                if pid not in gone and not is_there(pid):
                    gone[pid] = time.monotonic() - started
            return len(gone) == len(whats)

        until = started + IN_TIME_SECONDS
        while not look() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        await_value(look, lambda: f"{[whats[pid] for pid in whats if pid not in gone]} stay")
        return gone

    def _outcome(self, training: Training, rank: int, incarnation: int) -> str:
        log = self.installation.files.job(training.job_id).log(rank, incarnation).read_text()
        return next((outcome for words, outcome in SENTENCES.items() if words in log), ENDED)

    def _place_of(self, mark: str) -> tuple[Training, int, int]:
        uid, rank, incarnation = mark.split("/")
        for training in self._all():
            if self.installation.uids[training.job_id] == uid:
                return training, int(rank), int(incarnation)
        raise AssertionError(f"{mark} is of no job that trains")

    # What must not change

    def _standing(self) -> dict[str, Any]:
        """Return whatever a stale process might change, and successors do not."""
        database = Database.open(f"sqlite:///{self.installation.files.root / 'muster.db'}")
        try:
            lease = Leases(database).current(COORDINATOR_LEASE)
        finally:
            database.close()
        standing: dict[str, Any] = {"lease": (lease.epoch, lease.owner) if lease else None}
        for training in self._all():
            seen = self.installation.see(training.job_id)
            for worker in seen["workers"]:
                ended = {**worker["endings"]}
                # To finish is no harm; whatever else ends a process is.
                pid = None if ended.pop("finished", 0) or is_over(seen) else worker["pid"]
                process = f"{training.job_id}, worker {worker['worker_id']}"
                gone = (None, worker["restarts"], str(ended))
                standing[process] = {(pid, worker["restarts"], str(ended)), gone}
            for directory in self._directories(training):
                standing[str(directory)] = older_names(directory)
        return standing

    def _compare(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for what, value in before.items():
            is_same = after[what] <= value if isinstance(value, set) else after[what] == value
            if not is_same:
                self.findings.breaches.append(f"{what}: {value} became {after[what]}")

    def _compare_memory(self, old: Host, new: Host) -> None:
        """What a stale rank can write to is mapped by nobody else."""
        writable = {
            inode for pid in old.ranks() for mode, inode in shared_memory(pid) if "w" in mode
        }
        in_use = {inode for pid in new.ranks() for _, inode in shared_memory(pid)}
        if not (writable and in_use):
            self.findings.breaches.append("no shared memory was seen at all")
        if both := writable & in_use:
            self.findings.breaches.append(f"stale ranks can write to memory in use: {both}")

    def _expect_fenced(self, host: Host) -> None:
        await_value(lambda: host.exit_code() is not None, lambda: host.log.read_text()[-500:])
        if host.exit_code() != 75:
            code, log = host.exit_code(), host.log.read_text()[-500:]
            self.findings.breaches.append(f"the stale coordinator ended with {code}: {log}")

    def _expect_living(self, host: Host) -> None:
        if len(host.coordinators()) != 1 or host.exit_code() is not None:
            self.findings.breaches.append(f"{host.name} has lost its coordinator")

    def _describe(self) -> str:
        ids = [training.job_id for training in self._all()]
        logs = [host.log.read_text()[-2000:] for host in self._hosts[-2:]]
        return "\n".join([*map(self.installation.describe, ids), *logs])


def latest_of(directory: Path) -> CheckpointName | None:
    try:
        return parse_latest((directory / LATEST).read_bytes())
    except OSError:
        return None


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def generation_in(directory: Path) -> int:
    """Return whose checkpoint `LATEST` names; -1 if there is none."""
    latest = latest_of(directory)
    return -1 if latest is None else latest.generation


def is_finished(seen: Seen, rank: int) -> bool:
    return bool(seen["workers"][rank]["state"] == "finished")


def older_names(directory: Path) -> set[CheckpointName]:
    """Return the checkpoints of all generations but the one of `LATEST`."""
    latest = latest_of(directory)
    names = filter(None, map(CheckpointName.parse, names_in(directory)))
    return {name for name in names if latest is None or name.generation < latest.generation}


def report(findings: Findings) -> Iterator[str]:
    yield f"{'woken':16}{'stopped':18}{'count':>6}  {'gone after p50 / p95 / max':28}outcomes"
    groups: dict[tuple[str, str], list[Waking]] = defaultdict(list)
    for waking in findings.wakings:
        groups[waking.what, waking.instant].append(waking)
    for (what, instant), wakings in sorted(groups.items()):
        seconds = sorted(waking.seconds for waking in wakings)
        tail = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
        spread = f"{statistics.median(seconds):.2f} / {tail:.2f} / {seconds[-1]:.2f} s"
        counts = Counter(waking.outcome for waking in wakings)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        yield f"{what:16}{instant:18}{len(wakings):6}  {spread:28}{outcomes}"
    late = sum(waking.seconds > IN_TIME_SECONDS for waking in findings.wakings)
    yield f"later than {IN_TIME_SECONDS:g} s: {late} of {len(findings.wakings)}"
    yield f"jobs completed with the bits of an undisturbed run: {findings.completed}"
    yield f"commits of successors watched: {findings.commits}"
    yield f"breaches: {len(findings.breaches)}"
    yield from findings.breaches


def run(
    root: Path,
    *,
    wakings: int,
    seed: int,
    seconds: float,
    tell: Callable[[str], object],
    epochs: int = EPOCHS,
) -> Findings:
    """Wake so many stale ranks, or fewer if the time is over; return what was found.

    `epochs` is how long a job is: one goes through several machines, or over one change of them.
    """
    findings = Findings()
    installation = Installation(root)
    until = time.monotonic() + seconds
    with Scene(installation, seed, findings, epochs) as scene:
        scene.begin()
        while len(findings.of(*KINDS)) < wakings and time.monotonic() < until:
            scene.replace_a_host()
            tell(f"{len(findings.of(*KINDS))} of {wakings} stale ranks woken")
        scene.finish()
    return findings


def tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201  its purpose


def main() -> int:
    wakings = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    # Asked to end, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory:
        findings = run(Path(directory), wakings=wakings, seed=seed, seconds=600.0, tell=tell)
    for line in (f"seed {seed}", *report(findings)):
        tell(line)
    return bool(findings.breaches)


if __name__ == "__main__":
    sys.exit(main())
