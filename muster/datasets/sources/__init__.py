"""The kinds of storage that a data set can be read from."""

from pathlib import Path

from muster.datasets.source import DataSource
from muster.datasets.sources.local import LocalSource


def open_source(location: Path) -> DataSource:
    """List the data set at `location`.

    Raises `DatasetMissing`, `DatasetEmpty`, and `ShardUnreadable`.
    """
    return LocalSource(location)
