"""What was asked for is nothing that the present state of a job allows.

Where the API says so, it is a `muster.client.errors.Conflict`; this is found out here.
"""

from muster.contracts.errors import MusterError


class Untimely(MusterError):
    """At another time it may be right; nothing was done."""
