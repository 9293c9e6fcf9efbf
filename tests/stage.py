"""A stage for synchronous training in one process: ranks are threads, a conductor makes layouts.

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
from muster.collectives.message_reducer import MessageReducer
from muster.collectives.simulated import SimulatedGroup
from muster.contracts.messages import Layout, Seat
from muster.contracts.position import Position
from muster.datasets.drawing import Drawer
from muster.datasets.listing import find_shards
from muster.program import Batch, Contribution, State
from muster.shapes import Means
from muster.synchronous.course import Course
from muster.synchronous.layouts import Gathering, Regroup, Stopped
from muster.synchronous.meeting import Group, place_of
from muster.synchronous.replay import Replay
from muster.synchronous.replica import Committed, Replica
from muster.synchronous.shares import Shares
from muster.synchronous.taking_up import Differs
from muster.synchronous.trainer import Outcome, Trainer
from muster.synchronous.work import Work

FEATURES = 5

NOBODY = -1
"""Who "dies" when a layout is over: whoever waits in its group looks up."""


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


class ScriptedLayouts:
    """A rank's ear: the conductor puts the newest layout here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: Gathering | None = None
        self._generation = -1
        self.killed = False
        self.stopped = False

    def put(self, layout: Layout) -> None:
        with self._changed:
            self._newest = Gathering(layout=layout)
            self._changed.notify_all()

    def kill(self) -> None:
        with self._changed:
            self.killed = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def attend(self) -> None:
        if self.killed:
            raise Killed
        if self.stopped:
            raise Stopped
        if self._newest is not None:
            raise Regroup

    def next(self) -> Gathering:
        with self._changed:
            while self._newest is None:
                if self.killed:
                    raise Killed
                if self.stopped:
                    raise Stopped
                self._changed.wait(10)
            newest, self._newest = self._newest, None
            return newest


