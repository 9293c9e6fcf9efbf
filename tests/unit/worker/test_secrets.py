"""What a rank is given, and what is told of it."""

from pathlib import Path

import pytest

from muster.contracts.agent import AdoptedRank, AgentAssignment
from muster.contracts.messages import RankSaid, Warned
from muster.contracts.process import ProcessRecord
from muster.contracts.secrets import SecretUnavailable
from muster.safe import Safe
from worker.secrets import Secrets

VALUE = "correct horse battery staple"


@pytest.fixture(autouse=True)
def safe(tmp_path: Path) -> Safe:
    safe = Safe(tmp_path / "secrets")
    safe.put("token", VALUE)
    return safe


def assignment(tmp_path: Path, *adopted: AdoptedRank, **secrets: str) -> AgentAssignment:
    return AgentAssignment(
        job_uid="uid",
        generation=1,
        token="",
        job_root=str(tmp_path),
        address_file=str(tmp_path / "coordinator.json"),
        is_managed=False,
        orphan_timeout_seconds=1.0,
        stop_grace_seconds=1.0,
        pulse_seconds=1.0,
        secrets=secrets,
        safe=str(tmp_path / "secrets"),
        lent={"LENT": "lent by the service"},
        adopted=adopted,
    )


def test_each_reference_is_followed(tmp_path: Path) -> None:
    secrets = Secrets.of(assignment(tmp_path, A="file:token", B="env:LENT"))
    assert secrets.variables() == {
        "A": VALUE,
        "B": "lent by the service",
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


def test_an_agent_that_adopts_ranks_knows_what_they_hold(tmp_path: Path) -> None:
    process = ProcessRecord(pid=1, start_ticks=1, boot_id="boot", node="here")
    rank = AdoptedRank(rank=0, incarnation=0, process=process, mark="uid/0/0")
    secrets = Secrets.of(assignment(tmp_path, rank, A="file:token"))
    said = RankSaid(rank=0, incarnation=0, message=Warned(message=VALUE))
    assert VALUE not in repr(secrets.redaction.of(said))


def test_an_agent_adopts_ranks_whose_secrets_are_gone(safe: Safe, tmp_path: Path) -> None:
    process = ProcessRecord(pid=1, start_ticks=1, boot_id="boot", node="here")
    rank = AdoptedRank(rank=0, incarnation=0, process=process, mark="uid/0/0")
    safe.remove("token")
    with pytest.raises(SecretUnavailable):
        Secrets.of(assignment(tmp_path, rank, A="file:token")).variables()
