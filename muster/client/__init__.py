"""The API as Python: ``from muster import Client``.

Lazy like the library's own face: whoever only wants to know an error by its name needs no HTTP.

A question is asked again for ``retry_seconds``. Without it that is 2 seconds where nobody listens
and a client has met nobody there yet, and 10 in any other case: who hung up on it was there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.client.client import Client as Client
    from muster.client.errors import Ambiguous as Ambiguous
    from muster.client.errors import Busy as Busy
    from muster.client.errors import ClientError as ClientError
    from muster.client.errors import Conflict as Conflict
    from muster.client.errors import HungUp as HungUp
    from muster.client.errors import Invalid as Invalid
    from muster.client.errors import NoCertificates as NoCertificates
    from muster.client.errors import NotAllowed as NotAllowed
    from muster.client.errors import NotFound as NotFound
    from muster.client.errors import NotMuster as NotMuster
    from muster.client.errors import Refused as Refused
    from muster.client.errors import Replaced as Replaced
    from muster.client.errors import Unconfirmed as Unconfirmed
    from muster.client.errors import Unreachable as Unreachable
    from muster.client.errors import Unsendable as Unsendable
    from muster.client.errors import Untrusted as Untrusted
    from muster.client.errors import WaitTimedOut as WaitTimedOut
    from muster.client.errors import WrongPath as WrongPath
    from muster.client.job import Job as Job

__all__ = [
    "Ambiguous",
    "Busy",
    "Client",
    "ClientError",
    "Conflict",
    "HungUp",
    "Invalid",
    "Job",
    "NoCertificates",
    "NotAllowed",
    "NotFound",
    "NotMuster",
    "Refused",
    "Replaced",
    "Unconfirmed",
    "Unreachable",
    "Unsendable",
    "Untrusted",
    "WaitTimedOut",
    "WrongPath",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module attribute can be anything
    if name not in __all__:
        raise AttributeError(f"module 'muster.client' has no attribute {name!r}")
    home = name.lower() if name in {"Client", "Job"} else "errors"
    return getattr(import_module(f"muster.client.{home}"), name)


def __dir__() -> list[str]:
    return __all__
