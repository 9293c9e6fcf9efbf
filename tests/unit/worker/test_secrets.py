"""What a rank is given, and what is told of it."""

from pathlib import Path

import pytest
from secret_rank import LENT, VALUE, assignment, told_by

from muster.contracts.agent import AdoptedRank
from muster.contracts.process import ProcessRecord
from muster.contracts.secrets import SecretUnavailable
from muster.safe import Safe
from worker.secrets import Secrets

GONE = AdoptedRank(
    rank=0,
    incarnation=0,
    process=ProcessRecord(pid=2**22 + 1, start_ticks=1, boot_id="boot", node="here"),
    mark="uid/0/0",
)


@pytest.fixture(autouse=True)
def safe(tmp_path: Path) -> Safe:
    safe = Safe(tmp_path / "secrets")
    safe.put("token", VALUE)
    return safe


def test_each_reference_is_followed(tmp_path: Path) -> None:
    secrets = Secrets.of(assignment(tmp_path, A="file:token", B="env:LENT"))
    assert secrets.variables() == {
        "A": VALUE,
        "B": LENT,
        "MUSTER_SECRETS": "A,B",
    }


def test_it_is_looked_up_for_each_start(safe: Safe, tmp_path: Path) -> None:
    secrets = Secrets.of(assignment(tmp_path, A="file:token"))
    secrets.variables()
    safe.put("token", "a new one, since the old one leaked")
    assert secrets.variables()["A"] == "a new one, since the old one leaked"
    safe.remove("token")
    with pytest.raises(SecretUnavailable, match="file:token"):
        secrets.variables()


def test_a_job_without_secrets_gets_no_variable(tmp_path: Path) -> None:
    assert Secrets.of(assignment(tmp_path)).variables() == {}


def test_what_the_service_does_not_lend_is_not_to_be_had(tmp_path: Path) -> None:
    with pytest.raises(SecretUnavailable, match=r"env:HOME is not lent .* MUSTER_SECRET_ENV"):
        Secrets.of(assignment(tmp_path, A="env:HOME")).variables()


def test_an_agent_that_adopts_ranks_knows_what_the_references_lead_to(tmp_path: Path) -> None:
    secrets = Secrets.of(assignment(tmp_path, GONE, A="file:token"))
    assert VALUE not in told_by(secrets, VALUE)


def test_it_knows_the_others_when_one_of_them_is_gone(safe: Safe, tmp_path: Path) -> None:
    safe.put("other", "another value")
    safe.remove("token")
    references = {"A": "file:token", "B": "file:other", "C": "env:LENT"}
    secrets = Secrets.of(assignment(tmp_path, GONE, **references))
    assert told_by(secrets, f"another value, {LENT}") == "[secret], [secret]"
    with pytest.raises(SecretUnavailable):
        secrets.variables()


def test_a_start_that_fails_for_one_has_learnt_the_others(tmp_path: Path) -> None:
    secrets = Secrets.of(assignment(tmp_path, A="file:token", B="file:other"))
    with pytest.raises(SecretUnavailable):
        secrets.variables()
    assert told_by(secrets, VALUE) == "[secret]"
