"""Data sets on a disk or in a store, by their location."""

import os
from pathlib import Path

from muster.contracts.location import Location, S3Location
from muster.contracts.settings.services import S3Settings
from muster.datasets.cache import ShardCache
from muster.datasets.source import DataSource, LocalSource
from muster.datasets.sources.s3 import S3Source
from muster.objects.client import default_client


def open_source(location: Location) -> DataSource:
    """List a data set. Raises `DatasetMissing`, `DatasetEmpty`, `ShardUnreadable`, and as below."""
    return LocalSource(location) if isinstance(location, Path) else open_s3_source(location)


def open_s3_source(location: S3Location) -> S3Source:
    """List a data set in the store, and with the cache, that the environment names.

    Nothing is written before a shard is read. Raises `ObjectStoreError`.
    """
    settings = S3Settings.read(os.environ)
    cache = ShardCache(settings.cache_dir, settings.cache_bytes)
    return S3Source(location, default_client(), cache)
