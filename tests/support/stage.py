"""Synchronous training in one process: ranks are threads, and the stage publishes groups.

Failure is a script: `at(step, ...)` says what happens when the first rank has taken that step.
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from muster.checkpoints.errors import CheckpointFailed
from muster.collectives.errors import CollectiveError
from muster.collectives.reduction.compressed import KINDS, Compression
from muster.collectives.reduction.host_reducer import HostReducer
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.simulated import SimulatedBackend
from muster.contracts.messages.rank import GroupMember, WorkerGroup
from muster.contracts.shards import Position
from muster.datasets.random_access import RandomAccess
from muster.datasets.sources import open_source
from muster.program import Batch, Contribution, State
from muster.runtime.fingerprint import fingerprint
from muster.training.blocks import BlockComputer, BusyFlag
from muster.training.groups.group import Group, WorkersDiverged, group_rank_of
from muster.training.groups.replay import Replay
from muster.training.groups.state_sync import Committed, Replica
from muster.training.groups.updates import (
    NO_GROUP,
    GroupChanged,
    GroupUpdate,
    StopRequested,
    is_in_force,
)
from muster.training.schedule import Schedule
from muster.training.schema import Means
from muster.training.trainer import Outcome, Trainer

FEATURES = 5

NO_RANK = -1
"""Killed in place of a rank when a group ends, so that waiting members look up."""


class Killed(BaseException):
    """The rank is gone: nothing of it runs any more."""


class Regression:
    """A small program with everything that could break identity: noise, momentum, a metric."""

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(seed)
        weights = draw.standard_normal(FEATURES).astype(np.float32)
        return {"weights": weights, "momentum": np.zeros(FEATURES, np.float32)}

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        inputs = np.array([sample["x"] for sample in batch.samples], np.float32)
        inputs += random.normal(0, 0.01, inputs.shape).astype(np.float32)
        wanted = np.array([sample["y"] for sample in batch.samples], np.float32)
        errors = (inputs @ state["weights"] - wanted) * batch.weights
        return Contribution(
            {"weights": inputs.T @ errors}, float(errors @ errors), {"bias": float(errors.sum())}
        )

    def update(self, state: State, gradients: State, _step: int) -> dict[str, np.ndarray]:
        momentum = np.float32(0.9) * state["momentum"] + gradients["weights"]
        return {"weights": state["weights"] - np.float32(0.05) * momentum, "momentum": momentum}


def compression_of(kind: str, leaves: int, elements: int, groups: int = 4) -> Compression:
    return KINDS[kind](leaves, groups, elements, 3, 0.3)


def write_samples(directory: Path, samples: int, shards: int = 3) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(1)
    lines = [
        json.dumps({"x": draw.standard_normal(FEATURES).round(3).tolist(), "y": number % 3})
        for number in range(samples)
    ]
    for shard in range(shards):
        (directory / f"shard_{shard:05d}.txt").write_text("\n".join(lines[shard::shards]) + "\n")
    return directory


class ScriptedUpdates:
    """Updates of a rank: the conductor puts the newest group here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: GroupUpdate | None = None
        self._current = NO_GROUP
        self.in_step = False
        self.killed = False
        self.stopped = False

    def put(self, group: WorkerGroup) -> None:
        with self._changed:
            self._newest = GroupUpdate(group=group)
            self._changed.notify_all()

    def kill(self) -> None:
        with self._changed:
            self.killed = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        if self.killed:
            raise Killed
        if self.stopped:
            raise StopRequested
        current, newest = self._current, self._newest
        if newest and not is_in_force(current, newest.group, in_step=self.in_step):
            raise GroupChanged

    def next(self) -> GroupUpdate:
        with self._changed:
            while self._newest is None:
                if self.killed:
                    raise Killed
                if self.stopped:
                    raise StopRequested
                self._changed.wait(10)
            newest, self._newest = self._newest, None
            self._current = newest.group
            return newest


@dataclass
class Player:
    """One worker: a thread, its ear, and what it said."""

    worker_id: int
    rank: int
    groups: ScriptedUpdates
    replica: Replica
    thread: threading.Thread | None = None
    slots: np.ndarray | None = None
    compression: Compression | None = None
    outcome: Outcome | BaseException | None = None
    joined_round: int = 0
    """The last round that was in force for it; 0: none."""


