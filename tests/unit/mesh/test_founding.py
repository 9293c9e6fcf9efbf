"""Which node founds a cluster, and what it keeps of that."""

from pathlib import Path

import pytest

from muster.contracts.errors import MusterError
from muster.mesh.founding import ALONE_SECONDS, EarlierJobs, Founding
from muster.mesh.messages import ClusterRecord

OWN, OTHER = "n-1", "n-2"
RECORD = ClusterRecord(cluster_id="c", founder=OTHER, name="desk")


def founding(directory: Path, *, mark: bool = False, file: bool = False) -> Founding:
    return Founding(directory / "cluster.json", has_mark=mark, has_secret_file=file)


@pytest.mark.parametrize(
    ("mark", "file", "alone_seconds", "may_lead"),
    [
        (True, True, 1, True),  # the secret was made here
        (False, True, 0, False),  # it was typed here
        (False, True, 9999, False),
        (False, False, 0, True),  # all have it from the environment
        (False, False, 1, False),  # perhaps the network is not up yet
        (False, False, ALONE_SECONDS, True),
    ],
)
def test_who_may_found(
    tmp_path: Path, mark: object, file: object, alone_seconds: float, may_lead: object
) -> None:
    one = founding(tmp_path, mark=bool(mark), file=bool(file))
    assert one.may_lead(OWN, alone_seconds) is may_lead


def test_only_the_founder_leads_from_then_on(tmp_path: Path) -> None:
    founding(tmp_path).found(OWN, "desk")
    assert founding(tmp_path).may_lead(OWN, 1)
    assert not founding(tmp_path, mark=True).may_lead(OTHER, ALONE_SECONDS)


def test_a_member_never_leads(tmp_path: Path) -> None:
    founding(tmp_path).join(RECORD)
    kept = founding(tmp_path, mark=True)
    assert kept.record == RECORD
    assert not kept.may_lead(OWN, ALONE_SECONDS)


@pytest.mark.parametrize("unfinished", [0, 2])
def test_an_earlier_database_is_kept_or_binds(tmp_path: Path, unfinished: int) -> None:
    database = tmp_path / "muster.db"
    database.write_text("rows")
    one = Founding(
        tmp_path / "cluster.json",
        has_mark=False,
        has_secret_file=True,
        earlier=EarlierJobs(database, unfinished, 7),
    )
    if unfinished:
        with pytest.raises(MusterError, match="2 unfinished jobs"):
            one.join(RECORD)
        assert database.exists()
        assert one.record is None
    else:
        assert "7 jobs" in one.join(RECORD)
        assert [kept.read_text() for kept in tmp_path.glob("muster.db.*")] == ["rows"]


def test_earlier_secrets_are_set_aside(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("own")
    founding(tmp_path).join(RECORD)
    assert not (tmp_path / "secrets").exists()
    assert [kept.read_text() for kept in tmp_path.glob("secrets.*/key")] == ["own"]


def test_a_damaged_record_stops_the_node(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(MusterError, match="muster node leave"):
        founding(tmp_path)
