"""One rank of managed training: ``python -P -m muster.training``, as its environment says."""

import os
import sys

from muster.contracts.environ import PROCESS_TAG, SINGLE_THREADED, RankSettings
from muster.contracts.errors import InvalidEnvironment
from muster.contracts.spec import JobSpec
from muster.host.containment import contain_self
from muster.runtime.stderr_messages import print_stderr


def main() -> int:
    """Train, and end the process; return only if the environment is invalid."""
    try:
        settings = RankSettings.read(os.environ, world_size=JobSpec().world_size)
    except InvalidEnvironment as error:
        print_stderr(f"muster: {error}")
        return 2
    if PROCESS_TAG in os.environ:  # not when started by hand
        contain_self(os.environ[PROCESS_TAG])
    for name, threads in SINGLE_THREADED.items():
        os.environ.setdefault(name, threads)
    from muster.training.rank import train  # noqa: PLC0415  numpy must see the thread pins

    return train(settings)


if __name__ == "__main__":
    sys.exit(main())
