"""One rank of managed training: ``python -P -m muster.training``, as its environment says."""

import os
from typing import NoReturn

from muster.contracts.environ import PROCESS_TAG, SINGLE_THREADED, RankSettings
from muster.contracts.spec import JobSpec
from muster.host.containment import contain_self


def main() -> NoReturn:
    if PROCESS_TAG in os.environ:  # not when started by hand
        contain_self(os.environ[PROCESS_TAG])
    for name, threads in SINGLE_THREADED.items():
        os.environ.setdefault(name, threads)
    from muster.training.rank import train  # noqa: PLC0415  numpy must see the thread pins

    train(RankSettings.read(os.environ, world_size=JobSpec().world_size))


if __name__ == "__main__":
    main()
