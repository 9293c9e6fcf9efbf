"""All of `stress/security/canaries.py`; its jobs run at once, and fewer would prove less."""

from pathlib import Path

import pytest

from stress.security import canaries
from tests.support.certificates import needs_openssl
from tests.support.postgres_server import running_server


@pytest.mark.postgres
@needs_openssl
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_secrets_appear_only_in_output_of_careless_programs(tmp_path: Path) -> None:
    with running_server() as server, server.database("canaries") as database_url:
        scene = canaries.run(tmp_path, database_url)
    assert canaries.is_good(scene), "\n".join(canaries.report(scene))
