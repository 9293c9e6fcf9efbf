"""What was said on the command line cannot be meant, as one finds out only by looking.

Misuse
├── InvalidPreferences    cli/preferences.py
├── NoDataDirectory       cli/office.py
├── NoSuchRank            cli/chaos.py
└── WhoseUnsaid           cli/held.py
"""

from muster.contracts.errors import MusterError


class Misuse(MusterError):
    """The words have to be others; nothing was done."""
