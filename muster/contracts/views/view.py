"""What all bodies of REST responses share."""

from datetime import datetime
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from muster.contracts.job.field_types import BitsPromised

Moment: TypeAlias = Annotated[datetime, Meta(tz=True)]


def doc(text: str) -> Meta:
    return Meta(description=text)


Bits: TypeAlias = Annotated[
    BitsPromised,
    doc(
        "any: another run may give another result. unchecked: so it may if the body of the "
        "script's loop depends on more than state and batch; it gave `check=False`."
    ),
]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A response body, or a part of one."""