@dataclass
class Stage:
    """Runs a job of players through a script, and tells what came out."""

    data: Path
    epochs: int = 2
    batch_size: int = 16
    virtual_shards: int = 8
    program: type = Regression
    checkpoint_every: int = 4
    replay_every: int | None = None
    drawer: type[RandomAccess] = RandomAccess
    reducer: type[MessageReducer] = MessageReducer
    compression: str | None = None
    hosts: int = 1
    """Workers are on them in turn."""
    script: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.players: list[Player] = []
        self.members: list[Player] = []
        self.groups: dict[int, list[SimulatedBackend]] = {}
        self.round_number = 0
        self.kept: tuple[dict[str, np.ndarray], Committed] | None = None
        self.full_at: list[int] = []
        """The steps at which a checkpoint fails, each as often as it is listed."""
        self.unkept: list[int] = []
        self.saved: list[int] = []  # the steps of all checkpoints
        self.taken: list[tuple[int, int]] = []
        self.disputes: list[tuple[int, ...]] = []
        self.reached = -1
        self.is_over = False
        self.drawers: list[RandomAccess] = []
        self.held: tuple[int, Callable[[], object]] = (NO_RANK, lambda: None)
        """The round that is to end when all have joined it, and how."""
        self.when_disputed: Callable[[tuple[int, ...]], object] = lambda _workers: None

    # What happens to the pool

    def joins(self, rank: int | None = None) -> Player:
        with self.lock:
            taken = {player.rank for player in self.members}
            place = next(n for n in range(99) if n not in taken) if rank is None else rank
            player = self._player(len(self.players), place)
            self.players.append(player)
            self._announce([*self.members, player])
            player.thread.start()
        return player

    def leaves(self, worker_id: int) -> None:
        with self.lock:
            if not self.players[worker_id].joined_round:
                self.players[worker_id].groups.stop()
            self._announce([p for p in self.members if p.worker_id != worker_id])

    def dies(self, worker_id: int) -> None:
        """As by kill -9: it says nothing more, its peers notice, and the pool goes on without."""
        with self.lock:
            player = self.players[worker_id]
            group = self.groups.get(self.round_number)
            player.groups.kill()
            if group is not None and player in self.members:
                group[self.members.index(player)].kill()
            self._announce([p for p in self.members if p is not player])

    def pauses(self, *, save: bool = False) -> None:
        with self.lock:
            self._announce(self.members, paused=True, save=save)

    def saves_now(self) -> None:
        """As the coordinator does when a user requests a checkpoint."""
        with self.lock:
            self._announce(self.members, save=True)

    def holds(self, meanwhile: Callable[[], object] = lambda: None, *, save: bool = False) -> None:
        """Pause until all have taken that up, do something, and go on."""
        with self.lock:
            self.pauses(save=save)
            self.held = (self.round_number, meanwhile)

    def resumes(self) -> None:
        with self.lock:
            self._announce(self.members)

    def gives_new_memory(self) -> None:
        """As an agent does that takes over from another; what lay in the old slots is rubbish."""
        with self.lock:
            for player in self.members:
                player.slots = np.full_like(player.slots, np.nan)
            self._announce(self.members)

    def at(self, step: int, *acts: Callable[[], None]) -> "Stage":
        self.script.setdefault(step, []).extend(acts)
        return self

    # The play

    def plays(self, world_size: int) -> "Stage":
        """Begin with so many ranks, act out the script, and wait for the end."""
        with self.lock:
            self.members = [self._player(number, number) for number in range(world_size)]
            self.players = list(self.members)
            self._announce(self.members)
        for player in list(self.players):
            player.thread.start()
        for player in iter(self.players):
            player.thread.join(60)
            assert not player.thread.is_alive(), f"worker {player.worker_id} hangs"
        for drawer in self.drawers:
            drawer.close()
        for player in self.players:
            if isinstance(player.outcome, Exception) and not isinstance(
                player.outcome, WorkersDiverged
            ):
                raise player.outcome
        return self

    @property
    def finished(self) -> list[Player]:
        return [player for player in self.players if player.outcome is Outcome.DONE]

    @property
    def digest(self) -> str:
        (digest,) = {player.replica.digest() for player in self.finished}
        return digest

    # Seams of the trainers

    def create_group(self, player: Player, update: GroupUpdate) -> Group | None:
        group = update.group
        place = group_rank_of(player.rank, group)
        if place is None or group.members[place].worker_id != player.worker_id:
            return None
        with self.lock:
            if group.round < self.round_number or self.is_over:
                raise GroupChanged
            group = self.groups.setdefault(
                group.round, SimulatedBackend.create_group(len(group.members))
            )
        backend = group[place]
        backend.hosts = tuple(member.worker_id % self.hosts for member in update.group.members)
        compression = player.compression
        if compression is None:
            return Group(backend, self.reducer(backend, player.slots))
        if len({*backend.hosts}) == 1:
            reducer = self.reducer(backend, player.slots, compression.adder_of)
            return Group(backend, reducer)
        return Group(backend, HostReducer(backend, player.slots, compression))

    def _player(self, worker_id: int, rank: int) -> Player:
        drawer = self.drawer(open_source(self.data))
        self.drawers.append(drawer)
        schedule = Schedule(
            totals=drawer.totals,
            batch_size=self.batch_size,
            virtual_shards=self.virtual_shards,
            epochs=self.epochs,
            seed=3,
            checkpoint_every=self.checkpoint_every,
        )
        program = self.program()
        initial = program.initial(3)
        computer = BlockComputer(program, schedule, drawer, initial, BusyFlag())
        if self.compression is not None:
            computer.compression = compression_of(
                self.compression, self.virtual_shards, computer.compressed_elements
            )
        player = Player(worker_id, rank, ScriptedUpdates(), Replica(initial))
        player.compression = computer.compression
        player.slots = np.zeros((self.virtual_shards, computer.elements), np.float32)
        trainer = Trainer(
            computer=computer,
            replay=Replay(computer, self.replay_every),
            replica=player.replica,
            updates=player.groups,
            groups=_Groups(self, player),
            callbacks=_Callbacks(self, player, initial),
            arithmetic=fingerprint(),
        )
        player.thread = threading.Thread(
            target=self._run,
            args=(player, computer, trainer),
            name=f"worker-{worker_id}",
            daemon=True,
        )
        return player

    def _run(self, player: Player, computer: BlockComputer, trainer: Trainer) -> None:
        try:
            player.outcome = computer.run(trainer.train())
        except BaseException as error:  # noqa: BLE001  the test asks for it
            player.outcome = error
        if player.outcome is Outcome.DONE:
            with self.lock:
                self.is_over = True
                self._part()

    def _part(self) -> None:
        """As the coordinator would: a rank that is done is not in later groups."""
        self._end_groups()
        for player in self.players:
            player.groups.stop()

    def _end_groups(self) -> None:
        for group in self.groups.values():
            for backend in group:
                backend.kill()

    def _announce(
        self, members: Iterable[Player], *, paused: bool = False, save: bool = False
    ) -> None:
        former, self.members = self.members, sorted(members, key=lambda player: player.worker_id)
        has_begun = all(player.joined_round == self.round_number for player in former)
        self.round_number += 1
        members = tuple(
            GroupMember(worker_id=player.worker_id, rank=player.rank, host="", port=0)
            for player in self.members
        )
        group = WorkerGroup(
            round=self.round_number, token="", members=members, paused=paused, save=save
        )
        # Members that take a step finish it if others are only added.
        if not has_begun or any(player not in self.members for player in former):
            self._end_groups()
        for player in self.players:
            player.groups.put(group)
        if self.is_over:
            self._part()

    def note_joined(self, player: Player, group: WorkerGroup, step: int) -> None:
        with self.lock:
            player.joined_round = group.round
            self.taken.append((group.round, step))
            round_number, meanwhile = self.held
            if group.round != self.round_number or round_number != self.round_number:
                return
            if all(member.joined_round == round_number for member in self.members):
                meanwhile()
                self.resumes()

    def disputed(self, workers: tuple[int, ...]) -> None:
        """As the coordinator would: a rank that diverged leaves, once."""
        with self.lock:
            self.disputes.append(workers)
            if self.disputes.count(workers) == 1:
                self.when_disputed(workers)

    def reaches(self, step: int) -> None:
        """Act out the script up to `step`; each act once, in the thread of who came there first."""
        with self.lock:
            if step <= self.reached:
                return
            self.reached = step
            acts = self.script.pop(step, [])
        for act in acts:
            act()


