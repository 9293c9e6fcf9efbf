"""An agent whose ranks get secrets, and what it reports of them."""

from pathlib import Path

from muster.contracts.messages.agent import RankSaid
from muster.contracts.messages.assignment import AdoptedRank, AgentAssignment
from muster.contracts.messages.rank import Warned
from worker.ranks.start import RankSecrets

VALUE = "correct horse battery staple"
"""Of the secret that a test keeps."""

LENT = "lent by the service"
"""Of the variable that the service lends."""


def assignment(tmp_path: Path, *adopted: AdoptedRank, **secrets: str) -> AgentAssignment:
    """Return what an agent is given whose ranks are to have these secrets."""
    return AgentAssignment(
        job_uid="uid",
        host="local",
        agent_number=1,
        token="",
        job_root=str(tmp_path),
        address_file=str(tmp_path / "coordinator.json"),
        is_managed=False,
        orphan_timeout_seconds=1.0,
        stop_grace_seconds=1.0,
        agent_heartbeat_seconds=1.0,
        max_log_bytes=1 << 20,
        secrets=secrets,
        secrets_dir=str(tmp_path / "secrets"),
        shared_env={"LENT": LENT},
        adopted=adopted,
    )


def redacted_by(secrets: RankSecrets, text: str) -> str:
    """Return what is left of a rank's warning when it is reported."""
    said = RankSaid(rank=0, attempt=0, message=Warned(message=text))
    redacted = secrets.redaction.redact(said).message
    assert isinstance(redacted, Warned)
    return redacted.message
