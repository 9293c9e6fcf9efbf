"""What was said on the command line cannot be meant, as one finds out only by looking.

Misuse
├── WhoseUnsaid    cli/held.py
└── NoSuchRank     cli/chaos.py
"""

from muster.contracts.errors import MusterError


class Misuse(MusterError):
    """The words have to be others; nothing was done."""
