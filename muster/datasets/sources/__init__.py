"""The kinds of storage that a data set can be read from."""

import os
from collections.abc import Callable
from pathlib import Path

from muster.contracts.location import Location
from muster.contracts.settings import S3Settings
from muster.datasets.cache import ShardCache
from muster.datasets.source import DataSource
from muster.datasets.sources.local import LocalSource
from muster.datasets.sources.s3 import S3Source
from muster.objects.client import S3Client, StoreAccess


def open_source(
    location: Location, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> DataSource:
    """List the data set at `location`, in a store with the keys and the cache of the environment.

    `progress` is called with the numbers of shards while the lines of a store's data set are
    counted. Raises `DatasetMissing`, `DatasetEmpty`, `ShardUnreadable`, `CacheFull`, and an
    `ObjectStoreError`.
    """
    if isinstance(location, Path):
        return LocalSource(location)
    settings = S3Settings.read(os.environ)
    cache = ShardCache(settings.cache_dir, settings.cache_bytes)
    return S3Source(location, store_client(settings), cache, progress)


def store_client(settings: S3Settings) -> S3Client:
    return S3Client(
        StoreAccess(settings.endpoint, settings.access_key, settings.secret_key, settings.unfenced)
    )
