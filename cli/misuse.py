"""What was said on the command line cannot be meant, as one finds out only by looking."""

from muster.contracts.errors import MusterError


class Misuse(MusterError):
    """The words have to be others; nothing was done."""
