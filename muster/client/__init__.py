"""The API as Python: ``from muster import Client``.

`Client` and `Job` load lazily: importing an error does not import an HTTP library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from muster.client.errors import Ambiguous as Ambiguous
from muster.client.errors import Busy as Busy
from muster.client.errors import CertificateRejected as CertificateRejected
from muster.client.errors import ClientError as ClientError
from muster.client.errors import Conflict as Conflict
from muster.client.errors import ConnectionClosed as ConnectionClosed
from muster.client.errors import Invalid as Invalid
from muster.client.errors import InvalidRequest as InvalidRequest
from muster.client.errors import NoCertificates as NoCertificates
from muster.client.errors import NotAllowed as NotAllowed
from muster.client.errors import NotFound as NotFound
from muster.client.errors import NotMuster as NotMuster
from muster.client.errors import Refused as Refused
from muster.client.errors import Replaced as Replaced
from muster.client.errors import Unconfirmed as Unconfirmed
from muster.client.errors import Unreachable as Unreachable
from muster.client.errors import WaitTimedOut as WaitTimedOut
from muster.client.errors import WrongPath as WrongPath

if TYPE_CHECKING:
    from muster.client.client import Client as Client
    from muster.client.job import Job as Job


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module attribute can be anything
    if name not in {"Client", "Job"}:
        raise AttributeError(f"module 'muster.client' has no attribute {name!r}")
    return getattr(import_module(f"muster.client.{name.lower()}"), name)


def job_path(job_id: str, *rest: str) -> str:
    """Return the API path of a job, or of something below it."""
    return "/".join(["/jobs", quote(job_id, safe=""), *rest])
