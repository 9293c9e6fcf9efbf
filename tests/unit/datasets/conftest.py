from pathlib import Path

import pytest

from tests.support.ranks import write_contents

CONTENTS = [
    b"",  # empty at the beginning
    b"a\nb\nc\n",  # ends with a newline
    b"",
    b"",  # empty in the middle
    b"d\r\ne\r\nf",  # carriage returns, and no newline at the end
    b"\xff\xfe\n" + b"g" * 1000 + b"\n",  # no UTF-8
    b"",  # empty at the end
]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write_contents(tmp_path, *CONTENTS)