@dataclass
class Player:
    """One worker: a thread, its ear, and what it said."""

    worker_id: int
    rank: int
    layouts: ScriptedLayouts
    replica: Replica
    thread: threading.Thread | None = None
    slots: np.ndarray | None = None
    outcome: Outcome | BaseException | None = None
    took_up: int = 0
    """The last generation that was in force for it; 0: none."""


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
    drawer: type[Drawer] = Drawer
    reducer: type[MessageReducer] = MessageReducer
    script: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.players: list[Player] = []
        self.members: list[Player] = []
        self.groups: dict[int, SimulatedGroup] = {}
        self.generation = 0
        self.kept: tuple[dict[str, np.ndarray], Committed] | None = None
        self.full_at: list[int] = []
        """The steps at which a checkpoint fails, each as often as it is listed."""
        self.unkept: list[int] = []
        self.taken: list[tuple[int, int]] = []
        self.disputes: list[tuple[int, ...]] = []
        self.reached = -1
        self.is_over = False
        self.drawers: list[Drawer] = []
        self.held: tuple[int, Callable[[], object]] = (NOBODY, lambda: None)
        """The generation of the layout that is to end when all have taken it up, and how."""
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
            if not self.players[worker_id].took_up:
                self.players[worker_id].layouts.stop()
            self._announce([p for p in self.members if p.worker_id != worker_id])

    def dies(self, worker_id: int) -> None:
        """As by kill -9: it says nothing more, its peers notice, and the pool goes on without."""
        with self.lock:
            player = self.players[worker_id]
            group = self.groups.get(self.generation)
            player.layouts.kill()
            if group is not None and player in self.members:
                group.kill(self.members.index(player))
            self._announce([p for p in self.members if p is not player])

    def pauses(self) -> None:
        with self.lock:
            self._announce(self.members, paused=True)

    def holds(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Pause until all have taken that up, do something, and go on."""
        with self.lock:
            self.pauses()
            self.held = (self.generation, meanwhile)

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
            if isinstance(player.outcome, Exception) and not isinstance(player.outcome, Differs):
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

    def enter(self, player: Player, gathering: Gathering) -> Group | None:
        layout = gathering.layout
        place = place_of(player.rank, layout)
        if place is None or layout.seats[place].worker_id != player.worker_id:
            return None
        with self.lock:
            if layout.generation < self.generation or self.is_over:
                raise Regroup
            group = self.groups.setdefault(layout.generation, SimulatedGroup(len(layout.seats)))
        backend = group.backends()[place]
        reducer = self.reducer(backend, player.slots)
        return Group(backend, reducer)

    def _player(self, worker_id: int, rank: int) -> Player:
        drawer = self.drawer(find_shards(self.data))
        self.drawers.append(drawer)
        course = Course(
            totals=drawer.totals,
            batch_size=self.batch_size,
            virtual_shards=self.virtual_shards,
            epochs=self.epochs,
            seed=3,
            checkpoint_every=self.checkpoint_every,
        )
        program = self.program()
        initial = program.initial(3)
        shares = Shares(program, course, drawer, initial, Work())
        player = Player(worker_id, rank, ScriptedLayouts(), Replica(initial))
        player.slots = np.zeros((self.virtual_shards, shares.elements), np.float32)
        trainer = Trainer(
            shares=shares,
            replay=Replay(shares, self.replay_every),
            replica=player.replica,
            layouts=player.layouts,
            meeting=_Meeting(self, player),
            witness=_Witness(self, player, initial),
        )
        player.thread = threading.Thread(
            target=self._run, args=(player, trainer), name=f"worker-{worker_id}", daemon=True
        )
        return player

    def _run(self, player: Player, trainer: Trainer) -> None:
        try:
            player.outcome = trainer.run()
        except BaseException as error:  # noqa: BLE001  the test asks for it
            player.outcome = error
        if player.outcome is Outcome.DONE:
            with self.lock:
                self.is_over = True
                self._part()

    def _part(self) -> None:
        """As the coordinator would: when one is done, nobody waits for it in a later layout."""
        for group in self.groups.values():
            group.kill(NOBODY)
        for player in self.players:
            player.layouts.stop()

    def _announce(self, members: Iterable[Player], *, paused: bool = False) -> None:
        self.members = sorted(members, key=lambda player: player.worker_id)
        self.generation += 1
        seats = tuple(
            Seat(worker_id=player.worker_id, rank=player.rank, host="", port=0)
            for player in self.members
        )
        layout = Layout(generation=self.generation, token="", seats=seats, paused=paused)
        for group in self.groups.values():
            group.kill(NOBODY)
        for player in self.players:
            player.layouts.put(layout)
        if self.is_over:
            self._part()

    def took_up(self, player: Player, layout: Layout, step: int) -> None:
        with self.lock:
            player.took_up = layout.generation
            self.taken.append((layout.generation, step))
            generation, meanwhile = self.held
            if layout.generation != self.generation or generation != self.generation:
                return
            if all(member.took_up == generation for member in self.members):
                meanwhile()
                self.resumes()

    def disputed(self, workers: tuple[int, ...]) -> None:
        """As the coordinator would: who is disputed goes, once."""
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
class _Meeting:
    stage: Stage
    player: Player
    port: int = 0

    def enter(self, gathering: Gathering) -> Group | None:
        return self.stage.enter(self.player, gathering)


@dataclass
class _Witness:
    stage: Stage
    player: Player
    initial: dict[str, np.ndarray]

    def begin(self, _layout: Layout, replica: Replica) -> None:
        if self.stage.kept is None:
            replica.flip(
                {n: a.copy() for n, a in self.initial.items()}, Committed(position=Position())
            )
        else:
            state, committed = self.stage.kept
            replica.flip({name: array.copy() for name, array in state.items()}, committed)

    def took_up(self, layout: Layout, replica: Replica) -> None:
        self.stage.took_up(self.player, layout, replica.position.step)

    def stranded(self, layout: Layout, error: CollectiveError) -> None:
        pass

    def disputed(self, layout: Layout, differs: Differs) -> None:
        self.stage.disputed(tuple(layout.seats[place].worker_id for place in differs.places))

    def stepped(self, replica: Replica, _means: Means) -> None:
        self.stage.reaches(replica.position.step)

    def rest(self, attend: Callable[[], None]) -> None:
        attend()

    def unkept(self, replica: Replica, _error: CheckpointFailed) -> None:
        self.stage.unkept.append(replica.position.step)

    def pause(self, attend: Callable[[], None]) -> None:
        attend()

    def keep(self, _layout: Layout, replica: Replica) -> None:
        if replica.position.step in self.stage.full_at:
            self.stage.full_at.remove(replica.position.step)
            raise CheckpointFailed("no space is left")
        state = {name: array.copy() for name, array in replica.state.items()}
        self.stage.kept = (state, replica.committed)
