"""Checks that the body of the loop is a function of the state and the batch, bit for bit.

Everything that is promised of a loop whose ranks may die rests on that. So a rank computes one of
its shards again, when all of the first step are done and before they are added up: out of order,
with its items drawn anew. Now and then it computes a shard of another rank, and a process does so
before it first adds anything: only another process can tell what hooks have changed, what is made
once before the loop, or what is kept of earlier batches. A shard of the beginning is computed again
much later, from the state of then: what one process and all its peers have changed meanwhile shows
there. What differs then, and what does not, tells where to look.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128

from muster.collectives.backend import Backend
from muster.program import Contribution, InvalidProgram, ProgramRaised, State
from muster.torch.fingerprint import add_to_digest
from muster.training.blocks import Checks, Computer, LeafTask, Tasks
from muster.training.checkpointer import Witness
from muster.training.groups.group import gather_values
from muster.training.groups.state_sync import Replica
from muster.training.reporter import Reporter
from muster.training.schema import Leaf

USED: Final = "used"
"""The part of a contribution that counts, for each parameter, the shards that used it."""

DISTANCE: Final = 60
"""Steps between two checks, for each rank: a rank of many has few shards in a step."""

SETTLED: Final = "settled"
"""The kind of a difference after which nothing differs any more."""

NAMES_SHOWN: Final = 3

_FIRST: Final = Leaf(step=0, shard=0)

_RULE: Final = (
    "The body may depend on the batch, the model, registered objects and run.values alone"
)
_ADVICE: Final = (
    'see "The body is checked" in docs/pytorch.md; muster.torch.join(check=False) leaves it out'
)
_ONCE: Final = (
    "came out differently once, and then the same again: what was added up is right. If this "
    "comes again, suspect this host's memory or processor"
)
_ON_GPU: Final = "On a GPU, kernels that add in no fixed order differ as well"


class Seen(msgspec.Struct, frozen=True):
    """Digests of what the body was given for a shard, and of what it gave."""

    batch: str
    loss: str
    parts: dict[str, str]
    """Of the gradients, the changes of buffers, and `USED`."""

    def different_parts(self, other: "Seen") -> list[str]:
        """Return the names of gradients and buffers that differ."""
        names = [name for name, digest in self.parts.items() if digest != other.parts.get(name)]
        return [name.partition(".")[2] for name in names if name != USED]

    def different_kind(self, other: "Seen") -> str:
        """Return what differs first, the batch, the loss or a later result: a key of `_CAUSES`."""
        if self.batch != other.batch:
            return "batch"
        if self.loss != other.loss:
            return "loss"
        return "gradient" if self.parts[USED] == other.parts[USED] else USED


class BodyCheck(Checks):
    """Remembers a shard of a step, and compares it with the same shard computed again."""

    def __init__(
        self,
        computer: Computer,
        reporter: Reporter,
        digests: Callable[[], dict[str, str]],
        beginning: Callable[[], AbstractContextManager[None]],
        *,
        is_fatal: bool,
        is_gpu: bool,
    ) -> None:
        """`digests` are of what the body must not change; `beginning` goes back to the first state.

        Unless `is_fatal`, a difference is only a warning, and processes are not compared.
        """
        self._computer: Final = computer
        self._digests: Final = digests
        self._beginning: Final = beginning
        self._warn: Final = reporter.supervision.warn
        self._checkpointer: Final = reporter.checkpointer
        self._is_fatal: Final = is_fatal
        self._is_gpu: Final = is_gpu
        self._world_size = 1
        self._batch: str | None = None
        """Digest of the present batch, if its shard is compared."""
        self._kept: dict[str, str] = {}
        """The digests from before the body."""
        self._state = ""
        """The digest of these for the first shard of the present turn."""
        self._place = (-1, 0)
        """A step, and the turn of it, in which shards were noted."""
        self._seen: dict[Leaf, Seen] = {}
        """What they came out as: all that this rank has computed in step 0, else the first."""
        self._last = Seen("", "", {})
        """What the shard came out as that was compared last."""
        self._checked = (-1, 0)
        """The step and turn of the last check."""
        self._begun: Seen | None = None
        """What `_FIRST` came out as, from the state that training begins with."""
        self._has_warned = False
        self._is_proven = False
        """Whether this process was compared with another one."""
        self._is_proving = False
        """Whether there is a member that was not."""
        self._reference = 0
        """The member that all others are compared with."""
        self._witness: Witness | None = None
        """What that member is compared with, if no process trains already."""

    def meet(self, backend: Backend, replica: Replica, check: Callable[[], None]) -> Tasks[None]:
        self._world_size = backend.world_size
        if self._is_fatal:
            is_over = self._computer.schedule.is_over(replica.committed)
            if self._begun is None and not is_over:  # before the first body of this process
                check()
                with self._beginning():
                    self._begun = yield from self._compute(_FIRST, replica.state)
            proven = gather_values(backend, self._is_proven, bool)
            self._is_proving = not all(proven)
            # Where none is proven, the first one is right: it has restored or begun the state.
            self._reference = proven.index(True) if any(proven) else 0
            is_resumed = not (is_over or any(proven)) and replica.position.step > 0
            is_first = is_resumed and backend.rank == 0
            self._witness = self._checkpointer.witness(replica) if is_first else None

    def take_over(self) -> None:
        self._place = (-1, 0)  # what was noted there was computed from another state

    def _is_due(self, step: int) -> bool:
        # The last step, too: what begins after the first is seen in no other of a short job.
        return self._is_last(step) or step % (DISTANCE * self._world_size) == 0

    def _is_last(self, step: int) -> bool:
        return step == self._computer.schedule.total_steps - 1

    def _is_late(self, step: int) -> bool:
        """Return whether a step is the last, or the 1st, 2nd, 3rd, 5th, 9th … that is checked."""
        number = step // (DISTANCE * self._world_size)
        is_far = number.bit_count() < 2  # noqa: PLR2004  0, 1, 2, 4, 8 …
        return self._is_last(step) or (self._is_due(step) and is_far)

    def begin(self, task: LeafTask, batch: Any) -> None:  # noqa: ANN401  of the user
        step = task.leaf.step
        is_first = self._place != (step, self._computer.turn)
        self._batch = None
        # In step 0 all: what compares a loss with others may have no effect on one.
        is_checked = self._is_due(step) and (is_first or step == 0) and not self._has_warned
        is_wanted = self._is_proving or self.is_kept(step)
        if task.is_again or is_checked or (is_first and is_wanted):
            digest = xxh3_128()
            add_to_digest(digest, batch)
            self._batch, self._kept = digest.hexdigest(), self._digests()

    def end(self, task: LeafTask) -> None:
        found = task.contribution
        if self._batch is None or found is None:
            return
        self._last = _seen(self._batch, found, task.weight)
        self._batch, now = None, self._digests()
        if changed := [name for name, digest in now.items() if digest != self._kept.get(name)]:
            self._refuse(
                f"The body changes what it may only read{_listed(changed)}, once for each virtual "
                "shard: do it in a function given to run.after_step",
                task.leaf.step,
            )
        if self.is_kept(task.leaf.step):
            self._checkpointer.put_witness(task.leaf.shard, self._last)
        if task.is_again:
            return
        place = task.leaf.step, self._computer.turn
        if place != self._place:
            self._place, self._seen = place, {}
            self._state = _digest_of(self._kept)
        self._seen.setdefault(task.leaf, self._last)

    def is_kept(self, step: int) -> bool:
        is_compared = self._is_fatal and self._is_proven and self._computer.turn == 0
        return is_compared and self._checkpointer.is_witness_expected(step)

    def check(
        self, backend: Backend, state: State, step: int, check: Callable[[], None]
    ) -> Tasks[None]:
        """See `Checks.check`. Raises `InvalidProgram` and `ProgramRaised`."""
        place = step, self._computer.turn
        seen = self._seen if self._place == place else {}

        def compute(leaf: Leaf) -> Tasks[Seen]:
            check()
            return (yield from self._compute(leaf, state))

        if self._is_due(step) and step and self._is_fatal and self._world_size > 1:
            yield from self._check_other(backend, seen, compute)
        elif self._is_due(step) and place != self._checked:
            for leaf, first in seen.items():
                if not self._has_warned:
                    yield from self._check_self(leaf, first, compute)
            self._checked = place
        if self._is_proving:
            yield from self._prove(backend, step, seen, compute)
        if self._begun is not None and self._is_late(step) and place[1] == 0:
            yield from self._check_beginning(step, self._begun, compute)

    def _compute(self, leaf: Leaf, state: State) -> Tasks[Seen]:
        yield from self._computer.compute_again(leaf, state)
        return self._last

    def end_step(self) -> None:
        self._is_proven, self._is_proving = True, False

    def _prove(
        self,
        backend: Backend,
        step: int,
        seen: Mapping[Leaf, Seen],
        compute: Callable[[Leaf], Tasks[Seen]],
    ) -> Tasks[None]:
        """Compare the processes that have not been with one that trains, or has saved the state."""
        given, saved = [], self._witness
        self._witness = None  # it is of the first turn
        is_reference = backend.rank == self._reference
        if is_reference:
            leaf = Leaf(step, saved.shard) if saved else next(iter(seen), Leaf(step, 0))
            found = seen.get(leaf) or (yield from compute(leaf))
            if saved is not None:
                wanted = msgspec.convert(saved.seen, Seen)
                self._compare(leaf, found, wanted, "process that saved the state")
            given = [(leaf.shard, found)]
        answers = gather_values(backend, given, list[tuple[int, Seen]])
        if is_reference or self._is_proven:
            return
        ((shard, wanted),) = answers[self._reference]
        leaf = Leaf(step, shard)
        found = seen.get(leaf) or (yield from compute(leaf))
        self._compare(leaf, found, wanted, "group it joins")

    def _check_other(
        self, backend: Backend, seen: Mapping[Leaf, Seen], compute: Callable[[Leaf], Tasks[Seen]]
    ) -> Tasks[None]:
        """Compute the shard that the next rank with one has noted; all ranks call this."""
        given = [(leaf, found, self._state) for leaf, found in seen.items()][:1]
        answers = gather_values(backend, given, list[tuple[Leaf, Seen, str]])
        after, before = answers[backend.rank + 1 :], answers[: backend.rank]
        noted = next(chain.from_iterable((*after, *before)), None)
        if noted is None or self._has_warned:
            return
        leaf, wanted, state = noted
        found = yield from compute(leaf)
        # Different states are found at the end of the epoch, which tells whose is wrong.
        if found == wanted or state != _digest_of(self._kept):
            return
        for own, first in seen.items():  # a body that differs from itself: its cause is plainer
            yield from self._check_self(own, first, compute)
        again = yield from compute(leaf)
        if again == wanted:
            self._warn(f"{_where(leaf)} {_ONCE}")
        self._compare(leaf, again, wanted, "rank that added it up")

    def _compare(self, leaf: Leaf, found: Seen, wanted: Seen, other: str) -> None:
        if found == wanted:
            return
        parts = _listed(wanted.different_parts(found))
        sentence = (
            f"this process computed {_where(leaf)}{parts} differently from the {other}: "
            f"{_CAUSES_OF_NEW[wanted.different_kind(found)]} ({_ADVICE})"
        )
        if not self._is_gpu:
            raise ProgramRaised(leaf.step, sentence, "other bits in a new process")
        self._warn(f"{sentence}. {_ON_GPU}. Training goes on")
        self._has_warned = True

    def _check_self(
        self, leaf: Leaf, first: Seen, compute: Callable[[Leaf], Tasks[Seen]]
    ) -> Tasks[None]:
        again = yield from compute(leaf)
        if leaf.step == 0 and again == first and leaf == next(iter(self._seen)):
            # At once: what changes to and fro may have come round by then. And after a shard of
            # another shape, for which `torch.compile` makes another graph.
            again = yield from compute(leaf)
            last = self._computer.schedule.steps_per_epoch - 1
            if again == first and last:
                yield from compute(Leaf(last, 0))
                again = yield from compute(leaf)
        if again == first:
            return
        third = yield from compute(leaf)
        fourth = yield from compute(leaf)
        where = _where(leaf)
        parts = first.different_parts(again)
        if third == fourth == first:
            self._warn(f"{where} {_ONCE}")
            return
        kind = SETTLED if again == third == fourth else first.different_kind(again)
        where += f" came out differently when it was computed again{_listed(parts)}"
        self._refuse(f"{where}: {_CAUSES[kind]}", leaf.step)

    def _check_beginning(
        self, step: int, begun: Seen, compute: Callable[[Leaf], Tasks[Seen]]
    ) -> Tasks[None]:
        """Compare the first shard with what came out before the first step of this process.

        Other ranks may have changed in the same way as this one, so that nothing else differs.
        """
        with self._beginning():
            found = yield from compute(_FIRST)
            again = found if found == begun else (yield from compute(_FIRST))
        if found == begun or self._has_warned:
            return
        if again == begun:
            self._warn(f"{_where(_FIRST)} {_ONCE}")
            return
        parts, kind = _listed(begun.different_parts(found)), begun.different_kind(found)
        self._refuse(
            f"{_where(_FIRST)}, from the state that training began with, comes out differently in "
            f"step {step}{parts}: {_CAUSES_OF_LATE[kind] if step else _CAUSES[SETTLED]}",
            step,
        )

    def _refuse(self, sentence: str, step: int) -> None:
        if self._is_gpu:
            sentence += f". {_ON_GPU}"
        if not self._is_fatal or (self._is_gpu and step):
            self._warn(f"{sentence}. Training goes on, unchecked")
            self._has_warned = True  # it would come again
            return
        raise InvalidProgram(f"{sentence}. {_RULE}: {_ADVICE}")


_CAUSES: Final = {
    "batch": (
        "its batch differs, so look at the data set and collate_fn: items that change when they "
        "are read or whose memory the body changes, or a random generator of their own"
    ),
    "loss": (
        "its batch is the same and its loss is not, so look for a random generator of the body's "
        "own, something that is carried from one batch to the next (a hidden state, a count of "
        "batches, an attribute that forward changes) or a clock"
    ),
    USED: "other parameters are used, so look for what freezes some or chooses between branches",
    SETTLED: (
        "it was the same from then on, so something is made at the first call, kept from earlier "
        "ones (a maximum, a count of batches) or made for each shape: if that is torch.compile, "
        "give it dynamic=False or dynamic=True, or leave the smaller last batch of an epoch out "
        "with drop_last"
    ),
    "gradient": (
        "only gradients or buffers differ, so look for a hook of a tensor that keeps something, a "
        "sum in no fixed order (of a set, of threads) or memory that is read before it is written"
    ),
}
"""What is different, and what that leaves as the cause."""


_CAUSES_OF_NEW: Final = {
    "batch": (
        "the data set or collate_fn gives another process another batch, so look for what a hook "
        "changes there, what is kept of earlier epochs (a cache of items with random changes), or "
        "what is made without a seed"
    ),
    "loss": (
        "the loss depends on what a new process does not have, so look for a variable or an object "
        "that a hook changes and that is neither in run.values nor registered, for what is made "
        "before the loop without a seed, and for run.rank or run.is_main"
    ),
    USED: (
        "other parameters are used in a new process, so look for what a hook freezes or chooses"
    ),
    "gradient": (
        "gradients or buffers, but not the loss, depend on what a new process does not have, so "
        "look for a hook of a tensor, or a sum in the order of a set"
    ),
}
"""The same of a process that differs from another one."""


_CAUSES_OF_LATE: Final = {
    "batch": (
        "its batch differs, so look for what changes in the data set or collate_fn as training "
        "goes on, and is neither in run.values nor registered"
    ),
    **dict.fromkeys(
        ("loss", USED, "gradient"),
        "something has changed since that is neither in run.values nor registered, so look for "
        "what the body keeps of earlier batches (a flag, a list of losses, a count) or a hook sets",
    ),
}
"""The same of a process that differs from itself after many steps."""


def _digest_of(digests: Mapping[str, str]) -> str:
    return xxh3_64_hexdigest(msgspec.json.encode(digests, order="sorted"))


def _where(leaf: Leaf) -> str:
    return f"virtual shard {leaf.shard} of step {leaf.step}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f" ({', '.join(names[:NAMES_SHOWN])}{more})" if names else ""


def _seen(batch: str, found: Contribution, weight: float) -> Seen:
    return Seen(
        batch,
        f"{found.loss.hex()} {weight}",
        {name: xxh3_64_hexdigest(array.data) for name, array in found.gradients.items()},
    )