@dataclass
class _Groups:
    stage: Stage
    player: Player
    port: int = 0

    def create(self, update: GroupUpdate) -> Group | None:
        return self.stage.create_group(self.player, update)


@dataclass
class _Callbacks:
    stage: Stage
    player: Player
    initial: dict[str, np.ndarray]

    def load_state(self, _group: WorkerGroup, replica: Replica) -> None:
        if self.stage.kept is None:
            replica.commit(
                {n: a.copy() for n, a in self.initial.items()}, Committed(position=Position())
            )
        else:
            state, committed = self.stage.kept
            replica.commit({name: array.copy() for name, array in state.items()}, committed)

    def on_group_joined(self, group: WorkerGroup, replica: Replica) -> None:
        self.stage.note_joined(self.player, group, replica.position.step)

    def on_peer_lost(self, group: WorkerGroup, error: CollectiveError) -> None:
        pass

    def on_state_mismatch(self, group: WorkerGroup, error: WorkersDiverged) -> None:
        self.stage.disputed(tuple(group.members[place].worker_id for place in error.members))

    def is_best(self, _replica: Replica) -> bool:
        return False

    def on_step(self, replica: Replica, _means: Means) -> None:
        self.stage.reaches(replica.position.step)

    def wait_between_steps(self, check: Callable[[], None]) -> None:
        check()

    def on_checkpoint_failed(self, replica: Replica, _error: CheckpointFailed) -> None:
        self.stage.unkept.append(replica.position.step)

    def wait_before_retry(self, check: Callable[[], None]) -> None:
        check()

    def flush(self) -> None:
        """Do nothing: `save_checkpoint` is durable."""

    def save_checkpoint(self, _group: WorkerGroup, replica: Replica) -> None:
        if replica.position.step in self.stage.full_at:
            self.stage.full_at.remove(replica.position.step)
            raise CheckpointFailed("no space is left")
        state = {name: array.copy() for name, array in replica.state.items()}
        self.stage.kept = (state, replica.committed)
        self.stage.saved.append(replica.position.step)
