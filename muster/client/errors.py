"""What can go wrong between a client and the API.

ClientError
├── Unreachable        nobody answers
│   └── HungUp         somebody is there who ends the connection in place of an answer
├── Unconfirmed        no good answer came any more, and the order may have arrived: `lost` is why
├── Untrusted          somebody is there who cannot prove by a certificate who he is
├── NoCertificates     the file that says whom to trust cannot be used
├── Unsendable         a URL, a token or a text is of a form that no request has
├── NotMuster          somebody answers, and it is not our API
│   └── WrongPath      it is ours, and the URL has a path behind which it serves nothing
├── Refused            the API answered with a problem document; the message says what to do next
│   ├── Invalid        422  one or more fields cannot be accepted: `errors` says which
│   ├── NotAllowed     401, 403  no token, a wrong one, or one that may not do this
│   ├── NotFound       404  no job has this id
│   ├── Conflict       409, 412  the job's present state forbids it
│   └── Busy           408, 429, 502-504  not now: `retry_after_seconds` says when to ask again
├── Ambiguous          a word means several jobs
├── Replaced           the job was deleted, and another one has its id
└── WaitTimedOut       the job is not that far yet
"""

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from muster.client.ways_on import way_on
from muster.contracts.environ import LOCAL_NAMES
from muster.contracts.errors import MusterError


class FieldError(msgspec.Struct, frozen=True):
    """One thing that is wrong with a request."""

    loc: tuple[str | int, ...]
    """Where: ``("body", "world_size")`` or ``("query", "limit")``."""
    msg: str
    type: str
    hint: str | None = None
    """What was probably meant."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem document (RFC 9457)."""

    status: int
    detail: str
    type: str = "about:blank"
    title: str = ""
    instance: str = ""
    request_id: str = ""
    errors: tuple[FieldError, ...] = ()


class ClientError(MusterError):
    """A request had no good answer."""


class Unsendable(ClientError):
    """It cannot be asked in these words; nothing was sent."""


class Unreachable(ClientError):
    """Nobody answers. `nameless` is why the name in the URL is that of no machine."""

    def __init__(self, url: str, nameless: str | None = None) -> None:
        if nameless:
            way = f"its name leads nowhere ({nameless}); correct MUSTER_URL"
        elif urlsplit(url).hostname in LOCAL_NAMES:
            way = (
                "start it with `muster up -d`. If it is up, it starts the API again within "
                "seconds, so try again; if it is on another port, set MUSTER_PORT to what it "
                "printed"
            )
        else:
            way = "see whether it is up there and listens to other machines, or correct MUSTER_URL"
        super().__init__(f"nobody answers at {url}: {way}")


class HungUp(Unreachable):
    """Somebody was there, and went away or had nothing to say to us."""

    def __init__(self, url: str) -> None:
        ClientError.__init__(
            self,
            f"who is at {url} hangs up in place of an answer: if the API was replaced just now, "
            "try again; if it speaks TLS, write https:// in MUSTER_URL",
        )


class Unconfirmed(ClientError):
    """The order may have been carried out, however often it was repeated in vain."""

    def __init__(self, lost: "Unreachable | Busy") -> None:
        """`lost` is what was answered, or not, at the last attempt."""
        super().__init__(
            f"{str(lost).removesuffix('.')}. It may have been accepted all the same: before you "
            "repeat it, muster ps"
        )
        self.lost = lost


class Untrusted(ClientError):
    """No word was said: what is there has no certificate that is trusted here, or speaks no TLS."""


class NoCertificates(ClientError):
    """Nothing was asked: nobody would have been trusted."""


class NotMuster(ClientError):
    """Whoever answers speaks of something else."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(
            f"what answers at {url} is not Muster (HTTP {status}): set MUSTER_URL to where it is"
        )


class WrongPath(NotMuster):
    """Muster answers, and says that nothing is where the URL leads."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        ClientError.__init__(
            self,
            f"Muster serves nothing under {place.path}: set MUSTER_URL to "
            f"{place.scheme}://{place.netloc}",
        )


class Refused(ClientError):
    """The API answered with a problem; raised itself for a status without a class of its own."""

    def __init__(self, problem: Problem, retry_after_seconds: float | None = None) -> None:
        super().__init__(way_on(problem.type, problem.instance) or problem.detail)
        self.problem = problem
        self.retry_after_seconds = retry_after_seconds

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status

    @property
    def type(self) -> str:
        """The kind, for machines: ``/problems/job-not-found``."""
        return self.problem.type

    @property
    def detail(self) -> str:
        """The server's own sentence, which may speak of requests."""
        return self.problem.detail

    @property
    def errors(self) -> Sequence[FieldError]:
        """The fields that are wrong."""
        return self.problem.errors

    @property
    def request_id(self) -> str:
        """What the server's log calls the request."""
        return self.problem.request_id


class Invalid(Refused):
    """Fields of the request cannot be accepted."""


class NotAllowed(Refused):
    """The door is shut for this token, or for nobody's."""


class NotFound(Refused):
    """There is no such job, or nothing of the kind below it."""


class Conflict(Refused):
    """The job's present state forbids it; the sentence names the way on."""


class Busy(Refused):
    """Not now, and with 408 or 429 nothing was changed.

    With 502, 503 and 504 that is likely: a proxy may have passed the request on, and a database
    that is lost may have kept it.
    """


_BY_STATUS: Final[Mapping[int, type[Refused]]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    408: Busy,
    409: Conflict,
    412: Conflict,
    422: Invalid,
    429: Busy,
    502: Busy,
    503: Busy,
    504: Busy,
}


def refusal(problem: Problem, retry_after_seconds: float | None = None) -> Refused:
    """Return the error that a problem document is."""
    kind = _BY_STATUS.get(problem.status, Refused)
    return kind(problem, retry_after_seconds)


class Ambiguous(ClientError):
    """More than one job is meant."""

    def __init__(self, word: str, job_ids: Sequence[str]) -> None:
        super().__init__(f"{word!r} could be any of {', '.join(job_ids)}: say which")
        self.job_ids = tuple(job_ids)


class Replaced(ClientError):
    """What is called so now is another job."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"{job_id} was deleted, and another job has its id now: muster show it")
        self.job_id = job_id


class WaitTimedOut(ClientError):
    """The time is over, and the job goes on, as far as one has heard."""

    def __init__(
        self, job_id: str, status: str, seconds: float, lost: ClientError | None = None
    ) -> None:
        """`lost` is why nobody says at the end how the job is."""
        super().__init__(
            f"{job_id} is {status} after {seconds:g} s of waiting: it goes on"
            if lost is None
            else f"{job_id} was {status} when last seen, and {seconds:g} s of waiting are over: "
            f"{lost}"
        )
        self.job_id = job_id
        self.lost = lost
