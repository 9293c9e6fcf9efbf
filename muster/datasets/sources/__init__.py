"""Data sets on a disk or in a store, by their location."""

import os
from collections.abc import Callable
from pathlib import Path

from muster.contracts.location import Location
from muster.contracts.settings import S3Settings
from muster.datasets.cache import ShardCache
from muster.datasets.source import DataSource, LocalSource
from muster.datasets.sources.s3 import S3Source
from muster.objects.client import default_client


def open_source(
    location: Location, progress: Callable[[int, int], None] | None = None
) -> DataSource:
    """List a data set, in a store with the keys and the cache that the environment names.

    Raises `DatasetMissing`, `DatasetEmpty`, `ShardUnreadable`, `CacheFull`, `ObjectStoreError`.
    """
    if isinstance(location, Path):
        return LocalSource(location)
    settings = S3Settings.read(os.environ)
    cache = ShardCache(settings.cache_dir, settings.cache_bytes)
    return S3Source(location, default_client(), cache, progress)
