"""The root of the error tree.

MusterError
├── IllegalMove            a state machine was asked for a move its table does not have
├── InvalidSpec            a job was described in a way that cannot be run: the person's to mend
├── InvalidEnvironment     an environment variable says something that cannot be meant
├── BegunOtherwise         what is to go on under an id is not what has begun under it
├── WireError              the other end of a connection broke the protocol
├── SecretUnavailable      muster/contracts/secrets.py
├── InvalidSecret          muster/safe.py
├── PoolError …            muster/contracts/pool.py
├── CollectiveError …      muster/collectives/errors.py
├── TooFewDescriptors      muster/descriptors.py
├── CheckpointError …      muster/checkpoints/errors.py
├── DatasetError …         muster/datasets/errors.py
├── NotHere                muster/ports.py
├── NotToBeHad             muster/ports.py
├── InvalidProgram         muster/program.py
├── ProgramRaised          muster/program.py
├── Differs                muster/synchronous/taking_up.py
├── ClientError …          muster/client/errors.py
├── StoreError …           store/errors.py
├── Problem …              api/problems.py: what a client is answered
├── Exposed                api/exposure.py
├── LockedOut              api/exposure.py
├── InvalidCertificate     api/tls_files.py
├── PortTaken              api/__main__.py and cli/household.py, each in its own words
├── AlreadyUp              cli/office.py
├── NotUp                  cli/detached.py
├── NotOurs                cli/down.py
├── UnknownHolder          cli/down.py
├── DemoFailed             cli/demo.py
├── Misuse …               cli/misuse.py
├── Untimely               cli/untimely.py
├── Thwarted               cli/plain_errors.py
├── FaultRefused           cli/chaos.py
├── NotBack                cli/aftermath.py
└── InvalidJobFile         cli/job_file.py

Every message is a sentence that says what happened, where, and what to do next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One field that is wrong, and the sentence that says why."""

    field: str
    message: str


class MusterError(Exception):
    """Whatever goes wrong in Muster and is not a bug in it."""


class IllegalMove(MusterError):
    """The table does not allow the move from `current` to `target`."""

    def __init__(self, current: Enum, target: Enum) -> None:
        super().__init__(
            f"{type(current).__name__} cannot move from {current.value} to {target.value}"
        )
        self.current = current
        self.target = target


class InvalidSpec(MusterError):
    """A job description with one or more fields that cannot be accepted."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.message}" for problem in problems))
        self.problems = tuple(problems)


class InvalidEnvironment(MusterError):
    """An environment variable holds a value that cannot be used."""

    def __init__(
        self,
        name: str,
        value: str,
        wanted: str,
        way: str = "correct it in the environment or unset it",
    ) -> None:
        super().__init__(f"{name}={value!r} is not {wanted}: {way}")
        self.name = name
        self.value = value
        """As it may be shown."""
        self.wanted = wanted


class BegunOtherwise(MusterError):
    """An unfinished job of that id was described otherwise."""

    def __init__(self, job_id: str, fields: Sequence[str]) -> None:
        super().__init__(
            f"{job_id} has begun with another {', '.join(fields)}, and is not over: describe it as "
            "then to go on, or choose another id"
        )
        self.fields = tuple(fields)


class WireError(MusterError):
    """A peer sent bytes that are no frame, no message, or too long."""
