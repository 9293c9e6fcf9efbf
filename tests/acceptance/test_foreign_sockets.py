"""A foreign file at the path of an agent's socket costs one start, not the job."""

import pytest

from tests.support.installation import Installation, has_saved

JOB = {"world_size": 1, "epochs": 3, "sleep_sec": 0.05, "max_restarts": 0}


@pytest.mark.parametrize("is_early", [True, False])
def test_a_foreign_socket_is_named_and_outnumbered(
    installation: Installation,
    is_early: bool,  # noqa: FBT001  both are true
) -> None:
    job_id = installation.submit(**JOB)
    files = installation.files.job(job_id)
    foreign = files.agent_socket(9999)
    if is_early:
        files.run.mkdir(parents=True, exist_ok=True)
    else:
        installation.wait_until(job_id, has_saved)
    foreign.touch()
    installation.complete(job_id)
    assert f"{foreign.name} is there" in files.agent_log.read_text()
    assert not foreign.exists()
    assert files.agent_socket(10_000).exists()
