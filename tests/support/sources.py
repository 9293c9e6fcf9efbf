"""A data source that is neither a directory of the test nor a store."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from weakref import finalize

from muster.datasets.source import LocalSource


class MemorySource(LocalSource):
    """The files of a data set by name, as a private directory."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        directory = Path(mkdtemp(prefix="muster-data-"))
        finalize(self, shutil.rmtree, directory)
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        super().__init__(directory)
