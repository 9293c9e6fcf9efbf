"""Where ``muster`` begins: from here on Ctrl-C is a quiet end, also while all the rest is imported.

So nothing is imported above that takes longer than a person.
"""

import sys

INTERRUPTED = 130
"""`INTERRUPTED_CODE` of `muster.contracts.endings`, which is not imported yet."""


def main() -> None:
    """Run a command."""
    try:
        from cli.__main__ import main as run  # noqa: PLC0415  inside, as said above

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
