"""Checks that the body of the loop is a function of the state and the batch, bit for bit.

Everything that is promised of a loop whose ranks may die rests on that. So a rank computes one of
its shards again now and then, when all of a step are done and before they are added up: out of
order, with its items drawn anew. And before it first adds anything, a process computes a shard of
one that trains already: only another process can tell what hooks have changed, or what is made once
before the loop. What differs then, and what does not, tells where to look.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128

from muster.collectives.backend import Backend
from muster.program import Contribution, InvalidProgram, ProgramRaised, State
from muster.torch.fingerprint import add_to_digest
from muster.training.blocks import Computer, LeafTask, Tasks
from muster.training.group import gather_values
from muster.training.schema import Leaf

USED: Final = "used"
"""The part of a contribution that counts, for each parameter, the shards that used it."""

DISTANCE: Final = 60
"""Steps between two checks, for each rank: a rank of many has few shards in a step."""

SETTLED: Final = "settled"
"""The kind of a difference after which nothing differs any more."""

NAMES_SHOWN: Final = 3

_RULE: Final = (
    "The body may depend on the batch, the model, registered objects and run.values alone"
)
_ADVICE: Final = (
    'see "The body is checked" in docs/pytorch.md; muster.torch.join(check=False) leaves it out'
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
        names = [name for name, it in self.parts.items() if it != other.parts.get(name)]
        return [name.partition(".")[2] for name in names if name != USED]

    def different_kind(self, other: "Seen") -> str:
        """Return the first that differs of what one depends on the other: a key of `_CAUSES`."""
        if self.batch != other.batch:
            return "batch"
        if self.loss != other.loss:
            return "loss"
        return "gradient" if self.parts[USED] == other.parts[USED] else USED


class BodyCheck:
    """Remembers a shard of a step, and compares it with the same shard computed again."""

    def __init__(
        self, computer: Computer, warn: Callable[[str], None], *, is_fatal: bool, is_gpu: bool
    ) -> None:
        """Unless `is_fatal`, a difference is only a warning, and processes are not compared."""
        self._computer: Final = computer
        self._warn: Final = warn
        self._is_fatal: Final = is_fatal
        self._is_gpu: Final = is_gpu
        self._world_size = 1
        self._batch: str | None = None
        """Digest of the present batch, if its shard is compared."""
        self._leaf: Leaf | None = None
        """The first shard that was computed in the present step, if that is checked."""
        self._first = self._last = Seen("", "", {})
        """What that shard came out as, and the shard that was compared last."""
        self._checked_step = -1
        self._has_warned = False
        self._is_proven = False
        """Whether this process was compared with another one."""
        self._is_proving = False
        """Whether there is a member that was not."""
        self._reference = 0
        """The member that all others are compared with."""

    def meet(self, backend: Backend) -> None:
        """See `Computer.meet`."""
        self._world_size = backend.world_size
        if self._is_fatal:
            proven = gather_values(backend, self._is_proven, bool)
            self._is_proving = not all(proven)
            # Where none is proven, the first one is right: it has restored or begun the state.
            self._reference = proven.index(True) if any(proven) else 0

    def _is_due(self, step: int) -> bool:
        # The last step, too: what begins after the first is seen in no other of a short job.
        is_last = step == self._computer.schedule.total_steps - 1
        return not self._has_warned and (is_last or step % (DISTANCE * self._world_size) == 0)

    def begin(self, task: LeafTask, batch: Any) -> None:  # noqa: ANN401  of the user
        """Note a batch, before the body can change it."""
        step = task.leaf.step
        is_first = self._leaf is None or self._leaf.step != step
        self._batch = None
        if task.is_again or (is_first and (self._is_proving or self._is_due(step))):
            digest = xxh3_128()
            with suppress(RuntimeError, TypeError):  # a tensor without bytes, such as a sparse one
                add_to_digest(digest, batch)
            self._batch = digest.hexdigest()

    def end(self, task: LeafTask) -> None:
        """Note what was computed."""
        found = task.contribution
        if self._batch is None or found is None:
            return
        self._last = _seen(self._batch, found, task.weight)
        self._batch = None
        if not task.is_again:
            self._leaf, self._first = task.leaf, self._last

    def check(
        self, backend: Backend, state: State, step: int, check: Callable[[], None]
    ) -> Tasks[None]:
        """See `Computer.check`. Raises `InvalidProgram` and `ProgramRaised`."""
        leaf = self._leaf
        if leaf is not None and leaf.step != step:
            leaf = None

        def compute(leaf: Leaf) -> Tasks[Seen]:
            check()
            yield from self._computer.compute_again(leaf, state)
            return self._last

        if leaf is not None and self._is_due(step) and step != self._checked_step:
            yield from self._check_self(leaf, compute)
            self._checked_step = step
        if self._is_proving:
            yield from self._prove(backend, step, leaf, compute)
            self._is_proven, self._is_proving = True, False

    def _prove(
        self,
        backend: Backend,
        step: int,
        own: Leaf | None,
        compute: Callable[[Leaf], Tasks[Seen]],
    ) -> Tasks[None]:
        """Compare the processes that have not been with one that trains."""
        given = []
        is_reference = backend.rank == self._reference
        if is_reference:
            leaf = own or Leaf(step, 0)
            given = [(leaf.shard, self._first if own else (yield from compute(leaf)))]
        answers = gather_values(backend, given, list[tuple[int, Seen]])
        if is_reference or self._is_proven:
            return
        ((shard, wanted),) = answers[self._reference]
        leaf = Leaf(step, shard)
        found = self._first if leaf == own else (yield from compute(leaf))
        if found != wanted:
            parts = _listed(wanted.different_parts(found))
            sentence = (
                f"{_CAUSES_OF_NEW[wanted.different_kind(found)]} ({_ADVICE}): this process "
                f"computed virtual shard {leaf.shard} of step {step}{parts} differently from the "
                "group it joins"
            )
            if self._is_gpu:
                self._warn(f"{sentence}. {_ON_GPU}. Training goes on")
                return
            raise ProgramRaised(step, sentence, "other bits in a new process")

    def _check_self(self, leaf: Leaf, compute: Callable[[Leaf], Tasks[Seen]]) -> Tasks[None]:
        again = yield from compute(leaf)
        if leaf.step == 0 and again == self._first:
            # At once: what changes to and fro may have come round by then. And after a shard of
            # another shape, for which `torch.compile` makes another graph.
            again = yield from compute(leaf)
            last = self._computer.schedule.steps_per_epoch - 1
            if again == self._first and last:
                yield from compute(Leaf(last, 0))
                again = yield from compute(leaf)
        if again == self._first:
            return
        third = yield from compute(leaf)
        fourth = yield from compute(leaf)
        where = f"virtual shard {leaf.shard} of step {leaf.step}"
        parts = self._first.different_parts(again)
        if third == fourth == self._first:
            self._warn(
                f"{where} came out differently one time of four: what was added up is right. If "
                "this comes again, suspect this host's memory or processor"
            )
            return
        kind = SETTLED if again == third == fourth else self._first.different_kind(again)
        where += f" came out differently when it was computed again{_listed(parts)}"
        self._refuse(f"{where}: {_CAUSES[kind]}", leaf.step)

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
        "own, something that is carried from one batch to the next (a hidden state, a variable, an "
        "attribute that forward changes) or a clock"
    ),
    USED: "other parameters are used, so look for what freezes some or chooses between branches",
    SETTLED: (
        "it was the same from then on, so something is made at the first call, or for each shape: "
        "if that is torch.compile, give it dynamic=False or dynamic=True, or leave the smaller "
        "last batch of an epoch out with drop_last"
    ),
    "gradient": (
        "only gradients or buffers differ, so look for a hook of a tensor that keeps something, a "
        "sum in no fixed order (of a set, of threads) or memory that is read before it is written"
    ),
}
"""What is different, and what that leaves as the cause."""


_CAUSES_OF_NEW: Final = {
    "batch": (
        "the data set or collate_fn gives a new process another batch, so look for what a hook "
        "changes there, or what is made without a seed"
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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f" ({', '.join(names[:NAMES_SHOWN])}{more})" if names else ""


def _seen(batch: str, found: Contribution, weight: float) -> Seen:
    return Seen(
        batch,
        f"{found.loss.hex()} {weight}",
        {name: xxh3_64_hexdigest(array.data) for name, array in found.gradients.items()},
    )
