"""Elections without one of the rules."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import msgspec

from muster.mesh.election import (
    NO_ROWS,
    SILENCE_SECONDS,
    Ask,
    Candidate,
    Due,
    Election,
    ElectionMessage,
    Head,
    Mastership,
    Report,
    State,
    Stored,
)
from tests.support.elections import YEAR_SECONDS, Node, World, changes, faults


class WithoutSteppingDown(Election):
    """A master stays although there is a better one."""

    def _is_preferred(self, said: Mastership) -> bool:
        return self.state is not State.MASTER and super()._is_preferred(said)


class WithoutVouching(Election):
    """Only the master itself says that it lives."""

    def _report(self, nodes: Iterable[str], now: float, nonce: int = 0) -> None:
        before = len(self._messages)
        super()._report(nodes, now, nonce)
        if self.state is State.FOLLOWER:
            said = self._messages[before:]
            mute = [(to, msgspec.structs.replace(report, mastership=None)) for to, report in said]
            self._messages[before:] = mute


class WithoutRisingBeats(Election):
    """All news of the master counts as a sign of life."""

    def _weigh(self, node: str, report: Report, now: float) -> None:
        super()._weigh(node, report, now)
        if (said := report.mastership) and said.is_of(self.accepted):
            self._heard_at = now
            self._plan(now + SILENCE_SECONDS, self._time_out)


class WithoutEpochs(Election):
    """A node follows a master whose epoch is lower than one that it has accepted."""

    def _follow(self, said: Mastership, lived_at: float, now: float) -> None:
        self.epoch = min(self.epoch, said.epoch)
        super()._follow(said, lived_at, now)


class WithoutRaising(Election):
    """A master keeps its epoch although there are higher ones."""

    def _raise(self, said: Mastership | None, now: float) -> None:
        pass


class WithoutDurability(Election):
    """The epoch is not stored."""

    def take(self) -> Due:
        due = super().take()
        stored = due.stored and Stored(session=due.stored.session)
        return Due(stored, due.messages, due.events)


class WithoutProof(Election):
    """News of a better master counts without a question."""

    def _weigh(self, node: str, report: Report, now: float) -> None:
        self._questions[0] = now + report.age_seconds
        super()._weigh(node, report, now)


class WithoutExpiry(Election):
    """A master that was silent needs no other proof."""

    proven: Mastership | None = None

    def _weigh(self, node: str, report: Report, now: float) -> None:
        said = report.mastership
        if said and said.is_of(self.proven) and self._is_preferred(said):
            self._follow(said, now, now)
        super()._weigh(node, report, now)
        self.proven = self.accepted or self.proven


class WithoutTimeOfQuestion(Election):
    """An answer proves that a master lives when it comes."""

    def _weigh(self, node: str, report: Report, now: float) -> None:
        if report.nonce in self._questions:
            self._questions[report.nonce] = now
        super()._weigh(node, report, now)


class WithoutOwnCall(Election):
    """A candidate waits for those that have answered an earlier call."""

    def _call(self, now: float) -> None:
        candidates = self._candidates
        super()._call(now)
        self._candidates = candidates


class WithoutShortWindow(Election):
    """Answers to a call are collected for 3 s."""

    def _call(self, now: float) -> None:
        super()._call(now)
        self._plan(now + SILENCE_SECONDS, self._decide)


class WithoutQuestions(Election):
    """A node that waits for a master asks for it only in its call."""

    def _question_at(self) -> float:
        return super()._question_at() if self.state is State.FOLLOWER else float("inf")


class WithoutDoubt(Election):
    """A follower waits for beats."""

    def _question_at(self) -> float:
        return float("inf") if self.state is State.FOLLOWER else super()._question_at()


class WithoutCallingAgain(Election):
    """A better candidate does not call when a worse one does."""

    def _is_needed(self, caller: tuple[float, int, str]) -> bool:  # noqa: ARG002
        return False


class WithoutNews(Election):
    """A node does not say that it follows another master."""

    def _follow(self, said: Mastership, lived_at: float, now: float) -> None:
        before = len(self._messages)
        super()._follow(said, lived_at, now)
        del self._messages[before:]


class WithoutContradiction(Election):
    """A node does not say that it knows a better master, or a higher epoch."""

    def _contradict(self, node: str, said: Mastership, now: float) -> None:
        pass


class WithoutAnotherCampaign(Election):
    """A campaign without result is the last."""

    def _decide(self, now: float) -> None:
        super()._decide(now)
        if self.state is State.CAMPAIGNING:
            self._plan(float("inf"), self._campaign)


class WithoutSessions(Election):
    """Messages of an earlier session count."""

    def _note(self, node: str, message: ElectionMessage, now: float) -> bool:
        self._sessions.clear()
        is_valid = super()._note(node, message, now)
        self._sessions = defaultdict(int)
        return is_valid


class WithoutIncumbency(Election):
    """A better candidate unseats a master."""

    def _answer(self, node: str, ask: Ask, now: float) -> None:
        own = self._candidate().rank(self._own)
        if self.state is State.MASTER and ask.candidate and ask.candidate.rank(node) > own:
            self._rest(now)
        super()._answer(node, ask, now)


class WithoutCorrection(Election):
    """A node keeps its own clock."""

    def _note(self, node: str, message: ElectionMessage, now: float) -> bool:
        self._is_new = False
        return super()._note(node, message, now)


class WithoutLateness(Election):
    """A master that was stopped leads on."""

    def _expire(self, now: float) -> None:
        if self.state is not State.MASTER:
            super()._expire(now)


class WithoutRestraint(Election):
    """A worse master raises its epoch against a better one."""

    def _raise(self, said: Mastership | None, now: float) -> None:  # noqa: ARG002
        super()._raise(None, now)


# Histories that show a rule which random ones do not


class Listener:
    """One node, `b`, whose peers are played."""

    def __init__(self, make: type[Election]) -> None:
        chance = random.Random(1)  # noqa: S311  repeatable, not secret
        self.election = make("b", Stored(), wall=1000.0, now=0.0, chance=chance)
        self.election.meet("a", 0.0)

    def asked(self) -> dict[str, int]:
        """Return the nonces of the questions since the last call, by whom they are for."""
        messages = self.election.take().messages
        return {to: message.nonce for to, message in messages if isinstance(message, Ask)}

    def run(self, until: float) -> None:
        while self.election.wake_at() <= until:
            self.election.check(self.election.wake_at())

    def await_better(self) -> None:
        """Call, and wait for a better candidate, from 3.8 s to 6.2 s."""
        self.run(3.2)
        nonce = self.asked()["a"]
        better = Candidate(start=900.0, copy=NO_ROWS)
        head = Head(session=1, clock=0, time=1003.2, is_new=False)
        self.election.receive("a", Report(head=head, nonce=nonce, candidate=better), 3.3)
        self.run(3.9)
        self.election.take()

    def hear(self, now: float, said: Mastership, nonce: int = 0) -> None:
        """Have a master say that it leads."""
        head = Head(session=said.session, clock=said.epoch, time=1000.0 + now, is_new=False)
        self.election.receive(said.node, Report(head=head, nonce=nonce, mastership=said), now)
        self.election.check(now)

    def follow(self, now: float, said: Mastership) -> None:
        """Have a master say that it leads, and answer the question."""
        self.hear(now, said)
        self.hear(now, said, self.asked()[said.node])


def mastership(
    node: str = "a", *, epoch: int = 1, start: float = 900.0, beat: int = 1, session: int = 1
) -> Mastership:
    return Mastership(node=node, session=session, epoch=epoch, start=start, beat=beat)


def late_beat(make: type[Election]) -> list[str]:
    """A beat of a better master comes after its death, while another one answers."""
    listener = Listener(make)
    listener.follow(0.1, mastership())
    listener.hear(1.0, mastership("d", epoch=9, start=800.0))
    listener.hear(1.1, mastership(beat=2))
    return ["a dead master leads"] * (listener.election.master != "a")


def late_beats(make: type[Election]) -> list[str]:
    """Two beats of the master come after its death and 3 s of silence; they rise."""
    listener = Listener(make)
    listener.follow(0.1, mastership())
    for beat in 2, 3:
        listener.hear(3.2 + beat / 100, mastership(beat=beat))
    return ["a dead master leads"] * (listener.election.master is not None)


def late_answer(make: type[Election]) -> list[str]:
    """An answer comes 2.9 s after the question; its master has died since."""
    listener = Listener(make)
    nonce = listener.asked()["a"]
    listener.hear(2.9, mastership(), nonce)
    listener.election.check(3.1)
    return ["a master that was silent for 3.1 s leads"] * (listener.election.master is not None)


def senior_call(make: type[Election]) -> list[str]:
    """A better candidate calls, as it does not hear the master."""
    listener = Listener(make)
    while listener.election.state is not State.MASTER:
        listener.election.check(listener.election.wake_at())
    head = Head(session=1, clock=1, time=1004.0, is_new=False)
    ask = Ask(head=head, nonce=7, candidate=Candidate(start=900.0, copy=NO_ROWS))
    listener.election.receive("a", ask, 4.0)
    return ["a candidate unseats a master"] * (listener.election.master != "b")


def waiting(make: type[Election]) -> list[str]:
    """A candidate waits for a better one."""
    listener = Listener(make)
    listener.await_better()
    listener.run(5.0)
    return ["it asks no more"] * (not listener.asked())


def waiting_in_vain(make: type[Election]) -> list[str]:
    """A candidate has waited for a better one, which is gone."""
    listener = Listener(make)
    listener.await_better()
    listener.run(10.0)
    return ["it does not lead"] * (listener.election.state is not State.MASTER)


def junior_call(make: type[Election]) -> list[str]:
    """A worse candidate calls while this one waits for a better one."""
    listener = Listener(make)
    listener.await_better()
    head = Head(session=1, clock=0, time=1004.0, is_new=False)
    ask = Ask(head=head, nonce=7, candidate=Candidate(start=1100.0, copy=NO_ROWS))
    listener.election.receive("c", ask, 4.0)
    return ["it does not call"] * (not listener.asked())


def change(make: type[Election]) -> list[str]:
    """A node hears of a master, and its peer `c` does not."""
    listener = Listener(make)
    listener.election.meet("c", 0.0)
    listener.follow(0.1, mastership())
    told = [to for to, message in listener.election.take().messages if isinstance(message, Report)]
    return ["it passes nothing on"] * ("c" not in told)


def worse_master(make: type[Election]) -> list[str]:
    """A worse master beats, as it has not met the better one."""
    listener = Listener(make)
    listener.follow(0.1, mastership())
    listener.election.take()
    listener.hear(0.2, mastership("d", start=950.0))
    told = [to for to, message in listener.election.take().messages if isinstance(message, Report)]
    return ["it does not contradict"] * (told != ["d"])


def cluster(make: type[Election], wall_offsets: Sequence[float]) -> World:
    """Return nodes that start one after the other, without any fault."""
    world = World(random.Random(1), make)  # noqa: S311  repeatable, not secret
    for number, offset in enumerate(wall_offsets):
        world.nodes[f"n{number}"] = Node(1.7e9 + offset)
        world.at(number, world.start, f"n{number}")
    return world


def slow_clock(make: type[Election]) -> list[str]:
    """A node whose clock is a year behind leads alone for 200 s, and then meets a cluster."""
    world = cluster(make, [0.0, 0.0, -YEAR_SECONDS])
    world.blocked = {(a, b) for a in world.nodes for b in world.nodes if a != b and "n2" in (a, b)}
    world.run(200.0)
    world.cut(set())
    world.run(210.0)
    return [f"{name} leads" for name in world.masters() - {"n0"}]


def short_stop(make: type[Election]) -> list[str]:
    """A master is stopped for 10 s: the one elected since stays."""
    world = cluster(make, [0.0, 0.0, 0.0])
    world.run(10.0)
    world.freeze("n0")
    world.run(20.0)
    world.thaw("n0")
    world.run(30.0)
    return [f"{name} leads" for name in world.masters() - {"n1"}]


def restarts(make: type[Election], offset: float = -YEAR_SECONDS, number: int = 100) -> list[str]:
    """A node restarts every 5 s, as often as said."""
    world = cluster(make, [0.0, 0.0, 0.0, offset])
    world.run(10.0)
    before = changes(world)
    for _ in range(number):
        world.kill("n3")
        world.run(world.now + 0.2)
        world.start("n3")
        world.run(world.now + 4.8)
    more = changes(world) - before - number  # it hears itself who leads
    return [f"{more} changes of master"] * (more > 0)


History: TypeAlias = Callable[[type[Election]], list[str]]

WITHOUT: Final[Mapping[type[Election], History]] = {
    WithoutSteppingDown: partial(faults, seed=0),
    WithoutVouching: partial(faults, seed=13),
    WithoutRisingBeats: partial(faults, seed=1),
    WithoutEpochs: partial(faults, seed=12),
    WithoutRaising: partial(faults, seed=12),
    WithoutRestraint: partial(faults, seed=12),
    WithoutDurability: partial(faults, seed=55),
    WithoutProof: late_beat,
    WithoutExpiry: late_beats,
    WithoutTimeOfQuestion: late_answer,
    WithoutOwnCall: partial(faults, seed=1),
    WithoutShortWindow: partial(faults, seed=4),
    WithoutQuestions: waiting,
    WithoutDoubt: partial(faults, seed=13),
    WithoutCallingAgain: junior_call,
    WithoutNews: change,
    WithoutContradiction: worse_master,
    WithoutAnotherCampaign: waiting_in_vain,
    WithoutSessions: partial(faults, seed=14),
    WithoutIncumbency: senior_call,
    WithoutCorrection: slow_clock,
    WithoutLateness: short_stop,
}
"""Each without a rule that is needed, and a history of it; `stress.election` finds others."""
