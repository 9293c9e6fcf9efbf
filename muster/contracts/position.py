"""How new a copy of the database is."""

import msgspec


class Position(msgspec.Struct, frozen=True, order=True):
    """What a database holds. Of two the greater is the newer, as the fields are compared in order.

    A row that was written without a majority may be given up when the parts of a cluster meet, so
    the newest one with a majority counts first.
    """

    majority_epoch: int = 0
    """Of the newest row written while its leader had the majority."""
    majority_number: int = 0
    """The same."""
    epoch: int = 0
    """Of the newest row."""
    number: int = 0
    """Of the newest row; 0 without any."""
    image: str = ""
    """Copies of one image have equal rows up to the newest one that both have."""
    revision: str = ""
    """Of the schema."""
    may_lead: bool = True
    """False for the schema of a later version, which this one cannot use."""
    is_current: bool = False
    """Whether rows come from the node that leads, and none is missing."""
