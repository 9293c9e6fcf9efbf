"""The settings of the services that a person's environment means."""

import os

from muster.contracts.environ import ServiceSettings


def own_settings() -> ServiceSettings:
    """Return them; raises `InvalidEnvironment`, and `OSError` in a directory that is gone."""
    return ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)
