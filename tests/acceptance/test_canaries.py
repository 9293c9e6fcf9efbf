"""All of what `tests/canaries.py` does: its jobs run at the same time, and fewer prove less."""

from pathlib import Path

import canaries
import pytest
from certificates import needs_openssl
from postgres_server import running_server


@pytest.mark.postgres
@needs_openssl
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_secret_is_found_but_in_what_careless_programs_say(tmp_path: Path) -> None:
    with running_server() as server, server.database("canaries") as database_url:
        scene = canaries.sing(tmp_path, database_url)
    assert canaries.is_good(scene), "\n".join(canaries.report(scene))
