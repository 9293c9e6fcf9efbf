"""Errors of the client.

ClientError
├── Unreachable        no answer
│   └── ConnectionClosed         the server closed the connection instead of answering
├── Unconfirmed        no answer any more, and the request may have been carried out: see `lost`
├── CertificateRejected          the server has no trusted certificate, or does not speak TLS
├── NoCertificates     the file of trusted certificates cannot be used
├── InvalidRequest         a URL, a token or a value cannot be sent
├── NotMuster          the server that answers is not a Muster API
│   └── WrongPath      it is, but the URL has a path under which it serves nothing
├── Refused            the API answered with a problem document; the message says what to do next
│   ├── Invalid        422  one or more fields are invalid: see `errors`
│   ├── NotAllowed     401, 403  the token is missing, wrong, or lacks the scope
│   ├── NotFound       404  no job has this id
│   ├── Conflict       409, 412  the job's present state forbids it
│   └── Busy           408, 429, 502-504  not now: see `retry_after_seconds`
├── Ambiguous          a word matches several jobs
├── Replaced           the job was deleted, and another one has its id
└── WaitTimedOut       the job has not reached the status in time
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import unquote, urlsplit

from muster.contracts.errors import MusterError
from muster.contracts.settings.services import LOOPBACK_NAMES
from muster.contracts.token import WAY_TO_ADMIN
from muster.contracts.views.service import ProblemView


class ClientError(MusterError):
    """A request failed."""


class InvalidRequest(ClientError):
    """The request cannot be written as HTTP or JSON; nothing was sent."""


class Unreachable(ClientError):
    """No answer. `unresolved` is the system's reason if the host name has no address."""

    def __init__(self, url: str, unresolved: str | None = None) -> None:
        if unresolved:
            advice = f"its host name has no address ({unresolved}); correct MUSTER_URL"
        elif urlsplit(url).hostname in LOOPBACK_NAMES:
            advice = (
                "start it with `muster up -d`. If it is up, it restarts the API within seconds: "
                "try again, or set MUSTER_DATA_DIR or MUSTER_PORT to what it was started with"
            )
        else:
            advice = "check that it is up and listens to other machines, or correct MUSTER_URL"
        super().__init__(f"no answer from {url}: {advice}")


class ConnectionClosed(Unreachable):
    """The server closed the connection instead of answering."""

    def __init__(self, url: str) -> None:
        ClientError.__init__(
            self,
            f"{url} closed the connection instead of answering: if the API was just restarted, "
            "try again; if it speaks TLS, write https:// in MUSTER_URL",
        )


class Unconfirmed(ClientError):
    """The request may have been carried out; the retries brought no answer."""

    def __init__(self, lost: "Unreachable | Busy") -> None:
        """`lost` is the error of the last attempt."""
        super().__init__(
            f"{str(lost).removesuffix('.')}. The request may have been accepted: check with "
            "muster ps before you repeat it"
        )
        self.lost = lost


class CertificateRejected(ClientError):
    """The TLS handshake failed; no request was sent."""


class NoCertificates(ClientError):
    """The file of trusted certificates cannot be used; no request was sent."""


class NotMuster(ClientError):
    """The server that answers is not a Muster API."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(
            f"the server at {url} is not Muster (HTTP {status}): set MUSTER_URL to the address of "
            "the API"
        )


class WrongPath(NotMuster):
    """Muster answers, but serves nothing under the URL's path."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        ClientError.__init__(
            self,
            f"Muster serves nothing under {place.path}: set MUSTER_URL to "
            f"{place.scheme}://{place.netloc}",
        )


class Refused(ClientError):
    """The API answered with a problem; raised itself for a status without a class of its own."""

    def __init__(self, problem: ProblemView, retry_after_seconds: float | None = None) -> None:
        super().__init__(advice_for(problem.type, problem.instance) or problem.detail)
        self.status = problem.status
        self.type = problem.type  # for machines: ``/problems/job-not-found``
        self.detail = problem.detail  # the server's own sentence, which may name REST requests
        self.errors = problem.errors  # the invalid fields
        self.request_id = problem.request_id  # in the server's log
        self.retry_after_seconds = retry_after_seconds


class Invalid(Refused):
    """One or more fields of the request are invalid."""


class NotAllowed(Refused):
    """The token is missing, wrong, or lacks the scope."""


class NotFound(Refused):
    """There is no such job, or no such thing below it."""


class Conflict(Refused):
    """The job's present state forbids it; the message says what to do."""


class Busy(Refused):
    """Not now. With 408 and 429 nothing was changed.

    With 502, 503 and 504 the request may have been carried out: a proxy may have passed it on, or
    the database was lost during the commit.
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


def refusal(problem: ProblemView, retry_after_seconds: float | None = None) -> Refused:
    """Return the error for a problem document."""
    return _BY_STATUS.get(problem.status, Refused)(problem, retry_after_seconds)


class Ambiguous(ClientError):
    """A word matches more than one job."""

    def __init__(self, word: str, job_ids: Sequence[str]) -> None:
        super().__init__(f"{word!r} could be any of {', '.join(job_ids)}: say which")
        self.job_ids = tuple(job_ids)


class Replaced(ClientError):
    """The job was deleted, and another job has its id now."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"{job_id} was deleted, and another job has its id now: muster show {job_id}"
        )
        self.job_id = job_id


class WaitTimedOut(ClientError):
    """The timeout has expired; the job goes on."""

    def __init__(
        self, job_id: str, status: str, seconds: float, lost: ClientError | None = None
    ) -> None:
        """`lost` is why the last status is not known."""
        super().__init__(
            f"{job_id} is {status} after {seconds:g} s of waiting: it goes on"
            if lost is None
            else f"{job_id} was {status} when last seen, and {seconds:g} s of waiting are over: "
            f"{lost}"
        )
        self.job_id = job_id
        self.lost = lost


# A problem document names the next request. For people at a terminal these sentences name the next
# command; a kind that is not listed keeps the document's own sentence.
_ADVICE: Final[Mapping[str, str]] = {
    "job-not-found": "there is no job {name}: muster ps lists them",
    "job-exists": "a job has this id already: choose another, or delete that one first with "
    "muster rm (and --delete-checkpoints)",
    "job-not-over": "{name} is not over: stop it first (muster stop {name}), or delete it with "
    "--stop (it saves a last checkpoint) or --force (at once)",
    "never-pauses": "{name} is independent: its ranks share no step before which to pause. Stop it "
    "(muster stop {name}) and continue later: --set resume_from={name}",
    "worker-not-found": "{name} has no such worker: muster workers {name} lists them",
    "no-token": "this service requires a token: export MUSTER_TOKEN=mst_… (its operator makes one "
    "with muster token create)",
    "token-required": "this service requires a token from every caller: export MUSTER_TOKEN=mst_…. "
    f"If it is yours and there is no token of scope admin, {WAY_TO_ADMIN}",
    "token-not-found": "there is no token {name}, or it was revoked before: muster token ls lists "
    "them",
}

_NAMED: Final = re.compile(r"/(?:jobs|tokens)/([^/]+)")
"""The path may begin with the alias ``/api/v1`` or a proxy's prefix."""


def advice_for(kind: str, instance: str) -> str | None:
    """Return the sentence for a problem of this kind; None to use the problem's own.

    `instance` is the requested path, such as ``/jobs/my-job/stop``; empty if there was no request.
    """
    sentence = _ADVICE.get(kind.removeprefix("/problems/")) if instance else None
    named = _NAMED.search(instance)
    return sentence and sentence.format(name=unquote(named[1]) if named else "")
