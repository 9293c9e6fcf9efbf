"""Numbers of bytes, as people read them."""

import pytest

from cli.sizes import size


@pytest.mark.parametrize(
    ("count_bytes", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (11_800_000, "11.8 MB"), (10**16, "10000.0 TB")],
)
def test_a_size_has_a_unit(count_bytes: int, said: str) -> None:
    assert size(count_bytes) == said
